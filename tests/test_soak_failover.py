"""Redis is killed in the middle of a double create, again and again: one row each, and no 500.

With ``on_store_error="database"`` and the unique constraint. Some rounds belong to every run;
``SINGLEFLIGHT_SOAK_OUTAGES`` says how many the soak has (100 for the full run).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client

from singleflight_django import (
    acreate_or_existing,
    create_or_existing,
    semaphore_lock,
    single_flight,
)
from tests.library.models import Book, Owner
from tests.library.threads import race
from tests.meeting import PATIENCE, urls
from tests.servers import Valkey

CALLERS = 8
FEW, MANY = 2, int(os.environ.get("SINGLEFLIGHT_SOAK_OUTAGES", "10"))
# The kill comes within so many seconds: before the first caller, between two, or after the last.
LATEST = 0.1
# How long the view thinks between its look and its INSERT. Meanwhile the other callers come.
THINKS = 0.03
_rounds = count()

pytestmark = [
    pytest.mark.timeout(60 + 3 * MANY),
    pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.soak)]),
]


def look_then_create(request: HttpRequest) -> HttpResponse:
    """The double create as everybody writes it."""
    name = request.GET["uuid"]
    if Book.objects.filter(uuid=name).exists():
        return HttpResponse(status=200)
    Owner.objects.create(name=name)
    time.sleep(THINKS)
    Book.objects.create(uuid=name)
    return HttpResponse(status=201)


async def alook_then_create(request: HttpRequest) -> HttpResponse:
    name = request.GET["uuid"]
    if await Book.objects.filter(uuid=name).aexists():
        return HttpResponse(status=200)
    await asyncio.sleep(THINKS)
    await Book.objects.acreate(uuid=name)
    return HttpResponse(status=201)


def create(request: HttpRequest) -> HttpResponse:
    time.sleep(THINKS)
    _, created = create_or_existing(Book.objects, uuid=request.GET["uuid"])
    return HttpResponse(status=201 if created else 200)


async def acreate(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(THINKS)
    _, created = await acreate_or_existing(Book.objects, uuid=request.GET["uuid"])
    return HttpResponse(status=201 if created else 200)


@pytest.fixture
def guarded(
    using: str, redis_server: Valkey, cache_at: Callable[..., str], settings: Any
) -> Callable[[Any, Any], None]:
    """``guarded(guard, view)`` lets the site have this view, its leases in a server of the test's."""
    alias = cache_at(redis_server.url(), SOCKET_CONNECT_TIMEOUT=1, SOCKET_TIMEOUT=1)
    options = {"cache": alias, "on_store_error": "database"}

    def serve(guard: Any, view: Any) -> None:
        settings.ROOT_URLCONF = urls(guard(**options)(view), "")

    return serve


def lock(**options: Any) -> Any:
    return semaphore_lock("book:<query.uuid>", unique="library.Book.uuid", **options)


def flight(**options: Any) -> Any:
    return single_flight("book:<query.uuid>", max_followers=CALLERS, **options)


class Outages:
    """One outage each round, at a random moment, and what the callers are told."""

    def __init__(self, server: Valkey, settings: Any) -> None:
        self.server, self.settings = server, settings
        self.told: Counter[int] = Counter()

    def begin(self) -> str:
        """As in a new process: it finds out for itself that Redis is away."""
        self.settings.SINGLEFLIGHT_PREFIX = f"round{next(_rounds)}"
        return str(uuid4())

    def strike(self) -> None:
        time.sleep(random.uniform(0, LATEST))
        self.server.kill()

    def end(self, name: str, statuses: list[int]) -> None:
        self.server.start()
        self.told.update(statuses)
        assert Book.objects.filter(uuid=name).count() == 1
        assert {201} <= set(statuses) <= {200, 201, 409, 429, 503}, statuses

    def report(self, form: str, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
        noticed = sum("The store is away" in each.message for each in caplog.records)
        told = dict(sorted(self.told.items()))
        print(f"{form}: {rounds} kills, {noticed} in time to be noticed, one row each, {told}")


@pytest.fixture
def outages(redis_server: Valkey, settings: Any) -> Outages:
    return Outages(redis_server, settings)


@pytest.mark.parametrize(("guard", "view"), [(lock, look_then_create), (flight, create)])
def test_one_row_and_no_500(
    guarded: Callable[..., None],
    outages: Outages,
    rounds: int,
    guard: Any,
    view: Any,
    using: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded(guard, view)

    def click(name: str) -> int:
        time.sleep(random.uniform(0, THINKS))
        return Client(raise_request_exception=False).post(f"/?uuid={name}").status_code

    for _ in range(rounds):
        name = outages.begin()
        statuses = race(outages.strike, *[lambda name=name: click(name)] * CALLERS)[1:]
        outages.end(name, statuses)
        if guard is lock:
            # What the losers wrote before is rolled back with their duplicate.
            assert Owner.objects.filter(name=name).count() == 1
            assert statuses.count(201) == 1
    outages.report(f"{guard.__name__} on {using}", rounds, caplog)


@pytest.mark.parametrize(("guard", "view"), [(lock, alook_then_create), (flight, acreate)])
async def test_one_row_and_no_500_async(
    guarded: Callable[..., None],
    outages: Outages,
    rounds: int,
    guard: Any,
    view: Any,
    using: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded(guard, view)

    async def click(name: str) -> int:
        await asyncio.sleep(random.uniform(0, THINKS))
        # As Django's own ASGI handler does: each request has a thread of its own for sync code.
        async with ThreadSensitiveContext():
            try:
                client = AsyncClient(raise_request_exception=False)
                return (await client.post(f"/?uuid={name}")).status_code
            finally:
                await sync_to_async(connections.close_all)()

    for _ in range(rounds):
        name = outages.begin()
        strike = asyncio.to_thread(outages.strike)
        clicks = asyncio.gather(strike, *(click(name) for _ in range(CALLERS)))
        statuses = (await asyncio.wait_for(clicks, 3 * PATIENCE))[1:]
        await sync_to_async(outages.end)(name, statuses)
        if guard is lock:
            assert statuses.count(201) == 1
    await sync_to_async(connections.close_all)()
    outages.report(f"async {guard.__name__} on {using}", rounds, caplog)
