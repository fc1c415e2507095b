"""The laws of ``stores.base.Store``, once for every store.

A store's test class inherits ``StoreContract`` and provides the fixture ``store``. Each law holds
for the plain methods and for their a-twins; what needs several callers at once uses real threads,
or tasks of one event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.cache import close_caches

from singleflight_django.parts import join, qualify
from singleflight_django.stores.base import Claim, Conflict, Grant, Store

# No wait of a law comes near this, save where the store is broken.
PATIENCE = 20.0
LONG = 30.0

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


class Calls:
    """A store, called from plain code."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def acquire(
        self, key: str, token: str, ttl: float = LONG, limit: int = 1, wait: float = 0.0
    ) -> Grant | Conflict:
        return self.store.acquire(key, token, ttl, limit, wait)

    def renew(self, *claims: Claim) -> list[bool]:
        return self.store.renew(claims)

    def release(self, key: str, token: str) -> bool:
        return self.store.release(key, token)

    def wait_free(self, key: str, seconds: float) -> bool:
        return self.store.wait_free(key, seconds)


class AsyncCalls(Calls):
    """The same store, called from an event loop."""

    def __init__(self, store: Store, run: Callable[[Any], Any]) -> None:
        super().__init__(store)
        self.run = run

    def acquire(
        self, key: str, token: str, ttl: float = LONG, limit: int = 1, wait: float = 0.0
    ) -> Grant | Conflict:
        answer: Grant | Conflict = self.run(self.store.aacquire(key, token, ttl, limit, wait))
        return answer

    def renew(self, *claims: Claim) -> list[bool]:
        answers: list[bool] = self.run(self.store.arenew(claims))
        return answers

    def release(self, key: str, token: str) -> bool:
        answer: bool = self.run(self.store.arelease(key, token))
        return answer

    def wait_free(self, key: str, seconds: float) -> bool:
        answer: bool = self.run(self.store.await_free(key, seconds))
        return answer


def at_once(number: int, call: Callable[[int], Any]) -> list[Any]:
    """Call ``call(0)``, ``call(1)``, … in as many threads, which start together."""
    start = threading.Barrier(number, timeout=PATIENCE)

    def caller(index: int) -> Any:
        start.wait()
        try:
            return call(index)
        finally:
            close_caches()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(caller, range(number), timeout=PATIENCE * 2))


async def closing(work: Awaitable[Any]) -> Any:
    """Await ``work`` and then, as Django does after a request, close what its caches have open."""
    try:
        return await work
    finally:
        close_caches()


def grants(answers: Sequence[Any]) -> int:
    return sum(isinstance(answer, Grant) for answer in answers)


class StoreContract:
    """Inherit this in a test class with a fixture ``store``."""

    # The smallest step of a ttl in seconds: up to this a store may round up.
    finest = 0.001
    # A ttl that a law waits for.
    brief = 0.15

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("A store's test class provides the store.")

    @pytest.fixture(params=["sync", "async"])
    def calls(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Calls]:
        if request.param == "sync":
            yield Calls(store)
            return
        with asyncio.Runner() as runner:
            yield AsyncCalls(store, runner.run)
            runner.run(closing(asyncio.sleep(0)))

    def take_when_free(self, calls: Calls, key: str, token: str, limit: int = 1) -> Grant:
        """Acquire as a waiting caller does, and return the grant."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = calls.acquire(key, token, LONG, limit, wait=1.0)
            if isinstance(answer, Grant):
                return answer
            calls.wait_free(key, min(answer.remaining + 0.01, 0.2))
        raise AssertionError(f"{key} never came free")

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
            key = f"k{number}"
            answers = at_once(8, lambda i, key=key: store.acquire(key, f"t{i}", LONG, 1, 0.0))
            assert grants(answers) == 1, answers

    def test_of_many_threads_that_race_as_many_get_it_as_the_limit_says(self, store: Store) -> None:
        for number in range(5):
            key = f"k{number}"
            answers = at_once(8, lambda i, key=key: store.acquire(key, f"t{i}", LONG, 3, 0.0))
            assert grants(answers) == 3, answers

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

    # Waiting

    def test_a_wait_is_bounded(self, calls: Calls) -> None:
        calls.acquire("k", "a")
        calls.acquire("k", "b", LONG, 1, wait=0.1)
        begin = time.monotonic()
        assert calls.wait_free("k", 0.1) is False
        assert time.monotonic() - begin < 1.5

    def test_a_release_before_the_wait_is_not_missed(self, calls: Calls) -> None:
        """The holder leaves after the waiter's conflict, and before the waiter waits."""
        block = self.block_of(calls.store)
        calls.acquire("k", "a")
        calls.acquire("k", "b", LONG, 1, wait=10.0)
        calls.release("k", "a")
        assert calls.wait_free("k", block) is True

    def test_a_release_wakes_a_thread_that_waits(self, store: Store) -> None:
        block = self.block_of(store)
        store.acquire("k", "a", LONG, 1, 0.0)
        store.acquire("k", "b", LONG, 1, 10.0)
        waiting = threading.Event()

        def wait() -> bool:
            waiting.set()
            return store.wait_free("k", block)

        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(wait)
            assert waiting.wait(PATIENCE)
            store.release("k", "a")
            assert woken.result(PATIENCE) is True

    async def test_a_release_wakes_a_task_that_waits(self, store: Store) -> None:
        block = self.block_of(store)
        await store.aacquire("k", "a", LONG, 1, 0.0)
        await store.aacquire("k", "b", LONG, 1, 10.0)
        waiter = asyncio.ensure_future(store.await_free("k", block))
        await asyncio.sleep(0)
        await store.arelease("k", "a")
        assert await asyncio.wait_for(waiter, PATIENCE) is True
        close_caches()

    @staticmethod
    def block_of(store: Store) -> float:
        if not store.longest_block:
            pytest.skip("this store wakes nobody: its waiters look again by themselves")
        return store.longest_block

    async def test_a_task_that_waits_leaves_the_loop_to_others(self, store: Store) -> None:
        await store.aacquire("k", "a", LONG, 1, 0.0)
        await store.aacquire("k", "b", LONG, 1, 0.3)
        waiter = asyncio.ensure_future(store.await_free("k", 0.3))
        turns = 0
        while not waiter.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns >= 5
        close_caches()

    async def test_many_tasks_wait_at_once_and_each_gets_its_turn(self, store: Store) -> None:
        async def turn(token: str) -> None:
            while isinstance(answer := await store.aacquire("k", token, LONG, 1, 5.0), Conflict):
                await store.await_free("k", min(answer.remaining, 0.1))
            await store.arelease("k", token)

        turns = (closing(turn(f"t{number}")) for number in range(10))
        await asyncio.wait_for(asyncio.gather(*turns), PATIENCE)
