"""Deadlines and pauses; and waiters, who wake at the release and neither poll nor overstay."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from freezegun import freeze_time

from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.stores.base import Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.registry import get_store
from singleflight_django.waiting import Deadline, clock, pauses
from tests.engine import (
    PATIENCE,
    agive_back,
    atake,
    entries,
    give_back,
    in_threads,
    lease_on,
    take,
)
from tests.engine import fresh_context as fresh_context
from tests.servers import until


@pytest.fixture
def store() -> Store:
    return get_store("default")


def calls(client: redis.Redis) -> dict[str, int]:
    """How often the server carried out each command."""
    return {name: one["calls"] for name, one in client.info("commandstats").items()}


# The clock and the deadline


def test_the_clock_goes_on_where_a_test_suite_freezes_time() -> None:
    with freeze_time("2030-01-01"):
        frozen, before = time.monotonic(), clock()
        while clock() == before:
            pass
        assert time.monotonic() == frozen


def test_the_clock_goes_on_where_the_system_has_no_clock_gettime() -> None:
    script = (
        "import time; del time.clock_gettime\n"
        "from freezegun import freeze_time\n"
        "from singleflight_django.waiting import clock\n"
        "with freeze_time('2030-01-01'):\n"
        "    before = clock()\n"
        "    while clock() == before: pass\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE * 3)


def test_a_deadline_ends_by_the_clock() -> None:
    deadline = Deadline(0.01)
    while deadline.left():
        assert deadline.left() <= 0.01
    assert deadline.left() == 0.0


def test_a_deadline_ends_after_what_was_spent_even_where_no_clock_moves() -> None:
    deadline = Deadline(1000.0)
    deadline.spend(600.0)
    assert deadline.left() <= 400.0
    deadline.spend(600.0)
    assert deadline.left() == 0.0


def test_pauses_double_up_to_the_longest_and_drift_apart() -> None:
    longest = [0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.1]
    for pause, most in zip(pauses(0.1), longest, strict=False):
        assert most / 2 <= pause <= most
    assert next(pauses(0.001)) <= 0.001
    assert len({next(pauses(0.1)) for _ in range(20)}) > 1


# Waiting for a lease


def test_a_waiter_wakes_within_milliseconds_of_the_release(store: Store) -> None:
    late: list[float] = []
    for number in range(15):
        key = f"k{number}"
        holder = lease_on(store, key)
        released: list[float] = []
        took: list[float] = []

        def wait(key: str = key, took: list[float] = took) -> None:
            lease = take(lease_on(store, key), wait=PATIENCE)
            took.append(clock())
            give_back(lease)

        threading.Thread(target=take, args=(holder,)).run()
        (waiter,) = in_threads([wait])
        until(lambda: waiting_on_server(1), "a blocked waiter")
        released.append(clock())
        give_back(holder)
        waiter.join(PATIENCE)
        late.append(took[0] - released[0])
    assert sorted(late)[len(late) // 2] < 0.02, late


def waiting_on_server(number: int) -> bool:
    with redis.Redis.from_url(os.environ["SINGLEFLIGHT_RUN_REDIS_URL_" + worker()]) as client:
        return bool(client.info("clients")["blocked_clients"] >= number)


def worker() -> str:
    return os.environ.get("PYTEST_XDIST_WORKER", "main")


async def test_a_waiting_task_wakes_within_milliseconds_of_the_release(store: Store) -> None:
    late: list[float] = []
    for number in range(15):
        key = f"k{number}"
        holder = await asyncio.create_task(atake(lease_on(store, key)))
        waiter = asyncio.create_task(atake(lease_on(store, key), wait=PATIENCE))
        await asyncio.to_thread(until, lambda: waiting_on_server(1), "a blocked waiter")
        begin = clock()
        await agive_back(holder)
        lease = await waiter
        late.append(clock() - begin)
        await agive_back(lease)
    assert sorted(late)[len(late) // 2] < 0.02, late


TRIES = 25


@pytest.mark.parametrize("wait", [0.03, 0.2, 0.35])
def test_a_wait_is_used_up_and_not_overstayed(store: Store, wait: float) -> None:
    """The server's own timeout comes up to 0.1 s late; a busy machine delays some, never all."""
    holder = take(lease_on(store, "k", ttl=60.0))
    took: list[float] = []

    def late() -> None:
        begin = clock()
        with pytest.raises(LeaseConflictError) as caught:
            take(lease_on(store, "k"), wait=wait)
        took.append(clock() - begin)
        assert caught.value.retry_after > 20

    while not took or (min(took) >= wait + 0.04 and len(took) < TRIES):
        for waiter in in_threads([late]):
            waiter.join(PATIENCE)
    assert wait <= min(took) < wait + 0.04
    give_back(holder)


async def test_a_wait_of_a_task_is_used_up_and_not_overstayed(store: Store) -> None:
    holder = await asyncio.create_task(atake(lease_on(store, "k", ttl=60.0)))
    for wait in (0.03, 0.2, 0.35):
        took: list[float] = []
        while not took or (min(took) >= wait + 0.04 and len(took) < TRIES):
            begin = clock()
            with pytest.raises(LeaseConflictError):
                await asyncio.create_task(atake(lease_on(store, "k"), wait=wait))
            took.append(clock() - begin)
        assert wait <= min(took) < wait + 0.04
    await agive_back(holder)


def test_waiters_do_not_poll(store: Store, redis_client: redis.Redis) -> None:
    """Ten waiters for half a second: a conflict and a block each, and one more look at the end."""
    holder = take(lease_on(store, "k", ttl=30.0, max_hold=0))
    before = calls(redis_client)

    def late() -> None:
        with pytest.raises(LeaseConflictError):
            take(lease_on(store, "k"), wait=0.5)

    for waiter in in_threads([late] * 10):
        waiter.join(PATIENCE)
    after = calls(redis_client)
    assert after["cmdstat_blpop"] - before.get("cmdstat_blpop", 0) <= 10
    assert after["cmdstat_evalsha"] - before.get("cmdstat_evalsha", 0) <= 20
    give_back(holder)


def test_one_release_wakes_one_waiter(store: Store, redis_client: redis.Redis) -> None:
    holder = take(lease_on(store, "k", ttl=30.0, max_hold=0))
    turns, go = [0], threading.Event()

    def wait() -> None:
        lease = take(lease_on(store, "k", max_hold=0), wait=PATIENCE)
        turns[0] += 1
        assert go.wait(PATIENCE)
        give_back(lease)

    waiters = in_threads([wait] * 5)
    until(lambda: waiting_on_server(5), "five blocked waiters")
    before = calls(redis_client)
    give_back(holder)
    until(lambda: turns[0] == 1, "the first turn")
    # Its release and one acquire; the other four sleep on.
    assert calls(redis_client)["cmdstat_evalsha"] - before["cmdstat_evalsha"] <= 2 + 4
    assert waiting_on_server(4)
    go.set()
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert turns == [5]


def test_twenty_waiters_all_get_it_in_turn(store: Store) -> None:
    holder = take(lease_on(store, "k"))
    inside, order, guard = [0], [], threading.Lock()

    def wait(number: int) -> None:
        lease = take(lease_on(store, "k"), wait=PATIENCE)
        assert guard.acquire(blocking=False), "two holders at once"
        order.append(number)
        inside[0] += 1
        guard.release()
        give_back(lease)

    waiters = []
    for number in range(20):
        waiters += in_threads([lambda number=number: wait(number)])
        until(lambda number=number: waiting_on_server(number + 1), "a blocked waiter")
    begin = clock()
    give_back(holder)
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert sorted(order) == list(range(20))
    assert clock() - begin < 5


async def test_twenty_waiting_tasks_all_get_it_in_turn_without_a_thread(store: Store) -> None:
    holder = await asyncio.create_task(atake(lease_on(store, "k")))
    before, order = threading.active_count(), []

    async def wait(number: int) -> None:
        lease = await atake(lease_on(store, "k"), wait=PATIENCE)
        order.append(number)
        await agive_back(lease)

    waiters = [asyncio.create_task(wait(number)) for number in range(20)]
    await asyncio.to_thread(until, lambda: waiting_on_server(20), "20 blocked waiters")
    # One is the looker's own.
    assert threading.active_count() <= before + 1
    await agive_back(holder)
    await asyncio.wait_for(asyncio.gather(*waiters), PATIENCE)
    assert sorted(order) == list(range(20))


WAITER = """
import django; django.setup()
from singleflight_django import semaphore_lock
with semaphore_lock("k", wait=30): print("took it", flush=True)
"""


def test_a_waiter_that_is_killed_does_not_stall_the_others(redis_client: redis.Redis) -> None:
    """The first in the queue dies with the wake-up in its hands."""
    from singleflight_django import semaphore_lock

    done: list[float] = []

    def wait() -> None:
        with semaphore_lock("k", wait=PATIENCE):
            done.append(clock())

    with semaphore_lock("k"):
        first = subprocess.Popen(
            [sys.executable, "-c", WAITER],
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        )
        until(lambda: waiting_on_server(1), "the first waiter")
        # Stopped it can't look again, and takes the wake-up with it.
        first.send_signal(signal.SIGSTOP)
        (second,) = in_threads([wait])
        until(lambda: waiting_on_server(2), "the second waiter")
    begin = clock()
    first.kill()
    first.wait()
    second.join(PATIENCE)
    assert done[0] - begin < 5


def test_a_wake_up_that_came_before_anyone_waited_is_not_lost(store: Store) -> None:
    for _ in range(20):
        holder = take(lease_on(store, "k"))
        barrier = threading.Barrier(2, timeout=PATIENCE)
        took: list[float] = []

        def wait(barrier: threading.Barrier = barrier, took: list[float] = took) -> None:
            barrier.wait()
            begin = clock()
            give_back(take(lease_on(store, "k"), wait=PATIENCE))
            took.append(clock() - begin)

        (waiter,) = in_threads([wait])
        barrier.wait()
        give_back(holder)
        waiter.join(PATIENCE)
        # One that is lost costs a second.
        assert took[0] < 0.95


def test_nothing_of_the_waiting_outlives_it_for_long(
    store: Store, redis_client: redis.Redis
) -> None:
    holder = take(lease_on(store, "k"))
    in_threads([lambda: give_back(take(lease_on(store, "k"), wait=PATIENCE))])
    until(lambda: waiting_on_server(1), "a blocked waiter")
    give_back(holder)
    until(lambda: not entries(redis_client, "lease"), "the end of the lease")
    for key in redis_client.scan_iter():
        assert 0 < redis_client.pttl(key) <= 100_000


# Frozen clocks


@pytest.mark.parametrize("alias", ["default", "core", "locmem"])
def test_a_wait_ends_where_the_clocks_are_frozen(alias: str) -> None:
    store = get_store(alias)
    holder = take(lease_on(store, "k", ttl=30.0, max_hold=0))
    done = threading.Event()

    def late() -> None:
        with freeze_time(datetime.now(UTC)), pytest.raises(LeaseConflictError):
            take(lease_on(store, "k"), wait=0.2, longest_pause=0.05)
        done.set()

    (waiter,) = in_threads([late])
    waiter.join(PATIENCE)
    assert done.is_set()
    give_back(holder)


@pytest.mark.parametrize("step", ["-1 h", "+1 h"])
@pytest.mark.parametrize("alias", ["default", "cache"])
def test_a_wall_clock_that_steps_ends_no_lease_and_revives_none(
    alias: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # locmem itself lives by the wall clock.
    store = CacheStore("default") if alias == "cache" else get_store(alias)
    holder = take(lease_on(store, "k", ttl=30.0))
    real, shift = time.time, {"-1 h": -3600, "+1 h": 3600}[step]
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    assert store.renew(holder.claims()) == [True]
    assert not holder.lost
    give_back(holder)
    assert not holder.lost
    monkeypatch.undo()
    give_back(take(lease_on(store, "k")))


async def test_a_wait_of_a_task_ends_where_the_clocks_are_frozen(store: Store) -> None:
    holder = await asyncio.create_task(atake(lease_on(store, "k", ttl=30.0, max_hold=0)))
    with freeze_time(datetime.now(UTC), real_asyncio=True), pytest.raises(LeaseConflictError):
        await asyncio.wait_for(asyncio.create_task(atake(lease_on(store, "k"), wait=0.2)), PATIENCE)
    await agive_back(holder)


def test_a_store_that_wakes_nobody_is_looked_at_again_with_pauses() -> None:
    store = get_store("locmem")
    holder = take(lease_on(store, "k"))
    done: list[Any] = []
    (waiter,) = in_threads(
        [lambda: done.append(take(lease_on(store, "k"), wait=PATIENCE, longest_pause=0.02))]
    )
    give_back(holder)
    waiter.join(PATIENCE)
    give_back(done[0])


@pytest.mark.parametrize("number", range(3))
def test_several_places_wake_as_many_waiters(store: Store, number: int) -> None:
    held = [lease_on(store, "k") for _ in range(2)]
    for lease in held:
        for thread in in_threads([lambda lease=lease: take(lease, limit=2)]):
            thread.join(PATIENCE)
    counter: itertools.count[int] = itertools.count()

    def wait() -> None:
        give_back(take(lease_on(store, "k"), wait=PATIENCE, limit=2))
        next(counter)

    waiters = in_threads([wait] * 6)
    until(lambda: waiting_on_server(6), "six blocked waiters")
    for lease in held:
        give_back(lease)
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert next(counter) == 6
