"""The create view for the day when Redis is away: leases go to the database, as do duplicates."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock, single_flight
from testproject.lessons.creating import acreate_lesson, create_lesson, find_or_create_lesson
from testproject.lessons.models import LessonSession
from testproject.lessons.planning import aplan_lesson, plan_lesson
from testproject.lessons.workers import MAX_FOLLOWERS

lock = semaphore_lock(
    key="lesson_session:<uuid>", unique="lessons.LessonSession.uuid", on_store_error="database"
)


@require_POST
@lock
def function(request: HttpRequest) -> HttpResponse:
    return create_lesson(LessonSession, request.POST, plan_lesson)


@require_POST
@lock
async def asynchronous(request: HttpRequest) -> HttpResponse:
    return await acreate_lesson(LessonSession, request.POST, aplan_lesson)


@require_POST
@single_flight(
    key="lesson:<uuid>", result_ttl=5, max_followers=MAX_FOLLOWERS, on_store_error="database"
)
def shared(request: HttpRequest) -> HttpResponse:
    """Who waited in Redis takes part in a second flight, in the database: it finds the lesson."""
    return find_or_create_lesson(request.POST, plan_lesson)
