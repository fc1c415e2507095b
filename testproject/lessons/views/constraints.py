"""The create view with the unique constraint as the judge: without a lock, and beneath one."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock
from testproject.lessons.creating import create_lesson, find_or_create_lesson, insert_lesson
from testproject.lessons.models import LessonSession

EVERYBODY: Final = 1_000_000


# Everybody is let in, as if all leases had been lost.
@require_POST
@semaphore_lock(key="lesson_session:<uuid>", limit=EVERYBODY, unique="lessons.LessonSession.uuid")
def caught(request: HttpRequest) -> HttpResponse:
    """The loser's IntegrityError is a 409."""
    return insert_lesson(request.POST)


@require_POST
def existing(request: HttpRequest) -> HttpResponse:
    """No lock: whoever comes second gets the lesson that is there."""
    return find_or_create_lesson(request.POST)


@require_POST
@semaphore_lock(key="lesson_session:<uuid>", unique="lessons.LessonSession.uuid")
def lock(request: HttpRequest) -> HttpResponse:
    """Both, as one has it in a real project."""
    return create_lesson(LessonSession, request.POST)
