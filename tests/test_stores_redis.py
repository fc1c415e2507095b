"""The store's laws on Redis and Valkey, by every road to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches

from singleflight_django.stores.base import Claim, Conflict, Grant, Store
from singleflight_django.stores.redis.store import store_on
from tests.servers import Cluster, Sentinel, Valkey
from tests.store_contract import LONG, StoreContract

ThePlace = Callable[..., str]


class OfRedis(StoreContract):
    """What every Redis store has besides: a look at the server itself."""

    alias = "default"

    @pytest.fixture
    def store(self) -> Store:
        return store_on(self.alias, "laws")

    @pytest.fixture
    def server(self, redis_client: redis.Redis) -> redis.Redis:
        return redis_client

    def test_it_compares_and_sets_on_the_server_fences_and_wakes(self, store: Store) -> None:
        assert store.compares_and_sets
        assert store.fences
        assert store.longest_block > 0

    def test_nothing_on_the_server_lives_for_ever(self, store: Store, server: redis.Redis) -> None:
        store.acquire("k", "a", 5.0, 1, 0.0)
        store.acquire("k", "b", 5.0, 1, 3.0)
        assert_all_end(server, within=50.0)
        store.release("k", "a")
        assert_all_end(server, within=50.0)
        store.acquire("k", "b", 0.0004, 2, 0.0)
        assert_all_end(server, within=50.0)

    def test_the_ttl_on_the_server_is_the_one_that_was_asked_for(
        self, store: Store, server: redis.Redis
    ) -> None:
        store.acquire("k", "a", 5.0, 1, 0.0)
        lease = next(key for key in server.scan_iter(count=1000) if key.endswith(b":lease"))
        assert 4000 < server.pttl(lease) <= 5000


def assert_all_end(server: redis.Redis, within: float) -> None:
    keys = list(server.scan_iter(count=1000))
    assert keys
    for key in keys:
        # -1: never; -2: it has ended since.
        assert server.pttl(key) in (-2, *range(int(within * 1000) + 1)), key


class TestDjangoRedis(OfRedis):
    alias = "default"


class TestDjangosOwnRedisCache(OfRedis):
    alias = "core"


class TestDjangoValkey(OfRedis):
    alias = "valkey"


class TestSentinel(OfRedis):
    @pytest.fixture
    def store(self, sentinel: Sentinel, settings: Any) -> Iterator[Store]:
        settings.CACHES = {
            **settings.CACHES,
            "sentinel": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": f"redis://{sentinel.service}/0",
                "OPTIONS": {
                    "CLIENT_CLASS": "django_redis.client.SentinelClient",
                    "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                    "SENTINELS": [("127.0.0.1", sentinel.watcher.port)],
                    "SENTINEL_KWARGS": {"socket_timeout": 2},
                    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
                    "SOCKET_TIMEOUT": 2,
                },
            },
        }
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


def cluster_alias(cluster: Cluster) -> dict[str, Any]:
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": cluster.url(),
        "OPTIONS": {"CONNECTION_FACTORY": "tests.clusters.ClusterFactory", "SOCKET_TIMEOUT": 2},
    }
