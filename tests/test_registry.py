"""Which store a cache alias gets, and what happens where its server forbids what we use."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from singleflight_django import context, semaphore_lock
from singleflight_django.exceptions import LeaseConflictError, StoreUnavailableError
from singleflight_django.functions import SingleFlight
from singleflight_django.stores import outages
from singleflight_django.stores.base import Claim, Conflict, Grant, Kept, Landing
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis import fallback
from singleflight_django.stores.redis.fallback import RedisOrCacheStore
from singleflight_django.stores.registry import backed_by_database, get_store
from singleflight_django.testing.contract.flying import DONE, AsyncFlights, Flights
from singleflight_django.waiting import clock
from tests.engine import PATIENCE, in_threads
from tests.flying import afly, fly
from tests.meeting import Room
from tests.servers import Valkey, until
from tests.store_contract import LONG, AsyncCalls, Calls

CacheAt = Callable[..., str]


class OwnStore(CacheStore):
    """A store as a site may write one."""

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(alias)
        self.prefix = prefix


@pytest.mark.parametrize("alias", ["default", "core", "valkey", "ignoring", "dead"])
def test_redis_caches_get_the_redis_store(alias: str) -> None:
    assert isinstance(get_store(alias), RedisOrCacheStore)


def test_other_caches_get_the_cache_store_and_one_process_is_complained_of(
    caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.CACHES = {**settings.CACHES, "memory": dict(settings.CACHES["locmem"])}
    with caplog.at_level(logging.ERROR, "singleflight_django"):
        assert isinstance(get_store("memory"), CacheStore)
    assert "one process" in caplog.text
    caplog.clear()
    settings.DEBUG = True
    settings.CACHES = {**settings.CACHES, "memory": dict(settings.CACHES["locmem"])}
    assert isinstance(get_store("memory"), CacheStore)
    assert caplog.text == ""


def test_the_settings_choose(settings: Any) -> None:
    assert get_store() is get_store("default")
    settings.SINGLEFLIGHT_CACHE = "core"
    assert get_store() is get_store("core")
    settings.SINGLEFLIGHT_STORE = "cache"
    assert isinstance(get_store("core"), CacheStore)
    settings.SINGLEFLIGHT_STORE = "redis"
    assert isinstance(get_store("core"), RedisOrCacheStore)
    settings.SINGLEFLIGHT_STORE = "tests.test_registry.OwnStore"
    settings.SINGLEFLIGHT_PREFIX = "mine"
    own = get_store("locmem")
    assert isinstance(own, OwnStore)
    assert own.prefix == "mine"


def test_a_store_is_kept_for_as_long_as_its_settings_are(settings: Any) -> None:
    first = get_store("core")
    assert get_store("core") is first
    settings.SINGLEFLIGHT_PREFIX = "other"
    assert get_store("core") is not first
    del settings.SINGLEFLIGHT_PREFIX
    assert get_store("core") is first
    settings.CACHES = {**settings.CACHES, "core": dict(settings.CACHES["core"])}
    assert get_store("core") is not first


def test_prefixes_and_not_the_caches_own_keep_leases_apart(
    redis_url: str, cache_at: CacheAt, settings: Any
) -> None:
    """D14: a release hash in KEY_PREFIX or VERSION must not make two holders of a rolling deploy."""
    blue, green = cache_at(redis_url), cache_at(redis_url)
    settings.CACHES[blue]["KEY_PREFIX"], settings.CACHES[green]["VERSION"] = "blue", 2
    assert isinstance(get_store(blue).acquire("k", "a", LONG, 1, 0.0), Grant)
    assert isinstance(get_store(green).acquire("k", "b", LONG, 1, 0.0), Conflict)
    settings.SINGLEFLIGHT_PREFIX = "other"
    assert isinstance(get_store(green).acquire("k", "b", LONG, 1, 0.0), Grant)


# Where scripts are forbidden


@pytest.fixture
def forbidding(redis_server: Valkey, cache_at: CacheAt) -> str:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@scripting")
    return cache_at(redis_server.url())


def allow(server: Valkey) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "+@scripting")


@pytest.fixture(params=["sync", "async"])
def calls(request: pytest.FixtureRequest, forbidding: str) -> Any:
    store = get_store(forbidding)
    if request.param == "sync":
        yield Calls(store)
        return
    with asyncio.Runner() as runner:
        yield AsyncCalls(store, runner.run)


def test_leases_are_kept_through_the_cache_with_one_warning(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "singleflight_django"):
        for key in ("k1", "k2"):
            assert isinstance(calls.acquire(key, "a"), Grant)
            assert isinstance(calls.acquire(key, "b"), Conflict)
            assert calls.wait_free(key, 0.01) is False
            assert calls.renew(Claim(key, "a", LONG)) == [True]
            assert calls.release(key, "a") is True
            assert isinstance(calls.acquire(key, "b"), Grant)
    assert caplog.text.count("does not let us run scripts") == 1
    assert "EVALSHA" in caplog.text
    assert (calls.store.longest_block, calls.store.fences) == (0.0, False)
    assert not calls.store.compares_and_sets


@pytest.mark.parametrize("first", ["acquire", "join", "forget"])
def test_whatever_is_asked_first_falls_back_for_all(first: str, calls: Calls) -> None:
    flights = Flights(calls.store)
    if isinstance(calls, AsyncCalls):
        flights = AsyncFlights(calls.store, calls.run)
    if first == "acquire":
        calls.acquire("other", "a")
    elif first == "forget":
        flights.ask("forget", "k")
    led = flights.lead("a")
    assert flights.follow("b").flight == led.flight
    assert flights.ask("followed", "k") is True
    assert flights.ask("now", "k") >= led.now
    assert flights.publish("a", led.flight, DONE, b"one", keep=LONG) == DONE
    news, kept = flights.news("b", led.flight), flights.join("c")
    assert isinstance(news, Landing)
    assert isinstance(kept, Kept)
    assert news.payload == kept.payload == b"one"
    flights.ask("forget", "k")
    flights.lead("c")


def test_a_flight_that_scripts_began_is_told_as_away_when_they_are_forbidden(
    redis_server: Valkey, cache_at: CacheAt
) -> None:
    flights = Flights(get_store(cache_at(redis_server.url())))
    led = flights.lead("a")
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@scripting")
    with pytest.raises(StoreUnavailableError):
        flights.publish("a", led.flight, DONE, b"one")
    # It may still be its leader's: what is kept through the cache says nothing of it.
    flights.lead("b")
    with pytest.raises(StoreUnavailableError):
        flights.publish("a", led.flight, DONE, b"one")
    allow(redis_server)
    assert flights.publish("a", led.flight, DONE, b"one") == DONE


def test_workers_exclude_each_other_again_once_the_rules_are_corrected(
    calls: Calls,
    forbidding: str,
    redis_server: Valkey,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: Any,
) -> None:
    assert isinstance(calls.acquire("before", "a"), Grant)
    allow(redis_server)
    newcomer = RedisOrCacheStore(forbidding, "singleflight")
    # Scripts are not tried for each call that could do without.
    assert not calls.store.fences
    assert isinstance(calls.acquire("too soon", "a"), Grant)
    calls.store.forget("too soon")
    assert not calls.store.fences
    later = clock() + fallback.REST
    monkeypatch.setattr(outages, "clock", lambda: later)

    assert isinstance(calls.acquire("k", "a"), Grant)
    assert isinstance(newcomer.acquire("k", "b", LONG, 1, 0.0), Conflict)

    assert calls.store.fences
    assert calls.store.can_list
    assert calls.store.compares_and_sets
    assert calls.store.longest_block > 0
    assert caplog.text.count("does not let us run scripts") == 1
    assert caplog.text.count("lets us run scripts again") == 1


def test_what_was_taken_through_the_cache_is_renewed_and_given_back_there(
    calls: Calls, forbidding: str, redis_server: Valkey, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fallback, "REST", 0.0)
    assert isinstance(calls.acquire("k", "a"), Grant)
    allow(redis_server)
    assert isinstance(calls.acquire("other", "b"), Grant)
    assert calls.store.fences

    assert calls.renew(Claim("k", "a", LONG)) == [True]
    assert calls.renew(Claim("other", "b", LONG)) == [True]
    assert calls.release("k", "a") is True
    assert calls.release("other", "b") is True
    assert CacheStore(forbidding).release("k", "a") is False


def test_a_flight_that_was_led_through_the_cache_lands_there(
    calls: Calls, redis_server: Valkey, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fallback, "REST", 0.0)
    flights: Any = Flights(calls.store)
    if isinstance(calls, AsyncCalls):
        flights = AsyncFlights(calls.store, calls.run)
    led = flights.lead("a")
    allow(redis_server)
    assert isinstance(calls.acquire("other", "b"), Grant)

    assert flights.ask("now", "k") >= led.now
    assert flights.publish("a", led.flight, DONE, b"one") == DONE


def test_an_outcome_is_forgotten_by_scripts_once_they_are_allowed_again(
    calls: Calls, redis_server: Valkey, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fallback, "REST", 0.0)
    flights: Any = Flights(calls.store)
    if isinstance(calls, AsyncCalls):
        flights = AsyncFlights(calls.store, calls.run)
    flights.ask("forget", "k")
    assert not calls.store.fences
    allow(redis_server)
    flights.ask("forget", "k")
    assert calls.store.fences
    led = flights.lead("a")
    flights.publish("a", led.flight, DONE, b"one", keep=LONG)
    flights.ask("forget", "k")
    flights.lead("b")


def test_a_store_with_the_database_behind_it_can_what_the_first_one_can(
    redis_server: Valkey, forbidding: str
) -> None:
    both = backed_by_database(get_store(forbidding))
    assert (both.fences, both.can_list, both.compares_and_sets) == (True, True, True)
    get_store(forbidding).acquire("k", "a", LONG, 1, 0.0)
    assert (both.fences, both.can_list, both.compares_and_sets) == (False, False, False)


def test_a_coalesced_function_has_one_run_there(forbidding: str) -> None:
    room, flights = Room(), SingleFlight("f", cache=forbidding)
    work = lambda: flights.run("k", lambda: room.stay().status_code)  # noqa: E731
    assert fly(room, work, work, work) == [201] * 3
    assert room.visits == 1


async def test_a_coalesced_task_has_one_run_there(forbidding: str) -> None:
    room, flights = Room(), SingleFlight("f", cache=forbidding)

    async def stay() -> int:
        return (await room.astay()).status_code

    assert await afly(room, *[lambda: flights.arun("k", stay)] * 3) == [201] * 3
    assert room.visits == 1


def test_where_scripts_are_allowed_nothing_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    store = get_store("default")
    assert isinstance(store, RedisOrCacheStore)
    assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
    assert (store.fences, store.compares_and_sets) == (True, True)
    assert caplog.text == ""


def test_threads_that_find_out_together_share_one_fallback(
    forbidding: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, start, answers = get_store(forbidding), threading.Barrier(6, timeout=PATIENCE), []

    def ask(number: int) -> None:
        start.wait()
        answers.append((store.acquire("k", f"t{number}", LONG, 1, 0.0), f"t{number}"))

    for thread in in_threads([lambda number=number: ask(number) for number in range(6)]):
        thread.join(PATIENCE)
    (winner,) = (token for answer, token in answers if isinstance(answer, Grant))
    assert store.release("k", winner) is True
    assert caplog.text.count("does not let us run scripts") == 1


def test_the_lock_works_there_with_renewal_and_with_waiting(forbidding: str) -> None:
    done: list[bool] = []

    def wait() -> None:
        with semaphore_lock("k", cache=forbidding, wait=PATIENCE):
            done.append(True)

    with semaphore_lock("k", ttl=2, cache=forbidding) as lease:
        first = lease.expires
        (waiter,) = in_threads([wait])
        until(lambda: lease.expires > first, "a renewal")
        lease.check()
        assert done == []
    waiter.join(PATIENCE)
    assert done == [True]


async def test_the_lock_works_there_in_async_code_too(forbidding: str) -> None:
    async with semaphore_lock("k", cache=forbidding):
        with pytest.raises(LeaseConflictError):
            await asyncio.create_task(enter(forbidding))


async def enter(alias: str) -> None:
    # As another request, which doesn't hold it.
    context._held.set(())
    async with semaphore_lock("k", cache=alias):
        raise AssertionError("two holders at once")
