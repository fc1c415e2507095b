"""The lease: the time-bounded right to run for a key."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from singleflight_django.exceptions import LeaseConflictError, LeaseLostError
from singleflight_django.owners import new_token
from singleflight_django.waiting import clock

Emit = Callable[..., None]


class Claim(NamedTuple):
    """One key of one acquisition: what it takes to renew it or to give it back."""

    key: str
    token: str
    ttl: float


class LeaseStore(Protocol):
    """What a lease asks of the store that it lives in; ``stores.base.Store`` has it all."""

    longest_block: float

    def renew(self, claims: Any) -> list[bool]: ...

    def release(self, key: str, token: str) -> bool: ...

    async def arenew(self, claims: Any) -> list[bool]: ...

    async def afollowed(self, key: str) -> bool: ...


class Watcher(Protocol):
    """Whoever renews a lease, and has to hear of a new ttl."""

    def watch(self, lease: Lease) -> None: ...


class Lease:
    """The right to run for one or several keys, for ``ttl`` seconds unless renewed.

    ``acquired`` tells whether this caller got it (in the status form it may not have);
    ``fences`` has the fencing token of each key.
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "_lost",
        "_process",
        "emit",
        "expires",
        "fences",
        "keys",
        "max_hold",
        "since",
        "store",
        "token",
        "ttl",
        "watcher",
    )

    def __init__(
        self,
        store: LeaseStore,
        keys: tuple[str, ...],
        ttl: float,
        *,
        max_hold: float = 0.0,
        emit: Emit,
    ) -> None:
        self.store = store
        self.keys = keys
        self.ttl = ttl
        # Longest time in seconds that the lease is renewed for; 0: it is not renewed.
        self.max_hold = max_hold
        self.emit = emit
        # The owner token: a secret that never leaves the process, save to the store.
        self.token = new_token()
        self.fences: dict[str, int | None] = {}
        # By our own clock and always too early: counted from before the store was asked.
        self.since = self.expires = 0.0
        self._done = False
        self._lost = ""
        self._process = _process
        self.watcher: Watcher | None = None

    @classmethod
    def unprotected(cls, keys: tuple[str, ...], emit: Emit) -> Lease:
        """A lease that no store knows of, for code that runs without one: it is never lost."""
        lease = cls(_Nowhere(), keys, float("inf"), emit=emit)
        for key in keys:
            lease.grant(key, None, 0.0)
        return lease

    @property
    def is_protected(self) -> bool:
        """Whether there is a store that may know of it; see unprotected()."""
        return not isinstance(self.store, _Nowhere)

    @property
    def key(self) -> str:
        """The key, namespace included; several keys are joined by a comma."""
        return ",".join(self.keys)

    @property
    def acquired(self) -> bool:
        """Whether the caller got the lease at all; it may have ended since."""
        return len(self.fences) == len(self.keys)

    @property
    def held(self) -> bool:
        """Whether the lease was got and not yet given back, lost or not."""
        return bool(self.fences) and not self._done and self.is_ours

    @property
    def is_ours(self) -> bool:
        """Whether this process took it: a forked child leaves it to its parent."""
        return self._process is _process

    @property
    def status(self) -> Literal["locked", "skipped"]:
        """``"locked"``: you hold it. ``"skipped"``: someone else did."""
        return "locked" if self.acquired else "skipped"

    @property
    def lost(self) -> bool:
        """Whether the lease ended while its holder was still at work."""
        return bool(self._lost) or (self.held and clock() >= self.expires)

    @property
    def fence(self) -> int | None:
        """The fencing token. Several keys have one each: see ``fences``."""
        self._require()
        if len(self.keys) > 1:
            raise ValueError("This lease is for several keys: read lease.fences[key] instead.")
        return self.fences[self.keys[0]]

    def __bool__(self) -> bool:
        return self.acquired

    def __repr__(self) -> str:
        return f"<Lease {self.key} {self.status}{' lost' if self.lost else ''}>"

    def check(self) -> None:
        """Raise LeaseLostError if the lease is known to have ended. Asks nobody: it costs nothing."""
        self._require()
        if self.lost or self._done:
            raise LeaseLostError(
                f"The lease of {self.key!r} ended while its holder was at work: stop before the next "
                "effect.",
                key=self.key,
            )

    def extend(self, seconds: float) -> None:
        """Let the lease live for ``seconds`` from now, and as long at each renewal from here on.

        Raises LeaseLostError if it has ended, StoreUnavailableError if the store doesn't answer.
        """
        asked = self._extension(seconds)
        self._renewed(self.store.renew(self.claims()), asked)

    async def aextend(self, seconds: float) -> None:
        """See extend()."""
        asked = self._extension(seconds)
        self._renewed(await self.store.arenew(self.claims()), asked)

    def claims(self) -> list[Claim]:
        """What the store needs to renew each key."""
        # Another thread may be adding keys, or extend: copy in one step, and read the ttl once.
        ttl = self.ttl
        return [Claim(key, self.token, ttl) for key in tuple(self.fences)]

    def grant(self, key: str, fence: int | None, asked: float) -> None:
        """Note that the store gave us ``key`` when it was asked at ``asked``."""
        if not self.fences:
            self.since = asked
            self.expires = asked + self.ttl
        self.fences[key] = fence

    def renewed(self, asked: float, ttl: float) -> None:
        """Note that the store renewed all keys for ``ttl`` when it was asked at ``asked``."""
        self.expires = asked + ttl

    def lose(self, reason: str) -> None:
        """Note, and tell once, that the lease ended before its holder did."""
        if self._lost:
            return
        self._lost = reason
        self.emit("lease_lost", self, reason=reason, duration=clock() - self.since)

    def end(self) -> bool:
        """Note that the holder is done. True the first time only: whoever gets it gives the keys back.

        Never true in a forked child: the lease is its parent's.
        """
        first, self._done = not self._done, True
        return first and self.is_ours

    def _require(self) -> None:
        if not self.acquired:
            raise LeaseConflictError(
                f"{self.key!r} is held by someone else: look at lease.acquired before you use the "
                "lease.",
                key=self.key,
            )

    def _extension(self, seconds: float) -> float:
        self.check()
        if not 0 < seconds < float("inf"):
            raise ValueError(f"extend() takes a positive number of seconds, not {seconds!r}.")
        self.ttl = float(seconds)
        return clock()

    def _renewed(self, answers: list[bool], asked: float) -> None:
        if not all(answers):
            self.lose("not ours any more when extended")
        self.check()
        self.renewed(asked, self.ttl)
        if self.watcher is not None:
            self.watcher.watch(self)


class _Nowhere:
    longest_block = 0.0

    def renew(self, claims: Sequence[Any]) -> list[bool]:
        return [True] * len(claims)

    def release(self, key: str, token: str) -> bool:
        return True

    async def arenew(self, claims: Sequence[Any]) -> list[bool]:
        return self.renew(claims)

    async def afollowed(self, key: str) -> bool:
        return False

    async def arelease(self, key: str, token: str) -> bool:
        return self.release(key, token)


# Stands for this process: a forked child gets another.
_process = object()


def _after_fork() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
