"""What the tests of the engine share: leases taken by hand, and an ear for what is told about them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from singleflight_django import context
from singleflight_django.drivers import arun, run
from singleflight_django.lease import Lease
from singleflight_django.locking import Terms, acquire, release
from singleflight_django.stores.base import Store

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    """No test holds what another one failed to give back. To be imported by the test module."""
    yield
    context._held.set(())


class Ear:
    """An ``emit`` that remembers what it was told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, name: str, lease: Lease, reason: str = "", **facts: Any) -> None:
        self.events.append((name, reason))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def reasons(self, name: str) -> list[str]:
        return [reason for told, reason in self.events if told == name]


def lease_on(
    store: Store,
    *keys: str,
    ttl: float = 10.0,
    max_hold: float = 600.0,
    emit: Callable[..., None] | None = None,
) -> Lease:
    return Lease(store, keys or ("k",), ttl, max_hold=max_hold, emit=emit or Ear())


def take(lease: Lease, wait: float = 0.0, limit: int = 1, longest_pause: float = 0.5) -> Lease:
    run(acquire(lease, Terms(wait, limit, longest_pause)))
    return lease


async def atake(
    lease: Lease, wait: float = 0.0, limit: int = 1, longest_pause: float = 0.5
) -> Lease:
    await arun(acquire(lease, Terms(wait, limit, longest_pause)))
    return lease


def give_back(lease: Lease) -> None:
    run(release(lease))


async def agive_back(lease: Lease) -> None:
    await arun(release(lease))


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def entries(client: redis.Redis, name: str) -> list[bytes]:
    """The entries of that kind that are on the server: "lease", "waiting", "free"."""
    return [key for key in client.scan_iter(count=1000) if key.endswith(b":" + name.encode())]
