"""A coalesced view, sync and async: join the flight, then lead it or give what its leader gave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from inspect import isawaitable
from typing import Any, TypeVar

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.utils.module_loading import import_string

from singleflight_django.bodies import unwrap
from singleflight_django.callers import Alone, Leading, Outcome, Shared
from singleflight_django.coalescing import (
    SAFE_METHODS,
    Coalescer,
    forget_session,
    read_session_again,
    refuse_unauthorized,
    shared,
    tell_cache_status,
)
from singleflight_django.constraints import aanswered, answered
from singleflight_django.drivers import arun, run
from singleflight_django.entering import ahold, hold
from singleflight_django.exceptions import SingleFlightError, UnshareableResultError
from singleflight_django.flight import join
from singleflight_django.holding import outlives
from singleflight_django.landing import land
from singleflight_django.leading import Freight, lead_async
from singleflight_django.observing import aobserved, observed
from singleflight_django.placement import expose
from singleflight_django.publishing import Call, freight_of_error
from singleflight_django.raised import answer
from singleflight_django.records import UNREADABLE
from singleflight_django.steps import Steps
from singleflight_django.stores.base import Kept, Status
from singleflight_django.transactions import arefuse_to_wait, refuse_to_wait
from singleflight_django.wrapping import wrap_view

_View = TypeVar("_View", bound=Callable[..., Any])

# What the view itself has to answer.
_VIEW = object()


def flight_view(view: _View, guard: Coalescer) -> _View:
    """Return ``view`` coalesced by ``guard``: of the same colour, with the same attributes."""
    return wrap_view(view, guard, partial(_coalesced, guard), partial(_acoalesced, guard))


def _coalesced(
    guard: Coalescer, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Return the view's answer, the leader's, or what refuses the request."""
    if guard.observing:
        return observed(guard, call, request, args, kwargs)
    outcome: Outcome | None = None
    try:
        flight = guard.flight_of(request, args, kwargs)
        if flight is not None:
            refuse_to_wait(flight.key)
            outcome = run(join(flight))
            if flight.seat.taken:
                forget_session(request)
            if isinstance(outcome, Shared | Kept):
                refuse_unauthorized(guard.authorize(request))
        given = _given(request, outcome)
    except SingleFlightError as error:
        if not guard.runs_without(request, error):
            return guard.refusal(request, error)
        flight, given = None, _VIEW
    if given is not _VIEW:
        return given
    if flight is not None and isinstance(outcome, Leading):
        return answered(partial(_lead, call, Call.begin(guard, flight, request, kwargs)), request)
    return hold(call, guard, guard.unprotected(), request)


async def _acoalesced(
    guard: Coalescer, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """See _coalesced()."""
    if guard.observing:
        return await aobserved(guard, call, request, args, kwargs)
    outcome: Outcome | None = None
    try:
        flight = await guard.aflight_of(request, args, kwargs)
        if flight is not None:
            await arefuse_to_wait(flight.key)
            outcome = await arun(join(flight))
            if flight.seat.taken:
                forget_session(request)
            if isinstance(outcome, Shared | Kept):
                refuse_unauthorized(await guard.aauthorize(request))
        given = _given(request, outcome)
    except SingleFlightError as error:
        if not guard.runs_without(request, error):
            return await guard.arefusal(request, error)
        flight, given = None, _VIEW
    if given is not _VIEW:
        return given
    await read_session_again(request)
    if flight is not None and isinstance(outcome, Leading):
        leading = Call.begin(guard, flight, request, kwargs)
        return await aanswered(partial(_alead, _acalled(call), leading), request)
    return await ahold(call, guard, guard.unprotected(), request)


def _given(request: Any, outcome: Outcome | None) -> Any:
    """Return what somebody else's flight answers; _VIEW if the view has to."""
    if isinstance(outcome, Shared):
        result = shared(request, outcome.payload, "fwd=miss; collapsed")
    elif isinstance(outcome, Kept):
        result = shared(request, outcome.payload, f"hit; ttl={round(outcome.remaining)}")
    elif isinstance(outcome, Alone) and request.method not in SAFE_METHODS:
        raise UnshareableResultError(f"The leader's answer is not for sharing: {outcome.reason}.")
    else:
        return _VIEW
    return _VIEW if result is UNREADABLE else result


def _lead(view: Callable[[], Any], call: Call) -> Any:
    flight = call.flight
    expose(call.request, flight.lease)
    try:
        result = _answered(view, call.request)
    except BaseException as error:
        run(land(flight, *freight_of_error(error)))
        raise
    if isawaitable(result):
        return aanswered(partial(_alead, result, call), call.request)
    freight = _freight(call, result)
    if freight is not None:
        call.guard.check_landed(flight, run(land(flight, *freight)))
    return result


async def _alead(work: Awaitable[Any], call: Call) -> Any:
    expose(call.request, call.flight.lease)
    landed = await lead_async(
        call.flight,
        _aanswered(work, call.request),
        partial(_freight, call),
        freight_of_error,
        call.guard.max_run if _goes_on(call.request) else 0.0,
    )
    call.guard.check_landed(call.flight, landed.ours)
    return landed.result


def _freight(call: Call, result: Any) -> Freight | None:
    """Return what to publish now; None if the response isn't done, and publishes later."""
    request, flight = call.request, call.flight
    streams = getattr(result, "streaming", False)
    if streams:
        # At its end, its headers will have been sent.
        tell_cache_status(result, "fwd=miss")

    def end() -> Steps:
        if getattr(result, "is_rendered", True) is False:
            return land(flight, Status.FAILED)
        return land(flight, *call.freight(result))

    # A safe method's followers run on their own, and need not wait for the end of a stream.
    waits = not (streams and request.method in SAFE_METHODS)
    if waits and outlives(result, request, flight.lease, end):
        return None
    return call.freight(result)


def _answered(call: Callable[[], Any], request: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return answer(request, error)


async def _aanswered(work: Awaitable[Any], request: Any) -> Any:
    try:
        return await work
    except Exception as error:
        return answer(request, error)


async def _acalled(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if isawaitable(result) else result


def _goes_on(request: Any) -> bool:
    """Whether the work may outlive its request: where nothing between it and the server is sync."""
    return isinstance(unwrap(request), ASGIRequest) and _all_async(tuple(settings.MIDDLEWARE))


@lru_cache(maxsize=8)
def _all_async(middleware: tuple[str, ...]) -> bool:
    return all(getattr(import_string(path), "async_capable", False) for path in middleware)
