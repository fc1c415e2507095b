"""How the laws of flights call a store: from threads, and from event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from singleflight_django.stores.base import (
    Busy,
    Joined,
    Joining,
    Landing,
    Led,
    Publishing,
    Status,
    Store,
)
from singleflight_django.testing.contract.calling import LONG, closing

DONE, FAILED, AGAIN, VACANT = Status.DONE, Status.FAILED, Status.AGAIN, Status.VACANT


class Flights:
    """A store's flights, asked for from plain code."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def ask(self, verb: str, *args: Any) -> Any:
        return getattr(self.store, verb)(*args)

    def join(self, token: str, key: str = "k", **more: Any) -> Joined:
        given: dict[str, Any] = {"ttl": LONG, "wait": LONG, "life": 3 * LONG, **more}
        joined: Joined = self.ask("join", key, Joining(token, **given))
        return joined

    def lead(self, token: str, key: str = "k", **more: Any) -> Led:
        led = self.join(token, key, **more)
        assert isinstance(led, Led), led
        return led

    def follow(self, token: str, key: str = "k", **more: Any) -> Busy:
        busy = self.join(token, key, **more)
        assert isinstance(busy, Busy), busy
        return busy

    def publish(
        self,
        token: str,
        flight: int,
        status: Status = DONE,
        payload: bytes = b"",
        key: str = "k",
        **more: Any,
    ) -> Status | None:
        published: Status | None = self.ask(
            "publish", key, Publishing(token, flight, status, payload, **more)
        )
        return published

    def wait(self, flight: int, seen: str = "0", seconds: float = 0.05) -> Landing | None:
        landing: Landing | None = self.ask("wait_landing", "k", flight, seen, seconds)
        return landing

    def news(self, token: str, flight: int, seen: str = "0", **more: Any) -> Joined:
        """What a follower of ``flight`` learns once something has become of it."""
        news = self.wait(flight, seen) or self.join(token, flight=flight, seen=seen, **more)
        assert not isinstance(news, Busy), news
        return news

    def lapse(self, token: str, **more: Any) -> None:
        """Return when the lease that ``token`` was told of has ended."""
        busy = self.follow(token, **more)
        assert busy.remaining < 5
        time.sleep(busy.remaining + 0.02)


class AsyncFlights(Flights):
    """The same, asked for from an event loop."""

    def __init__(self, store: Store, run: Callable[[Any], Any]) -> None:
        super().__init__(store)
        self.run = run

    def ask(self, verb: str, *args: Any) -> Any:
        return self.run(getattr(self.store, "a" + verb)(*args))


class FlightLaws:
    """What laws of flights need."""

    # A ttl, or a time to keep an outcome, that a law waits for.
    brief = 0.15

    @pytest.fixture(params=["sync", "async"])
    def flights(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Flights]:
        if request.param == "sync":
            yield Flights(store)
            return
        with asyncio.Runner() as runner:
            yield AsyncFlights(store, runner.run)
            runner.run(closing(asyncio.sleep(0)))
