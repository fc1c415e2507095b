"""Laws of a flight whose leader lives: who leads, who gets the outcome, how long it is kept."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from singleflight_django.stores.base import Busy, Joining, Kept, Landing, Led, Store
from singleflight_django.testing.contract.calling import LONG, at_once, closing, in_a_loop
from singleflight_django.testing.contract.flying import DONE, FAILED, FlightLaws, Flights


class LandingLaws(FlightLaws):
    """Laws of a flight whose leader lives: who leads, who gets the outcome, how long it is kept."""

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

    @in_a_loop
    async def test_of_many_tasks_at_once_one_leads(self, store: Store) -> None:
        joining = Joining("", LONG, LONG)
        callers = (store.ajoin("k", joining._replace(token=f"t{n}")) for n in range(16))
        joined = await closing(asyncio.gather(*callers))
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
