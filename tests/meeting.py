"""Where callers meet: a view that holds its caller until the others have been answered.

Nothing here sleeps: who waits, waits for an event, and gives up loudly after PATIENCE seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import redis
from asgiref.sync import ThreadSensitiveContext
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path

from singleflight_django import signals
from singleflight_django.parts import qualify
from singleflight_django.stores.base import Grant
from singleflight_django.stores.registry import get_store
from tests import settings as run
from tests.servers import until

PATIENCE = 10.0
_names = itertools.count()


class Room:
    """The inside of a guarded view: callers are counted, and stay until the door opens."""

    def __init__(self, *, open: bool = False) -> None:
        self.entered, self.door = threading.Event(), threading.Event()
        self.visits = 0
        self._lock = threading.Lock()
        if open:
            self.door.set()

    def stay(self, *args: Any, **kwargs: Any) -> HttpResponse:
        with self._lock:
            self.visits += 1
        self.entered.set()
        assert self.door.wait(PATIENCE), "nobody opened the door"
        return HttpResponse("made", status=201)

    async def astay(self, *args: Any, **kwargs: Any) -> HttpResponse:
        return await asyncio.to_thread(self.stay)

    def wait(self) -> None:
        assert self.entered.wait(PATIENCE), "nobody came in"

    async def await_(self) -> None:
        await asyncio.to_thread(self.wait)


def meet(room: Room, first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
    """Call ``first``, and while it is in the room the others; return what they returned."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first)
        try:
            room.wait()
            answers = [other() for other in others]
        finally:
            room.door.set()
        return [running.result(PATIENCE), *answers]


async def ameet(
    room: Room, first: Callable[[], Awaitable[Any]], *others: Callable[[], Awaitable[Any]]
) -> list[Any]:
    """See meet()."""
    running = asyncio.ensure_future(first())
    try:
        await room.await_()
        answers = [await other() for other in others]
    finally:
        room.door.set()
    return [await asyncio.wait_for(running, PATIENCE), *answers]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Let the calls start at once, each in a thread; return what they returned."""
    barrier = threading.Barrier(len(calls), timeout=PATIENCE)

    def start(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [running.result(PATIENCE) for running in [pool.submit(start, c) for c in calls]]


def function(room: Room) -> Callable[..., Any]:
    def create(request: HttpRequest, pk: str) -> HttpResponse:
        return room.stay()

    return create


def afunction(room: Room) -> Callable[..., Any]:
    async def create(request: HttpRequest, pk: str) -> HttpResponse:
        return await room.astay()

    return create


def codes(responses: list[Any]) -> list[int]:
    return [response.status_code for response in responses]


def urls(view: Any, route: str = "<str:pk>/") -> ModuleType:
    """A URLconf of one view, for ``settings.ROOT_URLCONF``."""
    module = ModuleType(f"urls_of_test_{next(_names)}")
    vars(module)["urlpatterns"] = [path(route, view)]
    return module


def post(path: str = "/7/", **extra: Any) -> Callable[[], Any]:
    """A POST through the WSGI handler, to be made later."""
    return lambda: Client(**extra).post(path)


def apost(path: str = "/7/", **extra: Any) -> Callable[[], Awaitable[Any]]:
    """A POST through the ASGI handler, to be made later."""

    async def send() -> Any:
        # As Django's own ASGI handler does: each request has a thread of its own for sync code.
        async with ThreadSensitiveContext():
            return await AsyncClient(**extra).post(path)

    return send


def held(key: str, namespace: str = "semaphore_lock", cache: str | None = None) -> bool:
    """Whether someone holds the lease, asked at the store itself."""
    store, name = get_store(cache), qualify(namespace, key)
    answer = store.acquire(name, "a look from outside", 1.0, 1, 0.0)
    if isinstance(answer, Grant):
        store.release(name, "a look from outside")
    return not isinstance(answer, Grant)


def request_like(method: str = "POST", path: str = "/7/") -> HttpRequest:
    """A bare request, for calling a view directly."""
    return RequestFactory().generic(method, path)


def soon_free(key: str) -> None:
    """Return when nobody holds the lease any more."""
    until(lambda: not held(key), f"{key} is free", PATIENCE)


def someone_waits() -> None:
    """Return when the store knows of a waiter."""
    with redis.Redis.from_url(run.REDIS_URL) as client:
        until(lambda: client.keys("singleflight:*:waiting"), "a waiter", PATIENCE)


@contextmanager
def listening(*names: str) -> Iterator[list[tuple[str, signals.Facts]]]:
    """Note the events of these names, with their facts."""
    told: list[tuple[str, signals.Facts]] = []
    listeners = []
    for name in names:

        def listener(facts: signals.Facts, name: str = name, **kwargs: Any) -> None:
            told.append((name, facts))

        listeners.append((getattr(signals, name), listener))
    for signal, listener in listeners:
        signal.connect(listener)
    try:
        yield told
    finally:
        for signal, listener in listeners:
            signal.disconnect(listener)
