"""Two stores: leases go to the second while the first is away, and back when it answers again.

Each process finds out for itself. What can overlap while they disagree: whoever led in the first
store when it went away is unknown in the second, and the other way round when it comes back; so for
as long as its work takes, one more caller may do the same. The same holds between a process that
reaches the first store and one that doesn't, for as long as that lasts. Followers of a flight whose
store went away begin another. The constraint holds all the while: that is what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import (
    Claim,
    Conflict,
    Grant,
    Joined,
    Joining,
    Landing,
    Led,
    Publishing,
    Status,
    Store,
)
from singleflight_django.stores.findings import Finding
from singleflight_django.stores.listing import Holding
from singleflight_django.stores.outages import Breaker, Places, Steps, ask, ask_async, renewal


class FailoverStore(Store):
    """``first``, and ``second`` while that is away. A lease stays where it was taken."""

    # What the first raises where it is of no use for now.
    away: type[StoreUnavailableError] = StoreUnavailableError

    def __init__(self, first: Store, second: Store, breaker: Breaker | None = None) -> None:
        self._first, self._second = first, second
        self.steady = first.steady and second.steady
        self._breaker = breaker or Breaker()
        # What was taken in the second store.
        self._moved = Places()

    @property
    def compares_and_sets(self) -> bool:  # type: ignore[override]
        """See Store.compares_and_sets."""
        return self._first.compares_and_sets and self._second.compares_and_sets

    @property
    def fences(self) -> bool:  # type: ignore[override]
        """See Store.fences."""
        return self._first.fences and self._second.fences

    @property
    def can_list(self) -> bool:  # type: ignore[override]
        """See Store.can_list."""
        return self._first.can_list and self._second.can_list

    @property
    def longest_block(self) -> float:  # type: ignore[override]
        """See Store.longest_block."""
        return 0.0 if self._breaker.away else self._first.longest_block

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        if not self._breaker.away:
            try:
                return self._first.acquire(key, token, ttl, limit, wait)
            except self.away as error:
                self._breaker.trip(error)
        steps = self._take(key, token, ttl, "acquire", (key, token, ttl, limit, wait))
        return cast(Grant | Conflict, ask(steps))

    async def aacquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See acquire()."""
        if not self._breaker.away:
            try:
                return await self._first.aacquire(key, token, ttl, limit, wait)
            except self.away as error:
                self._breaker.trip(error)
        steps = self._take(key, token, ttl, "acquire", (key, token, ttl, limit, wait))
        return cast(Grant | Conflict, await ask_async(steps))

    def join(self, key: str, joining: Joining) -> Joined:
        """See Store.join()."""
        if not self._breaker.away:
            try:
                return self._first.join(key, joining)
            except self.away as error:
                self._breaker.trip(error)
        steps = self._take(key, joining.token, joining.ttl, "join", (key, joining))
        return cast(Joined, ask(steps))

    async def ajoin(self, key: str, joining: Joining) -> Joined:
        """See join()."""
        if not self._breaker.away:
            try:
                return await self._first.ajoin(key, joining)
            except self.away as error:
                self._breaker.trip(error)
        steps = self._take(key, joining.token, joining.ttl, "join", (key, joining))
        return cast(Joined, await ask_async(steps))

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        return cast(list[bool], ask(self._renewal(claims)))

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        return cast(list[bool], await ask_async(self._renewal(claims)))

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        if not self._moved.has(key, token):
            return self._first.release(key, token)
        return cast(bool, ask(self._release(key, token)))

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        if not self._moved.has(key, token):
            return await self._first.arelease(key, token)
        return cast(bool, await ask_async(self._release(key, token)))

    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """See Store.publish()."""
        if not self._moved.has(key, publishing.token):
            return self._first.publish(key, publishing)
        return cast(Status | None, ask(self._publish(key, publishing)))

    async def apublish(self, key: str, publishing: Publishing) -> Status | None:
        """See publish()."""
        if not self._moved.has(key, publishing.token):
            return await self._first.apublish(key, publishing)
        return cast(Status | None, await ask_async(self._publish(key, publishing)))

    def wait_free(self, key: str, seconds: float) -> bool:
        """See Store.wait_free()."""
        return cast(bool, ask(self._wait("wait_free", True, (key, seconds))))

    async def await_free(self, key: str, seconds: float) -> bool:
        """See wait_free()."""
        return cast(bool, await ask_async(self._wait("wait_free", True, (key, seconds))))

    def wait_landing(self, key: str, flight: int, seen: str, seconds: float) -> Landing | None:
        """See Store.wait_landing()."""
        steps = self._wait("wait_landing", None, (key, flight, seen, seconds))
        return cast(Landing | None, ask(steps))

    async def await_landing(
        self, key: str, flight: int, seen: str, seconds: float
    ) -> Landing | None:
        """See wait_landing()."""
        steps = self._wait("wait_landing", None, (key, flight, seen, seconds))
        return cast(Landing | None, await ask_async(steps))

    def followed(self, key: str) -> bool:
        """See Store.followed()."""
        return self._store_of(key).followed(key)

    async def afollowed(self, key: str) -> bool:
        """See followed()."""
        return await self._store_of(key).afollowed(key)

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        self._second.forget(key)
        self._first.forget(key)

    async def aforget(self, key: str) -> None:
        """See forget()."""
        await self._second.aforget(key)
        await self._first.aforget(key)

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        """See Store.holdings(). Of both: other processes may reach the one that is away for us."""
        yield from self._second.holdings(contains)
        yield from self._first.holdings(contains)

    def evict(self, holding: Holding) -> bool:
        """See Store.evict()."""
        return self._second.evict(holding) or self._first.evict(holding)

    def examine(self, ttl: float) -> Iterator[Finding]:
        """See Store.examine()."""
        yield from self._first.examine(ttl)
        yield from self._second.examine(ttl)

    def now(self, key: str) -> float | None:
        """See Store.now()."""
        return self._timekeeper(key).now(key)

    async def anow(self, key: str) -> float | None:
        """See now()."""
        return await self._timekeeper(key).anow(key)

    def _store_of(self, key: str) -> Store:
        return self._second if self._moved.has_key(key) else self._first

    def _timekeeper(self, key: str) -> Store:
        return self._second if self._breaker.away else self._store_of(key)

    def _take(self, key: str, token: str, ttl: float, verb: str, args: tuple[Any, ...]) -> Steps:
        if self._breaker.lets_through():
            try:
                answer = yield self._first, verb, args
            except self.away as error:
                self._breaker.trip(error)
            else:
                self._breaker.mend()
                return answer
        # Before it is asked: its reply may be lost, and then it is to be told that we left.
        self._moved.add(key, token, ttl)
        answer = yield self._second, verb, args
        if not isinstance(answer, Grant | Led):
            self._moved.remove(key, token)
        return answer

    def _wait(self, verb: str, at_once: object, args: tuple[Any, ...]) -> Steps:
        if self._breaker.away:
            return (yield self._second, verb, args)
        try:
            return (yield self._first, verb, args)
        except self.away as error:
            self._breaker.trip(error)
            return at_once

    def _renewal(self, claims: Sequence[Claim]) -> Steps:
        return renewal(self._first, self._second, self._moved, claims)

    def _release(self, key: str, token: str) -> Steps:
        released = yield self._second, "release", (key, token)
        self._moved.remove(key, token)
        if not self._breaker.away:
            # It may have carried out what it did not answer.
            try:
                yield self._first, "release", (key, token)
            except self.away as error:
                self._breaker.trip(error)
        return released

    def _publish(self, key: str, publishing: Publishing) -> Steps:
        status = yield self._second, "publish", (key, publishing)
        self._moved.remove(key, publishing.token)
        return status
