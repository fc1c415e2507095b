"""Leases on Redis or Valkey: each step is one script, each script one round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import (
    Claim,
    Conflict,
    Grant,
    Joined,
    Joining,
    Landing,
    Publishing,
    RenewalInDoubtError,
    Status,
    Store,
)
from singleflight_django.stores.findings import Finding
from singleflight_django.stores.listing import Holding
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import Call, Watching
from singleflight_django.stores.redis.examining import examine
from singleflight_django.stores.redis.flights import (
    first_landing,
    followed_call,
    forget_call,
    join_call,
    joined,
    ms,
    now_call,
    publish_call,
    published,
)
from singleflight_django.stores.redis.links import Link
from singleflight_django.stores.redis.listing import holdings
from singleflight_django.stores.redis.scripts import ACQUIRE, RELEASE, RENEW

# Where the access rules forbid BLPOP, waiters look again after this many seconds.
UNWAKEABLE_PAUSE = 0.1


class ScriptsForbiddenError(StoreUnavailableError):
    """The server, or its access rules, don't let us run scripts."""


class RedisStore(Store):
    """Leases of one prefix on the server behind ``link``. Where leases are kept: see ``scripts``."""

    compares_and_sets = True
    fences = True
    can_list = True
    steady = True

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        # A client's own timeout must not be taken for the server's, which comes up to 0.1 s late.
        clients = max(0.05, link.server.timeout / 2 - 0.1)
        self.longest_block = 1.0 if link.server.connects else min(1.0, clients)

    def acquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See Store.acquire()."""
        return _answer(self._run(key, self._acquire(key, token, ttl, limit, wait))[0])

    async def aacquire(
        self, key: str, token: str, ttl: float, limit: int, wait: float
    ) -> Grant | Conflict:
        """See acquire()."""
        return _answer((await self._arun(key, self._acquire(key, token, ttl, limit, wait)))[0])

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        with self._translated():
            return _told(self._link.transport.run_all([self._renew(c) for c in claims]))

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        with self._translated():
            calls = [self._renew(claim) for claim in claims]
            return _told(await self._link.loops.current().run_all(calls))

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        reply, resent = self._run(key, self._release(key, token))
        # Sent twice, it may have been the first that gave the lease back.
        return bool(reply) or resent

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        reply, resent = await self._arun(key, self._release(key, token))
        return bool(reply) or resent

    def wait_free(self, key: str, seconds: float) -> bool:
        """See Store.wait_free()."""
        with self._translated(key):
            try:
                return self._link.transport.watch(self._free(key, seconds), seconds) is not None
            except self._link.server.errors.NoPermissionError:
                time.sleep(min(seconds, UNWAKEABLE_PAUSE))
                return True

    async def await_free(self, key: str, seconds: float) -> bool:
        """See wait_free()."""
        with self._translated(key):
            try:
                watching = self._free(key, seconds)
                return await self._link.loops.current().watch(watching, seconds) is not None
            except self._link.server.errors.NoPermissionError:
                await asyncio.sleep(min(seconds, UNWAKEABLE_PAUSE))
                return True

    def join(self, key: str, joining: Joining) -> Joined:
        """See Store.join()."""
        return joined(self._run(key, join_call(self._base(key), joining))[0])

    async def ajoin(self, key: str, joining: Joining) -> Joined:
        """See join()."""
        return joined((await self._arun(key, join_call(self._base(key), joining)))[0])

    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """See Store.publish()."""
        call = publish_call(self._base(key), publishing)
        return published(*self._run(key, call), publishing)

    async def apublish(self, key: str, publishing: Publishing) -> Status | None:
        """See publish()."""
        call = publish_call(self._base(key), publishing)
        return published(*(await self._arun(key, call)), publishing)

    def wait_landing(self, key: str, flight: int, seen: str, seconds: float) -> Landing | None:
        """See Store.wait_landing()."""
        with self._translated(key):
            watching = self._news(key, flight, seen, seconds)
            return first_landing(self._link.transport.watch(watching, seconds))

    async def await_landing(
        self, key: str, flight: int, seen: str, seconds: float
    ) -> Landing | None:
        """See wait_landing()."""
        with self._translated(key):
            watching = self._news(key, flight, seen, seconds)
            return first_landing(await self._link.loops.current().watch(watching, seconds))

    def followed(self, key: str) -> bool:
        """See Store.followed()."""
        return bool(self._run(key, followed_call(self._base(key)))[0])

    async def afollowed(self, key: str) -> bool:
        """See followed()."""
        return bool((await self._arun(key, followed_call(self._base(key))))[0])

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        self._run(key, forget_call(self._base(key)))

    async def aforget(self, key: str) -> None:
        """See forget()."""
        await self._arun(key, forget_call(self._base(key)))

    def now(self, key: str) -> float:
        """See Store.now()."""
        return int(self._run(key, now_call(self._base(key)))[0]) / 1e6

    async def anow(self, key: str) -> float:
        """See now()."""
        return int((await self._arun(key, now_call(self._base(key))))[0]) / 1e6

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        """See Store.holdings()."""
        with self._translated():
            yield from holdings(self._link.server, self._link.transport, self._prefix, contains)

    def examine(self, ttl: float) -> Iterator[Finding]:
        """See Store.examine()."""
        return examine(self._link.server, self._link.transport, self._prefix, ttl)

    def _free(self, key: str, seconds: float) -> Watching:
        free = self._entry(key, "free")
        return Watching(("BLPOP", free, f"{max(seconds, 0.001):.3f}"), ("LPOP", free))

    def _news(self, key: str, flight: int, seen: str, seconds: float) -> Watching:
        # A block of 0 would be for ever.
        block = max(1, ms(seconds))
        look = ("STREAMS", f"{self._base(key)}{flight}", seen)
        return Watching(("XREAD", "BLOCK", block, *look), ("XREAD", *look))

    def _base(self, key: str) -> str:
        return f"{self._prefix}:{{{key}}}:"

    def _entry(self, key: str, name: str) -> str:
        return self._base(key) + name

    def _acquire(self, key: str, token: str, ttl: float, limit: int, wait: float) -> Call:
        base = self._base(key)
        return Call(
            ACQUIRE,
            (base + "lease", base + "fence", base + "waiting"),
            (token, ms(ttl), limit, ms(wait)),
        )

    def _renew(self, claim: Claim) -> Call:
        key, token, ttl = claim
        base = self._base(key)
        return Call(RENEW, (base + "lease", base + "fence"), (token, ms(ttl)))

    def _release(self, key: str, token: str) -> Call:
        base = self._base(key)
        return Call(RELEASE, (base + "lease", base + "waiting", base + "free"), (token,))

    def _run(self, key: str, call: Call) -> tuple[Any, bool]:
        try:
            return self._link.transport.run(call)
        except self._link.server.failures as error:
            raise self._unavailable(error, key) from error

    async def _arun(self, key: str, call: Call) -> tuple[Any, bool]:
        try:
            return await self._link.loops.current().run(call)
        except self._link.server.failures as error:
            raise self._unavailable(error, key) from error

    @contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        """See _run(), which does without the cost of this."""
        try:
            yield
        except self._link.server.failures as error:
            raise self._unavailable(error, key) from error

    def _unavailable(self, error: Exception, key: str) -> StoreUnavailableError:
        """Return what any failure of the driver says: the store can't tell."""
        forbidden = _scripts_forbidden(self._link.server, error)
        kind = ScriptsForbiddenError if forbidden else StoreUnavailableError
        return kind(f"The store did not answer: {error}", key=key)


def store_on(alias: str, prefix: str) -> RedisStore:
    """Return a store of ``prefix`` on the server of the cache ``alias``."""
    return RedisStore(Link(alias), prefix)


def _answer(reply: Any) -> Grant | Conflict:
    granted, value = reply
    return Grant(value) if granted else Conflict(value / 1000)


def _told(replies: list[Any]) -> list[bool]:
    failures = [reply for reply in replies if isinstance(reply, Exception)]
    if failures:
        answers = [None if isinstance(reply, Exception) else bool(reply) for reply in replies]
        raise RenewalInDoubtError(
            f"The store did not renew all leases: {failures[0]}", answers
        ) from failures[0]
    return [bool(reply) for reply in replies]


def _scripts_forbidden(server: Server, error: Exception) -> bool:
    if isinstance(error, server.errors.NoPermissionError):
        return "eval" in str(error).lower()
    return "unknown command" in str(error).lower() and "EVAL" in str(error).upper()
