"""A section of code under a lease: the context manager, sync and async."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any

from singleflight_django.conf import conf
from singleflight_django.context import held_here
from singleflight_django.entering import atake, take
from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.holding import leave
from singleflight_django.lease import Lease
from singleflight_django.locks import Lock
from singleflight_django.transactions import give_back


class Section:
    """``with`` and ``async with`` of a lock. One object is safe in threads and tasks."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        # A `with` is known by its frame, which is the same at its end even where another task
        # closes the generator that it stands in.
        self._entered: list[tuple[FrameType, Lease]] = []

    def __enter__(self) -> Lease:
        keys = self._keys()
        if conf.SINGLEFLIGHT_ENABLED is False:
            return self._enter(self._lock.unprotected(keys), sys._getframe(1))
        lease: Lease | None = None
        try:
            lease = self._lock.lease(keys)
            take(lease, self._lock)
        except Exception as error:
            lease = self._excused(error, lease, keys)
        return self._enter(lease, sys._getframe(1))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        give_back(self._left(sys._getframe(1)))

    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        return self._aenter(self._keys(), sys._getframe(1))

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[Any, Any, None]:
        return leave(self._left(sys._getframe(1)), error)

    async def _aenter(self, keys: tuple[str, ...], frame: FrameType) -> Lease:
        """See __enter__()."""
        if conf.SINGLEFLIGHT_ENABLED is False:
            return self._enter(self._lock.unprotected(keys), frame)
        lease: Lease | None = None
        try:
            lease = self._lock.lease(keys)
            await atake(lease, self._lock)
        except Exception as error:
            lease = self._excused(error, lease, keys)
        return self._enter(lease, frame)

    def _keys(self) -> tuple[str, ...]:
        if self._lock.options.on_conflict not in ("reject", "yield"):
            raise ValueError(
                'In a `with` on_conflict is "reject" (LeaseConflictError) or "yield" (look at '
                "lease.acquired): there is no response to answer with."
            )
        if self._lock.options.unique is not None:
            raise ValueError("unique= is for views: in a `with` use create_or_existing().")
        return self._lock.spec.static_keys()

    def _excused(self, error: Exception, lease: Lease | None, keys: tuple[str, ...]) -> Lease:
        """Return the lease to enter with in spite of ``error``, or raise it."""
        if self._lock.goes_on_without(error):
            return self._lock.unprotected(keys)
        yields = self._lock.options.on_conflict == "yield"
        if lease is not None and yields and isinstance(error, LeaseConflictError):
            return lease
        raise error

    def _enter(self, lease: Lease, frame: FrameType) -> Lease:
        self._entered.append((frame, lease))
        return lease

    def _left(self, frame: FrameType) -> Lease:
        entered = [entry for entry in self._entered if entry[0] is frame]
        if not entered:
            # An ExitStack, which enters in one frame and leaves in another.
            here = held_here()
            entered = [entry for entry in self._entered if entry[1] in here] or self._entered
        found = entered[0] if len(entered) == 1 else min(entered, key=lambda entry: entry[1].held)
        self._entered.remove(found)
        return found[1]
