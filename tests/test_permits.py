"""However many keys are asked for at once, the connections of a process stay bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from singleflight_django import semaphore_lock
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Conflict, Grant
from singleflight_django.stores.redis.async_permits import AsyncPermits
from singleflight_django.stores.redis.permits import MOST, Permits
from singleflight_django.stores.registry import get_store
from tests.proxy import Proxy
from tests.servers import Valkey

MANY = 1000
PATIENCE = 30.0


def eventually(what: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def aeventually(what: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class TestPermits:
    def test_there_are_so_many_and_no_more(self) -> None:
        permits = Permits(patience=0.01)
        for _ in range(MOST):
            permits.take()
        assert not permits.take_at_once()
        with pytest.raises(TimeoutError, match=f"{MOST} calls have been under way"):
            permits.take()

    def test_one_that_waits_gets_what_is_given_back(self) -> None:
        permits = Permits(patience=PATIENCE)
        for _ in range(MOST):
            permits.take()
        waiting = threading.Thread(target=permits.take)
        waiting.start()
        permits.give()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert not permits.take_at_once()

    def test_those_that_wait_get_what_is_given_back_in_turn(self) -> None:
        permits, served = Permits(patience=PATIENCE), []
        for _ in range(MOST):
            permits.take()

        def wait(number: int) -> None:
            permits.take()
            served.append(number)

        waiting = []
        for number in range(3):
            waiting.append(threading.Thread(target=wait, args=(number,)))
            waiting[-1].start()
            eventually(lambda place=number + 1: len(permits._queue) == place)
        for number in range(3):
            permits.give()
            eventually(lambda place=number + 1: len(served) == place)
        assert served == [0, 1, 2]

    def test_one_that_waited_in_vain_leaves_the_queue(self) -> None:
        permits = Permits(patience=0.01)
        for _ in range(MOST):
            permits.take()
        with pytest.raises(TimeoutError):
            permits.take()
        permits.give()
        assert permits.take_at_once()
        assert not permits.take_at_once()

    def test_none_is_lost_and_none_is_made(self) -> None:
        """Eight times as many threads as permits, and some of them give up."""
        permits, inside, most = Permits(patience=0.02), set(), []

        def work(number: int) -> int:
            given_up = 0
            for _ in range(20):
                try:
                    permits.take()
                except TimeoutError:
                    given_up += 1
                    continue
                inside.add(number)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.discard(number)
                permits.give()
            return given_up

        with ThreadPoolExecutor(8 * MOST) as pool:
            list(pool.map(work, range(8 * MOST)))
        assert max(most) <= MOST
        assert sum(permits.take_at_once() for _ in range(MOST + 1)) == MOST
        assert not permits._queue


class TestAsyncPermits:
    async def test_there_are_so_many_and_no_more(self) -> None:
        permits = AsyncPermits(patience=0.01)
        for _ in range(MOST):
            await permits.take()
        assert not permits.take_at_once()
        with pytest.raises(TimeoutError, match=f"{MOST} calls have been under way"):
            await permits.take()
        permits.give()
        assert permits.take_at_once()
        assert not permits.take_at_once()

    async def test_those_that_wait_get_what_is_given_back_in_turn(self) -> None:
        permits, served = AsyncPermits(patience=PATIENCE), []
        for _ in range(MOST):
            await permits.take()

        async def wait(number: int) -> None:
            await permits.take()
            served.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        permits.give()
        permits.give()
        assert not permits.take_at_once()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert served == [0, 2]

    async def test_one_that_comes_while_its_waiter_is_cancelled_is_not_lost(self) -> None:
        permits = AsyncPermits(patience=PATIENCE)
        for _ in range(MOST):
            await permits.take()
        waiting = asyncio.create_task(permits.take())
        await asyncio.sleep(0)
        permits.give()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert permits.take_at_once()
        assert not permits.take_at_once()


async def test_a_thousand_keys_taken_at_once_share_a_few_connections(
    redis_server: Valkey, cache_at: Any
) -> None:
    store = get_store(cache_at(redis_server.url()))
    with redis_server.client() as client:
        before = client.info("stats")["total_connections_received"]
        granted = await asyncio.gather(
            *(store.aacquire(f"k{n}", "mine", 60, 1, 0) for n in range(MANY))
        )
        assert all(isinstance(answer, Grant) for answer in granted)
        assert client.info("stats")["total_connections_received"] - before <= MOST


def test_threads_that_ask_at_once_share_them_too(redis_server: Valkey, cache_at: Any) -> None:
    store = get_store(cache_at(redis_server.url()))
    together = threading.Barrier(3 * MOST)

    def ask(number: int) -> Any:
        together.wait(PATIENCE)
        return store.acquire(f"k{number}", "mine", 60, 1, 0)

    with ThreadPoolExecutor(3 * MOST) as pool, redis_server.client() as client:
        assert all(isinstance(answer, Grant) for answer in pool.map(ask, range(3 * MOST)))
        # And one to look with.
        assert len(client.client_list()) <= MOST + 1


async def test_more_waiting_tasks_than_may_block_all_hear_of_the_release(
    redis_server: Valkey, cache_at: Any
) -> None:
    """Those over the number look now and then, on the connections that all share."""
    alias, many = cache_at(redis_server.url()), 2 * MOST
    store = get_store(alias)
    for number in range(many):
        await store.aacquire(f"semaphore_lock:k{number}", "another's", 60, 1, 0)

    async def wait_for(number: int) -> int:
        async with semaphore_lock(f"k{number}", wait=PATIENCE, cache=alias):
            return number

    waiting = [asyncio.create_task(wait_for(number)) for number in range(many)]
    with redis_server.client() as client:
        await aeventually(lambda: client.info("clients")["blocked_clients"] == MOST)
        for number in range(many):
            assert await store.arelease(f"semaphore_lock:k{number}", "another's")
        assert await asyncio.gather(*waiting) == list(range(many))
        assert len(client.client_list()) <= 2 * MOST + 1


def test_more_waiting_threads_than_may_block_all_hear_of_the_release(
    redis_server: Valkey, cache_at: Any
) -> None:
    alias, many = cache_at(redis_server.url()), MOST + 20
    store = get_store(alias)
    for number in range(many):
        store.acquire(f"semaphore_lock:k{number}", "another's", 60, 1, 0)

    def wait_for(number: int) -> int:
        with semaphore_lock(f"k{number}", wait=PATIENCE, cache=alias):
            return number

    with ThreadPoolExecutor(many) as pool, redis_server.client() as client:
        waiting = [pool.submit(wait_for, number) for number in range(many)]
        eventually(lambda: client.info("clients")["blocked_clients"] == MOST)
        for number in range(many):
            assert store.release(f"semaphore_lock:k{number}", "another's")
        assert [future.result(PATIENCE) for future in waiting] == list(range(many))
        assert len(client.client_list()) <= 2 * MOST + 1


async def test_a_store_that_hangs_costs_one_timeout_however_many_ask(
    proxy: Proxy, cache_at: Any
) -> None:
    store = get_store(cache_at(proxy.url(), SOCKET_TIMEOUT=2))
    assert isinstance(await store.aacquire("k", "mine", 60, 1, 0), Grant)
    assert isinstance(await store.aacquire("k", "another's", 60, 1, 0), Conflict)
    proxy.hang()
    begin = time.monotonic()
    answers = await asyncio.gather(
        *(store.aacquire(f"k{n}", "mine", 60, 1, 0) for n in range(5 * MOST)),
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers} == {StoreUnavailableError}
    # One to get a permit, and one of the socket for those who got one late.
    assert time.monotonic() - begin < 10
