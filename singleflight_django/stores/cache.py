"""Leases on any cache whose ``add`` is atomic: memcached, locmem for one process, Redis without scripts.

Weaker than a server that compares and sets: release and renew read the owner token first. A holder
whose lease lapses between the read and the write can end its successor's; so a release does nothing
in the last part of a lease, where the cache ends it by itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.steadiness import steadily
from singleflight_django.stores.base import Claim, Conflict, Grant
from singleflight_django.stores.cache_examining import examine
from singleflight_django.stores.cache_flights import CacheFlights, parse_lease
from singleflight_django.stores.findings import Finding
from singleflight_django.waiting import clock

# Their ``add`` has several winners (measured), or no memory at all.
REFUSED = (DummyCache, FileBasedCache, DatabaseCache)
# A release closer than this to the lease's end would race with its successor. Seconds.
MARGIN = 0.05

_T = TypeVar("_T")


class _Held(NamedTuple):
    slot: str
    # By our own clock, and always too early.
    ends: float


class CacheStore(CacheFlights):
    """Leases through ``cache.add``, under ``<namespace>:<key>``; holders after the first have a number.

    A lease is the text ``<owner token> <end> <more>``, the end by this machine's wall clock: only for
    telling others how long it has to live, never for ending it. Whole seconds, rounded up.
    """

    steady = True

    def __init__(self, alias: str) -> None:
        self._alias = alias
        # What each token holds, or may hold, by key.
        self._held: dict[tuple[str, str], _Held] = {}
        self._tidy_at = 1000
        # A renewal that read before, and wrote after, its own lease's release would revive it.
        self._turns = tuple(threading.Lock() for _ in range(64))

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        soonest = math.inf
        for number in range(limit):
            slot = f"{key}#{number}" if number else key
            present = self.take(slot, token, ttl, key=key)
            if present is None:
                return Grant(None)
            soonest = min(soonest, present[1])
        return Conflict(max(0.0, soonest - time.time()))

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        return [self._renew(*claim) for claim in claims]

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        with self._turn(token):
            found = self._find(key, token)
            if found is not None and found[1] > MARGIN:
                self.call("delete", found[0])
            self._held.pop((key, token), None)
        return found is not None

    def examine(self, ttl: float) -> Iterator[Finding]:
        """See Store.examine()."""
        return examine(self._alias, REFUSED)

    def take(
        self, slot: str, token: str, ttl: float, more: str = "", key: str = ""
    ) -> tuple[str, float] | None:
        """Take a lease: None if it is ours now, else the rest of the present one's text and its end.

        A cache that hides its errors answers like one where the key exists: only a foreign token,
        read back, proves a conflict.
        """
        seconds = math.ceil(ttl)
        # Noted before it is asked for: what was added without an answer can be given back, too.
        self._note(key or slot, token, _Held(slot, clock() + seconds))
        for _ in range(3):
            text = f"{token} {time.time() + seconds:.3f} {more}"
            if self.call("add", slot, text, seconds):
                return None
            owner, ends, other = parse_lease(self.call("get", slot))
            if owner == token:
                return None
            if owner:
                self._held.pop((key or slot, token), None)
                return other, ends
        raise StoreUnavailableError(
            f"The cache {self._alias!r} neither adds the lease nor has one: it is away and hides it.",
            key=slot,
        )

    def _renew(self, key: str, token: str, ttl: float) -> bool:
        with self._turn(token):
            found = self._find(key, token)
            if found is None or found[1] <= MARGIN:
                return False
            slot, _, more = found
            seconds = math.ceil(ttl)
            self._held[key, token] = _Held(slot, clock() + seconds)
            self.call("set", slot, f"{token} {time.time() + seconds:.3f} {more}", seconds)
        return True

    def _find(self, key: str, token: str) -> tuple[str, float, str] | None:
        """Find the slot that ``token`` holds, the seconds that it still does, and the lease's rest."""
        held = self._held.get((key, token))
        slot = held.slot if held else key
        owner, ends, more = parse_lease(self.call("get", slot))
        if owner != token:
            return None
        return slot, held.ends - clock() if held else ends - time.time(), more

    def _note(self, key: str, token: str, held: _Held) -> None:
        # Leases that were left to lapse are given back by nobody.
        if len(self._held) >= self._tidy_at:
            for which, old in list(self._held.items()):
                if old.ends < clock() - 60:
                    self._held.pop(which, None)
            self._tidy_at = max(1000, 2 * len(self._held))
        known = self._held.get((key, token))
        # Asked for again, it ends when the first one does.
        self._held[key, token] = known if known and known.slot == held.slot else held

    def _turn(self, token: str) -> threading.Lock:
        return self._turns[hash(token) % len(self._turns)]

    async def in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        """See Store.in_thread()."""
        # Made here, the cache with its connections stays in this context; in a thread that asgiref
        # hasn't moved the context to, it would be made anew for each call.
        usable_cache(self._alias)
        return await steadily(sync_to_async(call, thread_sensitive=False)(*args))

    def call(self, method: str, slot: str, *args: Any) -> Any:
        """Call a method of the cache; whatever goes wrong, the store can't tell."""
        cache = usable_cache(self._alias)
        # The tasks of one context share the object, each in a thread of its own, and not every client
        # bears that: sixteen threads on one of pymemcache's wait for ever (measured).
        turn = vars(cache).setdefault("_singleflight_turn", threading.Lock())
        try:
            with turn:
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
