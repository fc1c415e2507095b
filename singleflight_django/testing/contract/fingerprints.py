"""Laws of what does not belong together: another fingerprint, or nothing to share."""

from __future__ import annotations

import time

from singleflight_django.stores.base import Apart, Kept, Landing, Mismatch, Status
from singleflight_django.testing.contract.calling import LONG
from singleflight_django.testing.contract.flying import DONE, FlightLaws, Flights


class FingerprintLaws(FlightLaws):
    """Laws of what does not belong together: another fingerprint, or nothing to share."""

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
