"""Laws of waiting for a lease."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.cache import close_caches

from singleflight_django.stores.base import Conflict, Store
from singleflight_django.testing.contract.calling import (
    LONG,
    PATIENCE,
    Calls,
    StoreLaws,
    closing,
    in_a_loop,
)


class WaitingLaws(StoreLaws):
    """Laws of waiting for a lease."""

    # Waiting

    def test_a_wait_is_bounded(self, calls: Calls) -> None:
        calls.acquire("k", "a")
        calls.acquire("k", "b", LONG, 1, wait=0.1)
        begin = time.monotonic()
        assert calls.wait_free("k", 0.1) is False
        assert time.monotonic() - begin < 1.5

    def test_a_release_before_the_wait_is_not_missed(self, calls: Calls) -> None:
        """The holder leaves after the waiter's conflict, and before the waiter waits."""
        block = self.block_of(calls.store)
        calls.acquire("k", "a")
        calls.acquire("k", "b", LONG, 1, wait=10.0)
        calls.release("k", "a")
        assert calls.wait_free("k", block) is True

    def test_a_release_wakes_a_thread_that_waits(self, store: Store) -> None:
        block = self.block_of(store)
        store.acquire("k", "a", LONG, 1, 0.0)
        store.acquire("k", "b", LONG, 1, 10.0)
        waiting = threading.Event()

        def wait() -> bool:
            waiting.set()
            return store.wait_free("k", block)

        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(wait)
            assert waiting.wait(PATIENCE)
            store.release("k", "a")
            assert woken.result(PATIENCE) is True

    @in_a_loop
    async def test_a_release_wakes_a_task_that_waits(self, store: Store) -> None:
        block = self.block_of(store)
        await store.aacquire("k", "a", LONG, 1, 0.0)
        await store.aacquire("k", "b", LONG, 1, 10.0)
        waiter = asyncio.ensure_future(store.await_free("k", block))
        await asyncio.sleep(0)
        await store.arelease("k", "a")
        assert await asyncio.wait_for(waiter, PATIENCE) is True
        close_caches()

    @staticmethod
    def block_of(store: Store) -> float:
        if not store.longest_block:
            pytest.skip("this store wakes nobody: its waiters look again by themselves")
        return store.longest_block

    @in_a_loop
    async def test_a_task_that_waits_leaves_the_loop_to_others(self, store: Store) -> None:
        await store.aacquire("k", "a", LONG, 1, 0.0)
        await store.aacquire("k", "b", LONG, 1, 0.3)
        waiter = asyncio.ensure_future(store.await_free("k", 0.3))
        turns = 0
        while not waiter.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns >= 5
        close_caches()

    @in_a_loop
    async def test_many_tasks_wait_at_once_and_each_gets_its_turn(self, store: Store) -> None:
        async def turn(token: str) -> None:
            while isinstance(answer := await store.aacquire("k", token, LONG, 1, 5.0), Conflict):
                await store.await_free("k", min(answer.remaining, 0.1))
            await store.arelease("k", token)

        turns = (closing(turn(f"t{number}")) for number in range(10))
        await asyncio.wait_for(asyncio.gather(*turns), PATIENCE)
