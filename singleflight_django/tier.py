"""The local tier: callers of one flight in one process share one follower.

Whoever comes first is the agent, and speaks to the store for all. The others, threads or tasks,
are passengers: they wait for what the agent learns, so that N callers in P processes ask the store
about P times. An agent that leaves early (its own wait is used up, its client is gone) makes the
next passenger the agent.
"""

from __future__ import annotations

import asyncio
import os
from _thread import RLock, allocate_lock
from collections.abc import Hashable, Iterable
from contextlib import suppress
from typing import Any

from singleflight_django.stores.base import Joined, Landing, Status
from singleflight_django.waiting import clock

# By how much two clocks may have drifted apart since they were compared, in seconds.
DRIFT = 0.001

# What a passenger learns: a landing, an error of the store, or that it is the agent from now on.
AGENT = object()
# Came too late for the flight it boarded: the next one is its own.
ANEW = Landing(Status.AGAIN)

# Reentrant: the garbage collector may close a caller's steps while this very thread holds it.
_mutex = RLock()


class Passenger:
    """One caller that waits in this process."""

    __slots__ = ("_future", "_lock", "_loop", "arrived", "news")

    def __init__(self) -> None:
        self.arrived = clock()
        # Set once, under the tier's lock.
        self.news: Any = None
        self._lock: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None

    def wait_news(self, seconds: float) -> bool:
        """Return True as soon as there are news, False after ``seconds``."""
        lock = allocate_lock()
        lock.acquire()
        with _mutex:
            if self.news is not None:
                return True
            self._lock = lock
        return lock.acquire(timeout=seconds)

    async def await_news(self, seconds: float) -> bool:
        """See wait_news()."""
        loop = asyncio.get_running_loop()
        with _mutex:
            if self.news is not None:
                return True
            self._loop, self._future = loop, loop.create_future()
        timer = loop.call_later(seconds, _resolve, [self._future])
        try:
            await self._future
        finally:
            timer.cancel()
        return self.news is not None

    @property
    def reachable(self) -> bool:
        """Whether anybody is left to wake: a loop may have been closed with its tasks pending."""
        return self._loop is None or not self._loop.is_closed()


class LocalFlight:
    """The callers of one flight in this process, and what their agent knows of it."""

    __slots__ = ("_agent_arrived", "_offset", "_passengers", "_place", "flight", "seen")

    def __init__(self, place: Hashable) -> None:
        self._place = place
        self._passengers: dict[Passenger, None] = {}
        # The flight that the agent follows, and the last landing that it saw of it.
        self.flight = 0
        self.seen = "0"
        # Our clock minus the store's, at the least.
        self._offset = float("-inf")
        # 0: the store itself has told the agent that the flight was under way.
        self._agent_arrived = 0.0

    def follow(self, flight: int, asked: float, now: float) -> None:
        """Note that ``flight`` was under way when the store's clock said ``now``."""
        if flight != self.flight:
            self.flight, self.seen = flight, "0"
        self._agent_arrived = 0.0
        self.compare(asked, now)

    def compare(self, asked: float, now: float) -> None:
        """Note that the store's clock said ``now``, after we ``asked`` and before this."""
        self._offset = max(asked - now, min(self._offset, clock() - now))

    @property
    def has_passengers(self) -> bool:
        """Whether anybody waits for the agent."""
        return bool(self._passengers)

    def close(self) -> None:
        """Take nobody aboard any more: the flight is about to end."""
        with _mutex:
            _close(self)

    def doubts(self, news: Joined) -> bool:
        """Whether somebody aboard may have come after the end, as far as our clocks can tell."""
        latest = self._latest(news)
        with _mutex:
            arrivals = [passenger.arrived for passenger in self._passengers]
        return any(arrived >= latest for arrived in (*arrivals, self._agent_arrived))

    def _latest(self, news: Joined | Exception) -> float:
        """Whoever came before this, came before the end, which was at ``news.at`` for the store."""
        if isinstance(news, Landing) and news.at:
            return news.at + self._offset - DRIFT
        return float("inf")

    def land(self, news: Joined | Exception) -> Any:
        """Tell every passenger what became of the flight. Return what the agent is to be told.

        Who may have come after the end gets no part of it.
        """
        latest = self._latest(news)
        with _mutex:
            _close(self)
            passengers, self._passengers = self._passengers, {}
            for passenger in passengers:
                passenger.news = news if passenger.arrived < latest else ANEW
        _wake(passengers)
        return news if self._agent_arrived < latest else ANEW

    def hand_over(self) -> None:
        """Make the next passenger the agent; without one the flight is over for this process."""
        with _mutex:
            heir = next((one for one in self._passengers if one.reachable), None)
            if heir is None:
                _close(self)
                return
            del self._passengers[heir]
            self._agent_arrived = heir.arrived
            heir.news = AGENT
            # It may have been closed for a publish that came to nothing.
            _flights.setdefault(self._place, self)
        _wake([heir])

    def leave(self, passenger: Passenger) -> bool:
        """Let ``passenger`` go; False if there were news for it after all."""
        with _mutex:
            if passenger.news is not None:
                return False
            del self._passengers[passenger]
            return True


_flights: dict[Hashable, LocalFlight] = {}


def board(place: Hashable) -> tuple[LocalFlight, Passenger | None]:
    """Board the flight of ``place``: as its agent (no passenger), or as a passenger."""
    with _mutex:
        flight = _flights.get(place)
        if flight is None:
            flight = _flights[place] = LocalFlight(place)
            return flight, None
        passenger = Passenger()
        flight._passengers[passenger] = None
        return flight, passenger


def _close(flight: LocalFlight) -> None:
    if _flights.get(flight._place) is flight:
        del _flights[flight._place]


def _wake(passengers: Iterable[Passenger]) -> None:
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for passenger in passengers:
        if passenger._lock is not None:
            passenger._lock.release()
        elif passenger._future is not None and passenger._loop is not None:
            futures.setdefault(passenger._loop, []).append(passenger._future)
    for loop, waiting in futures.items():
        # A loop that is closed has nobody left to wake.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _forget() -> None:
    global _mutex
    _mutex = RLock()
    _flights.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
