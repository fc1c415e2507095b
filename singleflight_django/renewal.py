"""The keeper: one daemon thread per process that renews leases, and gives back what could not be.

It starts with the first lease that is watched, sleeps until one of them has lived a third of its
ttl, and renews all that are due in one go. A forked child starts without leases and without thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.lease import Claim, Lease
from singleflight_django.stores.base import RenewalInDoubtError
from singleflight_django.waiting import clock

logger = logging.getLogger("singleflight_django")

NEVER = float("inf")
# How long the thread rests after the store did not answer, in seconds.
REST = 0.5


class Keeper:
    """What is watched, and the thread that does it. ``_changed`` protects ``_wakes_at`` and the
    thread's start only: adding to and removing from a dict are atomic."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, the thread included: the leases of a forked child are its parent's."""
        self._watched: dict[Lease, float] = {}
        self._owed: dict[Lease, None] = {}
        self._errands: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = NEVER
        # When to bother a store again that did not take something back.
        self._rests_until = 0.0

    def watch(self, lease: Lease) -> None:
        """Renew ``lease`` whenever a third of its ttl has passed, for up to its ``max_hold``."""
        if lease.max_hold <= 0:
            return
        lease.watcher = self
        due = lease.expires - lease.ttl * 2 / 3
        self._watched[lease] = due
        # As _wake_by() does, for the many that come after the first.
        if self._thread is None or due < self._wakes_at:
            self._wake_by(due)

    def forget(self, lease: Lease) -> None:
        """Renew ``lease`` no more."""
        self._watched.pop(lease, None)

    def give_back_later(self, lease: Lease) -> None:
        """Release what ``lease`` may hold as soon as the store answers, until it has lapsed anyway."""
        self._owed[lease] = None
        self._wake_by(max(clock(), self._rests_until))

    def later(self, errand: Callable[[], object]) -> None:
        """Let the thread do ``errand``, for a caller that is in no place to do it itself."""
        self._errands.append(errand)
        self._wake_by(clock())

    def _wake_by(self, due: float) -> None:
        with self._changed:
            self._wakes_at = min(self._wakes_at, due)
            if self._thread is None:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="singleflight-keeper", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The interpreter is about to end, or the system has no thread left.
            logger.warning("No thread to renew leases: they live for their ttl. %s", error)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                pause = self._wakes_at - clock()
                if pause > 0:
                    self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                    continue
                self._wakes_at = NEVER
            self.work()
            self._wake_by(self._next())

    def _next(self) -> float:
        owed = max(clock(), self._rests_until) if self._owed else NEVER
        return min([owed, *list(self._watched.values())])

    def work(self) -> None:
        """Do what is due now: renew, give back, and run errands."""
        now = clock()
        # What is almost due comes along: leases of one ttl soon are renewed together.
        due = [lease for lease, when in list(self._watched.items()) if when <= now + lease.ttl / 30]
        for store, leases in _by_store([lease for lease in due if self._renewable(lease, now)]):
            self._renew(store, leases, now)
        if now >= self._rests_until:
            for store, leases in _by_store(list(self._owed)):
                self._give_back(store, leases)
        while self._errands:
            with suppress(Exception):
                self._errands.popleft()()

    def _renewable(self, lease: Lease, now: float) -> bool:
        if not lease.held:
            # Forgotten while a renewal was on its way.
            self.forget(lease)
        elif now - lease.since < lease.max_hold:
            return True
        elif lease.lost:
            self._lose(lease, "it was held for longer than max_hold")
        else:
            self._reschedule(lease, lease.expires)
        return False

    def _renew(self, store: Any, leases: Sequence[Lease], now: float) -> None:
        claims = [lease.claims() for lease in leases]
        answers = iter(_answers(store, [claim for some in claims for claim in some]))
        for lease, some in zip(leases, claims, strict=True):
            told = [next(answers) for _ in some]
            if False in told:
                self._lose(lease, "it was not ours any more when renewed")
            elif None in told:
                self._try_again(lease)
            else:
                ttl = some[0].ttl
                lease.renewed(now, ttl)
                # Extended meanwhile: nobody knows which of the two the store heard last.
                self._reschedule(lease, now + ttl / 3 if ttl == lease.ttl else now)

    def _try_again(self, lease: Lease) -> None:
        if lease.lost:
            self._lose(lease, "the store did not renew it within its ttl")
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

    def _give_back(self, store: Any, leases: Sequence[Lease]) -> None:
        for lease in leases:
            # Taken out first, and put back last: the next round begins with another.
            self._owed.pop(lease, None)
            try:
                for key in lease.fences:
                    store.release(key, lease.token)
            except Exception as error:
                _report(error)
                self._rests_until = clock() + REST
                if clock() < lease.expires + max(lease.ttl, REST):
                    self._owed[lease] = None
                # One budget for a store that is away, however much it is owed.
                return


def _answers(store: Any, claims: list[Claim]) -> Sequence[bool | None]:
    """Renew; None for each claim that the store says nothing about."""
    try:
        answers: Sequence[bool | None] = store.renew(claims)
    except RenewalInDoubtError as error:
        answers = error.answers
    except Exception as error:
        _report(error)
        answers = [None] * len(claims)
    return answers


def _report(error: Exception) -> None:
    if not isinstance(error, StoreUnavailableError):
        logger.error("A store failed in an unforeseen way; it is asked again.", exc_info=error)


def _by_store(leases: Iterable[Lease]) -> Iterable[tuple[Any, list[Lease]]]:
    groups: dict[int, list[Lease]] = defaultdict(list)
    for lease in leases:
        groups[id(lease.store)].append(lease)
    return [(group[0].store, group) for group in groups.values()]


keeper = Keeper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keeper.reset)
