"""The create view as a coroutine, for an ASGI server."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock, single_flight
from testproject.lessons.creating import acreate_lesson
from testproject.lessons.models import LooseLessonSession


@require_POST
@semaphore_lock(key="lesson_session:<uuid>")
async def reject(request: HttpRequest) -> HttpResponse:
    return await acreate_lesson(LooseLessonSession, request.POST)


# No max_followers: here a caller that waits is a suspended task, and holds no thread.
@require_POST
@single_flight(key="lesson:<uuid>", result_ttl=5)
async def coalesce(request: HttpRequest) -> HttpResponse:
    return await acreate_lesson(LooseLessonSession, request.POST)
