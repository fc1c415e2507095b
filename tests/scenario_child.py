"""A process that serves requests one by one, as ``test_scenarios`` tells it on its standard input.

It says what happens in lines: "ready", "inside" (and then waits for a line before it leaves the
view), and the status of each response.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import django
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path

KEYS = {
    "right": "lesson:<pk>",
    # Everybody contends with everybody.
    "too coarse": "lesson",
    # A retry of the same call has another id: nobody contends with anybody.
    "too fine": "lesson:<pk>:<header.X-Request-Id>",
}


def say(word: object) -> None:
    print(word, flush=True)


def work(request: HttpRequest, pk: str) -> HttpResponse:
    say("inside")
    sys.stdin.readline()
    return HttpResponse(status=201)


async def awork(request: HttpRequest, pk: str) -> HttpResponse:
    return await asyncio.to_thread(work, request, pk)


def patterns() -> list[Any]:
    from singleflight_django import semaphore_lock

    return [
        path(f"{colour}/{name.replace(' ', '-')}/<str:pk>/", semaphore_lock(key=key)(view))
        for name, key in KEYS.items()
        for colour, view in (("sync", work), ("async", awork))
    ]


def serve(url: str, request_id: str) -> int:
    headers = {"X-Request-Id": request_id}
    if url.startswith("/async/"):
        return asyncio.run(AsyncClient().post(url, headers=headers)).status_code
    return Client().post(url, headers=headers).status_code


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from tests import urls

    urls.urlpatterns += patterns()
    say("ready")
    while line := sys.stdin.readline():
        say(serve(**json.loads(line)))
