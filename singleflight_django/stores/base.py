"""The store contract: where leases live, and the laws that every store keeps.

A store is shared by all threads and event loops of a process. It raises ``StoreUnavailableError``
when it can't tell, and only then: "held by someone else" is always proven.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.lease import Claim as Claim
from singleflight_django.stores.findings import Finding
from singleflight_django.stores.listing import FLIGHT, Holding

_T = TypeVar("_T")


class Grant(NamedTuple):
    """The lease is the caller's. ``fence`` is None where the store has no clock to fence with."""

    fence: int | None


class Conflict(NamedTuple):
    """Someone else holds the lease for ``remaining`` more seconds, unless it is renewed."""

    remaining: float


class RenewalInDoubtError(StoreUnavailableError):
    """The store can't tell for each claim whether it was renewed: ``answers`` has None for those."""

    def __init__(self, message: str, answers: list[bool | None]) -> None:
        super().__init__(message)
        self.answers = answers


class Status(StrEnum):
    """How a flight ended, or a part of it. The value is what the store keeps."""

    DONE = "done"
    FAILED = "failed"
    # This leader is gone without an outcome, the flight isn't over: join again.
    VACANT = "vacant"
    # The same, but the next leader is not to be counted as one that took over.
    AGAIN = "again"
    # The outcome was for the leader's caller alone.
    UNSHAREABLE = "unshareable"


class Joining(NamedTuple):
    """What a caller says when it joins: see Store.join(). ``wait`` and ``ttl`` in seconds."""

    token: str
    ttl: float
    wait: float
    fingerprint: str = ""
    # The flight that the caller follows already, and the last landing that it saw of it; or none.
    flight: int = 0
    seen: str = "0"
    # For how long the flight may take at most: what a crash leaves behind is gone after that.
    life: float = 600.0
    # How many dead leaders one flight may have before it counts as failed.
    takeovers: int = 2


class Led(NamedTuple):
    """The caller leads ``flight``; ``takeovers`` leaders of it have died before.

    ``now``: see Busy.
    """

    flight: int
    fence: int | None
    takeovers: int = 0
    now: float = 0.0


class Busy(NamedTuple):
    """``flight`` is under way, its lease lives for ``remaining`` more seconds unless renewed.

    ``now``: when the server said so, in seconds on the clock that also says when a flight landed.
    """

    flight: int
    remaining: float
    now: float


class Landing(NamedTuple):
    """What became of a flight. ``at``: when, on the same clock as ``Busy.now``."""

    status: Status
    payload: bytes = b""
    at: float = 0.0
    seen: str = "0"


class Kept(NamedTuple):
    """The outcome of a flight that is over, kept for ``remaining`` more seconds."""

    payload: bytes
    remaining: float


class Mismatch(NamedTuple):
    """The flight under way, or the outcome kept, is of another fingerprint."""


class Apart(NamedTuple):
    """This identity isn't coalesced for a while: its outcome was not shareable."""


Joined = Led | Busy | Landing | Kept | Mismatch | Apart


class Publishing(NamedTuple):
    """What a leader publishes: see Store.publish(). Times in seconds."""

    token: str
    flight: int
    status: Status
    payload: bytes = b""
    # For how long a caller that comes after the end may have it.
    keep: float = 0.0
    # For how long the identity is not coalesced.
    apart: float = 0.0
    # How many failures of this flight are followed by another try.
    retry: int = 0
    # Whether it has followers that the store doesn't know, in the leader's own process.
    passengers: bool = False
    # How long followers that the store doesn't know wait at most.
    linger: float = 60.0


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
    # Can the store name those who hold something in it?
    can_list = False
    # May another task carry on what the a-methods of acquire, release, join and publish have begun?
    steady = False

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
        """Let each claim live for its ``ttl`` from now; False for each that is no longer held.

        Raises RenewalInDoubtError where it can tell for some of them only.
        """

    @abstractmethod
    def release(self, key: str, token: str) -> bool:
        """Give the lease back; False if it was no longer the caller's."""

    def wait_free(self, key: str, seconds: float) -> bool:
        """Return True as soon as the lease of ``key`` may be free, False after ``seconds``."""
        self.rest(seconds)
        return False

    @abstractmethod
    def join(self, key: str, joining: Joining) -> Joined:
        """Say in one step what the caller is: leader, follower, or done already.

        A follower that joins again (``joining.flight``) gets a landing of its flight that it hasn't
        seen, if there is one, before anything else.
        """

    @abstractmethod
    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """Store what became of a flight, end its lease and wake its followers, in one step.

        Return the status that the followers see: a failure may have become another try. None if the
        lease was not the caller's any more: nothing was done then.
        """

    def wait_landing(self, key: str, flight: int, seen: str, seconds: float) -> Landing | None:
        """Return the first landing of ``flight`` after ``seen``, or None after ``seconds``.

        A store that wakes nobody (``longest_block`` is 0) only lets the time pass: to join again
        tells.
        """
        self.rest(seconds)
        return None

    def followed(self, key: str) -> bool:
        """Whether anybody may be waiting for the flight of ``key`` to land."""
        return True

    @abstractmethod
    def forget(self, key: str) -> None:
        """Drop the outcome that is kept for ``key``."""

    def now(self, key: str) -> float | None:
        """The clock that says when a flight of ``key`` landed, in seconds; None: there is none."""
        return None

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        """Yield the live leases and flights whose key contains a text, in any order.

        Never all in one step, nor all in memory: what comes or goes meanwhile may be missing, or be
        there twice. Raises NotImplementedError unless ``can_list``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} can't list its leases: it finds them by their keys only."
        )

    def evict(self, holding: Holding) -> bool:
        """End a lease that ``holdings`` yielded; False if it was no longer there.

        By its token, so that nobody's later lease is touched. A follower takes a flight over.
        """
        if holding.kind == FLIGHT:
            vacant = Publishing(holding.token, holding.flight, Status.VACANT)
            return self.publish(holding.key, vacant) is not None
        return self.release(holding.key, holding.token)

    def examine(self, ttl: float) -> Iterator[Finding]:
        """Yield what ``manage.py singleflight doctor`` is to tell of the server behind this store.

        It connects, and may write entries that nobody else uses. ``ttl``: see SINGLEFLIGHT_TTL.
        """
        return iter(())

    def rest(self, seconds: float) -> None:
        """Let ``seconds`` pass before the store is asked again."""
        time.sleep(seconds)

    async def in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        """Carry out a blocking call for its a-twin."""
        return await asyncio.to_thread(call, *args)

    async def aacquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See acquire()."""
        return await self.in_thread(self.acquire, key, token, ttl, limit, wait)

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        return await self.in_thread(self.release, key, token)

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        return await self.in_thread(self.renew, claims)

    async def await_free(self, key: str, seconds: float) -> bool:
        """See wait_free()."""
        await self.arest(seconds)
        return False

    async def ajoin(self, key: str, joining: Joining) -> Joined:
        """See join()."""
        return await self.in_thread(self.join, key, joining)

    async def apublish(self, key: str, publishing: Publishing) -> Status | None:
        """See publish()."""
        return await self.in_thread(self.publish, key, publishing)

    async def await_landing(
        self, key: str, flight: int, seen: str, seconds: float
    ) -> Landing | None:
        """See wait_landing()."""
        await self.arest(seconds)
        return None

    async def afollowed(self, key: str) -> bool:
        """See followed()."""
        return self.followed(key)

    async def aforget(self, key: str) -> None:
        """See forget()."""
        await self.in_thread(self.forget, key)

    async def anow(self, key: str) -> float | None:
        """See now()."""
        return await asyncio.to_thread(self.now, key)

    async def arest(self, seconds: float) -> None:
        """See rest()."""
        await asyncio.sleep(seconds)
