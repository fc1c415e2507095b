"""One URL per way to protect the same view; ``testproject.racing.forms`` lists them."""

from __future__ import annotations

from django.urls import path

from testproject.lessons.views import answers, asynchronous, cascades, classes, functions

MESSAGE = "<uuid:session_id>/<uuid:message_id>/"
STEP = "<uuid:session_id>/<int:step>/"

urlpatterns = [
    path("unprotected/", functions.unprotected),
    path("constraint/", functions.constraint),
    path("reject/", functions.reject),
    path("skip/", functions.skip),
    path("mixin/", classes.LessonCreate.as_view()),
    path("drf/", classes.LessonCreateAPI.as_view()),
    path("async/", asynchronous.reject),
    path("coalesce/", functions.coalesce),
    path("coalesce-async/", asynchronous.coalesce),
    path("coalesce-drf/", classes.LessonShareAPI.as_view()),
    path(f"answers/unguarded/{MESSAGE}", answers.unguarded),
    path(f"answers/function/{MESSAGE}", answers.function),
    path(f"answers/view/{MESSAGE}", answers.view),
    path(f"answers/async/{MESSAGE}", answers.asynchronous),
    path(f"cascades/unguarded/{STEP}", cascades.unguarded),
    path(f"cascades/lock/{STEP}", cascades.lock),
]
