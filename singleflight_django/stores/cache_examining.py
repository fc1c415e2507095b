"""The examination of a cache that keeps leases through ``add``."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from django.core.cache import caches, close_caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache

from singleflight_django.stores.findings import Finding, Level

CALLERS = 8
ROUNDS = 30
_ANOTHER = "Point SINGLEFLIGHT_CACHE at a Redis, Valkey or memcached server."


def examine(alias: str, refused: tuple[type[BaseCache], ...]) -> Iterator[Finding]:
    """Yield what is found. ``refused``: kinds of caches that can't hold leases."""
    kind = type(caches[alias])
    if issubclass(kind, refused):
        text = f"{kind.__name__} can't hold leases: its add() has several winners, or no memory."
        yield Finding("server", Level.ERROR, text, _ANOTHER)
        return
    if issubclass(kind, LocMemCache):
        text = "It is in the memory of one process: other processes don't see its leases."
        yield Finding("server", Level.ERROR, text, _ANOTHER)
    else:
        text = (
            f"{kind.__name__}: a release reads first and deletes then, there are no fencing tokens, "
            "and a ttl is whole seconds."
        )
        yield Finding("server", Level.INFO, text, "Redis or Valkey has none of this.")
    try:
        yield _atomicity(alias)
    except Exception as error:
        text = f"The cache doesn't answer. {type(error).__name__}: {error}"
        yield Finding("reach", Level.ERROR, text, "Is it running, and is LOCATION right?")


def _atomicity(alias: str) -> Finding:
    """Let several callers add the same key at once, again and again."""
    name = f"singleflight-doctor-{secrets.token_hex(6)}"
    start = threading.Barrier(CALLERS, timeout=10)

    def caller(_: int) -> list[bool]:
        try:
            return [_added(alias, f"{name}-{number}", start) for number in range(ROUNDS)]
        finally:
            close_caches()

    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(caller, range(CALLERS)))
    caches[alias].delete_many([f"{name}-{number}" for number in range(ROUNDS)])
    winners = [sum(each) for each in zip(*answers, strict=True)]
    if set(winners) == {1}:
        text = f"add() is atomic: one winner each time ({ROUNDS} rounds of {CALLERS} callers)."
        return Finding("atomicity", Level.OK, text)
    bad = sum(number != 1 for number in winners)
    text = f"add() had {max(winners)} winners, or none, in {bad} of {ROUNDS} rounds."
    return Finding("atomicity", Level.ERROR, text, _ANOTHER)


def _added(alias: str, name: str, start: threading.Barrier) -> bool:
    start.wait()
    return bool(caches[alias].add(name, 1, 60))
