"""
The create view as a function, from bare to protected.

The protected ones write to the twin without the constraint: what holds there is the lock alone.
In a real project one has both.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock
from testproject.lessons.creating import create_lesson
from testproject.lessons.models import LessonSession, LooseLessonSession


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
