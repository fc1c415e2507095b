"""A message's answer, by a slow model: each caller on its own, and one call for all."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse

from singleflight_django import SingleFlight, single_flight
from singleflight_django.exceptions import LeaderFailedError
from testproject.lessons.answering import Answer, aask_model, ask_model
from testproject.lessons.workers import MAX_FOLLOWERS

answers = SingleFlight("answers", wait=10, result_ttl=5)


@answers.coalesce(key="<session_id>:<message_id>")
def shared_answer(session_id: UUID, message_id: UUID) -> Answer:
    return ask_model(session_id, message_id)


@answers.coalesce(key="<session_id>:<message_id>")
async def ashared_answer(session_id: UUID, message_id: UUID) -> Answer:
    return await aask_model(session_id, message_id)


def unguarded(request: HttpRequest, session_id: UUID, message_id: UUID) -> HttpResponse:
    return _answer(ask_model, session_id, message_id)


def function(request: HttpRequest, session_id: UUID, message_id: UUID) -> HttpResponse:
    """What is shared is the function's value: each caller has a response of its own."""
    return _answer(shared_answer, session_id, message_id)


@single_flight(key="answer:<session_id>:<message_id>", result_ttl=5, max_followers=MAX_FOLLOWERS)
def view(request: HttpRequest, session_id: UUID, message_id: UUID) -> HttpResponse:
    """What is shared is the response, with one caller's own requests alone."""
    return _answer(ask_model, session_id, message_id)


async def asynchronous(request: HttpRequest, session_id: UUID, message_id: UUID) -> HttpResponse:
    try:
        return JsonResponse(await ashared_answer(session_id, message_id))
    except (TimeoutError, LeaderFailedError) as error:
        return _failure(error)


def _answer(
    ask: Callable[[UUID, UUID], Answer], session_id: UUID, message_id: UUID
) -> HttpResponse:
    try:
        return JsonResponse(ask(session_id, message_id))
    except (TimeoutError, LeaderFailedError) as error:
        return _failure(error)


def _failure(error: Exception) -> HttpResponse:
    # FlightTimeoutError is a TimeoutError: who has waited in vain is told so in both cases.
    return HttpResponse(status=504 if isinstance(error, TimeoutError) else 503)
