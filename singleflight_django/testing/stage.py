"""Bring callers together at the real store, and keep who gets in there until all are answered.

A stage knows a caller by the owner token of its acquisition, so it sees those that a live server's
threads make as well. Nothing is left to chance but the store itself::

    A  asks ─┐            granted   waits ──────────┐ works, releases
             ├ together ─>                          │
    B  asks ─┘            held by A ────────────────┘ is refused, or waits for its turn
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest import mock

from asgiref.sync import iscoroutinefunction

from singleflight_django import guards, signals
from singleflight_django.stores.base import Grant, Led, Mismatch
from singleflight_django.stores.registry import get_store
from singleflight_django.testing.watching import WatchedStore, replaced

_PARKING = ("lease_acquired", "flight_led", "flight_taken_over")
_TELLING = ("lease_rejected", "share_refused", "unprotected_run", "flight_failed")


@dataclass
class Caller:
    """One acquisition. ``flies``: it joins a flight. ``answers``: what the store said, in order."""

    store: Any
    key: str
    limit: int = 1
    flies: bool = False
    answers: list[Any] = field(default_factory=list)
    inside: bool = False

    @property
    def got(self) -> bool:
        """Whether it was let in."""
        return any(isinstance(answer, Grant | Led) for answer in self.answers)

    @property
    def refused(self) -> bool:
        """Whether it was told at least once that somebody else is in."""
        return any(not isinstance(answer, Grant | Led) for answer in self.answers)

    @property
    def mismatched(self) -> bool:
        """Whether it met a flight of another fingerprint."""
        return any(isinstance(answer, Mismatch) for answer in self.answers)


class Stage:
    """For ``n`` callers, each of them waiting for the others for at most ``timeout`` seconds."""

    def __init__(self, n: int, timeout: float) -> None:
        self._n, self._timeout = n, timeout
        self._changed = threading.Condition()
        self._ended = self._parked = 0
        self.callers: dict[str, Caller] = {}
        # What the guards told of, by the event's name.
        self.told: dict[str, list[signals.Facts]] = {name: [] for name in _TELLING}
        # Whether somebody was neither answered by the store nor done in time.
        self.stuck = False
        # The most that were in at once, and their keys.
        self.together: list[str] = []
        self.working = self.runs = self.most_working = 0
        # Whether the work went on while nobody had a lease.
        self.bare = False

    @contextmanager
    def set(self, work: str | None = None) -> Iterator[None]:
        """Watch the guards, and what is done under them: ``work``, a dotted path."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(guards, "get_store", self._watched))
            if work:
                stack.enter_context(replaced(work, self._under_watch))
            for name in _PARKING:
                stack.callback(getattr(signals, name).disconnect, self._park)
                getattr(signals, name).connect(self._park)
            for name in _TELLING:
                told = self.told[name]

                def note(facts: signals.Facts, told: list[Any] = told, **_: Any) -> None:
                    told.append(facts)

                stack.callback(getattr(signals, name).disconnect, note)
                getattr(signals, name).connect(note)
            yield

    def end(self) -> None:
        """Note that one of the callers is done."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def emptied(self) -> bool:
        """Whether everybody has left, or does so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside(), self._timeout)

    def meet(self, token: str, *caller: Any) -> None:
        """Wait, before ``token`` first asks the store, until the others are there, too."""
        with self._changed:
            if token in self.callers:
                return
            self.callers[token] = Caller(*caller)
            self._changed.notify_all()
            self._wait(lambda: len(self.callers) + self._ended >= self._n)

    def note(self, token: str, answer: Any) -> Any:
        """Note what the store said to ``token``, and return it."""
        with self._changed:
            caller = self.callers[token]
            caller.answers.append(answer)
            caller.inside = isinstance(answer, Grant | Led)
            inside = [other.key for other in self._inside()]
            if len(inside) > len(self.together):
                self.together = inside
            self._changed.notify_all()
        return answer

    def leave(self, token: str) -> None:
        """Note that ``token`` gives its lease back."""
        with self._changed:
            self.callers[token].inside = False
            self._changed.notify_all()

    def _park(self, **_: Any) -> None:
        with self._changed:
            self._parked += 1
            self._changed.notify_all()
            self._wait(self._all_answered)

    def _all_answered(self) -> bool:
        refused = sum(caller.refused for caller in self.callers.values())
        return self._parked + max(refused, self._ended) >= self._n

    def _wait(self, until: Callable[[], bool]) -> None:
        if not self._changed.wait_for(until, self._timeout):
            self.stuck = True

    def _inside(self) -> list[Caller]:
        return [caller for caller in self.callers.values() if caller.inside]

    def _watched(self, alias: str | None = None) -> Any:
        # A new one each time: no two callers meet in this process's own tier, all go to the store.
        return WatchedStore(get_store(alias), self)

    def _under_watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self._at_work():
                return function(*args, **kwargs)

        @wraps(function)
        async def ainner(*args: Any, **kwargs: Any) -> Any:
            with self._at_work():
                return await function(*args, **kwargs)

        return ainner if iscoroutinefunction(function) else inner

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self.bare = self.bare or not self._inside()
            self.working += change
            self.runs += change > 0
            self.most_working = max(self.most_working, self.working)
