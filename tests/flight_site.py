"""A site that gunicorn (``wsgi``) and uvicorn (``asgi``) serve for ``test_flight_scenarios``.

Under gunicorn the view is sync, under uvicorn async: one key, one identity. Whoever is in the view
stays there until the test opens the door, in Redis.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import django
import redis
from django.http import HttpRequest, HttpResponse
from django.urls import path

PATIENCE = 20


def work(request: HttpRequest, pk: str) -> HttpResponse:
    from tests import settings

    with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=None) as client:
        client.incr(f"test:visits:{pk}")
        opened = client.blpop([f"test:door:{pk}"], timeout=PATIENCE)
    return HttpResponse(f"made by {os.getpid()}", status=201 if opened else 500)


async def awork(request: HttpRequest, pk: str) -> HttpResponse:
    return await asyncio.to_thread(work, request, pk)


async def waiting(request: HttpRequest) -> HttpResponse:
    """How many callers of this process wait for somebody's flight."""
    from singleflight_django.seats import _taken

    return HttpResponse(str(sum(_taken.values())))


def _site(view: Any) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from django.views.decorators.csrf import csrf_exempt

    from singleflight_django import single_flight
    from tests import urls

    flight = single_flight(key="lesson:<pk>", namespace="site", max_followers=100)
    urls.urlpatterns[:] = [
        path("waiting", waiting),
        path("lessons/<str:pk>/", csrf_exempt(flight(view))),
    ]


def wsgi() -> Any:
    """The application for gunicorn."""
    _site(work)
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()


def asgi() -> Any:
    """The application for uvicorn."""
    _site(awork)
    from django.core.asgi import get_asgi_application

    return get_asgi_application()
