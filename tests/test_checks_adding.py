"""The checks of leases that go through the cache's own methods: each turned on, and kept off."""

from __future__ import annotations

import pickle
from typing import Any
from weakref import WeakSet

import pytest
import redis

from singleflight_django import semaphore_lock
from singleflight_django.checks import database
from singleflight_django.exceptions import LeaseConflictError, StoreUnavailableError
from singleflight_django.stores.redis import defaults
from singleflight_django.testing import held
from tests.checking import deployment_messages, messages
from tests.meeting import held as held_by_anyone
from tests.settings import DEAD_URL, REDIS_URL, django_core, django_redis

BACKENDS = "django.core.cache.backends"
LOCMEM, CORE = f"{BACKENDS}.locmem.LocMemCache", f"{BACKENDS}.redis.RedisCache"
MEMCACHED = f"{BACKENDS}.memcached.PyMemcacheCache"
REDIS = "django_redis.cache.RedisCache"
JSON = "django_redis.serializers.json.JSONSerializer"


@pytest.fixture(autouse=True)
def _only_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "declared", WeakSet())


@pytest.fixture
def through(settings: Any) -> Any:
    """Set the cache that leases go through."""

    def set_cache(
        backend: str, location: Any = DEAD_URL, store: str | None = "cache", **options: Any
    ) -> None:
        settings.CACHES = {
            "default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        }
        settings.SINGLEFLIGHT_STORE = store

    return set_cache


class TestNothingIsCulled:
    @pytest.mark.parametrize(
        ("options", "more", "most"),
        [
            ({}, {}, 300),
            ({"MAX_ENTRIES": 500}, {}, 500),
            ({"MAX_ENTRIES": "many"}, {}, 300),
            ({"MAX_ENTRIES": 20_000}, {"max_entries": 400}, 400),
        ],
    )
    def test_a_cache_that_keeps_few_entries(
        self, settings: Any, options: Any, more: Any, most: int
    ) -> None:
        settings.CACHES = {"default": {"BACKEND": LOCMEM, "OPTIONS": options, **more}}

        assert f"keeps {most} entries" in deployment_messages()["W040"].msg
        assert "W040" not in messages()

    def test_one_that_keeps_many(self, through: Any) -> None:
        through(LOCMEM, MAX_ENTRIES=10_000)

        assert "W040" not in deployment_messages()

    def test_redis_evicts_as_its_server_is_told_to(self, through: Any) -> None:
        through(REDIS, store=None)

        assert deployment_messages() == {}


class TestWholeSeconds:
    @pytest.mark.parametrize(
        ("backend", "store"), [(REDIS, "cache"), (CORE, "cache"), (MEMCACHED, None)]
    )
    def test_a_ttl_that_is_rounded_up(
        self, settings: Any, through: Any, backend: str, store: str | None
    ) -> None:
        through(backend, store=store, timeout=2)
        settings.SINGLEFLIGHT_TTL = 1.5

        assert "rounded up to 2" in messages()["W041"].msg

    @pytest.mark.parametrize(
        ("backend", "store", "ttl"),
        [(REDIS, None, 1.5), (REDIS, "redis", 1.5), (CORE, None, 1.5), (REDIS, "cache", 2.0)],
    )
    def test_one_that_is_kept(
        self, settings: Any, through: Any, backend: str, store: str | None, ttl: float
    ) -> None:
        through(backend, store=store)
        settings.SINGLEFLIGHT_TTL = ttl

        assert messages() == {}

    def test_the_check_is_true(self, settings: Any, redis_client: redis.Redis) -> None:
        settings.CACHES = {"default": django_redis(REDIS_URL)}
        settings.SINGLEFLIGHT_STORE = "cache"

        with semaphore_lock("job", ttl=1.5):
            (lease,) = redis_client.keys("*job*")
            assert 1900 < redis_client.pttl(lease) <= 2000


class TestReadsSeeWrites:
    @pytest.mark.parametrize(
        ("backend", "location", "options"),
        [
            (REDIS, [DEAD_URL, DEAD_URL], {}),
            (REDIS, f"{DEAD_URL},{DEAD_URL}", {}),
            (CORE, f"{DEAD_URL};{DEAD_URL}", {}),
            (REDIS, DEAD_URL, {"CLIENT_CLASS": "django_redis.client.SentinelClient"}),
        ],
    )
    def test_replicas(self, through: Any, backend: str, location: Any, options: Any) -> None:
        through(backend, location, **options)

        message = messages()["W042"]

        assert 'SINGLEFLIGHT_STORE = "redis"' in str(message.hint)

    @pytest.mark.parametrize("store", [None, "redis"])
    @pytest.mark.parametrize("backend", [REDIS, CORE])
    def test_replicas_that_are_not_asked(
        self, through: Any, backend: str, store: str | None
    ) -> None:
        through(backend, [DEAD_URL, DEAD_URL], store=store)

        assert messages() == {}

    def test_servers_of_memcached_share_the_keys(self, through: Any) -> None:
        through(MEMCACHED, ["127.0.0.1:1", "127.0.0.1:2"], timeout=2)

        assert messages() == {}

    def test_one_server(self, through: Any) -> None:
        through(CORE)

        assert messages() == {}

    @pytest.mark.parametrize("make", [django_redis, django_core])
    def test_the_check_is_true(self, settings: Any, redis_client: redis.Redis, make: Any) -> None:
        """The second server is the first one's other database: a replica that lags for ever."""
        lagging = REDIS_URL.removesuffix("/0") + "/9"
        settings.CACHES = {"default": {**make(REDIS_URL), "LOCATION": [REDIS_URL, lagging]}}

        with held("job"), pytest.raises(LeaseConflictError), semaphore_lock("job"):
            pass
        assert not held_by_anyone("job")

        settings.SINGLEFLIGHT_STORE = "cache"
        with held("job"), pytest.raises(StoreUnavailableError), semaphore_lock("job"):
            pass
        assert redis_client.keys("*:semaphore_lock:job"), "it could be released after all"


class Bomb:
    """Its pickle runs code where it is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return explode, (self.name,)


exploded: list[str] = []


def explode(name: str) -> None:
    exploded.append(name)


class TestNoPickles:
    @pytest.mark.parametrize(
        ("backend", "options"),
        [
            (REDIS, {}),
            (REDIS, {"SERIALIZER": "django_redis.serializers.pickle.PickleSerializer"}),
            (CORE, {}),
        ],
    )
    def test_a_serializer_that_runs_code(self, through: Any, backend: str, options: Any) -> None:
        through(backend, **options)

        assert set(deployment_messages()) == {"W043"}
        assert messages() == {}

    @pytest.mark.parametrize(
        ("backend", "store", "options"),
        [
            (REDIS, "cache", {"SERIALIZER": JSON}),
            (CORE, "cache", {"serializer": JSON}),
            (REDIS, None, {}),
            (REDIS, "redis", {}),
            (CORE, None, {}),
        ],
    )
    def test_records_that_run_none(
        self, through: Any, backend: str, store: str | None, options: Any
    ) -> None:
        through(backend, store=store, **options)

        assert deployment_messages() == {}

    @pytest.mark.parametrize(
        ("store", "serializer", "runs"),
        [("cache", None, True), ("cache", JSON, False), ("redis", None, False)],
    )
    def test_the_check_is_true(
        self, settings: Any, redis_client: redis.Redis, store: str, serializer: Any, runs: bool
    ) -> None:
        options = {} if serializer is None else {"SERIALIZER": serializer}
        settings.CACHES = {"default": django_redis(REDIS_URL, **options)}
        settings.SINGLEFLIGHT_STORE = store
        # A late renewal of another test's lease must not set this one off.
        name = f"job:{store}:{serializer or 'default'}"
        with held(name):
            for key in redis_client.keys("*"):
                if redis_client.type(key) == b"string":
                    redis_client.set(key, pickle.dumps(Bomb(name)), ex=10)
            with pytest.raises((LeaseConflictError, StoreUnavailableError)), semaphore_lock(name):
                pass

        assert (name in exploded) is runs


class TestAHangEnds:
    @pytest.mark.parametrize(
        ("backend", "options", "name"),
        [
            (MEMCACHED, {}, "timeout"),
            (CORE, {"socket_timeout": None}, "socket_timeout"),
            (REDIS, {"CONNECTION_POOL_KWARGS": {"socket_timeout": None}}, "SOCKET_TIMEOUT"),
        ],
    )
    def test_a_client_that_waits_for_ever(
        self, through: Any, backend: str, options: Any, name: str
    ) -> None:
        through(backend, **options)

        assert f"Set {name} in its OPTIONS" in str(messages()["W044"].hint)

    @pytest.mark.parametrize(
        ("backend", "location", "options"),
        [
            (MEMCACHED, "127.0.0.1:1", {"timeout": 2}),
            (f"{BACKENDS}.memcached.PyLibMCCache", "127.0.0.1:1", {}),
            (LOCMEM, "", {}),
            (CORE, DEAD_URL, {"socket_timeout": 2}),
            (REDIS, DEAD_URL, {"SOCKET_TIMEOUT": 2}),
            (REDIS, DEAD_URL, {"CONNECTION_POOL_KWARGS": {"socket_timeout": 2}}),
            (REDIS, f"{DEAD_URL}?socket_timeout=2", {}),
        ],
    )
    def test_a_client_that_gives_up(
        self, through: Any, backend: str, location: str, options: Any
    ) -> None:
        through(backend, location, **options)

        assert "W044" not in messages()

    @pytest.mark.parametrize("backend", [REDIS, CORE])
    def test_our_own_connections_have_a_timeout(self, through: Any, backend: str) -> None:
        name = {REDIS: "CONNECTION_POOL_KWARGS", CORE: "socket_timeout"}[backend]
        through(
            backend, store=None, **{name: {"socket_timeout": None} if backend == REDIS else None}
        )

        assert messages() == {}

    @pytest.mark.parametrize("backend", [REDIS, CORE])
    def test_where_nothing_is_said_the_driver_decides(self, through: Any, backend: str) -> None:
        through(backend)

        assert ("W044" not in messages()) is defaults.gives_up("redis")
