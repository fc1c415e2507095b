"""Laws of a store that can name those who hold something in it."""

from __future__ import annotations

import pytest

from singleflight_django.stores.base import Conflict, Grant, Landing, Store
from singleflight_django.stores.listing import FLIGHT, LEASE, Holding
from singleflight_django.testing.contract.calling import LONG, Calls, StoreLaws
from singleflight_django.testing.contract.flying import FlightLaws, Flights


def listed(store: Store, contains: str = "") -> dict[str, Holding]:
    """What the store lists, by owner token. None of these laws changes anything meanwhile."""
    found = list(store.holdings(contains))
    by_token = {holding.token: holding for holding in found}
    assert len(by_token) == len(found)
    return by_token


class ListingLaws(StoreLaws):
    """Laws of listing leases."""

    def test_a_store_that_can_not_list_says_so(self, store: Store) -> None:
        if store.can_list:
            assert listed(store) == {}
        else:
            with pytest.raises(NotImplementedError, match="can't list"):
                store.holdings()

    def test_it_lists_the_live_leases_with_their_holders(self, calls: Calls) -> None:
        if not calls.store.can_list:
            return
        granted = calls.acquire("import:7", "secret@web-1:42", LONG)
        calls.acquire("import:8", "b", LONG)
        calls.acquire("import:9", "c", LONG)
        calls.release("import:9", "c")
        found = listed(calls.store)
        assert set(found) == {"secret@web-1:42", "b"}
        mine = found["secret@web-1:42"]
        assert (mine.key, mine.kind, mine.holder) == ("import:7", LEASE, "web-1:42")
        assert isinstance(granted, Grant)
        assert (mine.fence, mine.flight) == (granted.fence, 0)
        assert LONG - 10 < mine.remaining <= LONG + 1
        assert mine.age is None or 0 <= mine.age < 10
        assert found["b"].holder == ""
        assert "secret" not in repr(mine)

    def test_it_lists_all_holders_of_a_semaphore(self, calls: Calls) -> None:
        if not calls.store.can_list:
            return
        for token in ("a@x:1", "b@y:2"):
            calls.acquire("k", token, LONG, 2)
        assert {h.holder for h in listed(calls.store).values()} == {"x:1", "y:2"}

    def test_a_filter_is_a_plain_text(self, calls: Calls) -> None:
        if not calls.store.can_list:
            return
        for key in ("ab", "a*b", "axb", "AB", "a%b", "a[x]b", "a?b"):
            calls.acquire(key, key, LONG)
        for text in ("a*b", "a%b", "a[x]b", "a?b", "AB"):
            assert set(listed(calls.store, text)) == {text}
        assert set(listed(calls.store, "b")) == {"ab", "a*b", "axb", "a%b", "a[x]b", "a?b"}

    def test_a_lease_that_is_evicted_is_free(self, calls: Calls) -> None:
        if not calls.store.can_list:
            return
        calls.acquire("k", "a", LONG)
        (holding,) = listed(calls.store).values()
        assert calls.store.evict(holding) is True
        assert calls.release("k", "a") is False
        assert isinstance(self.take_when_free(calls, "k", "b"), Grant)
        # It is by its token: the next holder's is left alone.
        assert calls.store.evict(holding) is False
        assert isinstance(calls.acquire("k", "c", LONG), Conflict)


class FlightListingLaws(FlightLaws):
    """Laws of listing flights."""

    def test_it_lists_a_flight_under_way_with_its_followers(self, flights: Flights) -> None:
        if not flights.store.can_list:
            return
        led = flights.lead("a@web-1:42")
        (alone,) = listed(flights.store).values()
        assert (alone.kind, alone.holder, alone.flight) == (FLIGHT, "web-1:42", led.flight)
        assert (alone.followers, alone.fence) == (0, led.fence)
        for token in "bc":
            flights.follow(token)
            flights.follow(token, flight=led.flight)
        (followed,) = listed(flights.store).values()
        assert followed.followers in (2, None)
        flights.publish("a@web-1:42", led.flight)
        assert listed(flights.store) == {}

    def test_a_follower_takes_over_what_is_evicted(self, flights: Flights) -> None:
        if not flights.store.can_list:
            return
        led = flights.lead("a")
        flights.follow("b")
        (holding,) = listed(flights.store).values()
        assert flights.store.evict(holding) is True
        vacant = flights.news("b", led.flight)
        assert isinstance(vacant, Landing)
        again = flights.lead("b", flight=led.flight, seen=vacant.seen)
        assert again.flight == led.flight
        (now,) = listed(flights.store).values()
        assert (now.token, now.flight) == ("b", led.flight)
        assert now.followers in (0, None)
        assert flights.store.evict(holding) is False
        assert flights.publish("a", led.flight) is None
