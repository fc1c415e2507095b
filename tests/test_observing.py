"""Observe mode of flights: everybody runs its own work, and each duplicate is told of."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import Client
from django.views import View

from singleflight_django import SingleFlight, SingleFlightMixin, single_flight
from singleflight_django.exceptions import DuplicateMismatchError
from singleflight_django.renewal import keeper
from singleflight_django.signals import STORE_AWAY
from tests.flying import acall, call, problem, statuses
from tests.meeting import PATIENCE, codes, listening, together, urls
from tests.servers import until

TOLD = ("flight_led", "flight_joined", "share_refused", "unprotected_run", "lease_rejected")


class Inside:
    """The inside of an observed view: nobody leaves before ``number`` are there together."""

    def __init__(self, number: int = 1) -> None:
        self.barrier = threading.Barrier(number, timeout=PATIENCE)
        self.numbers = itertools.count()

    def work(self, *args: Any) -> int:
        self.barrier.wait()
        return next(self.numbers)

    async def awork(self, *args: Any) -> int:
        return await asyncio.to_thread(self.work)

    def view(self, request: HttpRequest, pk: str) -> HttpResponse:
        request.lease.check()  # type: ignore[attr-defined]
        return HttpResponse(str(self.work()), status=201)

    async def aview(self, request: HttpRequest, pk: str) -> HttpResponse:
        return await asyncio.to_thread(self.view, request, pk)

    def mixin(self, **attributes: Any) -> Any:
        bases, post = (SingleFlightMixin, View), lambda view, request, pk: self.view(request, pk)
        return type("V", bases, {"flight_key": "lesson:<pk>", "post": post, **attributes}).as_view()

    def amixin(self, **attributes: Any) -> Any:
        async def post(view: Any, request: HttpRequest, pk: str) -> HttpResponse:
            return await self.aview(request, pk)

        attributes = {"flight_key": "lesson:<pk>", "post": post, **attributes}
        return type("V", (SingleFlightMixin, View), attributes).as_view()


@pytest.fixture(params=["option", "setting"])
def observing(request: pytest.FixtureRequest, settings: Any) -> dict[str, Any]:
    """The options of what is to be observed."""
    if request.param == "option":
        return {"observe": True}
    settings.SINGLEFLIGHT_ENABLED = "observe"
    return {}


@pytest.fixture(autouse=True)
def _nothing_is_held() -> Iterator[None]:
    yield
    assert not [lease for lease in keeper._watched if lease.held]


def flight(**options: Any) -> Any:
    return single_flight(**{"key": "lesson:<pk>", "observe": True, **options})


async def gathered(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*(one() for one in calls)), PATIENCE)


def assert_two_of_three_were_told(told: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    assert sorted(name for name, _ in told) == ["flight_joined"] * 2 + ["flight_led"]
    assert len({facts.key for _, facts in told}) == 1
    joined = [facts for name, facts in told if name == "flight_joined"]
    assert {facts.reason for facts in joined} == {"observe"}
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert [line.partition(" ")[0] for line in lines] == ["flight_joined"] * 2
    assert all(line.endswith("reason=observe") for line in lines)


class TestViews:
    @pytest.mark.parametrize("kind", ["view", "mixin"])
    def test_everybody_runs_and_each_duplicate_is_told(
        self, observing: Any, kind: str, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        inside = Inside(3)
        if kind == "view":
            view = single_flight(key="lesson:<pk>", result_ttl=60, **observing)(inside.view)
        else:
            view = inside.mixin(flight_observe="observe" in observing)
        settings.ROOT_URLCONF = urls(view)
        with listening(*TOLD) as told, caplog.at_level(logging.INFO, "singleflight_django"):
            answers = together(call(), call(), call())
        assert sorted(one.content for one in answers) == [b"0", b"1", b"2"]
        assert statuses(answers) == [""] * 3
        assert_two_of_three_were_told(told, caplog)

    @pytest.mark.parametrize("kind", ["view", "mixin"])
    async def test_everybody_runs_and_each_duplicate_is_told_async(
        self, observing: Any, kind: str, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        inside = Inside(3)
        if kind == "view":
            view = single_flight(key="lesson:<pk>", result_ttl=60, **observing)(inside.aview)
        else:
            view = inside.amixin(flight_observe="observe" in observing)
        settings.ROOT_URLCONF = urls(view)
        with listening(*TOLD) as told, caplog.at_level(logging.INFO, "singleflight_django"):
            answers = await gathered(acall(), acall(), acall())
        assert sorted(one.content for one in answers) == [b"0", b"1", b"2"]
        assert statuses(answers) == [""] * 3
        assert_two_of_three_were_told(told, caplog)

    @pytest.mark.parametrize("other", [{"path": "/8/"}, {"method": "put"}])
    def test_other_identities_are_no_duplicates(self, other: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(flight()(Inside(2).view))
        with listening(*TOLD) as told:
            assert codes(together(call(), call(**other))) == [201, 201]
        assert [name for name, _ in told] == ["flight_led"] * 2

    def test_who_comes_after_the_end_is_no_duplicate(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(flight()(Inside().view))
        with listening(*TOLD) as told:
            assert codes([call()(), call()()]) == [201, 201]
        assert [name for name, _ in told] == ["flight_led"] * 2

    @pytest.mark.parametrize(
        ("key", "reason"),
        [
            ("x:<uuid>", "KeyFieldError"),
            ("x:<body.id>", "BadRequest"),
            ("x:<user>", "PermissionDenied"),
            (lambda request, pk: None, "TypeError"),
            (lambda request, pk: ["a", "b"], "KeyFieldError"),
        ],
    )
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_what_makes_no_key_is_told_and_refuses_nobody(
        self, key: Any, reason: str, kind: str, settings: Any
    ) -> None:
        inside = Inside()
        view = inside.view if kind == "sync" else inside.aview
        settings.ROOT_URLCONF = urls(flight(key=key)(view))
        data = b"{" if reason == "BadRequest" else b"{}"
        send = acall(data=data, content_type="application/json")
        with listening(*TOLD) as told:
            assert (await send()).status_code == 201
        assert [(name, facts.reason) for name, facts in told] == [
            ("share_refused", f"observe: {reason}")
        ]

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_a_body_too_large_to_compare_is_no_duplicate(self, kind: str, settings: Any) -> None:
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
        inside = Inside(2)
        settings.ROOT_URLCONF = urls(flight()(inside.view if kind == "sync" else inside.aview))
        big = call(data=b"x" * 11, content_type="application/octet-stream")
        with listening(*TOLD) as told:
            assert codes(together(big, big)) == [201, 201]
        assert told == []

    @pytest.mark.parametrize("policy", [None, "reject"])
    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_store_that_is_away_disturbs_nobody(
        self, kind: str, cache: str, policy: Any, settings: Any
    ) -> None:
        inside = Inside()
        view = inside.view if kind == "sync" else inside.aview
        settings.ROOT_URLCONF = urls(flight(cache=cache, on_store_error=policy)(view))
        with listening(*TOLD) as told:
            assert (await acall()()).status_code == 201
        assert [(name, facts.reason) for name, facts in told] == [("unprotected_run", STORE_AWAY)]

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_view_that_fails_gives_the_place_back(self, kind: str, settings: Any) -> None:
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            raise LookupError

        async def aview(request: HttpRequest, pk: str) -> HttpResponse:
            raise LookupError

        settings.ROOT_URLCONF = urls(flight()(view if kind == "sync" else aview))
        with listening(*TOLD) as told:
            assert codes([await acall()(), await acall()()]) == [500, 500]
        assert [name for name, _ in told] == ["flight_led"] * 2

    def test_a_stream_has_the_place_until_its_end(self, settings: Any) -> None:
        def view(request: HttpRequest, pk: str) -> StreamingHttpResponse:
            return StreamingHttpResponse(iter([b"a", b"b"]))

        settings.ROOT_URLCONF = urls(flight()(view))
        with listening(*TOLD) as told:
            (first,), (second,) = together(call()), together(call())
            for response in (first, second):
                assert b"".join(response) == b"ab"
                response.close()
            call()().close()
        assert [name for name, _ in told] == ["flight_led", "flight_joined", "flight_led"]

    def test_the_place_is_renewed_while_the_view_runs(self, settings: Any) -> None:
        def view(request: Any, pk: str) -> HttpResponse:
            first = request.lease.expires
            until(lambda: request.lease.expires > first, "a renewal", PATIENCE)
            request.lease.check()
            return HttpResponse(request.lease.key)

        settings.ROOT_URLCONF = urls(flight(ttl=1.5, namespace="lessons")(view))
        assert call()().content.startswith(b"lessons:lesson:7")

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_duplicate_row_is_answered_as_ever(self, kind: str, settings: Any) -> None:
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            raise DuplicateMismatchError("another")

        async def aview(request: HttpRequest, pk: str) -> HttpResponse:
            return view(request, pk)

        settings.ROOT_URLCONF = urls(flight()(view if kind == "sync" else aview))
        assert problem(await acall()()) == "duplicate-mismatch"

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_an_open_transaction_is_told(self, kind: str, settings: Any) -> None:
        inside = Inside()
        settings.ROOT_URLCONF = urls(flight()(inside.view if kind == "sync" else inside.aview))
        with listening(*TOLD) as told, transaction.atomic():
            assert Client().post("/7/").status_code == 201
        assert [facts.reason for _, facts in told] == ["observe: WaitInTransactionError"]


class TestFunctions:
    @pytest.mark.parametrize("how", ["run", "coalesce"])
    def test_everybody_runs_and_each_duplicate_is_told(
        self, observing: Any, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        inside, flights = Inside(3), SingleFlight("f", result_ttl=60, **observing)
        coalesced = flights.coalesce(key="<n>")(lambda n: inside.work())
        work = {
            "run": lambda: flights.run("7", inside.work),
            "coalesce": lambda: coalesced(7),
        }[how]
        with listening(*TOLD) as told, caplog.at_level(logging.INFO, "singleflight_django"):
            assert sorted(together(work, work, work)) == [0, 1, 2]
        assert {facts.key for _, facts in told} == {"f:7"}
        assert_two_of_three_were_told(told, caplog)

    @pytest.mark.parametrize("how", ["arun", "coalesce"])
    async def test_everybody_runs_and_each_duplicate_is_told_async(
        self, observing: Any, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        inside, flights = Inside(3), SingleFlight("f", result_ttl=60, **observing)

        @flights.coalesce(key="<n>")
        async def coalesced(n: int) -> int:
            return await inside.awork()

        work = {
            "arun": lambda: flights.arun("7", inside.awork),
            "coalesce": lambda: coalesced(7),
        }[how]
        with listening(*TOLD) as told, caplog.at_level(logging.INFO, "singleflight_django"):
            assert sorted(await gathered(work, work, work)) == [0, 1, 2]
        assert {facts.key for _, facts in told} == {"f:7"}
        assert_two_of_three_were_told(told, caplog)

    async def test_what_makes_no_key_is_told_and_refuses_nobody(self) -> None:
        flights, work = SingleFlight("f", observe=True), Inside()
        coalesced = flights.coalesce(key="<n>")(lambda n: n)
        with listening(*TOLD) as told:
            assert flights.run(None, work.work) == 0  # type: ignore[arg-type]
            assert await flights.arun("", work.awork) == 1
            assert coalesced(None) is None
        assert {(name, facts.reason) for name, facts in told} == {
            ("share_refused", "observe: TypeError")
        }
        assert len(told) == 3

    async def test_a_store_that_is_away_disturbs_nobody(self) -> None:
        inside = Inside()
        flights = SingleFlight("f", observe=True, cache="dead", on_store_error="reject")
        with listening(*TOLD) as told:
            assert flights.run("k", inside.work) == 0
            assert await flights.arun("k", inside.awork) == 1
        reasons = [(name, facts.reason) for name, facts in told]
        assert reasons == [("unprotected_run", STORE_AWAY)] * 2

    async def test_what_the_work_raises_is_the_callers_and_ends_its_place(self) -> None:
        flights = SingleFlight("f", observe=True)

        def fail() -> None:
            raise LookupError

        async def afail() -> None:
            raise LookupError

        with listening(*TOLD) as told:
            for _ in range(2):
                with suppress(LookupError):
                    flights.run("k", fail)
                with suppress(LookupError):
                    await flights.arun("k", afail)
        assert [name for name, _ in told] == ["flight_led"] * 4

    def test_a_call_from_within_itself_is_told_as_nested(self) -> None:
        flights = SingleFlight("f", observe=True)
        with listening(*TOLD) as told:
            assert flights.run("k", lambda: flights.run("k", lambda: 7)) == 7
        assert [facts.reason for _, facts in told] == ["", "observe: NestedFlightError"]

    async def test_cancelled_it_leaves_its_place_to_lapse(self) -> None:
        """A thread that it waited for may still be running."""
        flights, inside = SingleFlight("f", observe=True, ttl=60), Inside(2)
        running = asyncio.ensure_future(flights.arun("k", inside.awork))
        await asyncio.to_thread(until, lambda: inside.barrier.n_waiting, "the work", PATIENCE)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with listening(*TOLD) as told:
            await asyncio.gather(flights.arun("k", inside.awork))
        assert [facts.reason for _, facts in told] == ["observe"]

    @pytest.mark.django_db(transaction=True)
    def test_an_open_transaction_is_told(self) -> None:
        flights, inside = SingleFlight("f", observe=True), Inside()
        with listening(*TOLD) as told, transaction.atomic():
            assert flights.run("k", inside.work) == 0
            assert async_to_sync(flights.arun)("k", inside.awork) == 1
        assert [facts.reason for _, facts in told] == ["observe: WaitInTransactionError"] * 2
