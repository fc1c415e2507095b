"""
The create endpoint's body, written once; the views differ only in what they put around it.

Two calls with the same UUID meet like this, and both create the lesson::

    first call            second call
    is it there?  no
    work                  is it there?  no
    save                  work
                          save                (the double create)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django import forms
from django.conf import settings
from django.core.exceptions import BadRequest
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.utils import timezone

from singleflight_django import create_or_existing
from testproject.lessons.models import AbstractLessonSession, LessonSession


class LessonForm(forms.Form):
    uuid = forms.UUIDField()
    user = forms.IntegerField()
    course = forms.CharField(max_length=100)


def work() -> None:
    time.sleep(work_seconds())


async def awork() -> None:
    await asyncio.sleep(work_seconds())


def create_lesson(
    model: type[AbstractLessonSession],
    data: Mapping[str, Any],
    work: Callable[[], None] = work,
) -> HttpResponse:
    """Create the lesson that ``data`` describes: 201, or 204 if it is already there."""
    lesson = _read(model, data)
    if model._default_manager.filter(uuid=lesson.uuid).exists():
        return HttpResponse(status=204)
    work()
    _save(lesson)
    return _told(lesson)


async def acreate_lesson(
    model: type[AbstractLessonSession],
    data: Mapping[str, Any],
    work: Callable[[], Awaitable[None]] = awork,
) -> HttpResponse:
    """See create_lesson()."""
    lesson = _read(model, data)
    if await model._default_manager.filter(uuid=lesson.uuid).aexists():
        return HttpResponse(status=204)
    await work()
    # Three writes in one transaction, and Django's transactions are synchronous.
    await sync_to_async(_save)(lesson)
    return _told(lesson)


def insert_lesson(data: Mapping[str, Any]) -> HttpResponse:
    """Create the lesson, and leave it to the constraint to say that it is already there."""
    lesson = _read(LessonSession, data)
    _save(lesson)
    return _told(lesson)


def find_or_create_lesson(data: Mapping[str, Any], work: Callable[[], None] = work) -> HttpResponse:
    """Create the lesson: 201; or give the one that is already there, to its user: 200."""
    wanted = _read(LessonSession, data)
    work()
    with transaction.atomic():
        lesson, created = create_or_existing(
            LessonSession.objects.filter(user=wanted.user_id),
            uuid=wanted.uuid,
            defaults={"user_id": wanted.user_id, "course": wanted.course},
            same=("course",),
        )
        if created:
            _end_others(lesson)
            lesson.study_times.create(started_at=timezone.now())
    return _told(lesson, status=201 if created else 200)


def _read(model: type[AbstractLessonSession], data: Mapping[str, Any]) -> AbstractLessonSession:
    form = LessonForm(data)
    if not form.is_valid():
        raise BadRequest(form.errors.as_json())
    wanted = form.cleaned_data
    return model(uuid=wanted["uuid"], user_id=wanted["user"], course=wanted["course"])


@transaction.atomic
def _save(lesson: Any) -> None:
    _end_others(lesson)
    lesson.save()
    lesson.study_times.create(started_at=timezone.now())


def _end_others(lesson: Any) -> None:
    others = type(lesson)._default_manager.filter(user_id=lesson.user_id, active=True)
    others.exclude(uuid=lesson.uuid).update(active=False)


def _told(lesson: AbstractLessonSession, status: int = 201) -> HttpResponse:
    return JsonResponse({"id": lesson.pk, "uuid": lesson.uuid}, status=status)


def work_seconds() -> float:
    """
    How long a lesson's creation takes between "is it there?" and "save it".

    A real view does something in between: it asks a service, computes a plan. Without it two
    processes would seldom meet in a window of microseconds, and the double create would wait for
    the day with real traffic.
    """
    return float(getattr(settings, "LESSON_WORK", 0.03))
