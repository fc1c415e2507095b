"""One URL per way to protect the same create view; ``testproject.racing.forms`` lists them."""

from __future__ import annotations

from django.urls import path

from testproject.lessons.views import asynchronous, classes, functions

urlpatterns = [
    path("unprotected/", functions.unprotected),
    path("constraint/", functions.constraint),
    path("reject/", functions.reject),
    path("skip/", functions.skip),
    path("mixin/", classes.LessonCreate.as_view()),
    path("drf/", classes.LessonCreateAPI.as_view()),
    path("async/", asynchronous.reject),
]
