"""Laws of leaders that die, fail or come too late."""

from __future__ import annotations

import pytest

from singleflight_django.stores.base import Landing
from singleflight_django.testing.contract.calling import LONG
from singleflight_django.testing.contract.flying import (
    AGAIN,
    DONE,
    FAILED,
    VACANT,
    FlightLaws,
    Flights,
)


class TakeoverLaws(FlightLaws):
    """Laws of leaders that die, fail or come too late."""

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
