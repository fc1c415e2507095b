"""Acquire and release: one holder, all keys or none, given back on every way out, told as it was."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import redis

from singleflight_django.exceptions import (
    LeaseConflictError,
    NestedFlightError,
    StoreUnavailableError,
)
from singleflight_django.locking import Terms, acquire, hand_over, lapse
from singleflight_django.renewal import keeper
from singleflight_django.stores.base import Claim, Conflict, Grant, Store
from singleflight_django.stores.redis.scripts import ACQUIRE, RELEASE
from singleflight_django.stores.registry import get_store
from singleflight_django.waiting import clock
from tests.engine import (
    PATIENCE,
    Ear,
    agive_back,
    atake,
    entries,
    give_back,
    in_threads,
    lease_on,
    take,
)
from tests.engine import fresh_context as fresh_context
from tests.proxy import Proxy
from tests.servers import Valkey, until

CacheAt = Callable[..., str]


@pytest.fixture
def store() -> Store:
    return get_store("default")


@pytest.fixture
def distant(proxy: Proxy, cache_at: CacheAt) -> Store:
    """A store behind the proxy."""
    store = get_store(cache_at(proxy.url(), SOCKET_TIMEOUT=1.5, SOCKET_CONNECT_TIMEOUT=1.5))
    # So that the server knows the scripts.
    store.acquire("warm", "a", 1.0, 1, 0.0)
    store.renew([Claim("warm", "a", 1.0)])
    store.release("warm", "a")
    proxy.reset()
    return store


def refused(store: Store, *keys: str, ear: Ear | None = None) -> LeaseConflictError:
    """Ask for keys from another context, which is refused."""
    errors: list[LeaseConflictError] = []

    def ask() -> None:
        try:
            take(lease_on(store, *keys, emit=ear))
        except LeaseConflictError as error:
            errors.append(error)

    for thread in in_threads([ask]):
        thread.join(PATIENCE)
    return errors[0]


# One key


def test_a_conflict_names_the_key_and_the_remaining_time_and_is_told(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, ttl=8.0))
    error = refused(store, "k", ear=ear)
    assert error.key == "k"
    assert 6 < error.retry_after <= 8
    assert ear.names == ["lease_rejected"]
    give_back(lease)


def test_acquire_and_release_are_told(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, emit=ear))
    give_back(lease)
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_released"]


def test_a_nested_use_is_refused_at_once_and_leaves_the_outer_one(store: Store) -> None:
    outer = take(lease_on(store, "a", "b"))
    for keys in (("a",), ("b",), ("b", "c")):
        begin = clock()
        with pytest.raises(NestedFlightError, match="outermost") as caught:
            take(lease_on(store, *keys), wait=30)
        assert clock() - begin < 5
        assert caught.value.key == "a,b"
    outer.check()
    give_back(outer)
    give_back(take(lease_on(store, "a")))


def test_a_late_release_is_told_as_a_loss(store: Store, redis_client: redis.Redis) -> None:
    ear = Ear()
    lease = take(lease_on(store, emit=ear))
    redis_client.flushall()
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_lost", "lease_released"]


def test_a_lease_left_to_lapse_is_neither_renewed_nor_given_back(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, ttl=1.5, emit=ear))
    lapse(lease)
    lapse(lease)
    assert lease not in keeper._watched
    assert ear.events[1:] == [("lease_released", "cancelled: it lapses")]
    assert isinstance(store.acquire("k", "early", 1.0, 1, 0.0), Conflict)
    give_back(take(lease_on(store), wait=5))
    assert ear.names == ["lease_acquired", "lease_released"]


# Several keys


def test_several_keys_are_all_or_none(store: Store, redis_client: redis.Redis) -> None:
    ear = Ear()
    holder = take(lease_on(store, "b"))
    error = refused(store, "a", "b", "c", ear=ear)
    assert error.key == "b"
    assert ear.names == ["lease_rejected"]
    assert len(entries(redis_client, "lease")) == 1
    give_back(holder)
    lease = take(lease_on(store, "a", "b", "c"))
    assert len(entries(redis_client, "lease")) == 3
    give_back(lease)
    assert entries(redis_client, "lease") == []


def test_two_that_want_the_same_keys_never_wait_for_each_other(store: Store) -> None:
    """Keys come sorted from the key template; here both orders are one."""
    done: itertools.count[int] = itertools.count()

    def both() -> None:
        for _ in range(10):
            give_back(take(lease_on(store, "a", "b"), wait=PATIENCE))
        next(done)

    for thread in in_threads([both] * 4):
        thread.join(PATIENCE)
    assert next(done) == 4


def test_the_wait_is_one_for_all_keys(store: Store) -> None:
    first, second = take(lease_on(store, "a")), take(lease_on(store, "b"))
    took: list[float] = []

    def late() -> None:
        begin = clock()
        with pytest.raises(LeaseConflictError):
            take(lease_on(store, "a", "b"), wait=2)
        took.append(clock() - begin)

    (waiter,) = in_threads([late])
    # What is measured is time: most of the wait is used up for the first key.
    time.sleep(1.5)
    give_back(first)
    waiter.join(PATIENCE)
    # A wait for each key would be 3.5 s in all.
    assert took[0] < 3.4
    give_back(second)


# The store away, and interruptions


def test_an_acquire_that_got_no_answer_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    ear = Ear()
    held = proxy.trap(ACQUIRE.sha, then="hold")
    with pytest.raises(StoreUnavailableError):
        take(lease_on(distant, emit=ear))
    held.wait()
    with redis_server.client() as client:
        until(lambda: not entries(client, "lease"), "the orphan to be given back")
    assert ear.names == []


def test_an_acquire_whose_reply_is_lost_has_the_lease(distant: Store, proxy: Proxy) -> None:
    ear = Ear()
    lost = proxy.trap(ACQUIRE.sha)
    lease = take(lease_on(distant, emit=ear))
    lost.wait()
    lease.check()
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_released"]


def test_a_release_whose_reply_is_lost_is_no_loss(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    ear = Ear()
    lease = take(lease_on(distant, emit=ear))
    lost = proxy.trap(RELEASE.sha)
    give_back(lease)
    lost.wait()
    assert ear.names == ["lease_acquired", "lease_released"]
    with redis_server.client() as client:
        assert entries(client, "lease") == []


def test_a_signal_during_an_acquire_gives_back_and_goes_on_its_way(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    """gunicorn's worker timeout raises SystemExit wherever the worker is."""
    held = proxy.trap(ACQUIRE.sha, then="hold")

    def strike(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR1, strike)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        held.wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    (interrupting,) = in_threads([interrupt])
    ear = Ear()
    try:
        with pytest.raises(SystemExit) as caught:
            take(lease_on(distant, emit=ear))
    finally:
        signal.signal(signal.SIGUSR1, before)
    interrupting.join(PATIENCE)
    assert caught.value.code == 7
    with redis_server.client() as client:
        until(lambda: not entries(client, "lease"), "the lease to be given back")
    held.release()
    # The late reply was nobody's.
    assert isinstance(distant.acquire("k", "other", 1.0, 1, 0.0), Grant)
    assert ear.names == []


def test_a_signal_during_a_release_leaves_it_to_the_keeper(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    lease = take(lease_on(distant))
    held = proxy.trap(RELEASE.sha, at="request", then="hold")

    def strike(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, strike)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        held.wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    in_threads([interrupt])
    try:
        with pytest.raises(KeyboardInterrupt):
            give_back(lease)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with redis_server.client() as client:
        until(lambda: not entries(client, "lease"), "the lease to be given back")
    held.release()


def test_steps_that_are_closed_in_the_middle_leave_it_to_the_keeper(
    store: Store, redis_client: redis.Redis
) -> None:
    """A task that is destroyed while it waits: nobody can ask the store for it any more."""
    lease = lease_on(store)
    steps = acquire(lease, Terms())
    ask = next(steps)
    _, _, args = ask
    store.acquire(*args)
    steps.close()
    until(lambda: not entries(redis_client, "lease"), "the lease to be given back")


def test_what_is_handed_over_is_told_of_by_the_keeper(store: Store) -> None:
    """The garbage collector may close the holder in the middle of anything, a signal included."""
    told: list[tuple[str, str]] = []

    def emit(name: str, *args: Any, **facts: Any) -> None:
        told.append((name, threading.current_thread().name))

    lease = take(lease_on(store, emit=emit))
    hand_over(lease)
    until(lambda: told[1:], "the release to be told")
    assert told[1:] == [("lease_released", "singleflight-keeper")]


def test_a_conflict_met_while_waiting_gives_back_nothing_it_never_had(
    distant: Store, proxy: Proxy
) -> None:
    holder = take(lease_on(distant))
    ear = Ear()

    def late() -> None:
        with pytest.raises(LeaseConflictError):
            take(lease_on(distant, emit=ear), wait=0.1)

    for thread in in_threads([late]):
        thread.join(PATIENCE)
    assert proxy.count(RELEASE.sha) == 0
    assert ear.names == ["lease_rejected"]
    give_back(holder)


async def test_of_sync_and_async_callers_one_gets_it(store: Store) -> None:
    lease = await asyncio.create_task(atake(lease_on(store)))
    assert refused(store, "k").key == "k"
    with pytest.raises(LeaseConflictError):
        await asyncio.create_task(atake(lease_on(store)))
    await agive_back(lease)


def test_a_holder_that_is_dead_is_succeeded_when_its_lease_ends(store: Store) -> None:
    begin = clock()
    store.acquire("k", "dead", 0.5, 1, 0.0)
    lease = take(lease_on(store), wait=PATIENCE)
    assert 0.49 < clock() - begin < 5
    give_back(lease)


def test_fences_rise_from_holder_to_holder(store: Store) -> None:
    fences = []
    for _ in range(5):
        lease = take(lease_on(store))
        fences.append(lease.fence)
        give_back(lease)
    assert fences == sorted(set(fences))  # type: ignore[type-var]
