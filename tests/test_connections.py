"""A request that waits for another one's answer does not keep its database connections for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from singleflight_django import seats, single_flight
from tests.meeting import PATIENCE
from tests.servers import until

CALLERS = 5
gate = threading.Event()
alias = "default"


def query() -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")


def queries(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware that asks the database before the view is called, as that of logins does."""

    def middleware(request: HttpRequest) -> Any:
        query()
        return get_response(request)

    async def amiddleware(request: HttpRequest) -> Any:
        await sync_to_async(query)()
        return await get_response(request)

    if iscoroutinefunction(get_response):
        return markcoroutinefunction(amiddleware)
    return middleware


queries.async_capable = queries.sync_capable = True  # type: ignore[attr-defined]


@single_flight(key="answer", max_followers=CALLERS)
def answer(request: HttpRequest) -> HttpResponse:
    assert gate.wait(PATIENCE)
    query()
    return HttpResponse("42")


@single_flight(key="answer")
async def aanswer(request: HttpRequest) -> HttpResponse:
    assert await asyncio.to_thread(gate.wait, PATIENCE)
    await sync_to_async(query)()
    return HttpResponse("42")


urlpatterns = [path("answer", answer), path("aanswer", aanswer)]
pytestmark = [
    pytest.mark.urls(__name__),
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
]


@pytest.fixture(autouse=True)
def site(postgres: str, settings: Any) -> Iterator[None]:
    global alias
    alias = postgres
    gate.clear()
    settings.MIDDLEWARE = [f"{__name__}.queries"]
    yield
    gate.set()


def close() -> None:
    connections[alias].close()


def others() -> int:
    """How many connections there are to the database, beside the one that asks."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


def test_threads_that_wait_give_theirs_back() -> None:

    def get() -> HttpResponse:
        try:
            return Client().get("/answer")
        finally:
            close()

    before = others()
    with ThreadPoolExecutor(CALLERS) as pool:
        answers = [pool.submit(get) for _ in range(CALLERS)]
        until(lambda: seats.waiting() == CALLERS - 1, "followers")
        # The leader's, which is at work, stays.
        until(lambda: others() - before == 1, "their connections to be closed")
        gate.set()
        assert {answer.result(PATIENCE).content for answer in answers} == {b"42"}


async def test_tasks_that_wait_give_those_of_their_requests_back() -> None:
    """Each request has a thread of its own for the ORM, and that thread a connection."""
    before = await sync_to_async(others)()
    application = ASGIHandler()
    scope = {
        **{"type": "http", "method": "GET", "path": "/aanswer", "query_string": b""},
        **{"headers": [(b"host", b"testserver")], "server": ("testserver", 80)},
    }
    requests = [ApplicationCommunicator(application, scope) for _ in range(CALLERS)]
    for request in requests:
        await request.send_input({"type": "http.request", "body": b""})
    await eventually(lambda: seats.waiting() == CALLERS - 1)
    while await sync_to_async(others)() - before != 1:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)
    gate.set()
    for request in requests:
        assert (await request.receive_output(PATIENCE))["status"] == 200
        assert (await request.receive_output(PATIENCE))["body"] == b"42"
        await request.wait(PATIENCE)
    await sync_to_async(close)()


async def eventually(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not what():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def test_one_whose_transaction_is_open_keeps_it() -> None:
    """Nobody waits there; and what a site has begun by hand is not ours to end."""
    from singleflight_django.transactions import Connections

    connection = connections[alias]
    query()
    connection.set_autocommit(False)
    try:
        Connections().let_go()
        assert connection.connection is not None
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    Connections().let_go()
    assert connection.connection is None
