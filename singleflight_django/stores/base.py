"""The store contract: where leases live, and the laws that every store keeps.

A store is shared by all threads and event loops of a process. It raises ``StoreUnavailableError``
when it can't tell, and only then: "held by someone else" is always proven.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Grant(NamedTuple):
    """The lease is the caller's. ``fence`` is None where the store has no clock to fence with."""

    fence: int | None


class Conflict(NamedTuple):
    """Someone else holds the lease for ``remaining`` more seconds, unless it is renewed."""

    remaining: float


class Claim(NamedTuple):
    """One key of one acquisition: what it takes to renew it or to give it back."""

    key: str
    token: str
    ttl: float


class Store(ABC):
    """Leases by key. Times are seconds; tokens are ASCII; keys are what ``qualify`` made of them.

    Laws, each a test of ``store_contract``: acquire is one atomic step and accepts that the stored
    token is the caller's own (so it may be sent again); a lease ends by itself after ``ttl``;
    renew and release touch only what carries the caller's token; at most ``limit`` holders.
    """

    # For how many seconds may one wait_free() block? 0: a release wakes nobody, waiters look again.
    longest_block = 0.0
    # Are renew and release one server-side compare-and-set, or read-then-write?
    compares_and_sets = False
    # Does the store have a clock, and so fencing tokens?
    fences = False

    @abstractmethod
    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """Take the lease of ``key``, or tell how long it is held.

        ``wait``: for how long the caller means to wait if this is a conflict, so that a release knows
        whether there is anyone to wake.
        """

    @abstractmethod
    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """Let each claim live for its ``ttl`` from now; False for each that is no longer held."""

    @abstractmethod
    def release(self, key: str, token: str) -> bool:
        """Give the lease back; False if it was no longer the caller's."""

    def wait_free(self, key: str, seconds: float) -> bool:
        """Return True as soon as the lease of ``key`` may be free, False after ``seconds``."""
        time.sleep(seconds)
        return False

    async def aacquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See acquire()."""
        return await asyncio.to_thread(self.acquire, key, token, ttl, limit, wait)

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        return await asyncio.to_thread(self.release, key, token)

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        return await asyncio.to_thread(self.renew, claims)

    async def await_free(self, key: str, seconds: float) -> bool:
        """See wait_free()."""
        await asyncio.sleep(seconds)
        return False
