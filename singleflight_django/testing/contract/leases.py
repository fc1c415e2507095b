"""Laws of one lease: its holder, its owner token and its end."""

from __future__ import annotations

import time

from singleflight_django.parts import join, qualify
from singleflight_django.stores.base import Claim, Conflict, Grant
from singleflight_django.testing.contract.calling import LONG, Calls, StoreLaws

AWKWARD_KEYS = [
    "x" * 300,
    "x" * 301,
    "a b",
    "a\tb",
    "a\nb",
    "a\0b",
    "a{b}c",
    "a:b",
    "a#1",
    "a%20b",
    "\N{PILE OF POO}" * 80,
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
]


class LeaseLaws(StoreLaws):
    """Laws of one lease: its holder, its owner token and its end."""

    # One holder

    def test_a_free_key_is_granted(self, calls: Calls) -> None:
        assert isinstance(calls.acquire("k", "a"), Grant)

    def test_a_held_key_is_a_conflict_that_tells_the_time_left(self, calls: Calls) -> None:
        calls.acquire("k", "a", 7.0)
        answer = calls.acquire("k", "b", LONG)
        assert isinstance(answer, Conflict)
        assert 5.0 < answer.remaining <= 7.0 + self.finest

    def test_a_conflict_changes_nothing_for_the_holder(self, calls: Calls) -> None:
        calls.acquire("k", "a", 7.0)
        calls.acquire("k", "b", LONG)
        answer = calls.acquire("k", "c", LONG)
        assert isinstance(answer, Conflict)
        assert answer.remaining <= 7.0 + self.finest
        assert calls.renew(Claim("k", "a", LONG)) == [True]

    def test_a_released_key_is_free_at_once(self, calls: Calls) -> None:
        calls.acquire("k", "a")
        assert calls.release("k", "a") is True
        assert isinstance(calls.acquire("k", "b"), Grant)

    def test_a_second_release_is_told_that_nothing_was_held(self, calls: Calls) -> None:
        calls.acquire("k", "a")
        calls.release("k", "a")
        assert calls.release("k", "a") is False

    def test_two_keys_do_not_contend(self, calls: Calls) -> None:
        assert isinstance(calls.acquire("k1", "a"), Grant)
        assert isinstance(calls.acquire("k2", "b"), Grant)
        assert calls.release("k1", "b") is False
        assert isinstance(calls.acquire("k2", "a"), Conflict)

    def test_awkward_keys_are_as_good_as_others_and_all_different(self, calls: Calls) -> None:
        keys = [qualify("law", join((key,))) for key in AWKWARD_KEYS]
        for key in keys:
            assert isinstance(calls.acquire(key, "a"), Grant), key
        for key in keys:
            assert isinstance(calls.acquire(key, "b"), Conflict), key
            assert calls.renew(Claim(key, "a", LONG)) == [True]
            assert calls.release(key, "a") is True
            assert isinstance(calls.acquire(key, "b"), Grant), key

    # The owner token

    def test_a_caller_that_missed_the_reply_gets_its_own_lease(self, calls: Calls) -> None:
        """Guarantee 2: the reply was lost, so the same acquisition is sent once more."""
        calls.acquire("k", "a")
        assert isinstance(calls.acquire("k", "a"), Grant)
        assert isinstance(calls.acquire("k", "b"), Conflict)
        assert calls.release("k", "a") is True
        assert isinstance(calls.acquire("k", "b"), Grant)

    def test_a_wrong_token_neither_renews_nor_releases(self, calls: Calls) -> None:
        calls.acquire("k", "a", 7.0)
        assert calls.renew(Claim("k", "b", LONG)) == [False]
        assert calls.release("k", "b") is False
        answer = calls.acquire("k", "c")
        assert isinstance(answer, Conflict)
        assert answer.remaining <= 7.0 + self.finest

    def test_what_was_never_held_is_neither_renewed_nor_released(self, calls: Calls) -> None:
        assert calls.renew(Claim("k", "a", LONG)) == [False]
        assert calls.release("k", "a") is False
        assert isinstance(calls.acquire("k", "b"), Grant)

    # The end of a lease

    def test_a_lease_ends_by_itself_and_not_before_its_ttl(self, calls: Calls) -> None:
        begin = time.monotonic()
        calls.acquire("k", "a", self.brief)
        asked = time.monotonic()
        self.take_when_free(calls, "k", "b")
        assert time.monotonic() - begin >= self.brief - self.finest - 0.005
        assert time.monotonic() - asked <= self.brief + self.finest + 1.0

    def test_a_ttl_below_the_finest_step_is_neither_nothing_nor_for_ever(
        self, calls: Calls
    ) -> None:
        assert isinstance(calls.acquire("k", "a", 0.0004), Grant)
        self.take_when_free(calls, "k", "b")

    def test_a_late_owner_never_touches_its_successor(self, calls: Calls) -> None:
        calls.acquire("k", "a", self.brief)
        self.take_when_free(calls, "k", "b")
        assert calls.renew(Claim("k", "a", self.brief)) == [False]
        assert calls.release("k", "a") is False
        answer = calls.acquire("k", "c")
        assert isinstance(answer, Conflict)
        assert answer.remaining > LONG / 2

    def test_a_renewal_that_comes_too_late_revives_nothing(self, calls: Calls) -> None:
        calls.acquire("k", "a", self.brief)
        self.take_when_free(calls, "k", "b")
        calls.release("k", "b")
        assert calls.renew(Claim("k", "a", LONG)) == [False]
        assert isinstance(calls.acquire("k", "c"), Grant)

    def test_a_renewed_lease_lives_for_its_ttl_from_then_on(self, calls: Calls) -> None:
        calls.acquire("k", "a", 3.0)
        assert calls.renew(Claim("k", "a", LONG)) == [True]
        answer = calls.acquire("k", "b")
        assert isinstance(answer, Conflict)
        assert LONG - 2.0 < answer.remaining <= LONG + self.finest

    def test_a_renewal_can_shorten_a_lease(self, calls: Calls) -> None:
        calls.acquire("k", "a", LONG)
        assert calls.renew(Claim("k", "a", 3.0)) == [True]
        answer = calls.acquire("k", "b")
        assert isinstance(answer, Conflict)
        assert answer.remaining <= 3.0 + self.finest

    def test_renewals_are_answered_one_by_one_in_their_order(self, calls: Calls) -> None:
        for key in ("k1", "k2", "k3"):
            calls.acquire(key, "a")
        claims = [Claim(key, token, LONG) for key, token in zip("123", "aba", strict=True)]
        claims = [claim._replace(key=f"k{claim.key}") for claim in claims]
        assert calls.renew(*claims, Claim("k4", "a", LONG)) == [True, False, True, False]
        assert calls.renew() == []
