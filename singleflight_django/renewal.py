"""The keeper: one daemon thread per process that renews leases, and gives back what could not be.

It starts with the first lease that is watched, sleeps until one of them has lived a third of its
ttl, and renews all that are due in one go. A forked child starts without leases and without thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.lease import Lease
from singleflight_django.waiting import clock

logger = logging.getLogger("singleflight_django")

NEVER = float("inf")
# How long the thread rests after the store did not answer, in seconds.
REST = 0.5


class Keeper:
    """What is watched, and the thread that does it. ``_changed`` protects ``_wakes_at`` only:
    adding to and removing from a dict are atomic."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, the thread included: the leases of a forked child are its parent's."""
        self._watched: dict[Lease, float] = {}
        self._owed: dict[Lease, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = NEVER

    def watch(self, lease: Lease) -> None:
        """Renew ``lease`` whenever a third of its ttl has passed, for up to its ``max_hold``."""
        if lease.max_hold <= 0:
            return
        due = lease.since + lease.ttl / 3
        self._watched[lease] = due
        self._wake_by(due)

    def forget(self, lease: Lease) -> None:
        """Renew ``lease`` no more."""
        self._watched.pop(lease, None)

    def give_back_later(self, lease: Lease) -> None:
        """Release what ``lease`` may hold as soon as the store answers, until it has lapsed anyway."""
        self._owed[lease] = None
        self._wake_by(clock())

    def _wake_by(self, due: float) -> None:
        if self._thread is not None and due >= self._wakes_at:
            return
        with self._changed:
            self._wakes_at = min(self._wakes_at, due)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="singleflight-keeper", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                pause = self._wakes_at - clock()
                if pause > 0:
                    self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                    continue
                self._wakes_at = NEVER
            try:
                self.work()
            except Exception:
                logger.exception("The keeper failed; it goes on with the next lease.")
            self._wake_by(self._next())

    def _next(self) -> float:
        owed = clock() + REST if self._owed else NEVER
        return min([owed, *list(self._watched.values())])

    def work(self) -> None:
        """Do what is due now: renew, and give back."""
        now = clock()
        due = [lease for lease, when in list(self._watched.items()) if when <= now]
        for lease in [lease for lease in due if now - lease.since >= lease.max_hold]:
            due.remove(lease)
            self.forget(lease)
        for store, leases in _by_store(due):
            self._renew(store, leases, now)
        for lease in list(self._owed):
            self._give_back(lease, now)

    def _renew(self, store: Any, leases: Sequence[Lease], now: float) -> None:
        claims = [lease.claims() for lease in leases]
        try:
            answers = iter(store.renew([claim for some in claims for claim in some]))
        except StoreUnavailableError:
            self._try_again(leases)
            return
        for lease, some in zip(leases, claims, strict=True):
            if all([next(answers) for _ in some]):
                lease.renewed(now)
                self._reschedule(lease, now + lease.ttl / 3)
            else:
                self._lose(lease, "it was not ours any more when renewed")

    def _try_again(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            if lease.lost:
                self._lose(lease, "the store was away for longer than its ttl")
            else:
                self._reschedule(lease, clock() + min(REST, lease.ttl / 6))

    def _reschedule(self, lease: Lease, due: float) -> None:
        if lease in self._watched:
            self._watched[lease] = due

    def _lose(self, lease: Lease, reason: str) -> None:
        self.forget(lease)
        # A renewal that crossed the release on its way tells nothing.
        if lease.held:
            lease.lose(reason)

    def _give_back(self, lease: Lease, now: float) -> None:
        try:
            for key in lease.fences:
                lease.store.release(key, lease.token)
        except StoreUnavailableError:
            if now < lease.since + lease.ttl + max(lease.ttl, REST):
                return
        self._owed.pop(lease, None)


def _by_store(leases: Iterable[Lease]) -> Iterable[tuple[Any, list[Lease]]]:
    groups: dict[int, list[Lease]] = defaultdict(list)
    for lease in leases:
        groups[id(lease.store)].append(lease)
    return [(group[0].store, group) for group in groups.values()]


keeper = Keeper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keeper.reset)
