"""Seats: how many callers may wait in this process, so that waiting can't occupy every worker."""

from __future__ import annotations

import os
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from singleflight_django.exceptions import TooManyFollowersError

# Reentrant: the garbage collector may close a caller's steps while this very thread holds it.
_mutex = RLock()
_taken = {True: 0, False: 0}

# Called, without arguments, after the number of those who wait has changed.
watchers: list[Callable[[], None]] = []


def waiting() -> int:
    """Return how many callers, threads and tasks, wait in this process for somebody's flight."""
    return sum(_taken.values())


class Seat:
    """A place among the threads (``blocking``), or tasks, that wait in this process.

    ``most``: how many there are; None: any number. Whoever has one keeps it until the ``with``
    ends, whatever it waits for meanwhile.
    """

    def __init__(self, blocking: bool, most: int | None, key: str) -> None:
        self._blocking, self._most, self._key = blocking, most, key
        self._mine = False
        # Whether the caller has waited at all.
        self.taken = False

    def take(self) -> None:
        """Raise TooManyFollowersError if all are taken: the last workers are for other requests."""
        with _mutex:
            if self._mine:
                return
            if self._most is not None and _taken[self._blocking] >= self._most:
                raise TooManyFollowersError(
                    f"{self._most} callers wait in this process already.", key=self._key
                )
            _taken[self._blocking] += 1
            self._mine = self.taken = True
        _tell_watchers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc_info: object) -> None:
        with _mutex:
            changes = self._mine
            _taken[self._blocking] -= changes
            self._mine = False
        # The garbage collector may be closing the steps, at any point of any code, a watcher's own
        # included: the next change tells of this one, too.
        if changes and kind is not GeneratorExit:
            _tell_watchers()


def _tell_watchers() -> None:
    for watcher in watchers:
        with suppress(Exception):
            watcher()


def _forget() -> None:
    global _mutex
    _mutex = RLock()
    _taken.update({True: 0, False: 0})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
