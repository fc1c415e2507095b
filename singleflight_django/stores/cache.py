"""Leases on any cache whose ``add`` is atomic: memcached, locmem for one process, Redis without scripts.

Weaker than a server that compares and sets: release and renew read the owner token first. A holder
whose lease lapses between the read and the write can end its successor's; so a release does nothing
in the last part of a lease, where the cache ends it by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from django.core.cache import caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Claim, Conflict, Grant
from singleflight_django.stores.cache_flights import CacheFlights, parse_lease

# Their ``add`` has several winners (measured), or no memory at all.
REFUSED = (DummyCache, FileBasedCache, DatabaseCache)
# A release closer than this to the lease's end would race with its successor. Seconds.
MARGIN = 0.05


class CacheStore(CacheFlights):
    """Leases through ``cache.add``, under ``<namespace>:<key>``; holders after the first have a number.

    A lease is the text ``<owner token> <end> <more>``, the end by this machine's wall clock: only for
    telling how long it has to live, never for ending it. Whole seconds, rounded up.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        # How many slots an owner token may be in, where that is more than one.
        self._limits: dict[str, int] = {}

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        soonest = math.inf
        if limit > 1:
            self._limits[token] = limit
        for slot in range(limit):
            present = self.take(_slot(key, slot), token, ttl)
            if present is None:
                return Grant(None)
            soonest = min(soonest, present[1])
        self._limits.pop(token, None)
        return Conflict(max(0.0, soonest - time.time()))

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        return [self._renew(*claim) for claim in claims]

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        held = self._find(key, token)
        if held is None:
            return False
        slot, left, _ = held
        if left > MARGIN:
            self.call("delete", slot)
        self._limits.pop(token, None)
        return True

    def take(self, slot: str, token: str, ttl: float, more: str = "") -> tuple[str, float] | None:
        """Take a lease: None if it is ours now, else the rest of the present one's text and its end.

        A cache that hides its errors answers like one where the key exists: only a foreign token,
        read back, proves a conflict.
        """
        seconds = math.ceil(ttl)
        for _ in range(3):
            text = f"{token} {time.time() + seconds:.3f} {more}"
            if self.call("add", slot, text, seconds):
                return None
            owner, ends, other = parse_lease(self.call("get", slot))
            if owner == token:
                return None
            if owner:
                return other, ends
        raise StoreUnavailableError(
            f"The cache {self._alias!r} neither adds the lease nor has one: it is away and hides it.",
            key=slot,
        )

    def _renew(self, key: str, token: str, ttl: float) -> bool:
        held = self._find(key, token)
        if held is None or held[1] <= MARGIN:
            return False
        seconds = math.ceil(ttl)
        slot, _, more = held
        self.call("set", slot, f"{token} {time.time() + seconds:.3f} {more}", seconds)
        return True

    def _find(self, key: str, token: str) -> tuple[str, float, str] | None:
        """Find the slot that ``token`` holds, the seconds that it still does, and the lease's rest."""
        for number in range(self._limits.get(token, 1)):
            slot = _slot(key, number)
            owner, ends, more = parse_lease(self.call("get", slot))
            if owner == token:
                return slot, ends - time.time(), more
        return None

    def call(self, method: str, slot: str, *args: Any) -> Any:
        """Call a method of the cache; whatever goes wrong, the store can't tell."""
        cache = usable_cache(self._alias)
        try:
            return getattr(cache, method)(slot, *args)
        except Exception as error:
            raise StoreUnavailableError(f"The cache did not answer: {error}", key=slot) from error


def usable_cache(alias: str) -> BaseCache:
    """Return the cache ``alias``; StoreUnavailableError if leases can't live there."""
    cache = caches[alias]
    if isinstance(cache, REFUSED):
        raise StoreUnavailableError(
            f"The cache {alias!r} ({type(cache).__name__}) can't hold leases: its add() is not atomic. "
            "Point SINGLEFLIGHT_CACHE at a Redis, Valkey or memcached cache, or switch the library "
            "off with SINGLEFLIGHT_ENABLED = False."
        )
    return cache


def _slot(key: str, number: int) -> str:
    return f"{key}#{number}" if number else key
