"""The lock over a network that loses requests and replies and cuts connections, at random.

``SINGLEFLIGHT_SOAK_SECONDS``: 30 for the full run.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from singleflight_django import semaphore_lock
from singleflight_django.exceptions import LeaseConflictError, StoreUnavailableError
from tests.proxy import Proxy

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

SECONDS = float(os.environ.get("SINGLEFLIGHT_SOAK_SECONDS", "6"))
THREADS = 6


def test_the_lock_may_be_away_and_is_never_wrong(
    proxy: Proxy, cache_at: Callable[..., str]
) -> None:
    alias = cache_at(proxy.url(), SOCKET_TIMEOUT=1.0, SOCKET_CONNECT_TIMEOUT=1.0)
    end = time.monotonic() + SECONDS
    inside, pause = threading.Lock(), threading.Event()

    def take_turns(_: int) -> tuple[int, int]:
        turns = away = 0
        while time.monotonic() < end:
            try:
                with semaphore_lock("soak:network", ttl=1, wait=5, cache=alias):
                    assert inside.acquire(blocking=False), "two holders at once"
                    pause.wait(0.001)
                    inside.release()
                turns += 1
            except (StoreUnavailableError, LeaseConflictError):
                away += 1
        return turns, away

    with ThreadPoolExecutor(THREADS) as pool:
        takers = [pool.submit(take_turns, number) for number in range(THREADS)]
        while time.monotonic() < end:
            strike(proxy)
            pause.wait(random.uniform(0, 0.05))
        turns, away = map(sum, zip(*(taker.result(60) for taker in takers), strict=True))
    print(f"{turns} turns, {away} times away, never two inside")
    assert turns > 20
    assert away > 0
    # Whatever a lost reply has left behind ends with its ttl.
    with semaphore_lock("soak:network", ttl=1, wait=10, cache=alias) as lease:
        assert lease.acquired


def strike(proxy: Proxy) -> None:
    """One fault, now or soon."""
    if random.random() < 0.1:
        proxy.cut()
    elif random.random() < 0.5:
        proxy.trap(b"EVALSHA", at="request", nth=random.randint(1, 20))
    else:
        proxy.trap(b"EVALSHA", at="reply", nth=random.randint(1, 20))
