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
    store = get_store(cache_at(proxy.url(), SOCKET_TIMEOUT=1))
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
