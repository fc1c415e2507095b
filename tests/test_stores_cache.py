"""The store's laws on ``cache.add``, for the caches whose add is atomic."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Claim, Grant, Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.waiting import clock
from tests.store_contract import LONG, Calls, StoreContract


class OfCaches(StoreContract):
    """Caches count whole seconds: a store may round up to one."""

    finest = 1.0
    brief = 1.0
    alias = "default"

    @pytest.fixture
    def store(self) -> Store:
        return CacheStore(self.alias)

    def test_it_reads_then_writes_and_has_no_clock(self, store: Store) -> None:
        assert not store.compares_and_sets
        assert not store.fences
        assert not store.longest_block

    def test_the_lease_is_an_entry_of_the_cache_under_the_key_itself(self, store: Store) -> None:
        store.acquire("ns:k", "a", LONG, 1, 0.0)
        assert self.alias in caches
        assert caches[self.alias].get("ns:k") is not None
        store.release("ns:k", "a")
        assert caches[self.alias].get("ns:k") is None


class TestOnDjangoRedis(OfCaches):
    alias = "default"


class TestOnDjangosOwnRedisCache(OfCaches):
    alias = "core"

    @pytest.fixture
    def calls(self, store: Store) -> Calls:
        # Its laws wait for whole seconds, and the a-twins are the same on every cache.
        return Calls(store)


class TestOnLocmem(OfCaches):
    alias = "locmem"


class TestOnMemcached(OfCaches):
    @pytest.fixture
    def store(self, memcached: str, settings: Any) -> Iterator[Store]:
        settings.CACHES = {
            **settings.CACHES,
            "memcached": {
                "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
                "LOCATION": memcached,
                # Others use the same server: what is there is not ours to clear.
                "KEY_PREFIX": uuid.uuid4().hex[:8],
            },
        }
        yield CacheStore("memcached")
        caches["memcached"].close()

    alias = "memcached"


class TestACacheThatIsAway:
    """Guarantee 6: an outage is never "held by someone else"."""

    @pytest.mark.parametrize("alias", ["dead", "dead_core", "dead_ignoring"])
    def test_a_dead_server_is_no_conflict(self, alias: str) -> None:
        store = CacheStore(alias)
        with pytest.raises(StoreUnavailableError):
            store.acquire("k", "a", LONG, 1, 0.0)

    @pytest.mark.parametrize("alias", ["dead", "dead_core", "dead_ignoring"])
    async def test_a_dead_server_is_no_conflict_for_async_callers(self, alias: str) -> None:
        store = CacheStore(alias)
        with pytest.raises(StoreUnavailableError):
            await store.aacquire("k", "a", LONG, 1, 0.0)

    @pytest.mark.parametrize("alias", ["dead", "dead_core"])
    def test_a_dead_server_neither_confirms_nor_denies(self, alias: str) -> None:
        store = CacheStore(alias)
        with pytest.raises(StoreUnavailableError):
            store.release("k", "a")
        with pytest.raises(StoreUnavailableError):
            store.renew([Claim("k", "a", LONG)])

    def test_a_dead_memcached_is_no_conflict_however_often_it_is_asked(self, settings: Any) -> None:
        """pymemcache raises once, and then says "not added" for a while (measured)."""
        settings.CACHES = {
            **settings.CACHES,
            "dead_memcached": {
                "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
                "LOCATION": settings.CACHES["dead"]["LOCATION"].split("/")[2],
            },
        }
        store = CacheStore("dead_memcached")
        for _ in range(5):
            with pytest.raises(StoreUnavailableError):
                store.acquire("k", "a", LONG, 1, 0.0)

    @pytest.mark.parametrize(
        "backend",
        ["dummy.DummyCache", "filebased.FileBasedCache", "db.DatabaseCache"],
    )
    def test_a_cache_whose_add_has_several_winners_is_refused(
        self, backend: str, settings: Any, tmp_path: Path
    ) -> None:
        settings.CACHES = {
            **settings.CACHES,
            "unfit": {
                "BACKEND": f"django.core.cache.backends.{backend}",
                "LOCATION": str(tmp_path),
            },
        }
        with pytest.raises(StoreUnavailableError, match="SINGLEFLIGHT_CACHE"):
            CacheStore("unfit").acquire("k", "a", LONG, 1, 0.0)


def test_a_cache_that_ignores_errors_works_while_its_server_does() -> None:
    store = CacheStore("ignoring")
    assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
    assert store.release("k", "a") is True


# What the store remembers of its own leases


@pytest.mark.parametrize("alias", ["default", "locmem"])
def test_two_keys_with_several_places_are_both_given_back(alias: str) -> None:
    store = CacheStore(alias)
    for key in ("k1", "k2"):
        store.acquire(key, "other", LONG, 3, 0.0)
        assert isinstance(store.acquire(key, "a", LONG, 3, 0.0), Grant)
    assert store.renew([Claim("k1", "a", LONG), Claim("k2", "a", LONG)]) == [True, True]
    assert store.release("k2", "a") is True
    assert store.release("k1", "a") is True
    assert store.release("k1", "a") is False


def test_a_lease_of_another_store_object_is_found_by_its_text() -> None:
    """As after a change of settings."""
    CacheStore("locmem").acquire("k", "a", LONG, 1, 0.0)
    assert CacheStore("locmem").renew([Claim("k", "a", LONG)]) == [True]
    assert CacheStore("locmem").release("k", "a") is True


def test_a_renewal_or_release_at_the_very_end_leaves_it_to_lapse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the read and the write the lease would end, and a successor's begin."""
    monkeypatch.setattr("singleflight_django.stores.cache.MARGIN", LONG + 1)
    store = CacheStore("locmem")
    store.acquire("k", "a", LONG, 1, 0.0)
    assert store.renew([Claim("k", "a", LONG)]) == [False]
    assert store.release("k", "a") is True
    assert caches["locmem"].get("k") is not None


def test_leases_that_were_left_to_lapse_are_forgotten_some_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CacheStore("locmem")
    for number in range(1000):
        store.acquire(f"k{number}", "a", LONG, 1, 0.0)
    later = clock() + LONG + 100
    monkeypatch.setattr("singleflight_django.stores.cache.clock", lambda: later)
    store.acquire("k", "a", LONG, 1, 0.0)
    assert list(store._held) == [("k", "a")]


async def test_async_callers_use_the_connections_of_their_own_context(redis_client: Any) -> None:
    """In a thread's copy of the context each call would make a cache, and connect, anew."""
    store = CacheStore("core")
    await store.aacquire("k", "a", LONG, 1, 0.0)
    before = redis_client.info("stats")["total_connections_received"]
    for _ in range(5):
        await store.aacquire("k", "a", LONG, 1, 0.0)
    assert await store.arelease("k", "a") is True
    assert redis_client.info("stats")["total_connections_received"] == before
    caches["core"].close()
