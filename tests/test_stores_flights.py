"""The laws of flights, on every store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Busy, Kept, Landing, Led, Publishing, Status, Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis.store import store_on
from singleflight_django.stores.registry import get_store
from tests.flight_contract import AGAIN, DONE, FAILED, VACANT, FlightContract, Flights
from tests.servers import Cluster, Sentinel, Valkey
from tests.settings import REDIS_URL
from tests.store_contract import LONG, PATIENCE
from tests.test_stores_redis import (
    ENCODINGS,
    CacheAt,
    assert_all_end,
    cluster_alias,
    sentinel_alias,
)


class OfRedis(FlightContract):
    """What every Redis store has besides."""

    alias = "default"

    @pytest.fixture
    def store(self) -> Store:
        return store_on(self.alias, "laws")

    @pytest.fixture
    def server(self, redis_client: redis.Redis) -> redis.Redis:
        return redis_client

    def test_a_join_sent_again_leads_the_same_flight(self, flights: Flights) -> None:
        """Guarantee 2: the reply to the first was lost."""
        led = flights.lead("a")
        assert flights.lead("a")[:3] == led[:3]
        assert flights.follow("b").flight == led.flight

    def test_a_landing_wakes_who_waits_for_it(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        other = Flights(flights.store)
        publisher = threading.Timer(0.1, other.publish, ("a", led.flight, DONE, b"one"))
        publisher.start()
        begin = time.monotonic()
        landing = flights.wait(led.flight, seconds=flights.store.longest_block)
        publisher.join(PATIENCE)
        assert landing is not None
        assert landing.payload == b"one"
        # Not woken, it would look again after a second.
        assert time.monotonic() - begin < 0.95

    def test_a_landing_before_the_wait_is_not_missed(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        flights.publish("a", led.flight, DONE, b"one")
        for _ in range(2):
            landing = flights.wait(led.flight, seconds=1.0)
            assert landing is not None
            assert landing.payload == b"one"
        assert flights.wait(led.flight, landing.seen) is None

    def test_an_outcome_that_nobody_follows_leaves_nothing(
        self, flights: Flights, server: redis.Redis
    ) -> None:
        led = flights.lead("a")
        flights.publish("a", led.flight, DONE, b"one" * 1000)
        assert [key for key in server.scan_iter(count=1000) if not key.endswith(b":fence")] == []

    def test_nothing_on_the_server_lives_for_ever(
        self, flights: Flights, server: redis.Redis
    ) -> None:
        led = flights.lead("a", ttl=5.0, wait=5.0, life=20.0)
        flights.follow("b", wait=5.0)
        assert_all_end(server, within=50.0)
        flights.publish("a", led.flight, AGAIN, linger=5.0)
        assert_all_end(server, within=50.0)
        seen = flights.join("b", flight=led.flight).seen  # type: ignore[union-attr]
        flights.lead("b", flight=led.flight, seen=seen, ttl=5.0, wait=5.0, life=20.0)
        flights.publish("b", led.flight, DONE, b"one", keep=5.0, apart=5.0)
        assert_all_end(server, within=50.0)

    def test_nobody_follows_at_first(self, flights: Flights) -> None:
        assert flights.ask("followed", "k") is False
        flights.lead("a")
        assert flights.ask("followed", "k") is False

    @pytest.mark.parametrize("status", [FAILED, VACANT])
    def test_who_comes_while_passengers_take_part_again_goes_on_with_their_flight(
        self, flights: Flights, status: Status
    ) -> None:
        """Or else its flight would have all its tries anew. They are known to the leader only."""
        led = flights.lead("a")
        told = flights.publish("a", led.flight, status, retry=1, passengers=True, linger=LONG)
        assert told == {FAILED: AGAIN, VACANT: VACANT}[status]
        newcomer = flights.lead("b")
        assert newcomer.flight == led.flight
        assert newcomer.takeovers == (status == VACANT)
        last = flights.publish("b", led.flight, FAILED, retry=1)
        assert last == {FAILED: FAILED, VACANT: AGAIN}[status]

    def test_a_newcomer_goes_on_with_a_dead_leaders_flight_for_its_followers(
        self, flights: Flights
    ) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        assert flights.lead("c")[0::2][:2] == (led.flight, 1)
        assert flights.follow("b", flight=led.flight).flight == led.flight

    def test_a_newcomer_to_a_flight_with_too_many_dead_leaders_begins_its_own(
        self, flights: Flights
    ) -> None:
        led = flights.lead("a", ttl=self.brief, takeovers=0)
        flights.lapse("b")
        assert flights.lead("c", takeovers=0).flight > led.flight
        told = flights.join("b", flight=led.flight)
        assert isinstance(told, Landing)
        assert told.status == FAILED

    def test_a_flight_has_nothing_of_the_one_before(self, flights: Flights) -> None:
        led = flights.lead("a", fingerprint="p")
        flights.follow("b", fingerprint="p")
        assert flights.publish("a", led.flight, FAILED, retry=1) == AGAIN
        fresh = flights.lead("c", fingerprint="q")
        assert (fresh.flight > led.flight, fresh.takeovers) == (True, 0)
        flights.follow("d", fingerprint="q")
        # Its own first failure, with a try left.
        assert flights.publish("c", fresh.flight, FAILED, retry=1) == AGAIN

    @pytest.mark.parametrize("entry", [":lease", ":flight", ":fence"])
    def test_what_the_server_evicts_costs_a_run_and_no_more(
        self, flights: Flights, server: redis.Redis, entry: str
    ) -> None:
        led = flights.lead("a", fingerprint="p")
        flights.follow("b", fingerprint="p")
        for key in list(server.scan_iter(count=1000)):
            if key.endswith(entry.encode()):
                server.delete(key)
        joined = flights.join("b", fingerprint="p", flight=led.flight)
        assert isinstance(joined, Led if entry == ":lease" else Busy)
        published = flights.publish("a", led.flight, DONE, b"one", keep=5.0)
        assert published == (None if entry == ":lease" else DONE)
        after = flights.join("c", fingerprint="p")
        assert not isinstance(after, Landing)
        assert_all_end(server, within=400.0)


class TestDjangoRedis(OfRedis):
    alias = "default"


class TestDjangosOwnRedisCache(OfRedis):
    alias = "core"


class TestDjangoValkey(OfRedis):
    alias = "valkey"


class TestSentinel(OfRedis):
    @pytest.fixture
    def store(self, sentinel: Sentinel, settings: Any) -> Iterator[Store]:
        settings.CACHES = {**settings.CACHES, "sentinel": sentinel_alias(sentinel)}
        with sentinel.primary.client() as client:
            client.flushall()
        yield store_on("sentinel", "laws")
        caches["sentinel"].close()

    @pytest.fixture
    def server(self, sentinel: Sentinel) -> Iterator[redis.Redis]:
        with sentinel.primary.client() as client:
            yield client


class TestCluster(OfRedis):
    @pytest.fixture
    def store(self, cluster: Cluster, settings: Any) -> Iterator[Store]:
        settings.CACHES = {**settings.CACHES, "cluster": cluster_alias(cluster)}
        for node in cluster.nodes:
            with node.client() as client:
                client.flushall()
        yield store_on("cluster", "laws")
        caches["cluster"].close()

    @pytest.fixture
    def server(self, cluster: Cluster) -> Iterator[redis.RedisCluster]:
        with redis.RedisCluster(host="127.0.0.1", port=cluster.port) as client:
            yield client


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_outcomes_are_the_same_however_the_cache_encodes(encoding: str, cache_at: CacheAt) -> None:
    backend, options = ENCODINGS[encoding]
    flights = Flights(store_on(cache_at(REDIS_URL, backend=backend, **options), "laws"))
    led = flights.lead("a")
    flights.follow("b")
    flights.publish("a", led.flight, DONE, b"\xff\0one", keep=LONG)
    news, kept = flights.wait(led.flight), flights.join("c")
    assert isinstance(news, Landing)
    assert isinstance(kept, Kept)
    assert news.payload == kept.payload == b"\xff\0one"


# Caches


class OfCaches(FlightContract):
    """Caches count whole seconds."""

    brief = 1.0
    alias = "default"

    @pytest.fixture
    def store(self) -> Store:
        return CacheStore(self.alias)

    @pytest.fixture
    def flights(self, store: Store) -> Flights:
        # Its laws wait for whole seconds, and the a-twins are the same on every cache.
        return Flights(store)


class TestOnDjangoRedis(OfCaches):
    alias = "default"


class TestOnLocmem(OfCaches):
    alias = "locmem"


@pytest.fixture(scope="module")
def refusing() -> Iterator[Valkey]:
    """A server with a user who may do everything but run scripts."""
    with Valkey() as server:
        with server.client() as client:
            client.execute_command(
                "ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-@scripting"
            )
        yield server


@pytest.mark.soak
class TestOnRedisWithoutScripts(OfCaches):
    """It has learned of it; how it does is in ``test_registry``."""

    @pytest.fixture
    def store(self, refusing: Valkey, cache_at: CacheAt) -> Store:
        with refusing.client() as client:
            client.flushall()
        store = get_store(cache_at(refusing.url().replace("//", "//plain:secret@")))
        store.forget("k")
        return store

    # A token that leads nothing here may lead what scripts keep: nobody can tell.
    test_nobody_else_can_publish = None  # type: ignore[assignment]
    test_nobody_can_publish_twice = None  # type: ignore[assignment]
    test_the_lease_ends_with_the_flight = None  # type: ignore[assignment]
    test_a_leader_that_was_taken_over_touches_nothing = None  # type: ignore[assignment]

    def nobody_can_tell(self, flights: Flights, token: str, flight: int) -> None:
        with pytest.raises(StoreUnavailableError):
            flights.publish(token, flight, DONE, b"forged", keep=LONG)
        with pytest.raises(StoreUnavailableError):
            flights.ask("release", "k", token)

    def test_who_does_not_lead_here_touches_nothing(self, flights: Flights) -> None:
        led = flights.lead("a")
        flights.follow("b")
        for token in "bx":
            self.nobody_can_tell(flights, token, led.flight)
        assert flights.wait(led.flight) is None
        assert flights.publish("a", led.flight, DONE, b"one") == DONE
        self.nobody_can_tell(flights, "a", led.flight)
        news = flights.news("b", led.flight)
        assert isinstance(news, Landing)
        assert news.payload == b"one"

    def test_who_was_taken_over_here_touches_nothing(self, flights: Flights) -> None:
        led = flights.lead("a", ttl=self.brief)
        flights.lapse("b")
        flights.lead("b", flight=led.flight)
        assert flights.publish("a", led.flight, DONE, b"late", keep=LONG) is None
        self.nobody_can_tell(flights, "a", led.flight)
        flights.follow("c")
        assert flights.publish("b", led.flight, DONE, b"one") == DONE
        news = flights.news("c", led.flight)
        assert isinstance(news, Landing)
        assert news.payload == b"one"


class TestOnMemcached(OfCaches):
    @pytest.fixture
    def store(self, memcached: str, settings: Any) -> Iterator[Store]:
        settings.CACHES = {
            **settings.CACHES,
            "memcached": {
                "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
                "LOCATION": memcached,
            },
        }
        caches["memcached"].clear()
        yield CacheStore("memcached")
        caches["memcached"].close()


class PickyCache(type(caches["locmem"])):  # type: ignore[misc]
    """Like memcached: no value over 1 MB. ``loud``: whether it says so."""

    loud = True

    def set(self, key: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, str) and len(value) > 1_000_000:
            if self.loud:
                raise ValueError("object too large for cache")
            return
        super().set(key, value, *args, **kwargs)


class SilentCache(PickyCache):
    loud = False


@pytest.mark.parametrize("kind", ["PickyCache", "SilentCache"])
def test_an_outcome_that_the_cache_refuses_is_told_as_unshareable(kind: str, settings: Any) -> None:
    """Followers must not wait for what never comes, nor run the work as if the leader had died."""
    settings.CACHES = {
        **settings.CACHES,
        "picky": {"BACKEND": f"tests.test_stores_flights.{kind}", "LOCATION": "picky"},
    }
    flights = Flights(CacheStore("picky"))
    led = flights.lead("a")
    flights.follow("b")
    told = flights.publish("a", led.flight, DONE, b"x" * 1_000_000)
    assert told == Status.UNSHAREABLE
    news = flights.news("b", led.flight)
    assert isinstance(news, Landing)
    assert news.status == Status.UNSHAREABLE


@pytest.mark.parametrize("alias", ["dead", "dead_core", "dead_ignoring"])
def test_a_cache_that_is_away_is_no_leader_and_no_result(alias: str) -> None:
    flights = Flights(CacheStore(alias))
    with pytest.raises(StoreUnavailableError):
        flights.join("a")


@pytest.mark.parametrize("alias", ["dead", "dead_core", "dead_ignoring"])
def test_a_server_that_is_away_is_no_leader_and_no_result(alias: str) -> None:
    store = store_on(alias, "laws")
    with pytest.raises(StoreUnavailableError):
        Flights(store).join("a")
    with pytest.raises(StoreUnavailableError):
        store.publish("k", Publishing("a", 1, DONE))
    with pytest.raises(StoreUnavailableError):
        store.forget("k")


def test_a_stale_look_and_a_won_lease_do_not_run_the_work_twice() -> None:
    """Between a follower's look for a landing and its ``add`` the leader publishes."""

    class Slow(CacheStore):
        def take(self, *args: Any) -> Any:
            if args[1] == "b":
                leader.publish("a", led.flight, DONE, b"one")
            return super().take(*args)

    leader = Flights(CacheStore("locmem"))
    led = leader.lead("a")
    leader.follow("b")
    news = Flights(Slow("locmem")).join("b", flight=led.flight)
    assert isinstance(news, Landing)
    assert news.payload == b"one"
    leader.lead("c")


def test_the_last_look_finds_what_was_kept_meanwhile() -> None:
    class Slow(CacheStore):
        def take(self, *args: Any) -> Any:
            if args[1] == "b":
                leader.publish("a", led.flight, DONE, b"one", keep=LONG)
            return super().take(*args)

    leader = Flights(CacheStore("locmem"))
    led = leader.lead("a")
    assert isinstance(Flights(Slow("locmem")).join("b"), Kept)
