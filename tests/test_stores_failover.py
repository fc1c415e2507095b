"""While Redis is away leases go to the database, and back when it answers again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path

from singleflight_django import SingleFlight, semaphore_lock, single_flight
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.models import Lease, Outcome
from singleflight_django.stores import outages
from singleflight_django.stores.base import (
    Busy,
    Claim,
    Conflict,
    Grant,
    Joining,
    Kept,
    Landing,
    Led,
    Publishing,
    RenewalInDoubtError,
    Status,
    Store,
)
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.failover import FailoverStore
from singleflight_django.stores.outages import Breaker, Places
from singleflight_django.stores.redis.store import store_on
from singleflight_django.stores.registry import backed_by_database, get_store
from tests.flight_contract import FlightContract
from tests.servers import Valkey
from tests.store_contract import LONG, StoreContract

JOINING = Joining("", LONG, LONG)
DONE = Publishing("a", 0, Status.DONE, b"one")


@pytest.mark.django_db(transaction=True)
class TestWhileRedisAnswers(StoreContract, FlightContract):
    @pytest.fixture
    def store(self) -> Store:
        return FailoverStore(store_on("default", "laws"), DatabaseStore("laws"))

    def test_it_can_what_redis_can(self, store: Store) -> None:
        assert store.compares_and_sets
        assert store.fences
        assert store.longest_block > 0


@pytest.mark.django_db(transaction=True)
class TestWhileRedisIsAway(StoreContract, FlightContract):
    @pytest.fixture
    def store(self) -> Store:
        store = FailoverStore(store_on("dead", "laws"), DatabaseStore("laws"))
        # It notices by itself: this only lets the laws see one store from the start.
        store.acquire("noticed", "a", LONG, 1, 0.0)
        return store

    # Whatever was not taken here may be in the store that is away: nobody can tell.
    test_a_kept_outcome_can_be_forgotten = None  # type: ignore[assignment]
    test_to_forget_leaves_the_flight_under_way_alone = None  # type: ignore[assignment]
    test_nobody_else_can_publish = None  # type: ignore[assignment]
    test_nobody_can_publish_twice = None  # type: ignore[assignment]
    test_the_lease_ends_with_the_flight = None  # type: ignore[assignment]
    test_a_leader_that_was_taken_over_touches_nothing = None  # type: ignore[assignment]
    test_a_second_release_is_told_that_nothing_was_held = None  # type: ignore[assignment]
    test_two_keys_do_not_contend = None  # type: ignore[assignment]
    test_a_wrong_token_neither_renews_nor_releases = None  # type: ignore[assignment]
    test_what_was_never_held_is_neither_renewed_nor_released = None  # type: ignore[assignment]
    test_renewals_are_answered_one_by_one_in_their_order = None  # type: ignore[assignment]
    # The list ends in saying that one store is away: see below.
    test_a_store_that_can_not_list_says_so = None  # type: ignore[assignment]
    test_it_lists_the_live_leases_with_their_holders = None  # type: ignore[assignment]
    test_it_lists_all_holders_of_a_semaphore = None  # type: ignore[assignment]
    test_a_filter_is_a_plain_text = None  # type: ignore[assignment]
    test_a_lease_that_is_evicted_is_free = None  # type: ignore[assignment]
    test_it_lists_a_flight_under_way_with_its_followers = None  # type: ignore[assignment]
    test_a_follower_takes_over_what_is_evicted = None  # type: ignore[assignment]

    def test_it_lists_the_database_and_then_says_that_the_first_store_is_away(
        self, store: Store
    ) -> None:
        listing = store.holdings()
        holding = next(listing)
        assert (holding.key, holding.token) == ("noticed", "a")
        with pytest.raises(StoreUnavailableError):
            next(listing)
        assert store.evict(holding) is True
        with pytest.raises(StoreUnavailableError):
            store.evict(holding)

    @pytest.mark.parametrize("known", [True, False])
    def test_nobody_can_tell_of_a_lease_that_was_not_taken_here(
        self, store: Store, known: bool
    ) -> None:
        if known:
            store.acquire("k", "a", LONG, 1, 0.0)
            store.release("k", "a")
        with pytest.raises(StoreUnavailableError):
            store.release("k", "a")
        with pytest.raises(StoreUnavailableError):
            store.renew([Claim("k", "a", LONG)])
        with pytest.raises(StoreUnavailableError):
            store.publish("k", DONE)

    def test_it_can_what_the_database_can(self, store: Store) -> None:
        assert not store.longest_block
        assert Lease.objects.count() == 1


@pytest.fixture
def redis_and_database(
    redis_server: Valkey, cache_at: Callable[..., str], transactional_db: None, monkeypatch: Any
) -> Store:
    """A store whose server can be killed and started; nobody rests before he looks again."""
    monkeypatch.setattr(outages, "REST", 0.0)
    first = store_on(cache_at(redis_server.url()), "laws")
    return FailoverStore(first, DatabaseStore("laws"))


class TestAnOutage:
    def test_a_lease_goes_to_the_database_and_the_next_back_to_redis(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        redis_server.kill()
        assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)
        assert Lease.objects.count() == 1
        redis_server.start()
        assert store.renew([Claim("k", "a", LONG)]) == [True]
        assert store.release("k", "a") is True
        assert isinstance(store.acquire("k", "c", LONG, 1, 0.0), Grant)
        assert Lease.objects.filter(token="c").count() == 0

    async def test_so_it_does_for_async_callers(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        await asyncio.to_thread(redis_server.kill)
        assert isinstance(await store.aacquire("k", "a", LONG, 1, 0.0), Grant)
        assert isinstance(await store.aacquire("k", "b", LONG, 1, 0.0), Conflict)
        assert await store.await_free("k", 0.01) is False
        await asyncio.to_thread(redis_server.start)
        assert await store.arenew([Claim("k", "a", LONG)]) == [True]
        assert await store.arelease("k", "a") is True
        assert isinstance(await store.aacquire("k", "c", LONG, 1, 0.0), Grant)
        assert await store.arelease("k", "c") is True

    def test_a_waiter_is_sent_to_the_database_at_once(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        store.acquire("k", "a", LONG, 1, 0.0)
        assert isinstance(store.acquire("k", "b", LONG, 1, LONG), Conflict)
        redis_server.kill()
        assert store.wait_free("k", 1.0) is True
        assert isinstance(store.acquire("k", "b", LONG, 1, LONG), Grant)

    def test_a_flight_in_the_database_is_landed_there(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        redis_server.kill()
        led = store.join("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        busy = store.join("k", JOINING._replace(token="b"))
        assert isinstance(busy, Busy)
        assert store.wait_landing("k", busy.flight, "0", 0.01) is None
        redis_server.start()
        assert store.followed("k") is True
        now = store.now("k")
        assert now is not None
        assert abs(now - busy.now) < LONG
        assert store.publish("k", DONE._replace(flight=led.flight, keep=LONG)) == Status.DONE
        assert Outcome.objects.count() == 1

    def test_followers_of_a_flight_whose_store_went_away_begin_another(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        led = store.join("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        busy = store.join("k", JOINING._replace(token="b"))
        assert isinstance(busy, Busy)
        redis_server.kill()
        assert store.wait_landing("k", busy.flight, "0", 1.0) is None
        anew = store.join("k", JOINING._replace(token="b", flight=busy.flight))
        assert isinstance(anew, Led)
        assert anew.flight > led.flight
        with pytest.raises(StoreUnavailableError):
            store.publish("k", DONE._replace(flight=led.flight))

    def test_each_renewal_is_told_of_its_own_store(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        store.acquire("there", "a", LONG, 1, 0.0)
        redis_server.kill()
        store.acquire("here", "a", LONG, 1, 0.0)
        claims = [Claim("there", "a", LONG), Claim("here", "a", LONG), Claim("here", "x", LONG)]
        with pytest.raises(RenewalInDoubtError) as caught:
            store.renew(claims)
        assert caught.value.answers == [None, True, None]
        assert store.renew([]) == []

    def test_a_lease_that_both_may_have_is_given_back_to_both(
        self, redis_and_database: Store, redis_server: Valkey, cache_at: Callable[..., str]
    ) -> None:
        """Redis carried the acquire out, and was away before its reply came."""
        store = redis_and_database
        redis_server.kill()
        store.acquire("k", "a", LONG, 1, 0.0)
        redis_server.start()
        redis = store_on(cache_at(redis_server.url()), "laws")
        redis.acquire("k", "a", LONG, 1, 0.0)
        store.acquire("other", "b", LONG, 1, 0.0)
        assert store.release("k", "a") is True
        assert isinstance(redis.acquire("k", "b", LONG, 1, 0.0), Grant)

    def test_what_is_kept_is_forgotten_in_both(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        for away in (False, True):
            if away:
                redis_server.kill()
            led = store.join("k", JOINING._replace(token="a"))
            assert isinstance(led, Led)
            store.publish("k", DONE._replace(flight=led.flight, keep=LONG))
            assert isinstance(store.join("k", JOINING._replace(token="b")), Kept)
            if not away:
                store.forget("k")
        with pytest.raises(StoreUnavailableError):
            store.forget("k")
        assert isinstance(store.join("k", JOINING._replace(token="b")), Led)

    async def test_so_it_is_for_async_callers(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        await asyncio.to_thread(redis_server.kill)
        led = await store.ajoin("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        busy = await store.ajoin("k", JOINING._replace(token="b"))
        assert isinstance(busy, Busy)
        assert await store.await_landing("k", led.flight, "0", 0.01) is None
        assert await store.afollowed("k") is True
        assert await store.anow("k") is not None
        done = DONE._replace(flight=led.flight, keep=LONG)
        assert await store.apublish("k", done) == Status.DONE
        news = await store.ajoin("k", JOINING._replace(token="b", flight=led.flight))
        assert isinstance(news, Landing)
        await asyncio.to_thread(redis_server.start)
        await store.aforget("k")

    def test_a_store_that_went_away_again_does_not_keep_a_lease_from_being_given_back(
        self, redis_and_database: Store, redis_server: Valkey
    ) -> None:
        store = redis_and_database
        redis_server.kill()
        store.acquire("k", "a", LONG, 1, 0.0)
        redis_server.start()
        store.acquire("other", "b", LONG, 1, 0.0)
        redis_server.kill()
        assert store.release("k", "a") is True
        assert isinstance(store.acquire("k", "c", LONG, 1, 0.0), Grant)

    def test_both_away_is_away(self, monkeypatch: Any) -> None:
        store = FailoverStore(store_on("dead", "laws"), store_on("dead_core", "laws"))
        with pytest.raises(StoreUnavailableError):
            store.acquire("k", "a", LONG, 1, 0.0)
        with pytest.raises(StoreUnavailableError):
            store.release("k", "a")

    def test_it_is_told_once_when_the_store_goes_and_once_when_it_comes_back(
        self, redis_and_database: Store, redis_server: Valkey, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = redis_and_database
        with caplog.at_level(logging.WARNING, "singleflight_django"):
            redis_server.kill()
            for token in "ab":
                store.acquire(token, token, LONG, 1, 0.0)
            redis_server.start()
            for token in "cd":
                store.acquire(token, token, LONG, 1, 0.0)
        assert [record.message.split(",")[0] for record in caplog.records] == [
            "The store is away",
            "The store answers again",
        ]


class TestTheBreaker:
    def test_while_it_is_open_one_caller_looks_at_a_time(self, monkeypatch: Any) -> None:
        breaker = Breaker()
        assert breaker.lets_through()
        breaker.trip(StoreUnavailableError("away"))
        assert breaker.away
        assert not breaker.lets_through()
        later = breaker._again_at
        monkeypatch.setattr(outages, "clock", lambda: later)
        assert [breaker.lets_through() for _ in range(3)] == [True, False, False]
        breaker.mend()
        assert not breaker.away
        assert breaker.lets_through()

    def test_leases_that_nobody_gave_back_are_not_remembered_for_ever(
        self, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(outages, "MANY", 2)
        places = Places()
        places.add("k1", "a", LONG)
        places.add("k2", "a", -1)
        places.add("k3", "a", LONG)
        assert [places.has(key, "a") for key in ("k1", "k2", "k3")] == [True, False, True]
        places.note_renewal([Claim("k1", "a", -1), Claim("k2", "a", LONG)])
        places.add("k4", "a", LONG)
        assert [places.has_key(key) for key in ("k1", "k2", "k4")] == [False, False, True]


@semaphore_lock(key="order:7", on_store_error="database")
def locked(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(request.lease.fence))  # type: ignore[attr-defined]


@single_flight(key="order:7", scope="global", result_ttl=LONG, on_store_error="database")
def flown(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(Lease.objects.count()))


@semaphore_lock(key="order:7", on_store_error="database")
async def locked_async(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(request.lease.fence))  # type: ignore[attr-defined]


urlpatterns = [path("locked", locked), path("flown", flown), path("locked-async", locked_async)]


@pytest.mark.urls(__name__)
@pytest.mark.django_db(transaction=True)
class TestGuards:
    """``on_store_error="database"``, and a site without Redis at all."""

    @pytest.fixture(autouse=True, params=["dead", "none"])
    def _no_redis(self, request: pytest.FixtureRequest, settings: Any) -> None:
        settings.SINGLEFLIGHT_CACHE = "dead"
        if request.param == "none":
            settings.SINGLEFLIGHT_STORE = "database"

    def test_a_lock_is_held_in_the_database(self, client: Client) -> None:
        assert client.post("/locked").status_code == 200
        assert Lease.objects.get().key == "semaphore_lock:order:7"
        with semaphore_lock("order:7", on_store_error="database") as lease:
            assert Lease.objects.get().fence == lease.fence

    def test_a_conflict_is_answered_as_ever(self, client: Client) -> None:
        store = backed_by_database(get_store())
        store.acquire("semaphore_lock:order:7", "someone else", LONG, 1, 0.0)
        assert client.post("/locked").status_code == 429
        store.release("semaphore_lock:order:7", "someone else")
        assert client.post("/locked").status_code == 200

    async def test_so_it_is_for_async_views(self, async_client: AsyncClient) -> None:
        assert (await async_client.post("/locked-async")).status_code == 200
        store = backed_by_database(get_store())
        await store.aacquire("semaphore_lock:order:7", "someone else", LONG, 1, 0.0)
        assert (await async_client.post("/locked-async")).status_code == 429

    def test_a_flights_outcome_is_kept_in_the_database(self, client: Client) -> None:
        first, second = client.get("/flown"), client.get("/flown")
        assert first.content == second.content == b"1"
        assert "stored" in first.headers["Cache-Status"]
        assert "hit" in second.headers["Cache-Status"]
        assert Outcome.objects.count() == 1

    async def test_functions_are_coalesced(self) -> None:
        flights = SingleFlight("answers", result_ttl=LONG, on_store_error="database")
        runs: list[int] = []

        async def work() -> int:
            runs.append(1)
            await asyncio.sleep(0.05)
            return len(runs)

        answers = await asyncio.gather(*(flights.arun("k", work) for _ in range(8)))
        assert answers == [1] * 8
        assert await flights.arun("k", work) == 1


class TestRegistry:
    def test_a_store_has_the_database_behind_it_once(self, settings: Any) -> None:
        store = get_store()
        both = backed_by_database(store)
        assert isinstance(both, FailoverStore)
        assert backed_by_database(store) is both
        settings.SINGLEFLIGHT_PREFIX = "another"
        other = backed_by_database(get_store())
        assert other is not both
        settings.SINGLEFLIGHT_PREFIX = "singleflight"
        assert backed_by_database(get_store()) is both

    def test_options_are_checked(self) -> None:
        with pytest.raises(ValueError, match="'reject', 'proceed', 'database'"):
            semaphore_lock("k", on_store_error="elsewhere")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    connections["default"].close()
