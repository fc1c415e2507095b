"""Async leaders: what happens when they are cancelled, and to whom."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from singleflight_django import drivers, tier
from singleflight_django.exceptions import (
    FlightTimeoutError,
    LeaderFailedError,
    StoreUnavailableError,
)
from singleflight_django.functions import SingleFlight
from singleflight_django.renewal import keeper
from singleflight_django.seats import _taken
from tests.proxy import Proxy
from tests.servers import Valkey, until

PATIENCE = 20.0


class Work:
    """Async work that waits for its gate."""

    def __init__(self) -> None:
        self.runs = self.cancelled = 0
        self.running, self.gate = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> int:
        self.runs += 1
        run = self.runs
        self.running.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return run


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    """No flight, seat, lease or task, and no exception that nobody has retrieved."""
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    yield
    await background()
    gc.collect()
    await asyncio.sleep(0)
    assert reports == []
    assert tier._flights == {}
    assert set(_taken.values()) == {0}
    assert not [lease for lease in keeper._watched if lease.held]


async def background() -> None:
    """Return when what goes on in the background of this loop has ended."""
    while running := drivers._background.get(asyncio.get_running_loop(), (set(), None))[0]:
        await asyncio.wait(running)


async def aboard(number: int) -> None:
    def passengers() -> int:
        return sum(len(flight._passengers) for flight in tier._flights.values())

    while passengers() != number:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def gone(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_leader_goes_on_for_its_followers() -> None:
    flights, work = SingleFlight("f", wait=PATIENCE), Work()
    leader = asyncio.create_task(flights.arun("k", work))
    await work.running.wait()
    followers = [asyncio.create_task(flights.arun("k", work)) for _ in range(5)]
    await aboard(5)
    await gone(leader)
    work.gate.set()
    assert await asyncio.gather(*followers) == [1] * 5
    assert work.cancelled == 0


async def test_a_cancelled_leader_whom_nobody_follows_is_cancelled() -> None:
    flights, work = SingleFlight("f", wait=PATIENCE, ttl=1.5), Work()
    leader = asyncio.create_task(flights.arun("k", work))
    await work.running.wait()
    await gone(leader)
    await background()
    assert work.cancelled == 1
    work.gate.set()
    # Its thread, if it had one, may still be at work: the lease lapses by itself.
    begin = asyncio.get_running_loop().time()
    assert await flights.arun("k", work) == 2
    assert 0.1 < asyncio.get_running_loop().time() - begin < 8


async def test_a_cancelled_leader_goes_on_for_so_long_and_no_longer() -> None:
    flights, work = SingleFlight("f", wait=PATIENCE, ttl=1.5, max_run=0.1), Work()
    leader = asyncio.create_task(flights.arun("k", work))
    await work.running.wait()
    follower = asyncio.create_task(flights.arun("k", work))
    await aboard(1)
    await gone(leader)
    work.running.clear()
    await work.running.wait()
    assert work.cancelled == 1
    work.gate.set()
    assert await follower == 2


async def test_a_cancelled_leader_whose_work_fails_later_tells_its_followers() -> None:
    flights = SingleFlight("f", wait=PATIENCE)
    running, gate = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        running.set()
        await gate.wait()
        raise KeyError

    leader = asyncio.create_task(flights.arun("k", work))
    await running.wait()
    follower = asyncio.create_task(flights.arun("k", work))
    await aboard(1)
    await gone(leader)
    gate.set()
    with pytest.raises(LeaderFailedError):
        await follower


async def test_a_leader_that_timed_out_may_call_again() -> None:
    """The work that goes on without it isn't held by it any more: this is no nested call."""
    flights, work = SingleFlight("f", wait=PATIENCE), Work()
    followers = []

    async def follow() -> int:
        await work.running.wait()
        return await flights.arun("k", work)

    # Not in the leader's context.
    followers.append(asyncio.create_task(follow()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await flights.arun("k", work)
    again = asyncio.create_task(flights.arun("k", work))
    await aboard(2)
    work.gate.set()
    assert await again == await followers[0] == 1


async def test_a_cancelled_follower_does_no_damage() -> None:
    flights, work = SingleFlight("f", wait=PATIENCE), Work()
    leader = asyncio.create_task(flights.arun("k", work))
    await work.running.wait()
    followers = [asyncio.create_task(flights.arun("k", work)) for _ in range(10)]
    await aboard(10)
    for follower in followers[::2]:
        await gone(follower)
    await aboard(5)
    work.gate.set()
    assert await asyncio.gather(leader, *followers[1::2]) == [1] * 6


@pytest.mark.parametrize(
    "rounds", [60, pytest.param(1000, marks=(pytest.mark.soak, pytest.mark.timeout(600)))]
)
async def test_cancelled_or_out_of_patience_at_any_moment_nothing_is_left_behind(
    rounds: int, redis_client: redis.Redis
) -> None:
    """D47. Leaders, agents and passengers; some are cancelled before they have begun."""
    flights, dice = SingleFlight("f", wait=PATIENCE, ttl=0.3), random.Random(7)
    hasty = [SingleFlight("f", wait=wait, ttl=0.3) for wait in (0.001, 0.01)]
    out_of_patience = 0

    async def work() -> str:
        await asyncio.sleep(dice.random() * 0.004)
        return "done"

    for _ in range(rounds):
        callers = [asyncio.create_task(flights.arun("k", work)) for _ in range(8)]
        calls = [asyncio.to_thread(each.run, "k", lambda: "done") for each in hasty]
        threads = [asyncio.create_task(each) for each in calls]
        for caller in dice.sample(callers, 4):
            await asyncio.sleep(dice.random() * 0.001)
            caller.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert {str(answer) for answer in answers} <= {"done", ""}
        assert answers.count("done") >= 4
        for answer in await asyncio.gather(*threads, return_exceptions=True):
            out_of_patience += isinstance(answer, FlightTimeoutError)
            assert answer == "done" or isinstance(answer, FlightTimeoutError)
    assert out_of_patience > 0
    await asyncio.to_thread(until, lambda: left(redis_client) <= {"fence"}, "no key is left")


def left(client: redis.Redis) -> set[str]:
    """What is left of the flights in the store, by the last part of its keys."""
    names = client.scan_iter(match="singleflight:{f:*")
    return {name.decode().rpartition(":")[2] for name in names}


@pytest.mark.parametrize("at", ["join", "publish"])
async def test_cancelled_during_a_request_the_flight_is_none_the_worse(
    at: str, redis_server: Valkey, proxy: Proxy, cache_at: Any
) -> None:
    """D29 and D30: the server has carried it out, or will."""
    flights = SingleFlight("f", cache=cache_at(proxy.url()), wait=PATIENCE, ttl=60)
    work = Work()
    work.gate.set()
    await flights.arun("warm", work)
    trap = proxy.trap(b"EVALSHA", then="hold", nth=1 if at == "join" else 2)
    leader = asyncio.create_task(flights.arun("k", work))
    await asyncio.to_thread(trap.wait)
    other = asyncio.create_task(flights.arun("k", work))
    await gone(leader)
    trap.release()
    assert await asyncio.wait_for(other, 5) in (2, 3)


async def test_without_the_store_a_cancelled_leader_is_cancelled(
    redis_server: Valkey, cache_at: Any
) -> None:
    flights, work = SingleFlight("f", cache=cache_at(redis_server.url()), ttl=0.3), Work()
    leader = asyncio.create_task(flights.arun("k", work))
    await work.running.wait()
    redis_server.kill()
    await gone(leader)
    await background()
    assert work.cancelled == 1


async def test_what_is_raised_before_there_is_anything_to_await_is_a_failure_too() -> None:
    flights = SingleFlight("f")

    def work() -> Any:
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            await flights.arun("k", work)


async def test_work_that_is_cancelled_from_within_has_failed() -> None:
    flights = SingleFlight("f")

    async def work() -> None:
        raise asyncio.CancelledError

    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await flights.arun("k", work)


def test_a_loop_that_ends_with_a_leader_at_work_lets_the_lease_lapse(
    redis_client: redis.Redis,
) -> None:
    flights = SingleFlight("f", ttl=0.4, wait=PATIENCE)

    async def hang() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(flights.arun("k", hang))
        while not tier._flights or not task:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert flights.run("k", lambda: "next") == "next"


def test_a_leader_whose_task_exits_is_taken_over(redis_client: redis.Redis) -> None:
    """SystemExit in a task stops its loop."""
    flights = SingleFlight("f", ttl=0.4, wait=PATIENCE)

    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        asyncio.run(flights.arun("k", leave))
    assert flights.run("k", lambda: "next") == "next"


async def test_ten_thousand_tasks_wait_on_one_connection_and_no_thread(
    redis_server: Valkey, cache_at: Any
) -> None:
    """Led by another thread's caller, so that these have to follow through the server."""
    alias = cache_at(redis_server.url())
    flights = SingleFlight("f", cache=alias, wait=60)
    gate, running = threading.Event(), threading.Event()

    def work() -> str:
        running.set()
        assert gate.wait(PATIENCE)
        return "one"

    leader = threading.Thread(target=flights.run, args=("k", work))
    leader.start()
    await asyncio.to_thread(running.wait, PATIENCE)
    with tier._mutex:
        tier._flights.clear()
    with redis_server.client() as client:
        threads, connections = threading.active_count(), len(client.client_list())

        async def follow() -> Any:
            return await flights.arun("k", work)  # type: ignore[arg-type]

        followers = [asyncio.create_task(follow()) for _ in range(10_000)]
        await aboard(9_999)
        while client.info("clients")["blocked_clients"] != 1:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert len(client.client_list()) - connections <= 1
        assert threading.active_count() == threads
        loop = asyncio.get_running_loop()
        begin = loop.time()
        gate.set()
        assert set(await asyncio.gather(*followers)) == {"one"}
        took = loop.time() - begin
    leader.join(PATIENCE)
    print(f"10,000 followers resolved in {took * 1000:.0f} ms")
    # A loaded machine takes many times what an idle one does.
    assert took < 5


@pytest.mark.parametrize("how", ["threads", "tasks"])
async def test_a_large_result_crosses_the_wire_once_a_process(
    how: str, redis_server: Valkey, cache_at: Any
) -> None:
    """Led by another thread's caller, so that these have to follow through the server."""
    flights = SingleFlight("f", cache=cache_at(redis_server.url()), wait=PATIENCE)
    gate, running, size = threading.Event(), threading.Event(), 100_000

    def work() -> str:
        running.set()
        assert gate.wait(PATIENCE)
        return "x" * size

    def follow() -> Any:
        if how == "threads":
            return pool.submit(flights.run, "k", work)
        return flights.arun("k", work)  # type: ignore[arg-type]

    with redis_server.client() as client, ThreadPoolExecutor(21) as pool:
        leader = pool.submit(flights.run, "k", work)
        await asyncio.to_thread(running.wait, PATIENCE)
        with tier._mutex:
            tier._flights.clear()
        futures = [follow() for _ in range(20)]
        wrap = asyncio.wrap_future if how == "threads" else asyncio.ensure_future
        followers = [wrap(future) for future in futures]
        await aboard(19)
        while client.info("clients")["blocked_clients"] != 1:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        before = client.info("stats")["total_net_output_bytes"]
        gate.set()
        answers = await asyncio.gather(*followers)
        sent = client.info("stats")["total_net_output_bytes"] - before
        assert leader.result(PATIENCE) == answers[0]
    assert {len(answer) for answer in answers} == {size}
    assert size <= sent < 2 * size


async def test_an_unreachable_store_is_told_to_every_task() -> None:
    flights = SingleFlight("f", cache="dead", on_store_error="reject")
    answers = await asyncio.gather(
        *(flights.arun("k", Work()) for _ in range(5)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {StoreUnavailableError}
