"""The local tier: callers of one flight in one process share one follower.

Whoever comes first is the agent, and speaks to the store for all. The others, threads or tasks, are
passengers: they wait for what the agent learns, so that N callers in P processes ask the store about
P times. An agent that leaves early (its own wait is used up, its client is gone) makes the next
passenger the agent.
"""

from __future__ import annotations

import asyncio
import os
from _thread import allocate_lock
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from singleflight_django.exceptions import TooManyFollowersError
from singleflight_django.stores.base import Joined, Landing, Status
from singleflight_django.waiting import clock

# By how much two clocks may have drifted apart since they were compared, in seconds.
DRIFT = 0.001

# What a passenger learns: a landing, an error of the store, or that it is the agent from now on.
AGENT = object()


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
        self._loop = asyncio.get_running_loop()
        with _mutex:
            if self.news is not None:
                return True
            self._future = self._loop.create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._future
        except TimeoutError:
            return False
        return True


class LocalFlight:
    """The callers of one flight in this process, and what their agent knows of it."""

    __slots__ = ("_offset", "_passengers", "_place", "flight", "seen")

    def __init__(self, place: Hashable) -> None:
        self._place = place
        self._passengers: list[Passenger] = []
        # The flight that the agent follows, and the last landing that it saw of it.
        self.flight = 0
        self.seen = "0"
        # Our clock minus the store's, at the least.
        self._offset = 0.0

    def follow(self, flight: int, asked: float, now: float) -> None:
        """Note that ``flight`` was under way when the store's clock said ``now``."""
        if flight != self.flight:
            self.flight, self.seen = flight, "0"
        self._offset = asked - now

    @property
    def has_passengers(self) -> bool:
        """Whether anybody waits for the agent."""
        return bool(self._passengers)

    def close(self) -> None:
        """Take nobody aboard any more: the flight is about to end."""
        with _mutex:
            _close(self)

    def land(self, news: Joined | Exception) -> None:
        """Tell every passenger what became of the flight.

        It ended at ``news.at`` by the store's clock: who may have come after that gets no part of it.
        """
        if isinstance(news, Landing) and news.at:
            latest = news.at + self._offset - DRIFT
        else:
            latest = float("inf")
        with _mutex:
            _close(self)
            passengers, self._passengers = self._passengers, []
            for passenger in passengers:
                passenger.news = news if passenger.arrived < latest else _ANEW
        _wake(passengers)

    def hand_over(self) -> None:
        """Make the next passenger the agent; without one the flight is over for this process."""
        with _mutex:
            if not self._passengers:
                _close(self)
                return
            heir = self._passengers.pop(0)
            heir.news = AGENT
            # It may have been closed for a publish that came to nothing.
            _flights.setdefault(self._place, self)
        _wake([heir])

    def leave(self, passenger: Passenger) -> bool:
        """Let ``passenger`` go; False if there were news for it after all."""
        with _mutex:
            if passenger.news is not None:
                return False
            self._passengers.remove(passenger)
            return True


# Came too late for the flight it boarded: the next one is its own.
_ANEW = Landing(Status.AGAIN)

_mutex = allocate_lock()
_flights: dict[Hashable, LocalFlight] = {}


def board(place: Hashable) -> tuple[LocalFlight, Passenger | None]:
    """Board the flight of ``place``: as its agent (no passenger), or as a passenger."""
    with _mutex:
        flight = _flights.get(place)
        if flight is None:
            flight = _flights[place] = LocalFlight(place)
            return flight, None
        passenger = Passenger()
        flight._passengers.append(passenger)
        return flight, passenger


_seated = {True: 0, False: 0}


@contextmanager
def seat(blocking: bool, most: int | None, key: str) -> Iterator[None]:
    """Take a place among the threads (``blocking``), or tasks, that wait in this process.

    Raises TooManyFollowersError if ``most`` are taken: the last workers are for other requests.
    """
    with _mutex:
        if most is not None and _seated[blocking] >= most:
            raise TooManyFollowersError(f"{most} callers wait in this process already.", key=key)
        _seated[blocking] += 1
    try:
        yield
    finally:
        with _mutex:
            _seated[blocking] -= 1


def _close(flight: LocalFlight) -> None:
    if _flights.get(flight._place) is flight:
        del _flights[flight._place]


def _wake(passengers: list[Passenger]) -> None:
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for passenger in passengers:
        if passenger._lock is not None:
            passenger._lock.release()
        elif passenger._future is not None and passenger._loop is not None:
            futures.setdefault(passenger._loop, []).append(passenger._future)
    for loop, waiting in futures.items():
        # A loop that is closed has nobody left to wake.
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _forget() -> None:
    global _mutex
    _mutex = allocate_lock()
    _flights.clear()
    _seated.update({True: 0, False: 0})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
