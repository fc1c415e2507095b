"""Connections of our own that nobody uses just now: to open one costs as much as thirty steps.

Any thread may take one. They are few, and are closed when nobody has come for them for a while.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from threading import Lock, Timer
from typing import Any, NamedTuple

from django.core import mail
from django.db import Error, connections

from singleflight_django.waiting import clock

MOST = 4
# For how many seconds nobody may come for one.
IDLE = 5.0


class _Spare(NamedTuple):
    connection: Any
    since: float


class Spares:
    """The spare connections of this process, the one that was used last first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, without a word to the server: in a forked child they are its parent's."""
        self._inherited = getattr(self, "_spares", [])
        self._lock = Lock()
        self._spares: list[_Spare] = []
        self._reaper: Timer | None = None

    def take(self, alias: str) -> Any:
        """Return a connection to the database that ``alias`` means now, or None."""
        wanted = connections[alias].settings_dict["NAME"]
        with self._lock:
            for spare in reversed(self._spares):
                connection = spare.connection
                if connection.alias == alias and connection.settings_dict["NAME"] == wanted:
                    self._spares.remove(spare)
                    return connection
        return None

    def put(self, connection: Any) -> None:
        """Keep ``connection``, or close it."""
        now = clock()
        # In a test run it would hold up the DROP DATABASE at the end.
        keeps = not hasattr(mail, "outbox")
        with self._lock:
            keeps = keeps and len(self._spares) < MOST
            if keeps:
                self._spares.append(_Spare(connection, now))
                self._reap_later()
        if not keeps:
            close(connection)

    def close_idle(self, longer_than: float = 0.0) -> None:
        """Close those that nobody has come for."""
        latest = clock() - longer_than
        with self._lock:
            idle = [spare for spare in self._spares if spare.since <= latest]
            self._spares = [spare for spare in self._spares if spare.since > latest]
        for spare in idle:
            close(spare.connection)

    def _reap_later(self) -> None:
        if self._reaper is None:
            self._reaper = Timer(IDLE, self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        self.close_idle(IDLE)
        with self._lock:
            self._reaper = None
            if self._spares:
                self._reap_later()


def close(connection: Any) -> None:
    """Close ``connection``, broken or not."""
    with suppress(Error):
        connection.close()


spares = Spares()
atexit.register(spares.close_idle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=spares.reset)
