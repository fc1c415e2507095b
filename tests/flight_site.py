"""A site that gunicorn (``wsgi``) and uvicorn (``asgi``) serve; ``flight_servers`` starts them.

Its view is sync at ``/sync/`` and async at ``/async/``; at ``/mixed/`` and ``/brief/`` it is sync
under gunicorn and async under uvicorn: one key, one namespace, one identity. Whoever is in it stays
there until the test opens the door, in Redis. There, too, is told who runs and who waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import django
import redis
from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import sync_and_async_middleware

from singleflight_django import callers, single_flight
from singleflight_django.seats import Seat
from singleflight_django.waiting import clock
from tests import settings as run

PATIENCE = 20
# Life of a lease at ``/brief/``, in seconds: longer than a loaded machine keeps it from being renewed.
TTL = 1.5


def work(request: HttpRequest) -> HttpResponse:
    pk = request.POST["lesson"]
    with redis.Redis.from_url(run.REDIS_URL, socket_timeout=None) as client:
        number = client.rpush(f"test:runs:{pk}", f"{os.getpid()} {clock()}")
        doors = [f"test:door:{pk}", f"test:door:{pk}:{os.getpid()}"]
        opened = client.blpop(doors, timeout=PATIENCE)
    headers = {
        "Location": f"/lessons/{pk}/{number}/",
        "ETag": f'"{os.getpid()}-{number}"',
        "Content-Language": "en",
        # The one that describes no answer: it isn't for the followers.
        "X-Run": str(number),
    }
    text = f"run {number}, by {os.getpid()}"
    return HttpResponse(text, status=201 if opened else 500, headers=headers)


async def awork(request: HttpRequest) -> HttpResponse:
    return await asyncio.to_thread(work, request)


async def who(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@sync_and_async_middleware
def signed(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Say which process answers: whatever the view's answer, and wherever that comes from."""

    def sign(response: HttpResponse) -> HttpResponse:
        response["X-Process"] = str(os.getpid())
        return response

    async def amiddleware(request: HttpRequest) -> HttpResponse:
        return sign(await get_response(request))

    def middleware(request: HttpRequest) -> HttpResponse:
        return sign(get_response(request))

    return amiddleware if iscoroutinefunction(get_response) else middleware


class ToldSeat(Seat):
    """Tells of each caller that it waits for somebody's flight, and that it does no more."""

    client: redis.Redis

    def take(self) -> None:
        before = self._mine
        super().take()
        if not before:
            self.client.hincrby("test:waiting", str(os.getpid()), 1)

    def __exit__(self, *exc_info: object) -> None:
        if self._mine:
            self.client.hincrby("test:waiting", str(os.getpid()), -1)
        super().__exit__(*exc_info)


def _site(view: Any) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from django.conf import settings
    from django.views.decorators.csrf import csrf_exempt

    from tests import urls

    ToldSeat.client = redis.Redis.from_url(run.REDIS_URL)
    callers.Seat = ToldSeat  # type: ignore[misc]
    settings.MIDDLEWARE = [f"{__name__}.signed", *settings.MIDDLEWARE]
    urls.urlpatterns[:] = [path("who", csrf_exempt(who))]
    for name, one in {"sync": work, "async": awork, "mixed": view, "brief": view}.items():
        guard = single_flight(
            key="lesson:<body.lesson>",
            namespace=name,
            ttl=TTL if name == "brief" else None,
            max_followers=100,
        )
        urls.urlpatterns.append(path(f"{name}/", csrf_exempt(guard(one))))


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
