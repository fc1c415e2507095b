"""How the laws of leases call a store: from threads, and from event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import pytest
from django.core.cache import close_caches
from django.db import connections

from singleflight_django.stores.base import Claim, Conflict, Grant, Store

# No wait of a law comes near this, save where the store is broken.
PATIENCE = 20.0
LONG = 30.0


class Calls:
    """A store, called from plain code."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def acquire(
        self, key: str, token: str, ttl: float = LONG, limit: int = 1, wait: float = 0.0
    ) -> Grant | Conflict:
        return self.store.acquire(key, token, ttl, limit, wait)

    def renew(self, *claims: Claim) -> list[bool]:
        return self.store.renew(claims)

    def release(self, key: str, token: str) -> bool:
        return self.store.release(key, token)

    def wait_free(self, key: str, seconds: float) -> bool:
        return self.store.wait_free(key, seconds)


class AsyncCalls(Calls):
    """The same store, called from an event loop."""

    def __init__(self, store: Store, run: Callable[[Any], Any]) -> None:
        super().__init__(store)
        self.run = run

    def acquire(
        self, key: str, token: str, ttl: float = LONG, limit: int = 1, wait: float = 0.0
    ) -> Grant | Conflict:
        answer: Grant | Conflict = self.run(self.store.aacquire(key, token, ttl, limit, wait))
        return answer

    def renew(self, *claims: Claim) -> list[bool]:
        answers: list[bool] = self.run(self.store.arenew(claims))
        return answers

    def release(self, key: str, token: str) -> bool:
        answer: bool = self.run(self.store.arelease(key, token))
        return answer

    def wait_free(self, key: str, seconds: float) -> bool:
        answer: bool = self.run(self.store.await_free(key, seconds))
        return answer


def at_once(number: int, call: Callable[[int], Any]) -> list[Any]:
    """Call ``call(0)``, ``call(1)``, … in as many threads, which start together."""
    start = threading.Barrier(number, timeout=PATIENCE)

    def caller(index: int) -> Any:
        start.wait()
        try:
            return call(index)
        finally:
            close_caches()
            connections.close_all()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(caller, range(number), timeout=PATIENCE * 2))


async def closing(work: Awaitable[Any]) -> Any:
    """Await ``work`` and then, as Django does after a request, close what its caches have open."""
    try:
        return await work
    finally:
        close_caches()


def grants(answers: Sequence[Any]) -> int:
    return sum(isinstance(answer, Grant) for answer in answers)


def in_a_loop(law: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async law without a plugin of pytest."""

    @wraps(law)
    def inner(*args: Any, **kwargs: Any) -> None:
        asyncio.run(law(*args, **kwargs))

    return inner


class StoreLaws:
    """What laws of leases need."""

    # The smallest step of a ttl in seconds: up to this a store may round up.
    finest = 0.001
    # A ttl that a law waits for.
    brief = 0.15

    @pytest.fixture(params=["sync", "async"])
    def calls(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Calls]:
        if request.param == "sync":
            yield Calls(store)
            return
        with asyncio.Runner() as runner:
            yield AsyncCalls(store, runner.run)
            runner.run(closing(asyncio.sleep(0)))

    def take_when_free(self, calls: Calls, key: str, token: str, limit: int = 1) -> Grant:
        """Acquire as a waiting caller does, and return the grant."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, f"{key} never came free"
            answer = calls.acquire(key, token, LONG, limit, wait=1.0)
            if isinstance(answer, Grant):
                return answer
            calls.wait_free(key, min(answer.remaining + 0.01, 0.2))
