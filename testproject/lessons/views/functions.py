"""
The create view as a function, from bare to protected.

The protected ones write to the twin without the constraint: what holds there is the lock, or the
flight, alone.
In a real project one has both.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock, single_flight
from testproject.lessons.creating import create_lesson
from testproject.lessons.models import LessonSession, LooseLessonSession
from testproject.lessons.workers import MAX_FOLLOWERS


@require_POST
def unprotected(request: HttpRequest) -> HttpResponse:
    return create_lesson(LooseLessonSession, request.POST)


@require_POST
def constraint(request: HttpRequest) -> HttpResponse:
    """The data are safe, but the loser's IntegrityError is a 500."""
    return create_lesson(LessonSession, request.POST)


@require_POST
@semaphore_lock(key="lesson_session:<uuid>")
def reject(request: HttpRequest) -> HttpResponse:
    return create_lesson(LooseLessonSession, request.POST)


@require_POST
@semaphore_lock(key="lesson_session:<uuid>", on_conflict="skip")
def skip(request: HttpRequest) -> HttpResponse:
    return create_lesson(LooseLessonSession, request.POST)


@require_POST
@single_flight(key="lesson:<uuid>", result_ttl=5, max_followers=MAX_FOLLOWERS)
def coalesce(request: HttpRequest) -> HttpResponse:
    """Everyone gets the same 201, late callers included: five seconds long."""
    return create_lesson(LooseLessonSession, request.POST)
