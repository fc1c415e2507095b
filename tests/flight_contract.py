"""The laws of flights in ``stores.base.Store``, once for every store.

A store's test class inherits ``FlightContract`` and provides the fixture ``store``; see
``store_contract``, which has the laws of leases.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from singleflight_django.stores.base import (
    Apart,
    Busy,
    Joined,
    Joining,
    Kept,
    Landing,
    Led,
    Mismatch,
    Publishing,
    Status,
    Store,
)
from tests.store_contract import LONG, PATIENCE, at_once, closing

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
        """What a follower of ``flight`` learns, as soon as it isn't busy any more."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            news = self.wait(flight, seen) or self.join(token, flight=flight, seen=seen, **more)
            if not isinstance(news, Busy):
                return news
        raise AssertionError("nothing ever became of it")

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


class FlightContract:
    """Inherit this in a test class with a fixture ``store``."""

    # A ttl, or a time to keep an outcome, that a law waits for.
    brief = 0.15

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("A store's test class provides the store.")

    @pytest.fixture(params=["sync", "async"])
    def flights(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Flights]:
        if request.param == "sync":
            yield Flights(store)
            return
        with asyncio.Runner() as runner:
            yield AsyncFlights(store, runner.run)
            runner.run(closing(asyncio.sleep(0)))

    # Leading and following

    def test_who_comes_first_leads(self, flights: Flights) -> None:
        led = flights.lead("a")
        assert led.flight > 0
        assert led.takeovers == 0
        assert (led.fence is not None) == flights.store.fences

    def test_who_comes_next_follows_the_same_flight(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=7.0)
        busy = flights.follow("b")
        assert busy.flight == led.flight
        assert 5.0 < busy.remaining <= 8.0
        assert busy.now > 0

    def test_flights_of_other_keys_are_other_flights(self, flights: Flights) -> None:
        flights.lead("a")
        flights.lead("b", "k2")

    def test_of_many_at_once_one_leads_and_all_others_follow_it(self, store: Store) -> None:
        flights = Flights(store)
        joined = at_once(16, lambda index: flights.join(f"t{index}"))
        (led,) = (one for one in joined if isinstance(one, Led))
        assert {one.flight for one in joined if isinstance(one, Busy)} == {led.flight}
        assert sum(isinstance(one, Busy) for one in joined) == 15

    async def test_of_many_tasks_at_once_one_leads(self, store: Store) -> None:
        joining = Joining("", LONG, LONG)
        joined = await asyncio.gather(
            *(closing(store.ajoin("k", joining._replace(token=f"t{n}"))) for n in range(16))
        )
        assert sum(isinstance(one, Led) for one in joined) == 1
        assert sum(isinstance(one, Busy) for one in joined) == 15

    def test_a_lease_that_is_no_flights_is_waited_for(self, flights: Flights) -> None:
        flights.store.acquire("k", "a", LONG, 1, 0.0)
        flights.follow("b")
        flights.store.release("k", "a")
        flights.lead("b")

    # Landing

    def test_a_follower_gets_the_outcome(self, flights: Flights) -> None:
        led = flights.lead("a")
        busy = flights.follow("b")
        assert flights.wait(busy.flight) is None
        assert flights.publish("a", led.flight, DONE, b"one") == DONE
        news = flights.news("b", busy.flight)
        assert isinstance(news, Landing)
        assert (news.status, news.payload) == (DONE, b"one")
        assert news.at >= busy.now

    @pytest.mark.parametrize("size", [0, 1, 100_000])
    def test_an_outcome_is_bytes_of_any_kind_and_length(self, flights: Flights, size: int) -> None:
        payload = bytes(range(256)) + os.urandom(size)
        led = flights.lead("a")
        busy = flights.follow("b")
        flights.publish("a", led.flight, DONE, payload, keep=LONG)
        news, kept = flights.news("b", busy.flight), flights.join("c")
        assert isinstance(news, Landing)
        assert isinstance(kept, Kept)
        assert news.payload == kept.payload == payload

    def test_an_empty_outcome_is_one(self, flights: Flights) -> None:
        led = flights.lead("a")
        busy = flights.follow("b")
        flights.publish("a", led.flight)
        news = flights.news("b", busy.flight)
        assert isinstance(news, Landing)
        assert news.payload == b""

    def test_every_follower_gets_it(self, flights: Flights) -> None:
        led = flights.lead("a")
        for token in "bcd":
            flights.follow(token)
        flights.publish("a", led.flight, DONE, b"one")
        news = [flights.news(token, led.flight) for token in "bcd"]
        assert [one.payload for one in news if isinstance(one, Landing)] == [b"one"] * 3

    def test_who_comes_after_the_end_begins_another_flight(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        flights.publish("a", led.flight, DONE, b"one")
        assert flights.lead("c").flight > led.flight

    def test_a_late_follower_gets_its_own_flight_while_the_next_is_under_way(
        self, flights: Flights
    ) -> None:
        """Guarantee 14."""
        first = flights.lead("a")
        flights.follow("b")
        flights.publish("a", first.flight, DONE, b"one")
        second = flights.lead("c")
        flights.follow("d")
        during = flights.join("b", flight=first.flight)
        flights.publish("c", second.flight, DONE, b"two")
        after = flights.join("b", flight=first.flight)
        other = flights.news("d", second.flight)
        assert [one.payload for one in (during, after, other) if isinstance(one, Landing)] == [
            b"one",
            b"one",
            b"two",
        ]

    def test_the_lease_ends_with_the_flight(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight)
        assert flights.store.release("k", "a") is False

    # Kept outcomes

    def test_a_kept_outcome_answers_those_who_come_later(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, DONE, b"one", keep=LONG)
        kept = flights.join("b")
        assert isinstance(kept, Kept)
        assert kept.payload == b"one"
        assert LONG - 5 < kept.remaining <= LONG

    def test_a_kept_outcome_ends(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, DONE, b"one", keep=self.brief)
        kept = flights.join("b")
        assert isinstance(kept, Kept)
        assert kept.remaining <= self.brief
        time.sleep(self.brief + 0.01)
        flights.lead("b")

    def test_a_failure_is_not_kept(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, FAILED, b"", keep=LONG)
        flights.lead("b")

    def test_a_kept_outcome_can_be_forgotten(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, DONE, b"one", keep=LONG)
        flights.ask("forget", "k")
        flights.lead("b")

    def test_to_forget_leaves_the_flight_under_way_alone(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.ask("forget", "k")
        assert flights.follow("b").flight == led.flight
        flights.ask("forget", "other")
        assert flights.publish("a", led.flight, DONE, b"one") == DONE

    # Fingerprints

    def test_another_fingerprint_is_a_mismatch_while_the_flight_is_under_way(
        self, flights: Flights
    ) -> None:
        led = flights.lead("a", fingerprint="one")
        assert isinstance(flights.join("b", fingerprint="two"), Mismatch)
        assert flights.follow("b", fingerprint="one").flight == led.flight

    def test_another_fingerprint_is_a_mismatch_with_what_is_kept(self, flights: Flights) -> None:
        led = flights.lead("a", fingerprint="one")
        flights.publish("a", led.flight, DONE, b"1", keep=LONG)
        assert isinstance(flights.join("b", fingerprint="two"), Mismatch)
        assert isinstance(flights.join("b", fingerprint="one"), Kept)

    def test_another_fingerprint_does_not_go_on_with_a_dead_leaders_flight(
        self, flights: Flights
    ) -> None:
        """Its followers would get the answer to another question."""
        led = flights.lead("a", fingerprint="one", ttl=self.brief)
        flights.lapse("b", fingerprint="one")
        other = flights.lead("c", fingerprint="two")
        assert other.flight != led.flight
        flights.publish("c", other.flight, DONE, b"two")
        assert not isinstance(flights.join("b", fingerprint="one", flight=led.flight), Landing)

    # Zombies

    def test_nobody_else_can_publish(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        assert flights.publish("b", led.flight, DONE, b"forged") is None
        assert flights.publish("x", led.flight, DONE, b"forged") is None
        assert flights.wait(led.flight) is None
        assert flights.publish("a", led.flight, DONE, b"one") == DONE

    def test_nobody_can_publish_twice(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        flights.publish("a", led.flight, DONE, b"one")
        assert flights.publish("a", led.flight, DONE, b"two") is None
        news = flights.news("b", led.flight)
        assert isinstance(news, Landing)
        assert news.payload == b"one"

    def test_a_leader_whose_lease_has_ended_can_not_publish(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        assert flights.publish("a", led.flight, DONE, b"late", keep=LONG) is None
        flights.lead("b", flight=led.flight)

    def test_a_leader_that_was_taken_over_touches_nothing(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        flights.lead("b", flight=led.flight)
        assert flights.publish("a", led.flight, DONE, b"late", keep=LONG) is None
        assert flights.store.release("k", "a") is False
        flights.follow("c")
        assert flights.publish("b", led.flight, DONE, b"one") == DONE
        news = flights.news("c", led.flight)
        assert isinstance(news, Landing)
        assert news.payload == b"one"

    # Takeover

    def test_a_follower_takes_over_from_a_dead_leader(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        taken = flights.lead("b", flight=led.flight)
        assert (taken.flight, taken.takeovers) == (led.flight, 1)
        if led.fence is not None:
            assert taken.fence is not None
            assert taken.fence > led.fence
        assert flights.follow("c").flight == led.flight

    def test_takeovers_are_bounded_and_then_the_flight_has_failed(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        for takeovers, token in enumerate("bc", 1):
            flights.lapse("x")
            assert flights.lead(token, flight=led.flight, ttl=self.brief).takeovers == takeovers
        flights.lapse("x")
        failed = flights.join("d", flight=led.flight)
        assert isinstance(failed, Landing)
        assert failed.status == FAILED
        told = flights.join("x", flight=led.flight)
        assert isinstance(told, Landing)
        assert told.status == FAILED
        assert flights.lead("e").flight > led.flight

    def test_without_takeover_a_dead_leader_has_failed(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        failed = flights.join("b", flight=led.flight, takeovers=0)
        assert isinstance(failed, Landing)
        assert failed.status == FAILED

    def test_a_leader_that_says_it_is_gone_is_taken_over_at_once(self, flights: Flights) -> None:
        led = flights.lead("a")
        busy = flights.follow("b")
        assert flights.publish("a", led.flight, VACANT) == VACANT
        news = flights.news("b", busy.flight)
        assert isinstance(news, Landing)
        assert news.status == VACANT
        taken = flights.lead("b", flight=led.flight, seen=news.seen)
        assert (taken.flight, taken.takeovers) == (led.flight, 1)

    def test_a_dead_leader_that_nobody_follows_is_forgotten(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b", wait=0.0)
        fresh = flights.lead("c")
        assert fresh.flight > led.flight
        assert fresh.takeovers == 0

    # Trying again

    def test_a_failure_is_told_at_once(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        assert flights.publish("a", led.flight, FAILED) == FAILED
        news = flights.news("b", led.flight)
        assert isinstance(news, Landing)
        assert news.status == FAILED
        flights.lead("c")

    @pytest.mark.parametrize("retry", [1, 3])
    def test_so_many_failures_are_followed_by_another_try(
        self, flights: Flights, retry: int
    ) -> None:
        led = flights.lead("t0")
        flights.follow("x")
        seen = "0"
        for turn in range(retry):
            assert flights.publish(f"t{turn}", led.flight, FAILED, retry=retry) == AGAIN
            news = flights.news("x", led.flight, seen)
            assert isinstance(news, Landing)
            assert news.status == AGAIN
            seen = news.seen
            again = flights.lead(f"t{turn + 1}", flight=led.flight, seen=seen)
            assert (again.flight, again.takeovers) == (led.flight, 0)
        assert flights.publish(f"t{retry}", led.flight, FAILED, retry=retry) == FAILED
        news = flights.news("x", led.flight, seen)
        assert isinstance(news, Landing)
        assert news.status == FAILED

    def test_an_outcome_for_nobody_else_sends_the_followers_back(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        assert flights.publish("a", led.flight, AGAIN) == AGAIN
        news = flights.news("b", led.flight)
        assert isinstance(news, Landing)
        assert news.status == AGAIN
        again = flights.lead("b", flight=led.flight, seen=news.seen)
        flights.follow("c")
        assert flights.publish("b", again.flight, DONE, b"mine") == DONE
        news = flights.news("c", again.flight, news.seen)
        assert isinstance(news, Landing)
        assert news.payload == b"mine"

    # Apart

    def test_an_unshareable_outcome_is_told_and_keeps_the_identity_apart(
        self, flights: Flights
    ) -> None:
        led = flights.lead("a")
        busy = flights.follow("b")
        assert flights.publish("a", led.flight, Status.UNSHAREABLE, apart=LONG) == "unshareable"
        news = flights.join("b", flight=busy.flight)
        assert isinstance(news, Landing)
        assert news.status == Status.UNSHAREABLE
        assert isinstance(flights.join("c"), Apart)

    def test_apart_ends(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, Status.UNSHAREABLE, apart=self.brief)
        assert isinstance(flights.join("c"), Apart)
        time.sleep(self.brief + 0.02)
        flights.lead("c")

    # Whether anybody follows

    def test_a_flight_that_has_a_follower_is_followed(self, flights: Flights) -> None:
        flights.lead("a")
        flights.follow("b")
        assert flights.ask("followed", "k") is True
