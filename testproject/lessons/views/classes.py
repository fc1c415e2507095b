"""The create view as a class, Django's and REST framework's."""

from __future__ import annotations

from typing import Any, cast

from django.http import HttpRequest, HttpResponse
from django.views import View
from rest_framework.request import Request
from rest_framework.views import APIView

from singleflight_django import SemaphoreLockMixin, SingleFlightMixin, single_flight
from testproject.lessons.creating import create_lesson
from testproject.lessons.models import LooseLessonSession
from testproject.lessons.workers import MAX_FOLLOWERS


class LessonCreate(SemaphoreLockMixin, View):
    lock_key = "lesson_session:<uuid>"

    def post(self, request: HttpRequest) -> HttpResponse:
        return create_lesson(LooseLessonSession, request.POST)


class LessonCreateAPI(SemaphoreLockMixin, APIView):
    lock_key = "lesson_session:<uuid>"

    def post(self, request: Request) -> HttpResponse:
        # Not a list: that has no <uuid>, and is answered 400 before it comes here.
        return create_lesson(LooseLessonSession, cast("dict[str, Any]", request.data))


class LessonShare(SingleFlightMixin, View):
    flight_key = "lesson:<uuid>"
    flight_result_ttl = 5
    flight_max_followers = MAX_FOLLOWERS

    def post(self, request: HttpRequest) -> HttpResponse:
        return create_lesson(LooseLessonSession, request.POST)


class LessonShareAPI(APIView):
    # On the method: REST framework has authenticated the caller by then.
    @single_flight(key="lesson:<uuid>", result_ttl=5, max_followers=MAX_FOLLOWERS)
    def post(self, request: Request) -> HttpResponse:
        return create_lesson(LooseLessonSession, cast("dict[str, Any]", request.data))
