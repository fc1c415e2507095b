"""One URL per way to protect the same view; ``testproject.racing.forms`` lists them."""

from __future__ import annotations

from django.urls import path

from testproject.lessons.views import (
    answers,
    asynchronous,
    cascades,
    classes,
    constraints,
    functions,
    outages,
)

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
    path("coalesce-mixin/", classes.LessonShare.as_view()),
    path("coalesce-drf/", classes.LessonShareAPI.as_view()),
    path("constraint-caught/", constraints.caught),
    path("create-or-existing/", constraints.existing),
    path("lock-constraint/", constraints.lock),
    path("redis-killed/", outages.function),
    path("redis-killed-async/", outages.asynchronous),
    path("redis-killed-coalesce/", outages.shared),
    path(f"answers/unguarded/{MESSAGE}", answers.unguarded),
    path(f"answers/function/{MESSAGE}", answers.function),
    path(f"answers/view/{MESSAGE}", answers.view),
    path(f"answers/async/{MESSAGE}", answers.asynchronous),
    path(f"cascades/unguarded/{STEP}", cascades.unguarded),
    path(f"cascades/lock/{STEP}", cascades.lock),
]
