"""The test kit: callers at once, and one that dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path

from singleflight_django import SingleFlight, semaphore_lock, single_flight
from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.signals import lease_acquired
from singleflight_django.testing import crash_leader, held, processes, race
from singleflight_django.testing.racing import Outcome
from testproject.lessons.models import LooseLessonSession

answers = SingleFlight("answers", ttl=1, wait=20)


@semaphore_lock(key="lesson:<name>", ttl=1)
def locked(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=201)


@single_flight(key="lesson:<name>", ttl=1)
async def flown(request: HttpRequest) -> HttpResponse:
    return HttpResponse("answer")


def free(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


urlpatterns = [path("locked", locked), path("flown", flown), path("free", free)]
pytestmark = pytest.mark.urls(__name__)


class TestThreads:
    def test_results_and_errors_are_told_apart(self) -> None:
        numbers = iter(range(5))

        def odd() -> int:
            number = next(numbers)
            if number % 2 == 0:
                raise ValueError(number)
            return number

        results, errors = race(5, odd)
        assert sorted(results) == [1, 3]
        assert sorted(str(error) for error in errors) == ["0", "2", "4"]

    def test_all_are_there_before_one_begins(self) -> None:
        together = threading.Barrier(4, timeout=10)
        results, errors = race(4, together.wait)
        assert (sorted(results), errors) == ([0, 1, 2, 3], [])

    def test_each_has_a_context_of_its_own(self) -> None:
        seen: ContextVar[str] = ContextVar("seen", default="nothing")
        seen.set("the test's")
        assert race(2, seen.get).results == ["nothing", "nothing"]

    def test_async_callables_are_awaited_and_their_sync_parts_do_not_wait_for_each_other(
        self,
    ) -> None:
        together = threading.Barrier(3, timeout=10)

        async def meet() -> int:
            await asyncio.sleep(0)
            return await sync_to_async(together.wait)()

        assert sorted(race(3, meet).results) == [0, 1, 2]

    async def test_it_works_in_an_async_test(self, async_client: AsyncClient) -> None:
        async with held("lesson:7"):
            results, _ = race(2, lambda: async_client.post("/locked", {"name": "7"}))
        assert [response.status_code for response in results] == [429, 429]

    def test_one_that_does_not_end_is_told_of(self) -> None:
        never = threading.Event()
        calls = iter([never.wait, int])
        with pytest.raises(TimeoutError, match=r"1 of 2 callers were still running after 0\.2 s"):
            race(2, lambda: next(calls)(), timeout=0.2)
        never.set()

    @pytest.mark.parametrize("n", [0, -1, True, 2.0])
    def test_an_impossible_number_is_refused(self, n: Any) -> None:
        with pytest.raises(ValueError, match="n must be"):
            race(n, int)

    @pytest.mark.django_db(transaction=True)
    def test_database_connections_are_closed(self, django_user_model: Any) -> None:
        django_user_model.objects.create(pk=1, username="ann")
        wrappers = []

        def create() -> int:
            wrappers.append(connection._connections["default"])  # type: ignore[attr-defined]
            LooseLessonSession.objects.create(uuid=uuid4(), course="x", user_id=1)
            return id(connection.connection)

        assert race(3, create).errors == []
        assert LooseLessonSession.objects.count() == 3
        assert len({id(wrapper) for wrapper in wrappers}) == 3
        assert [wrapper.connection for wrapper in wrappers] == [None] * 3

    @pytest.mark.django_db
    def test_a_transaction_of_the_test_is_named_as_a_cause(self) -> None:
        never = threading.Event()
        with pytest.raises(TimeoutError, match="use a TransactionTestCase"):
            race(1, never.wait, timeout=0.2)
        never.set()


class TestProcesses:
    def test_each_is_a_process_of_its_own_and_all_begin_together(self) -> None:
        results, errors = race(3, os.getpid, processes=True)
        assert errors == []
        assert len({*results, os.getpid()}) == 4

    def test_one_of_them_gets_the_key(self, client: Client) -> None:
        def hold() -> str:
            with semaphore_lock("lesson:7", ttl=60, renew=False) as lease:
                # Never given back.
                lease.end()
                return lease.token

        results, errors = race(3, hold, processes=True)
        assert len(results) == 1
        assert [type(error) for error in errors] == [LeaseConflictError] * 2
        assert "in hold" in errors[0].__notes__[0]
        assert client.post("/locked", {"name": "7"}).status_code == 429

    @pytest.mark.django_db(transaction=True)
    def test_they_have_database_connections_of_their_own(self, django_user_model: Any) -> None:
        django_user_model.objects.create(pk=1, username="ann")
        connection.ensure_connection()

        def create() -> int:
            return LooseLessonSession.objects.create(uuid=uuid4(), course="x", user_id=1).pk

        results, errors = race(2, create, processes=True)
        assert errors == []
        assert {*LooseLessonSession.objects.values_list("pk", flat=True)} == {*results}

    def test_async_callables_are_awaited(self) -> None:
        async def pid() -> int:
            return os.getpid()

        assert os.getpid() not in race(2, pid, processes=True).results

    def test_one_that_does_not_end_is_killed_and_told_of(self) -> None:
        with pytest.raises(TimeoutError, match="2 of 2 callers"):
            race(2, threading.Event().wait, processes=True, timeout=0.5)

    def test_one_that_dies_is_told_of(self) -> None:
        results, errors = race(1, lambda: os._exit(3), processes=True)
        assert results == []
        assert str(errors[0]) == "The process ended with 3."

    def test_what_can_not_travel_is_told_of(self, client: Client) -> None:
        (error,) = race(1, lambda: client.post("/free"), processes=True).errors
        assert "can't send this to the test" in str(error)

    def test_a_system_without_fork_is_told_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "fork")
        with pytest.raises(RuntimeError, match="use threads"):
            race(2, int, processes=True)


class UnreadableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one text")


class TestWhatAChildSends:
    """Done here, too: what children execute isn't seen by the measuring of coverage."""

    def test_a_result_or_an_error(self) -> None:
        assert pickle.loads(processes.packed(Outcome(7))) == (7, None)
        _, error = pickle.loads(processes.packed(Outcome(error=ValueError("x"))))
        assert str(error) == "x"

    def test_an_error_that_can_be_written_but_not_be_read(self) -> None:
        _, error = pickle.loads(processes.packed(Outcome(error=UnreadableError(1, 2))))
        assert isinstance(error, TypeError)
        assert "UnreadableError: only one text" in str(error)

    @pytest.mark.django_db(transaction=True)
    def test_it_leaves_its_parents_connections_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        connection.ensure_connection()
        ours = connection.connection
        monkeypatch.setattr(processes, "_not_ours", kept := [])
        receiving, sending = processes._fork_context().Pipe(duplex=False)

        processes._report(transaction.get_autocommit, sending)

        assert pickle.loads(receiving.recv_bytes()) == (True, None)
        wrapper = next(one for one in kept if one.alias == "default")
        assert wrapper.connection is ours
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT 1")
        wrapper.close()
        receiving.close()
        sending.close()

    def test_the_leader_is_killed_where_it_has_the_lease(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed = []
        monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
        processes._lead_and_die(lambda: held("lesson:7").enable())
        for event in (processes.lease_acquired, processes.flight_led, processes.flight_taken_over):
            assert event.disconnect(processes._die)
        assert killed == [(os.getpid(), signal.SIGKILL)]

    def test_they_begin_when_all_are_there(self) -> None:
        assert processes._begin(threading.Barrier(1), int) == 0


class TestCrashLeader:
    def test_its_lease_is_left_to_lapse(self, client: Client) -> None:
        begin = time.monotonic()
        crash_leader("lesson:7", ttl=1)
        assert client.post("/locked", {"name": "7"}).status_code == 429
        with semaphore_lock("lesson:7", wait=20):
            assert time.monotonic() - begin >= 0.9

    def test_a_request_dies_with_its_lease(self, client: Client) -> None:
        crash_leader(lambda: client.post("/locked", {"name": "7"}))
        assert client.post("/locked", {"name": "7"}).status_code == 429

    def test_a_flight_is_taken_over_when_the_lease_has_lapsed(self) -> None:
        crash_leader(lambda: answers.run("s1", int))
        assert answers.run("s1", lambda: "answer") == "answer"

    def test_an_async_flight_is_taken_over(self, client: Client) -> None:
        crash_leader(lambda: client.post("/flown", {"name": "7"}))
        assert client.post("/flown", {"name": "7"}).content == b"answer"

    def test_what_does_not_lead_is_told_of(self, client: Client) -> None:
        with pytest.raises(AssertionError, match="never led"):
            crash_leader(lambda: client.post("/free").status_code)

    def test_what_is_held_already_is_told_of(self) -> None:
        with (
            held("lesson:7"),
            pytest.raises(AssertionError, match="held by someone else"),
        ):
            crash_leader("lesson:7")

    def test_what_never_comes_to_it_is_told_of(self) -> None:
        with pytest.raises(TimeoutError):
            crash_leader(threading.Event().wait, timeout=0.5)

    def test_nobody_listens_afterwards(self) -> None:
        crash_leader("lesson:7")
        assert lease_acquired.receivers == []
