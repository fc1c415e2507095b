from __future__ import annotations

import os

from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def worker(request: HttpRequest) -> HttpResponse:
    """Which process answers: so that one can see that there are several, and that they are up."""
    return HttpResponse(str(os.getpid()), content_type="text/plain")


urlpatterns = [
    path("worker/", worker),
    path("lessons/", include("testproject.lessons.urls")),
]
