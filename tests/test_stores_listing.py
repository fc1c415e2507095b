"""The live list on a server that is busy, large, shared or not to be trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.db import connections
from django.test.utils import CaptureQueriesContext

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.lease import Lease
from singleflight_django.models import Lease as Row
from singleflight_django.stores.base import Claim, Grant, Store
from singleflight_django.stores.database.leases import digest_of
from singleflight_django.stores.database.listing import CHUNK
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.redis.listing import BATCH
from singleflight_django.stores.redis.store import ScriptsForbiddenError, store_on
from singleflight_django.stores.registry import get_store
from tests.servers import Cluster, Valkey
from tests.test_stores_redis import cluster_alias

CacheAt = Callable[..., str]
LONG = 60.0


def plant(client: redis.Redis, number: int, prefix: str = "laws") -> None:
    """As many leases as ``number`` says, written past the store, which would take a minute."""
    pipeline = client.pipeline(transaction=False)
    seconds, _ = client.time()
    for n in range(number):
        name = f"{prefix}:{{bulk:{n}}}:lease"
        pipeline.zadd(name, {f"t{n}@far:{n}": (seconds + 600) * 1_000_000})
        pipeline.pexpire(name, 600_000)
        if n % 5000 == 4999:
            pipeline.execute()
    pipeline.execute()


def commands_of(client: redis.Redis) -> dict[str, Any]:
    return {
        name.removeprefix("cmdstat_"): stat for name, stat in client.info("commandstats").items()
    }


@pytest.mark.parametrize(
    "many", [10_000, pytest.param(100_000, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_however_many_keys_are_walked_over_in_small_steps(
    many: int, redis_server: Valkey, cache_at: CacheAt
) -> None:
    store = store_on(cache_at(redis_server.url()), "laws")
    with redis_server.client() as client:
        plant(client, many)
        client.mset({f"site:cached:{n}": n for n in range(10_000)})
        client.config_resetstat()
        assert sum(1 for _ in store.holdings()) >= many
        stats = commands_of(client)
        assert "keys" not in stats
        assert stats["scan"]["calls"] >= many // 1000
        # No step holds the server up: the mean is far below a millisecond for a thousand keys.
        assert stats["scan"]["usec_per_call"] < 10_000
        listing = store.holdings()
        next(listing)
        client.config_resetstat()
        for _ in range(BATCH - 1):
            next(listing)
        # Nothing is read ahead: who looks at the first page asks for the first page.
        assert "scan" not in commands_of(client)


def test_a_filter_reads_only_the_leases_that_match(redis_server: Valkey, cache_at: CacheAt) -> None:
    store = store_on(cache_at(redis_server.url()), "laws")
    with redis_server.client() as client:
        plant(client, 2000)
        client.config_resetstat()
        assert {h.key for h in store.holdings("bulk:1999")} == {"bulk:1999"}
        assert commands_of(client)["zrangebyscore"]["calls"] == 1


@pytest.mark.parametrize("prefix", ["l*", "l[a]ws", "l?ws", "laws\\"])
def test_a_prefix_is_no_pattern(redis_client: redis.Redis, prefix: str) -> None:
    odd, plain = store_on("default", prefix), store_on("default", "laws")
    odd.acquire("odd", "a", LONG, 1, 0.0)
    plain.acquire("plain", "a", LONG, 1, 0.0)
    assert [h.key for h in odd.holdings()] == ["odd"]
    assert [h.key for h in plain.holdings()] == ["plain"]


def test_a_key_of_the_sites_own_that_looks_like_a_lease_is_passed_over(
    redis_client: redis.Redis,
) -> None:
    store = store_on("default", "laws")
    redis_client.set("laws:{k}:lease", "not a lease")
    store.acquire("mine", "a", LONG, 1, 0.0)
    assert [h.key for h in store.holdings()] == ["mine"]


def test_a_lease_that_has_lapsed_is_not_listed_though_its_entry_is_there(
    redis_client: redis.Redis,
) -> None:
    store = store_on("default", "laws")
    store.acquire("k", "a", 0.001, 2, 0.0)
    store.acquire("k", "b", LONG, 2, 0.0)
    seconds, _ = redis_client.time()
    redis_client.zadd("laws:{k}:lease", {"dead": (seconds - 5) * 1_000_000})
    assert [h.token for h in store.holdings()] == ["b"]


def test_a_cluster_is_listed_on_every_primary(cluster: Cluster, settings: Any) -> None:
    settings.CACHES = {**settings.CACHES, "cluster": cluster_alias(cluster)}
    store = store_on("cluster", "everywhere")
    try:
        for n in range(60):
            store.acquire(f"k{n}", f"t{n}@web:{n}", LONG, 1, 0.0)
        assert {h.key for h in store.holdings()} == {f"k{n}" for n in range(60)}
        for node in cluster.nodes:
            with node.client() as client:
                assert "cmdstat_keys" not in client.info("commandstats")
        (one,) = store.holdings("k59")
        assert one.holder == "web:59"
        assert store.evict(one) is True
        assert list(store.holdings("k59")) == []
    finally:
        caches["cluster"].close()


def test_the_age_of_a_lease_is_known_for_as_long_as_it_is_renewed(
    redis_client: redis.Redis,
) -> None:
    store = store_on("default", "laws")
    granted = store.acquire("k", "a", 0.1, 1, 0.0)
    assert isinstance(granted, Grant)
    assert store.renew([Claim("k", "a", LONG)]) == [True]
    # The fence is remembered from the last renewal on, not from the acquisition.
    assert redis_client.pttl("laws:{k}:fence") > 9 * LONG * 1000
    (holding,) = store.holdings()
    assert holding.fence == granted.fence


@pytest.fixture
def without_scripts(redis_server: Valkey, cache_at: CacheAt) -> Store:
    with redis_server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "site", "on", ">secret", "~*", "&*", "+@all", "-eval", "-evalsha"
        )
        plant(client, 3, "singleflight")
    return get_store(cache_at(f"redis://site:secret@127.0.0.1:{redis_server.port}/0"))


def test_where_scripts_are_forbidden_the_list_says_so_before_and_after_it_is_known(
    without_scripts: Store,
) -> None:
    with pytest.raises(ScriptsForbiddenError):
        list(without_scripts.holdings())
    without_scripts.acquire("k", "a", LONG, 1, 0.0)
    assert not without_scripts.can_list
    with pytest.raises(NotImplementedError, match="can't list"):
        list(without_scripts.holdings())


def test_a_server_that_is_away_is_not_an_empty_list() -> None:
    with pytest.raises(StoreUnavailableError):
        list(get_store("dead").holdings())


def test_a_lease_in_use_is_listed_by_its_process() -> None:
    store = get_store()
    lease = Lease(store, ("ns:k",), LONG, emit=lambda *args, **facts: None)
    store.acquire("ns:k", lease.token, LONG, 1, 0.0)
    (holding,) = store.holdings("ns:")
    assert holding.holder == lease.token.partition("@")[2]
    assert holding.token not in repr(holding)


def test_a_table_is_read_in_chunks_and_by_its_prefix(using: str) -> None:
    mine, other = DatabaseStore("mine"), DatabaseStore("other")
    other.acquire("k", "theirs", LONG, 1, 0.0)
    mine.acquire("k", "mine", LONG, 1, 0.0)
    mine.acquire("gone", "a", LONG, 1, 0.0)
    mine.release("gone", "a")
    far = int((mine.now("k") + 600) * 1_000_000)
    Row.objects.bulk_create(
        Row(
            digest=digest_of("mine", f"bulk:{n}"),
            key=f"bulk:{n}",
            token=str(n),
            ends=far,
            until=far,
        )
        for n in range(2 * CHUNK + 10)
    )
    assert [each.token for each in other.holdings()] == ["theirs"]
    listed = [each.key for each in mine.holdings()]
    assert len(listed) == len(set(listed)) == 2 * CHUNK + 11
    assert [each.key for each in mine.holdings(f"bulk:{2 * CHUNK}")] == [f"bulk:{2 * CHUNK}"]
    with CaptureQueriesContext(connections[using]) as queries:
        next(mine.holdings())
    # Only the first chunk was asked for.
    assert len([each for each in queries if "LIMIT" in each["sql"]]) == 1
