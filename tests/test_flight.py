"""Flights in one process: threads, tasks and both, on Valkey and on a cache."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.core.cache import close_caches
from freezegun import freeze_time

from singleflight_django import signals, tier
from singleflight_django.exceptions import (
    FlightTimeoutError,
    LeaderFailedError,
    LeaseLostError,
    NestedFlightError,
    StoreUnavailableError,
    TooManyFollowersError,
)
from singleflight_django.flight import join
from singleflight_django.functions import SingleFlight
from singleflight_django.renewal import keeper
from singleflight_django.seats import _taken
from singleflight_django.stores import registry
from singleflight_django.stores.registry import get_store
from tests.servers import until
from tests.store_contract import at_once

PATIENCE = 20.0


class Work:
    """What callers want done: counts its runs, and waits for its gate."""

    def __init__(self) -> None:
        self.runs = 0
        self.running = threading.Semaphore(0)
        self.gate = threading.Event()
        self.raises: list[BaseException] = []
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        with self._lock:
            self.runs += 1
            run = self.runs
        self.running.release()
        assert self.gate.wait(PATIENCE)
        if len(self.raises) >= run:
            raise self.raises[run - 1]
        return run

    async def task(self) -> Any:
        return await asyncio.to_thread(self)

    def started(self) -> None:
        assert self.running.acquire(timeout=PATIENCE)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture(params=["redis", "cache"])
def kind(request: pytest.FixtureRequest, settings: Any) -> str:
    settings.SINGLEFLIGHT_STORE = request.param
    settings.SINGLEFLIGHT_POLL_INTERVAL = 0.02
    kind: str = request.param
    return kind


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert tier._flights == {}
    assert set(_taken.values()) == {0}
    assert not [lease for lease in keeper._watched if lease.held]


@contextmanager
def callers(number: int = 40) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(number) as pool:
        yield pool


def call(flights: SingleFlight, work: Callable[[], Any], key: Any = "k") -> Any:
    try:
        return flights.run(key, work)
    finally:
        close_caches()


async def acall(flights: SingleFlight, work: Work, key: Any = "k") -> Any:
    try:
        return await flights.arun(key, work.task)
    finally:
        close_caches()


def tasks(number: int, flights: SingleFlight, work: Work) -> list[Any]:
    """Run so many tasks on a loop of their own, in this thread."""

    async def all_of_them() -> list[Any]:
        calls = (acall(flights, work) for _ in range(number))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


def aboard(number: int) -> None:
    """Return when so many callers wait in this process, in whichever flight."""

    def passengers() -> int:
        return sum(len(flight._passengers) for flight in list(tier._flights.values()))

    until(lambda: passengers() == number, f"{number} passengers")


def blocked(client: redis.Redis, number: int = 1) -> None:
    """Return when so many connections wait on the server for a landing."""
    until(lambda: client.info("clients")["blocked_clients"] == number, f"{number} blocked")


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception(PATIENCE) or future.result() for future in futures]


# One execution


def test_threads_get_the_result_of_one_run(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(30)]
        aboard(29)
        work.gate.set()
        assert results(futures) == [1] * 30
    assert work.runs == 1


def test_tasks_get_the_result_of_one_run(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        loop = pool.submit(tasks, 30, flights, work)
        aboard(29)
        work.gate.set()
        assert loop.result(PATIENCE) == [1] * 30
    assert work.runs == 1


def test_threads_and_tasks_of_several_loops_get_the_result_of_one_run(
    kind: str, work: Work
) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        loops = [pool.submit(tasks, 10, flights, work) for _ in range(2)]
        aboard(29)
        work.gate.set()
        assert results(futures) == [1] * 10
        assert [loop.result(PATIENCE) for loop in loops] == [[1] * 10] * 2
    assert work.runs == 1


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_what_is_falsy_is_a_result(kind: str, value: Any) -> None:
    flights = SingleFlight("f", result_ttl=60)
    runs: list[int] = []

    def work() -> Any:
        runs.append(1)
        return value

    assert [flights.run("k", work) for _ in range(3)] == [value] * 3
    assert len(runs) == 1


def test_keys_do_not_wait_for_each_other(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        first = pool.submit(call, flights, work, "one")
        work.started()
        assert flights.run("two", lambda: "two") == "two"
        assert SingleFlight("g").run("one", lambda: "other") == "other"
        work.gate.set()
        assert first.result(PATIENCE) == 1


def test_the_first_callers_of_a_process_meet_in_one_store() -> None:
    for _ in range(20):
        registry._stores.clear()
        assert len({id(store) for store in at_once(16, lambda _: get_store())}) == 1


# Afterwards


def test_who_comes_after_the_end_runs_again(kind: str) -> None:
    flights = SingleFlight("f")
    numbers = iter(range(10))
    assert [flights.run("k", lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


async def test_who_comes_after_the_end_runs_again_in_tasks_too(kind: str) -> None:
    flights = SingleFlight("f")
    numbers = iter(range(10))

    async def work() -> int:
        return next(numbers)

    assert [await flights.arun("k", work) for _ in range(3)] == [0, 1, 2]


def test_a_caller_never_gets_what_was_over_before_it_came(kind: str) -> None:
    """Each caller arrives right after another one has returned; many at once, without a pause."""
    flights = SingleFlight("f", wait=PATIENCE)
    ticks, lock = iter(range(100_000)), threading.Lock()
    returned: dict[int, int] = {}
    given: list[tuple[int, int]] = []

    def tick() -> int:
        with lock:
            return next(ticks)

    def caller(_: int) -> None:
        for _ in range(40):
            arrived, mine = tick(), []

            def work(mine: list[int] = mine) -> int:
                mine.append(tick())
                return mine[0]

            answer = call(flights, work)
            if mine:
                returned[answer] = tick()
            given.append((arrived, answer))

    with callers(8) as pool:
        list(pool.map(caller, range(8), timeout=PATIENCE * 2))
    assert len(given) == 320
    assert [one for one in given if returned[one[1]] < one[0]] == []


def test_a_result_is_kept_for_its_time_and_no_longer(work: Work) -> None:
    flights = SingleFlight("f", result_ttl=1.5)
    work.gate.set()
    begin = time.monotonic()
    assert [flights.run("k", work) for _ in range(5)] == [1] * 5
    until(lambda: flights.run("k", work) == 2, "the result to end")
    assert time.monotonic() - begin >= 1.5


async def test_a_kept_result_can_be_forgotten(kind: str, work: Work) -> None:
    flights = SingleFlight("f", result_ttl=60)
    work.gate.set()
    assert flights.run(("a", 1), work) == flights.run(("a", 1), work) == 1
    flights.forget(("a", 1))
    assert await flights.arun(("a", 1), work.task) == 2
    await flights.aforget(("a", 1))
    assert flights.run(("a", 1), work) == 3


# Failure


def test_the_followers_of_a_leader_that_raised_learn_it_at_once(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    work.raises = [KeyError("mine")]
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        work.gate.set()
        errors = Counter(type(error) for error in results(futures))
    assert errors == {KeyError: 1, LeaderFailedError: 9}
    assert work.runs == 1
    assert flights.run("k", work) == 2


@pytest.mark.parametrize("retry", [0, 1, 2])
@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_retry_bounds_the_executions_whatever_the_number_of_callers(
    kind: str, work: Work, retry: int, way: str
) -> None:
    flights = SingleFlight("f", wait=PATIENCE, retry=retry)
    work.raises = [KeyError(f"run {number}") for number in range(20)]
    with callers() as pool:
        if way == "threads":
            futures = [pool.submit(call, flights, work) for _ in range(20)]
            aboard(19)
            work.gate.set()
            answers = results(futures)
        else:
            loop = pool.submit(tasks, 20, flights, work)
            aboard(19)
            work.gate.set()
            answers = loop.result(PATIENCE)
    errors = Counter(type(error) for error in answers)
    assert errors == {KeyError: retry + 1, LeaderFailedError: 19 - retry}
    assert work.runs == retry + 1


def test_a_retry_that_succeeds_answers_the_others(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE, retry=1)
    work.raises = [KeyError("first")]
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        work.gate.set()
        answers = results(futures)
    assert sorted(str(answer) for answer in answers) == ["'first'", *["2"] * 9]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_when_a_leaders_worker_ends_a_follower_takes_over(
    kind: str, work: Work, error: type[BaseException]
) -> None:
    flights = SingleFlight("f", wait=PATIENCE, ttl=60)
    work.raises = [error()]
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        work.gate.set()
        answers = results(futures)
    assert [answer for answer in answers if answer != 2] == work.raises
    assert answers.count(2) == 9


def test_takeovers_are_bounded(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE, ttl=60)
    work.raises = [SystemExit(number) for number in range(20)]
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        work.gate.set()
        errors = Counter(type(error) for error in results(futures))
    assert errors == {SystemExit: 3, LeaderFailedError: 7}
    assert work.runs == 3


def test_without_takeover_the_followers_of_a_dead_leader_fail(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE, ttl=60, takeover=False)
    work.raises = [SystemExit()]
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        work.gate.set()
        errors = Counter(type(error) for error in results(futures))
    assert errors == {SystemExit: 1, LeaderFailedError: 9}


# Waiting


def test_wait_used_up_is_told_and_not_late(kind: str, work: Work) -> None:
    flights, patient = SingleFlight("f", wait=0.2), SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        leader = pool.submit(call, patient, work)
        work.started()
        begin = time.monotonic()
        followers = [pool.submit(call, flights, work) for _ in range(5)]
        answers = results(followers)
        assert {type(answer) for answer in answers} == {FlightTimeoutError}
        assert all(answer.key == "f:k" for answer in answers)
        assert 0.2 <= time.monotonic() - begin < 5.0
        work.gate.set()
        assert leader.result(PATIENCE) == 1
    assert work.runs == 1


async def test_wait_used_up_is_told_to_tasks(kind: str, work: Work) -> None:
    flights, patient = SingleFlight("f", wait=0.2), SingleFlight("f", wait=PATIENCE)
    leader = asyncio.ensure_future(acall(patient, work))
    await asyncio.to_thread(work.started)
    begin = time.monotonic()
    followers = [acall(flights, work) for _ in range(5)]
    answers = await asyncio.gather(*followers, return_exceptions=True)
    assert {type(answer) for answer in answers} == {FlightTimeoutError}
    assert 0.2 <= time.monotonic() - begin < 5.0
    work.gate.set()
    assert await leader == 1


@contextmanager
def led_elsewhere(flights: SingleFlight, work: Work) -> Iterator[Future[Any]]:
    """A leader that this process takes for another one's: its callers ask the store."""
    with callers(1) as pool:
        leader = pool.submit(call, flights, work)
        work.started()
        with tier._mutex:
            assert len(tier._flights) == 1
            tier._flights.clear()
        try:
            yield leader
        finally:
            work.gate.set()


def test_wait_used_up_is_not_late_where_the_store_is_asked(kind: str, work: Work) -> None:
    flights, patient = SingleFlight("f", wait=0.2), SingleFlight("f", wait=PATIENCE)
    with led_elsewhere(patient, work):
        begin = time.monotonic()
        with pytest.raises(FlightTimeoutError):
            flights.run("k", work)
        assert 0.2 <= time.monotonic() - begin < 5.0


def test_who_does_not_wait_is_told_at_once(kind: str, work: Work) -> None:
    flights, patient = SingleFlight("f", wait=0), SingleFlight("f", wait=PATIENCE)
    with led_elsewhere(patient, work):
        for _ in range(2):
            with pytest.raises(FlightTimeoutError):
                flights.run("k", work)


def test_an_agent_that_waits_for_less_long_hands_over(kind: str, work: Work) -> None:
    """Its passengers wait on, and miss nothing."""
    short, long = SingleFlight("f", wait=1.5), SingleFlight("f", wait=PATIENCE)
    with callers() as pool, led_elsewhere(long, work) as leader:
        agent = pool.submit(call, short, work)
        until(lambda: tier._flights, "the agent")
        passengers = [pool.submit(call, long, work) for _ in range(5)]
        aboard(5)
        assert isinstance(agent.exception(PATIENCE), FlightTimeoutError)
        aboard(4)
        work.gate.set()
        assert results(passengers) == [1] * 5
        assert leader.result(PATIENCE) == 1
    assert work.runs == 1


@pytest.mark.parametrize("way", ["agent", "agent and passenger"])
def test_a_wait_ends_although_the_clocks_stand_still(kind: str, work: Work, way: str) -> None:
    """D31: test suites freeze every clock of Python."""
    flights, patient = SingleFlight("f", wait=0.2), SingleFlight("f", wait=PATIENCE)
    with led_elsewhere(patient, work), freeze_time("2026-01-01"), callers(2) as pool:
        number = 2 if way == "agent and passenger" else 1
        errors = results([pool.submit(call, flights, work) for _ in range(number)])
        assert {type(error) for error in errors} == {FlightTimeoutError}


def test_over_max_followers_a_caller_is_refused_at_once(kind: str, work: Work) -> None:
    flights = SingleFlight("f", wait=PATIENCE, max_followers=3)
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(4)]
        aboard(3)
        with pytest.raises(TooManyFollowersError):
            flights.run("k", work)
        aboard(3)
        work.gate.set()
        assert results(futures) == [1] * 4


def test_an_agent_without_a_seat_leaves_the_others_theirs(work: Work) -> None:
    flights, patient = SingleFlight("f", wait=PATIENCE, max_followers=0), SingleFlight("f")
    with callers() as pool, led_elsewhere(patient, work):
        with pytest.raises(TooManyFollowersError):
            flights.run("k", work)
        other = pool.submit(call, patient, work)
        until(lambda: _taken[True] == 1, "a follower")
        work.gate.set()
        assert other.result(PATIENCE) == 1


def test_an_heir_keeps_its_seat(work: Work) -> None:
    """All seats are taken by those who wait: the one that becomes the agent has one."""
    short = SingleFlight("f", wait=1.5, max_followers=3)
    long = SingleFlight("f", wait=PATIENCE, max_followers=3)
    with callers() as pool, led_elsewhere(long, work):
        agent = pool.submit(call, short, work)
        until(lambda: _taken[True] == 1, "the agent's seat")
        passengers = [pool.submit(call, long, work) for _ in range(2)]
        aboard(2)
        assert isinstance(agent.exception(PATIENCE), FlightTimeoutError)
        work.gate.set()
        assert results(passengers) == [1] * 2


# Nested


def test_a_call_inside_its_own_flight_is_refused_at_once(kind: str) -> None:
    flights = SingleFlight("f", wait=PATIENCE)

    def work() -> Any:
        return flights.run("k", work)

    with pytest.raises(NestedFlightError) as caught:
        flights.run("k", work)
    assert caught.value.key == "f:k"
    assert flights.run("k", lambda: 1) == 1


async def test_a_task_inside_its_own_flight_is_refused_at_once(kind: str) -> None:
    flights = SingleFlight("f", wait=PATIENCE)

    async def work() -> Any:
        return await flights.arun("k", work)

    with pytest.raises(NestedFlightError):
        await flights.arun("k", work)


def test_a_call_for_another_key_inside_a_flight_is_none_of_its_business(kind: str) -> None:
    flights = SingleFlight("f")
    assert flights.run("a", lambda: flights.run("b", lambda: "b") + "a") == "ba"


# Lost leases


@pytest.mark.parametrize("on_lost", ["raise", "return"])
def test_a_leader_that_lost_its_lease_is_told(
    work: Work, on_lost: Any, redis_client: redis.Redis
) -> None:
    flights = SingleFlight("f", on_lost=on_lost)
    with callers() as pool:
        leader = pool.submit(call, flights, work)
        work.started()
        redis_client.flushdb()
        work.gate.set()
        answer = results([leader])[0]
    assert isinstance(answer, LeaseLostError) if on_lost == "raise" else answer == 1


async def test_an_async_leader_that_lost_its_lease_is_told(
    work: Work, redis_client: redis.Redis
) -> None:
    flights = SingleFlight("f")
    leader = asyncio.ensure_future(acall(flights, work))
    await asyncio.to_thread(work.started)
    redis_client.flushdb()
    work.gate.set()
    with pytest.raises(LeaseLostError) as caught:
        await leader
    assert caught.value.key == "f:k"


def test_after_a_flush_the_followers_run_the_work_once_more(
    work: Work, redis_client: redis.Redis
) -> None:
    """Guarantee 24: at least once under data loss; the leader is told."""
    flights = SingleFlight("f", wait=PATIENCE)
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(10)]
        aboard(9)
        redis_client.flushdb()
        work.gate.set()
        answers = results(futures)
    assert sum(isinstance(answer, LeaseLostError) for answer in answers) == 1
    assert answers.count(2) == 9


# The store away


@pytest.mark.parametrize("alias", ["dead", "dead_core"])
def test_without_the_store_the_work_runs_unprotected(alias: str, work: Work) -> None:
    flights = SingleFlight("f", cache=alias)
    work.gate.set()
    assert [flights.run("k", work), flights.run("k", work)] == [1, 2]


async def test_without_the_store_async_work_runs_unprotected(work: Work) -> None:
    flights = SingleFlight("f", cache="dead")
    work.gate.set()
    assert [await flights.arun("k", work.task), await flights.arun("k", work.task)] == [1, 2]


async def test_without_the_store_the_work_can_be_refused(work: Work) -> None:
    flights = SingleFlight("f", cache="dead", on_store_error="reject")
    with pytest.raises(StoreUnavailableError):
        flights.run("k", work)
    with pytest.raises(StoreUnavailableError):
        await flights.arun("k", work.task)
    assert work.runs == 0


# What is told


def test_every_outcome_is_told_apart(work: Work) -> None:
    told: list[tuple[str, str]] = []

    def listen(name: str) -> Any:
        def listener(facts: signals.Facts, **kwargs: Any) -> None:
            assert facts.key == "f:k"
            assert facts.namespace == "f"
            told.append((name, facts.reason))

        getattr(signals, name).connect(listener)
        return listener

    listeners = [
        listen(name)
        for name in (
            "flight_led",
            "flight_joined",
            "flight_failed",
            "flight_timed_out",
            "flight_taken_over",
            "share_refused",
        )
    ]
    flights = SingleFlight("f", wait=PATIENCE, result_ttl=60)
    with callers() as pool:
        futures = [pool.submit(call, flights, work) for _ in range(2)]
        aboard(1)
        work.gate.set()
        results(futures)
    assert told == [("flight_led", ""), ("flight_joined", "")]
    told.clear()
    flights.run("k", work)
    assert told == [("flight_joined", "kept")]
    told.clear()
    flights.forget("k")
    flights.run("k", object)
    assert [name for name, _ in told] == ["flight_led", "share_refused"]
    assert len(listeners) == 6


def test_an_unshareable_value_is_the_leaders_and_told_once(
    kind: str, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    values: list[object] = []

    def unshareable() -> object:
        work()
        values.append(object())
        return values[-1]

    with callers() as pool, caplog.at_level(logging.INFO, "singleflight_django"):
        futures = [pool.submit(call, flights, unshareable) for _ in range(10)]
        aboard(9)
        work.gate.set()
        assert {id(value) for value in results(futures)} == {id(value) for value in values}
        assert type(call(flights, unshareable)) is object
    assert work.runs == 11
    assert [r.message.split()[0] for r in caplog.records].count("share_refused") == 1


async def test_a_join_that_is_closed_in_the_middle_leaves_it_to_the_keeper() -> None:
    """A coroutine that nobody awaits any more may not ask the store: close() has to come back."""
    flights = SingleFlight("f", ttl=60, wait=PATIENCE)

    async def nothing() -> None:
        return None

    coroutine = flights.arun("k", nothing)
    coroutine.send(None)
    coroutine.close()
    # What it may have taken meanwhile is free again long before its ttl is over.
    assert await asyncio.wait_for(flights.arun("k", nothing), PATIENCE / 2) is None


def test_steps_of_a_join_that_are_dropped_give_back_what_they_won() -> None:
    """An interrupt between the store's answer and the next step, which nobody carries out."""
    guard = SingleFlight("f", ttl=60, wait=PATIENCE)._guard
    flight = guard.flight("k", blocking=True)
    steps = join(flight)
    ask = next(steps)
    on, verb, args = ask
    getattr(on, verb)(*args)
    steps.close()
    assert SingleFlight("f", ttl=60, wait=5).run("k", lambda: 7) == 7
