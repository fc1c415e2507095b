"""ATOMIC_REQUESTS and a slow COMMIT: eight threads of a real server create one row, round after round.

On PostgreSQL, in a table without a unique constraint: nothing but the guard is in the way. A few
rounds belong to every run; ``SINGLEFLIGHT_SOAK_ROUNDS`` says how many the soak has (150 for the
full run).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from uuid import uuid4

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse
from django.test.testcases import QuietWSGIRequestHandler
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from singleflight_django import (
    SemaphoreLockMixin,
    SingleFlightMixin,
    semaphore_lock,
    single_flight,
)
from tests.library.models import Owner
from tests.meeting import PATIENCE, urls

THREADS = 8
FEW, MANY = 3, int(os.environ.get("SINGLEFLIGHT_SOAK_ROUNDS", "15"))
KEY = "owner:<query.name>"
lock = semaphore_lock(KEY)
# All but one of the threads may wait: nobody else has a request for them.
flight = single_flight(KEY, max_followers=THREADS)

pytestmark = [
    pytest.mark.timeout(300 + 3 * MANY),
    pytest.mark.parametrize("using", ["postgres"], indirect=True),
    pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.soak)]),
]

# The COMMIT itself takes a tenth of a second: its end is when others see the row.
SLOW = """
CREATE FUNCTION soak_slow() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER soak_slow AFTER INSERT ON library_owner
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION soak_slow()"""
FAST = "DROP TRIGGER soak_slow ON library_owner; DROP FUNCTION soak_slow()"


def create(request: Any) -> int:
    """The double create as everybody writes it; returns its status."""
    assert connection.alias == "default"
    assert connections["postgres"].in_atomic_block
    name = request.GET["name"]
    if Owner.objects.filter(name=name).exists():
        return 200
    Owner.objects.create(name=name)
    return 201


def function(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=create(request))


class Plain(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=create(request))


class PlainAPI(APIView):
    def post(self, request: Any) -> Response:
        return Response(status=create(request))


def on_dispatch(guard: Any) -> Any:
    return method_decorator(guard, name="dispatch")(type("Dispatched", (Plain,), {})).as_view()


def beneath(guard: Any) -> Any:
    class Beneath(View):
        @guard
        def post(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(status=create(request))

    return Beneath.as_view()


def beneath_api_view(guard: Any) -> Any:
    @api_view(["POST"])
    @guard
    def post(request: Any) -> Response:
        return Response(status=create(request))

    return post


class Locked(SemaphoreLockMixin, Plain):
    lock_key = KEY


class Flown(SingleFlightMixin, Plain):
    flight_key = KEY
    flight_max_followers = THREADS


class LockedAPI(SemaphoreLockMixin, PlainAPI):
    lock_key = KEY


class FlownAPI(SingleFlightMixin, PlainAPI):
    flight_key = KEY
    flight_max_followers = THREADS


class Owners(SemaphoreLockMixin, ViewSet):
    lock_key = KEY

    def create(self, request: Any) -> Response:
        return Response(status=create(request))


def in_a_router() -> Any:
    router = SimpleRouter()
    router.register("", Owners, "owners")
    (route,) = router.urls
    return route.callback


# Where the lease is outside of the transaction, and where it ends with it.
PROTECTED: dict[str, Callable[[], Any]] = {
    "lock, function": lambda: lock(function),
    "lock, as_view()": lambda: lock(Plain.as_view()),
    "lock, dispatch()": lambda: on_dispatch(lock),
    "lock, mixin": Locked.as_view,
    "lock, mixin, APIView": LockedAPI.as_view,
    "lock, mixin, ViewSet": in_a_router,
    "lock, on a method": lambda: beneath(lock),
    "lock, beneath @api_view": lambda: beneath_api_view(lock),
    "flight, function": lambda: flight(function),
    "flight, as_view()": lambda: flight(Plain.as_view()),
    "flight, dispatch()": lambda: on_dispatch(flight),
    "flight, mixin": Flown.as_view,
    "flight, mixin, APIView": FlownAPI.as_view,
}
# Where it could only wait inside of the transaction.
REFUSED: dict[str, Callable[[], Any]] = {
    "lock that waits, on a method": lambda: beneath(semaphore_lock(KEY, wait=5)),
    "lock that waits, beneath @api_view": lambda: beneath_api_view(semaphore_lock(KEY, wait=5)),
    "flight, on a method": lambda: beneath(flight),
    "flight, @method_decorator": lambda: beneath(method_decorator(flight)),
    "flight, beneath @api_view": lambda: beneath_api_view(flight),
}


class Site:
    """A real server, and what its eight callers are answered."""

    def __init__(self, port: int) -> None:
        self.port = port

    def race(self, form: str, rounds: int) -> tuple[list[int], list[Counter[int]]]:
        """Return of each round how many rows there are, and how often which status came."""
        rows, statuses = [], []
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(rounds):
                name, barrier = str(uuid4()), threading.Barrier(THREADS, timeout=PATIENCE)
                calls = [pool.submit(self._post, name, barrier) for _ in range(THREADS)]
                statuses.append(Counter(call.result(3 * PATIENCE) for call in calls))
                rows.append(Owner.objects.filter(name=name).count())
        double = sum(number > 1 for number in rows)
        told = dict(sorted(sum(statuses, Counter()).items()))
        print(f"{form}: {rounds} rounds, {double} with duplicates, {told}")
        return rows, statuses

    def _post(self, name: str, barrier: threading.Barrier) -> int:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=2 * PATIENCE)) as client:
            client.connect()
            barrier.wait()
            client.request("POST", f"/?name={name}")
            with client.getresponse() as response:
                response.read()
                return response.status


@pytest.fixture
def site(using: str, settings: Any) -> Iterator[Callable[[Any], Site]]:
    """``site(view)`` serves the view, each request in its thread and, by Django, its transaction."""
    # That of the CSRF token is not for callers without a browser.
    settings.MIDDLEWARE = []
    connections.settings[using]["ATOMIC_REQUESTS"] = True
    with connections[using].cursor() as cursor:
        cursor.execute(SLOW)
    server = ThreadedWSGIServer(("127.0.0.1", 0), QuietWSGIRequestHandler)
    server.daemon_threads = False
    server.set_app(WSGIHandler())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def serve(view: Any) -> Site:
        settings.ROOT_URLCONF = urls(view, "")
        return Site(server.server_port)

    yield serve
    server.shutdown()
    server.server_close()
    thread.join()
    with connections[using].cursor() as cursor:
        cursor.execute(FAST)
    connections.settings[using]["ATOMIC_REQUESTS"] = False


def test_unprotected_there_are_duplicates(site: Callable[[Any], Site], rounds: int) -> None:
    rows, _ = site(function).race("unprotected", rounds)

    assert max(rows) > 1


@pytest.mark.parametrize("form", PROTECTED)
def test_protected_there_is_one_row(site: Callable[[Any], Site], rounds: int, form: str) -> None:
    rows, statuses = site(PROTECTED[form]()).race(form, rounds)

    assert rows == [1] * rounds
    told = sum(statuses, Counter())
    if form.startswith("lock"):
        assert all(each[201] == 1 for each in statuses)
        # Who is that late finds the row.
        assert set(told) <= {201, 429, 200}
        assert told[429]
    else:
        assert all(each[201] >= 1 for each in statuses)
        assert set(told) <= {201, 200}
        assert told[201] > rounds


@pytest.mark.parametrize("form", REFUSED)
def test_where_the_transaction_is_open_already_it_is_an_error_each_time(
    site: Callable[[Any], Site], rounds: int, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, statuses = site(REFUSED[form]()).race(form, rounds)

    assert rows == [0] * rounds
    assert statuses == [Counter({500: THREADS})] * rounds
    errors = {each.exc_info[0].__name__ for each in caplog.records if each.exc_info}
    assert errors == {"WaitInTransactionError"}
