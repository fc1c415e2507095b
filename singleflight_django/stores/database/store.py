"""A database table as a store: for sites without Redis, and while Redis is away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

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
from singleflight_django.stores.database.running import Call, Runner


class DatabaseStore(Store):
    """Leases of one prefix in the table of ``models.Lease``, by the database's own clock.

    ``using``: the database's alias; None: the one that the router names for the model.
    Inside a transaction of the caller's, and for async callers, each step has a connection of its own;
    SQLite can't have a second writer, and WaitInTransactionError says so. Inside a TestCase leases are
    part of the test's transaction, and end with it.
    A release wakes nobody: waiters look again. The database's own timeouts bound how long it may take.
    """

    compares_and_sets = True
    fences = True

    def __init__(self, prefix: str, using: str | None = None) -> None:
        self._prefix = prefix
        self._runner = Runner(using)

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        return cast(
            Grant | Conflict, self._runner.run(self._acquire(key, token, ttl, limit))[0]
        )

    async def aacquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See acquire()."""
        call = self._acquire(key, token, ttl, limit)
        return cast(Grant | Conflict, (await self._runner.arun(call))[0])

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        return cast(list[bool], self._runner.run(self._renew(claims))[0])

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        return cast(list[bool], (await self._runner.arun(self._renew(claims)))[0])

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        released, resent = self._runner.run(self._release(key, token))
        # Sent twice, it may have been the first that gave the lease back.
        return released or resent

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        released, resent = await self._runner.arun(self._release(key, token))
        return released or resent

    def join(self, key: str, joining: Joining) -> Joined:
        """See Store.join()."""
        return cast(Joined, self._runner.run(self._join(key, joining))[0])

    async def ajoin(self, key: str, joining: Joining) -> Joined:
        """See join()."""
        return cast(Joined, (await self._runner.arun(self._join(key, joining)))[0])

    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """See Store.publish()."""
        return _published(*self._runner.run(self._publish(key, publishing)), publishing)

    async def apublish(self, key: str, publishing: Publishing) -> Status | None:
        """See publish()."""
        return _published(*await self._runner.arun(self._publish(key, publishing)), publishing)

    def followed(self, key: str) -> bool:
        """See Store.followed()."""
        return bool(self._runner.run(self._followed(key))[0])

    async def afollowed(self, key: str) -> bool:
        """See followed()."""
        return bool((await self._runner.arun(self._followed(key)))[0])

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        self._runner.run(self._forget(key))

    async def aforget(self, key: str) -> None:
        """See forget()."""
        await self._runner.arun(self._forget(key))

    def _acquire(self, key: str, token: str, ttl: float, limit: int) -> Call:
        values = {"key": key, "token": token, "ttl": ttl, "limit": limit}
        return Call(partial(leases.acquire, digest=self._digest(key), **values), key, opens=True)

    def _renew(self, claims: Sequence[Claim]) -> Call:
        digests = [(self._digest(claim[0]), Claim(*claim)) for claim in claims]
        return Call(partial(leases.renew, claims=digests))

    def _release(self, key: str, token: str) -> Call:
        return Call(partial(leases.release, digest=self._digest(key), token=token), key)

    def _join(self, key: str, joining: Joining) -> Call:
        step = partial(flights.join, digest=self._digest(key), key=key, joining=joining)
        return Call(step, key, opens=True)

    def _publish(self, key: str, publishing: Publishing) -> Call:
        step = partial(flights.publish, digest=self._digest(key), publishing=publishing)
        return Call(step, key)

    def _followed(self, key: str) -> Call:
        return Call(partial(flights.followed, digest=self._digest(key)), key)

    def _forget(self, key: str) -> Call:
        return Call(partial(flights.forget, digest=self._digest(key)), key)

    def _digest(self, key: str) -> str:
        return leases.digest_of(self._prefix, key)


def _published(status: Status | None, resent: bool, publishing: Publishing) -> Status | None:
    """Sent twice, it may have been the first that did it."""
    return publishing.status if status is None and resent else status
