"""Where callers fly together: one is in the view, the others wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from asgiref.sync import ThreadSensitiveContext
from django.db import connections
from django.test import AsyncClient, Client

from singleflight_django.seats import _taken
from singleflight_django.snapshots import CARRIED
from tests.meeting import PATIENCE, Room
from tests.servers import until

Send = Callable[[], Any]
Asend = Callable[[], Awaitable[Any]]


def they_wait(number: int) -> None:
    """Return when so many callers of this process wait for somebody's flight."""
    until(lambda: sum(_taken.values()) >= number, f"{number} followers", PATIENCE)


def fly(
    room: Room,
    first: Send,
    *others: Send,
    waiting: int | None = None,
    meanwhile: Sequence[Send] = (),
) -> list[Any]:
    """Call ``first``, and once it is in the room the others; return what all of them returned.

    When ``waiting`` of the others wait, by default all, those of ``meanwhile`` are called, which
    don't wait; then the door opens.
    """
    with ThreadPoolExecutor(len(others) + 1) as pool:
        running = [pool.submit(_closing, first)]
        try:
            room.wait()
            running += [pool.submit(_closing, other) for other in others]
            they_wait(len(others) if waiting is None else waiting)
            at_once = [send() for send in meanwhile]
        finally:
            room.door.set()
        return [*(one.result(PATIENCE) for one in running), *at_once]


def _closing(send: Send) -> Any:
    try:
        return send()
    finally:
        connections.close_all()


async def afly(room: Room, first: Asend, *others: Asend, waiting: int | None = None) -> list[Any]:
    """See fly()."""
    running = [asyncio.ensure_future(first())]
    try:
        await room.await_()
        running += [asyncio.ensure_future(other()) for other in others]
        await asyncio.to_thread(they_wait, len(others) if waiting is None else waiting)
    finally:
        room.door.set()
    return await asyncio.wait_for(asyncio.gather(*running), PATIENCE)


def call(method: str = "post", path: str = "/7/", **kwargs: Any) -> Send:
    """A request through the WSGI handler, of a client of its own, to be made later."""
    return lambda: _sender(Client, method, kwargs)(path)


def acall(method: str = "post", path: str = "/7/", **kwargs: Any) -> Asend:
    """A request through the ASGI handler, of a client of its own, to be made later."""

    async def send() -> Any:
        # As Django's own ASGI handler does: each request has a thread of its own for sync code.
        async with ThreadSensitiveContext():
            return await _sender(AsyncClient, method, kwargs)(path)

    return send


def _sender(kind: Any, method: str, kwargs: dict[str, Any]) -> Any:
    """The method of a new client. A header Cookie becomes its cookies: Django 5.2 spoils the header."""
    client, headers = kind(raise_request_exception=False), dict(kwargs.get("headers") or {})
    client.cookies.load(headers.pop("Cookie", ""))
    return partial(getattr(client, method), **{**kwargs, "headers": headers})


def seen(response: Any) -> tuple[Any, ...]:
    """What a client sees of an answer and what every follower has to see as well."""
    headers = {(n.lower(), v) for n, v in response.headers.items() if n.lower() in CARRIED}
    return response.status_code, response.reason_phrase, response.content, headers


def statuses(responses: list[Any]) -> list[str]:
    """What each answer says of where it comes from."""
    return [response.headers.get("Cache-Status", "") for response in responses]


def problem(response: Any) -> str:
    """The last word of the type of one of our own answers."""
    assert response["Content-Type"] == "application/problem+json"
    return str(response.json()["type"]).rpartition(":")[2]
