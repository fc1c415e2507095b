"""Laws of several callers: fencing, limits and races."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from singleflight_django.stores.base import Claim, Conflict, Grant, Store
from singleflight_django.testing.contract.calling import (
    LONG,
    Calls,
    StoreLaws,
    at_once,
    closing,
    grants,
    in_a_loop,
)


class HolderLaws(StoreLaws):
    """Laws of several callers: fencing, limits and races."""

    # Fencing

    def test_fences_only_ever_rise(self, calls: Calls) -> None:
        fences: list[int | None] = []
        for token in "abc":
            fences.append(self.take_when_free(calls, "k", token).fence)
            calls.release("k", token)
        calls.acquire("k", "d", self.brief)
        fences.append(self.take_when_free(calls, "k", "e").fence)
        if not calls.store.fences:
            assert set(fences) == {None}
            return
        numbers = [fence for fence in fences if fence is not None]
        assert len(numbers) == len(fences)
        assert numbers == sorted(set(numbers))

    # Several holders

    def test_as_many_hold_it_as_the_limit_says(self, calls: Calls) -> None:
        answers = [calls.acquire("k", token, LONG, 3) for token in "abcd"]
        assert [isinstance(answer, Grant) for answer in answers] == [True, True, True, False]
        assert calls.release("k", "b") is True
        assert isinstance(calls.acquire("k", "d", LONG, 3), Grant)
        assert isinstance(calls.acquire("k", "e", LONG, 3), Conflict)

    def test_a_holder_that_asks_again_takes_one_place_only(self, calls: Calls) -> None:
        for token in ("a", "a", "b", "b"):
            assert isinstance(calls.acquire("k", token, LONG, 2), Grant)
        assert isinstance(calls.acquire("k", "c", LONG, 2), Conflict)
        calls.release("k", "a")
        assert isinstance(calls.acquire("k", "c", LONG, 2), Grant)

    def test_a_dead_holder_makes_place_and_the_others_stay(self, calls: Calls) -> None:
        calls.acquire("k", "a", LONG, 2)
        calls.acquire("k", "b", self.brief, 2)
        conflict = calls.acquire("k", "c", LONG, 2)
        assert isinstance(conflict, Conflict)
        assert conflict.remaining <= self.brief + self.finest
        self.take_when_free(calls, "k", "c", limit=2)
        assert isinstance(calls.acquire("k", "d", LONG, 2), Conflict)
        assert calls.renew(Claim("k", "a", LONG)) == [True]
        assert calls.release("k", "b") is False

    # Races

    def test_of_many_threads_that_race_for_a_key_one_gets_it(self, store: Store) -> None:
        for number in range(10):
            answers = race(store, f"k{number}", limit=1)
            assert grants(answers) == 1, answers

    def test_of_many_threads_that_race_as_many_get_it_as_the_limit_says(self, store: Store) -> None:
        for number in range(5):
            answers = race(store, f"k{number}", limit=3)
            assert grants(answers) == 3, answers

    @in_a_loop
    async def test_of_many_tasks_that_race_for_a_key_one_gets_it(self, store: Store) -> None:
        for number in range(5):
            racing = (store.aacquire(f"k{number}", f"t{i}", LONG, 1, 0.0) for i in range(8))
            assert grants(await asyncio.gather(*map(closing, racing))) == 1

    def test_no_increment_is_lost_under_the_lease(self, store: Store) -> None:
        """A counter that is read, and written back later, by four threads in turn."""
        counter, inside = [0], threading.Lock()
        calls = Calls(store)

        def count(index: int) -> None:
            for turn in range(10):
                token = f"t{index}.{turn}"
                self.take_when_free(calls, "k", token)
                assert inside.acquire(blocking=False), "two holders at once"
                counter[0] += 1
                inside.release()
                calls.release("k", token)

        at_once(4, count)
        assert counter == [40]


def race(store: Store, key: str, limit: int) -> list[Any]:
    """Let eight threads ask for ``key`` at once, and return what they are told."""
    return at_once(8, lambda index: store.acquire(key, f"t{index}", LONG, limit, 0.0))
