"""Room for a step's new draft, with two calls at once in mind and without."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from singleflight_django import semaphore_lock
from testproject.lessons.cascading import cascade


@require_POST
def unguarded(request: HttpRequest, session_id: UUID, step: int) -> HttpResponse:
    return cascade(session_id, step)


@require_POST
@semaphore_lock(key="cascade:<session_id>:<step>")
def lock(request: HttpRequest, session_id: UUID, step: int) -> HttpResponse:
    return cascade(session_id, step)
