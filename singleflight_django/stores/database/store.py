"""A database table as a store: for sites without Redis, and while Redis is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from singleflight_django.stores.base import (
    Claim,
    Conflict,
    Grant,
    Joined,
    Joining,
    Publishing,
    Status,
    Store,
)
from singleflight_django.stores.database import flights, leases
from singleflight_django.stores.database.examining import examine
from singleflight_django.stores.database.listing import some_holdings
from singleflight_django.stores.database.running import Runner
from singleflight_django.stores.findings import Finding
from singleflight_django.stores.listing import Holding

_T = TypeVar("_T")


class DatabaseStore(Store):
    """Leases of one prefix in the table of ``models.Lease``, by the database's own clock.

    ``using``: the database's alias; None: the one that the router names for the model.
    Inside a transaction of the caller's, and for async callers, each step has a connection of its
    own; SQLite can't have a second writer, and WaitInTransactionError says so. Inside a TestCase
    leases are part of the test's transaction, and end with it. The thread that renews sees nothing
    of that: what is held there for a third of its ttl or longer counts as lost. A release wakes
    nobody: waiters look again. How long a step may take at most is for the database's own timeouts
    to say.
    """

    compares_and_sets = True
    fences = True
    can_list = True

    def __init__(self, prefix: str, using: str | None = None) -> None:
        self._prefix = prefix
        self._runner = Runner(using)

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        step = partial(leases.acquire, key=key, token=token, ttl=ttl, limit=limit)
        return self._run(step, key, opens=True)[0]

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        digests = [(self._digest(claim[0]), Claim(*claim)) for claim in claims]
        return self._runner.run(partial(leases.renew, claims=digests))[0] if digests else []

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        released, resent = self._run(partial(leases.release, token=token), key)
        # Sent twice, it may have been the first that gave the lease back.
        return released or resent

    def join(self, key: str, joining: Joining) -> Joined:
        """See Store.join()."""
        return self._run(partial(flights.join, key=key, joining=joining), key, opens=True)[0]

    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """See Store.publish()."""
        status, resent = self._run(partial(flights.publish, publishing=publishing), key)
        return publishing.status if status is None and resent else status

    def followed(self, key: str) -> bool:
        """See Store.followed()."""
        return self._run(flights.followed, key)[0]

    async def afollowed(self, key: str) -> bool:
        """See followed()."""
        return await self.in_thread(self.followed, key)

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        self._run(flights.forget, key)

    def now(self, key: str) -> float:
        """See Store.now()."""
        return self._runner.run(flights.now, key)[0]

    async def anow(self, key: str) -> float:
        """See now()."""
        return await self.in_thread(self.now, key)

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        """See Store.holdings()."""
        after = -1
        while after:
            step = partial(some_holdings, after=after, prefix=self._prefix, contains=contains)
            (found, after), _ = self._runner.run(step)
            yield from found

    def examine(self, ttl: float) -> Iterator[Finding]:
        """See Store.examine()."""
        return examine(self._runner, self._runner.alias, ttl)

    async def in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        """See Store.in_thread()."""
        return await self._runner.in_thread(call, *args)

    def _run(self, step: Callable[..., _T], key: str, *, opens: bool = False) -> tuple[_T, bool]:
        return self._runner.run(partial(step, digest=self._digest(key)), key, opens=opens)

    def _digest(self, key: str) -> str:
        return leases.digest_of(self._prefix, key)
