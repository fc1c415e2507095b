"""The store's laws on Redis and Valkey, by every road to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches

from singleflight_django.stores.base import Claim, Conflict, Grant, Store
from singleflight_django.stores.redis.store import store_on
from tests.servers import Cluster, Sentinel, Valkey
from tests.settings import REDIS_URL, SOCKET_TIMEOUT
from tests.store_contract import LONG, StoreContract

CacheAt = Callable[..., str]


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


def sentinel_alias(sentinel: Sentinel) -> dict[str, Any]:
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://{sentinel.service}/0",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", sentinel.watcher.port)],
            "SENTINEL_KWARGS": {"socket_timeout": SOCKET_TIMEOUT},
            "SOCKET_TIMEOUT": SOCKET_TIMEOUT,
        },
    }


def cluster_alias(cluster: Cluster) -> dict[str, Any]:
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": cluster.url(),
        "OPTIONS": {
            "CONNECTION_FACTORY": "tests.clusters.ClusterFactory",
            "SOCKET_TIMEOUT": SOCKET_TIMEOUT,
        },
    }


# Settings of the cache that must not matter to a lease

ENCODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "pickle": ("django_redis", {}),
    "json": ("django_redis", {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"}),
    "msgpack": (
        "django_redis",
        {"SERIALIZER": "django_redis.serializers.msgpack.MSGPackSerializer"},
    ),
    "zlib": ("django_redis", {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"}),
    "text": ("django_redis", {"CONNECTION_POOL_KWARGS": {"decode_responses": True}}),
    "utf16": ("django_redis", {"CONNECTION_POOL_KWARGS": {"encoding": "utf-16"}}),
    "herd": ("django_redis", {"CLIENT_CLASS": "django_redis.client.HerdClient"}),
    "core": ("core", {}),
    "core-json": ("core", {"serializer": "tests.test_stores_redis.JSONSerializer"}),
    "core-text": ("core", {"decode_responses": True}),
    "resp3": ("django_redis", {"CONNECTION_POOL_KWARGS": {"protocol": 3}}),
}


class JSONSerializer:
    """A serializer for Django's own Redis cache."""

    def dumps(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def loads(self, data: bytes) -> Any:
        return json.loads(data)


@pytest.fixture(params=ENCODINGS)
def encoded(request: pytest.FixtureRequest, cache_at: CacheAt) -> str:
    backend, options = ENCODINGS[request.param]
    return cache_at(REDIS_URL, backend=backend, **options)


def test_a_token_is_known_again_however_the_cache_encodes(
    encoded: str, redis_client: redis.Redis
) -> None:
    store = store_on(encoded, "laws")
    assert isinstance(store.acquire("k", "a", 5.0, 1, 0.0), Grant)
    (lease,) = redis_client.scan_iter("*:lease")
    assert 4000 < redis_client.pttl(lease) <= 5000
    assert store.renew([Claim("k", "a", 5.0)]) == [True]
    assert isinstance(store.acquire("k", "b", 5.0, 1, 0.0), Conflict)
    assert store.release("k", "a") is True
    assert list(redis_client.scan_iter("*:lease")) == []
    assert isinstance(store.acquire("k", "b", 5.0, 1, 0.0), Grant)


async def test_a_token_is_known_again_by_async_callers_too(encoded: str) -> None:
    store = store_on(encoded, "laws")
    assert isinstance(store.acquire("k", "a", 5.0, 1, 0.0), Grant)
    assert await store.arenew([Claim("k", "a", 5.0)]) == [True]
    assert await store.arelease("k", "a") is True
    assert isinstance(await store.aacquire("k", "b", 5.0, 1, 0.0), Grant)
    assert store.release("k", "b") is True


def test_caches_with_other_prefixes_and_versions_contend(settings: Any) -> None:
    """Blue and green run side by side during a deploy, on caches that don't share a value."""
    settings.CACHES = {
        **settings.CACHES,
        "blue": {**settings.CACHES["default"], "KEY_PREFIX": "blue"},
        "green": {**settings.CACHES["core"], "KEY_PREFIX": "green", "VERSION": 2},
    }
    assert isinstance(store_on("blue", "laws").acquire("k", "a", LONG, 1, 0.0), Grant)
    assert isinstance(store_on("green", "laws").acquire("k", "b", LONG, 1, 0.0), Conflict)
    assert isinstance(store_on("valkey", "laws").acquire("k", "b", LONG, 1, 0.0), Conflict)


def test_stores_with_other_prefixes_do_not_contend() -> None:
    assert isinstance(store_on("default", "one").acquire("k", "a", LONG, 1, 0.0), Grant)
    assert isinstance(store_on("default", "two").acquire("k", "b", LONG, 1, 0.0), Grant)


def test_all_entries_of_a_key_live_on_one_node(cluster: Cluster, settings: Any) -> None:
    settings.CACHES = {**settings.CACHES, "cluster": cluster_alias(cluster)}
    store = store_on("cluster", "one-node")
    for number in range(30):
        store.acquire(f"k{number}", "a", LONG, 1, 0.0)
        store.acquire(f"k{number}", "b", LONG, 1, LONG)
    tags = [node_tags(node) for node in cluster.nodes]
    assert all(tags)
    assert sum(map(len, tags)) == len(set[bytes]().union(*tags)) == 30


def node_tags(node: Valkey) -> set[bytes]:
    with node.client() as client:
        return {key.split(b"{")[1].split(b"}")[0] for key in client.scan_iter("one-node:*")}
