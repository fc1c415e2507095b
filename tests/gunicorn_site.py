"""A site that gunicorn serves with its own kinds of workers; ``test_gunicorn`` starts it.

Whoever is in one of its guarded views stays there until the test opens the door, in Redis. There,
too, is told who runs, and whose worker was told to exit.
"""

from __future__ import annotations

import os
from typing import Any

import django
import redis
from django.http import HttpRequest, HttpResponse
from django.urls import path

from singleflight_django import semaphore_lock, single_flight
from tests import settings as run

# How long the work takes where nobody opens the door, in seconds.
LONG = 20
TTL = 2.0


def work(request: HttpRequest) -> HttpResponse:
    pk = request.POST["lesson"]
    with redis.Redis.from_url(run.REDIS_URL, socket_timeout=None) as client:
        number = client.rpush(f"test:runs:{pk}", os.getpid())
        try:
            opened = client.blpop([f"test:door:{pk}"], timeout=LONG)
        except SystemExit:
            client.set(f"test:exit:{pk}", os.getpid())
            raise
    headers = {"Location": f"/lessons/{pk}/{number}/"}
    text = f"run {number}, by {os.getpid()}"
    return HttpResponse(text, status=201 if opened else 500, headers=headers)


def health(request: HttpRequest) -> HttpResponse:
    return HttpResponse("well")


def wsgi() -> Any:
    """The application for gunicorn."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from django.core.wsgi import get_wsgi_application
    from django.views.decorators.csrf import csrf_exempt

    from tests import urls

    key = "lesson:<body.lesson>"
    guards = {
        "flight": single_flight(key),
        "lock": semaphore_lock(key, ttl=TTL),
        "long-lock": semaphore_lock(key, ttl=LONG),
    }
    urls.urlpatterns[:] = [path("health/", csrf_exempt(health))]
    for name, guard in guards.items():
        urls.urlpatterns.append(path(f"{name}/", csrf_exempt(guard(work))))
    return get_wsgi_application()
