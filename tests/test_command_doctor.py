"""``manage.py singleflight doctor``: each misconfiguration is planted for real, and has to be found."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.management import CommandError, call_command
from django.db import connections
from freezegun import freeze_time

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Conflict, Joining, Led, Publishing
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis import scripts
from singleflight_django.stores.redis.links import Link
from singleflight_django.stores.redis.rights import DISPENSABLE, scratch_commands
from singleflight_django.stores.redis.store import RedisStore, store_on
from tests import clusters
from tests.conftest import OneDatabase
from tests.proxy import Proxy
from tests.servers import Cluster, Sentinel, Valkey, until
from tests.settings import database
from tests.test_stores_redis import cluster_alias, sentinel_alias

CacheAt = Callable[..., str]


class Report(NamedTuple):
    findings: list[dict[str, str]]
    failed: bool

    def levels(self, name: str) -> list[str]:
        return [each["level"] for each in self.findings if each["name"] == name]

    def one(self, name: str) -> dict[str, str]:
        (found,) = (each for each in self.findings if each["name"] == name)
        return found

    def errors(self) -> set[str]:
        return {each["name"] for each in self.findings if each["level"] == "error"}


def doctor(alias: str = "default", *arguments: str) -> Report:
    out, failed = StringIO(), False
    try:
        call_command("singleflight", "doctor", "--json", "--cache", alias, *arguments, stdout=out)
    except CommandError:
        failed = True
    document = json.loads(out.getvalue())
    assert document["ok"] is not failed
    return Report(document["findings"], failed)


@pytest.fixture
def lasting() -> Iterator[Valkey]:
    """A server as it should be."""
    with Valkey("--appendonly", "yes") as server:
        yield server


def user_on(server: Valkey, *rules: str) -> str:
    """The URL of a user of ``server`` with these rights."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "site", "reset", "on", ">secret", *rules)
    return f"redis://site:secret@127.0.0.1:{server.port}/0"


# As it should be


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_a_server_as_it_should_be_has_no_findings(
    lasting: Valkey, cache_at: CacheAt, backend: str
) -> None:
    report = doctor(cache_at(lasting.url(), backend), "--strict")
    assert not report.failed
    assert {each["level"] for each in report.findings} == {"ok"}
    names = [each["name"] for each in report.findings]
    for name in ("server", "role", "eviction", "persistence", "clock", "rights", "smoke"):
        assert name in names
    assert re.match(r"(Valkey|Redis) \d+\.\d+", report.one("server")["text"])


def test_it_leaves_nothing_behind(lasting: Valkey, cache_at: CacheAt) -> None:
    doctor(cache_at(lasting.url()))
    with lasting.client() as client:
        left = list(client.scan_iter())
        # A fence is remembered for some time, and so is an outcome.
        assert all(0 < client.pttl(key) <= 200_000 or client.pttl(key) == -2 for key in left)
        assert not [key for key in left if key.endswith(b":lease")]


def test_sentinel_and_cluster_are_fine_too(
    sentinel: Sentinel, cluster: Cluster, settings: Any
) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "sentinel": sentinel_alias(sentinel),
        "cluster": cluster_alias(cluster),
    }
    try:
        for alias in ("sentinel", "cluster"):
            report = doctor(alias)
            assert not report.failed, report
            assert report.levels("smoke") == ["ok"]
        assert report.levels("cluster") == ["ok"] * 3
        assert "1 replica" in doctor("sentinel").one("replicas")["text"]
    finally:
        for alias in ("sentinel", "cluster"):
            caches[alias].close()


def test_it_prints_each_finding_with_its_cure(redis_server: Valkey, cache_at: CacheAt) -> None:
    out = StringIO()
    call_command(
        "singleflight", "doctor", "--cache", cache_at(redis_server.url()), stdout=out, no_color=True
    )
    text = out.getvalue()
    assert re.search(r"^warning +persistence +Nothing is kept on disk", text, re.M)
    assert re.search(r"^ +-> appendonly yes", text, re.M)
    assert text.endswith("\n0 errors, 1 warning.\n")


# What is planted


def test_a_replica(sentinel: Sentinel, cache_at: CacheAt) -> None:
    report = doctor(cache_at(sentinel.replica.url()))
    assert report.failed
    assert report.errors() == {"role"}
    assert "primary" in report.one("role")["cure"]
    assert report.one("smoke")["level"] == "unknown"


def test_an_eviction_policy(cache_at: CacheAt) -> None:
    with Valkey("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        alias = cache_at(server.url())
        report = doctor(alias)
        assert not report.failed
        assert report.one("eviction")["level"] == "warning"
        assert "noeviction" in report.one("eviction")["cure"]
        assert doctor(alias, "--strict").failed
        with server.client() as client:
            client.config_set("maxmemory", 0)
        assert doctor(alias).one("eviction")["level"] == "info"


def test_a_full_memory(redis_server: Valkey, cache_at: CacheAt) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory", 1)
    report = doctor(cache_at(redis_server.url()))
    assert report.failed
    assert "memory" in report.errors()
    assert "warning" in report.levels("memory")


def test_scripts_that_are_forbidden(redis_server: Valkey, cache_at: CacheAt) -> None:
    url = user_on(redis_server, "~*", "&*", "+@all", "-eval", "-evalsha")
    report = doctor(cache_at(url))
    assert not report.failed
    assert report.one("scripts")["level"] == "warning"
    assert "+eval" in report.one("scripts")["cure"]
    # It still excludes, by another way.
    assert report.levels("smoke") == ["ok"]


@pytest.mark.parametrize("command", ["xadd", "zadd", "hincrby", "pexpire", "time"])
def test_a_right_that_is_missing(redis_server: Valkey, cache_at: CacheAt, command: str) -> None:
    url = user_on(redis_server, "~*", "&*", "+@all", f"-{command}")
    report = doctor(cache_at(url))
    assert report.errors() == {"rights"}
    assert report.one("rights")["cure"].endswith(f"+{command}")


@pytest.mark.parametrize("command", [name.lower() for name in DISPENSABLE])
def test_a_right_that_can_be_done_without(
    redis_server: Valkey, cache_at: CacheAt, command: str
) -> None:
    url = user_on(redis_server, "~*", "&*", "+@all", f"-{command}")
    report = doctor(cache_at(url))
    assert not report.failed
    assert report.one("rights")["level"] == "warning"
    assert report.levels("smoke") == ["ok"]


def test_keys_that_the_user_may_not_use(redis_server: Valkey, cache_at: CacheAt) -> None:
    report = doctor(cache_at(user_on(redis_server, "~site:*", "&*", "+@all")))
    assert report.errors() == {"keys"}
    assert report.one("keys")["cure"].endswith("~singleflight:*")


def test_no_persistence_and_snapshots_only(redis_server: Valkey, cache_at: CacheAt) -> None:
    alias = cache_at(redis_server.url())
    assert doctor(alias).one("persistence")["level"] == "warning"
    with redis_server.client() as client:
        client.config_set("save", "3600 1")
    assert doctor(alias).one("persistence")["level"] == "info"


def test_a_dead_server() -> None:
    report = doctor("dead")
    assert report.failed
    assert "reach" in report.errors()


def test_a_wrong_password(redis_server: Valkey, cache_at: CacheAt) -> None:
    user_on(redis_server, "~*", "+@all")
    report = doctor(cache_at(f"redis://site:wrong@127.0.0.1:{redis_server.port}/0"))
    assert report.failed
    assert "login" in report.errors()
    assert "wrong" not in json.dumps(report.findings).replace("WRONGPASS", "").lower().split()


@pytest.mark.parametrize("alias", ["dummy", "locmem", "files"])
def test_a_cache_that_can_not_keep_leases(settings: Any, tmp_path: Path, alias: str) -> None:
    files = {
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": str(tmp_path),
    }
    settings.CACHES = {**settings.CACHES, "files": files}
    report = doctor(alias)
    assert report.failed
    assert "server" in report.errors()


def test_a_database_cache(settings: Any) -> None:
    backend = "django.core.cache.backends.db.DatabaseCache"
    settings.CACHES = {**settings.CACHES, "table": {"BACKEND": backend, "LOCATION": "cache_table"}}
    report = doctor("table")
    assert "several winners" in report.one("server")["text"]
    assert "server" in report.errors()


def test_slots_that_nobody_serves(settings: Any) -> None:
    with Cluster() as cluster:
        entry = cluster_alias(cluster)
        settings.CACHES = {**settings.CACHES, "cluster": entry}
        try:
            assert not doctor("cluster").failed
            for node in cluster.nodes:
                with node.client() as client:
                    client.execute_command("CLUSTER", "DELSLOTS", 7)
            report = doctor("cluster")
            assert report.errors() == {"cluster"}
            texts = [each["text"] for each in report.findings if each["name"] == "cluster"]
            assert any("16383 of 16384" in text for text in texts)
            # Its client can't even be made now.
            clusters.ClusterFactory.clients.clear()
            settings.CACHES = {**settings.CACHES, "again": {**entry}}
            report = doctor("again")
            assert "reach" in report.errors()
            assert "not covered" in report.one("reach")["text"]
        finally:
            caches["cluster"].close()


def test_a_node_of_a_cluster_with_a_client_for_one_server(
    cluster: Cluster, cache_at: CacheAt
) -> None:
    report = doctor(cache_at(cluster.url()))
    assert "cluster" in report.errors()


def test_a_clock_that_is_an_hour_off(redis_server: Valkey, cache_at: CacheAt) -> None:
    alias = cache_at(redis_server.url())
    with freeze_time("2031-05-05 12:00", tick=True):
        report = doctor(alias)
    assert report.one("clock")["level"] == "warning"
    assert "NTP" in report.one("clock")["cure"]


def test_a_long_way_to_the_server(proxy: Proxy, cache_at: CacheAt, settings: Any) -> None:
    settings.SINGLEFLIGHT_TTL = 0.001
    report = doctor(cache_at(f"redis://127.0.0.1:{proxy.port}/0"))
    assert report.one("round-trip")["level"] == "warning"


def test_a_client_without_a_timeout(redis_server: Valkey, cache_at: CacheAt) -> None:
    pool = {"socket_timeout": None}
    report = doctor(cache_at(redis_server.url(), CONNECTION_POOL_KWARGS=pool, SOCKET_TIMEOUT=None))
    assert report.one("timeouts")["level"] == "info"


def test_a_library_that_is_switched_off(settings: Any) -> None:
    settings.SINGLEFLIGHT_ENABLED = False
    assert doctor().one("settings")["level"] == "warning"


def test_an_alias_that_does_not_exist_and_a_store_that_can_not_be_made(settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = "tests.nowhere.Store"
    report = doctor()
    assert "store" in report.errors()


def test_a_managed_server_that_tells_nothing_of_itself(
    redis_server: Valkey, cache_at: CacheAt
) -> None:
    url = user_on(redis_server, "~*", "&*", "+@all", "-info", "-config", "-role", "-cluster")
    report = doctor(cache_at(url))
    assert not report.failed
    for name in ("server", "role", "eviction", "persistence"):
        assert report.one(name)["level"] == "unknown"
    assert report.levels("smoke") == ["ok"]


# The database


@pytest.fixture
def bare_database(settings: Any, tmp_path: Path, django_db_blocker: Any) -> Iterator[str]:
    """A database that nobody has migrated."""
    different = {"NAME": str(tmp_path / "bare.sqlite3")}
    connections.settings["bare"] = connections.configure_settings(
        {**connections.settings, "bare": {**database("sqlite"), **different}}
    )["bare"]
    settings.SINGLEFLIGHT_STORE = "database"
    settings.DATABASE_ROUTERS = [OneDatabase("bare")]
    with django_db_blocker.unblock():
        yield "bare"
        connections["bare"].close()
        if (kept := connections["bare"].connection) is not None:
            # Django keeps what is in memory.
            kept.close()
        del connections["bare"]
        del connections.settings["bare"]


def test_tables_that_were_not_made(bare_database: str) -> None:
    report = doctor()
    assert report.failed
    assert "tables" in report.errors()
    assert report.one("tables")["cure"] == "manage.py migrate --database bare"


def test_a_database_as_it_should_be(using: str, settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = "database"
    report = doctor()
    assert not report.failed, report
    assert report.levels("tables") == ["ok"]
    assert report.levels("clock") == ["ok"]
    assert report.levels("smoke") == ["ok"]


def test_a_database_that_takes_no_writes(
    postgres: str, settings: Any, django_db_blocker: Any
) -> None:
    settings.SINGLEFLIGHT_STORE = "database"
    settings.DATABASE_ROUTERS = [OneDatabase("postgres")]
    with django_db_blocker.unblock():
        connection = connections["postgres"]
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET default_transaction_read_only = on")
            report = doctor()
        finally:
            connection.close()
    assert "role" in report.errors()


def test_the_database_behind_redis_is_examined_if_asked(
    transactional_db: None, redis_server: Valkey, cache_at: CacheAt
) -> None:
    report = doctor(cache_at(redis_server.url()), "--database")
    assert report.levels("tables") == ["ok"]
    assert report.levels("eviction") == ["ok"]


# The smoke test


class Private(CacheStore):
    """A store that each process has for itself, and does not say so."""

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__("locmem")

    def examine(self, ttl: float) -> Iterator[Any]:
        return iter(())


def test_processes_that_do_not_see_each_other(settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = f"{__name__}.Private"
    report = doctor()
    assert report.failed
    assert report.one("smoke")["level"] == "error"
    assert "4 got in" in report.one("smoke")["text"]


class Sticky(Private):
    """A store that gives nothing back."""

    def release(self, key: str, token: str) -> bool:
        return True


def test_a_lease_that_is_not_given_back(settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = f"{__name__}.Sticky"
    report = doctor()
    # The process that held it has gone, and its memory with it: only this one's own shows.
    assert report.one("smoke")["level"] == "error"


def test_memcached_is_tried_out(memcached: str, settings: Any) -> None:
    backend = "django.core.cache.backends.memcached.PyMemcacheCache"
    settings.CACHES = {**settings.CACHES, "mem": {"BACKEND": backend, "LOCATION": memcached}}
    report = doctor("mem")
    assert not report.failed, report
    assert report.levels("atomicity") == ["ok"]
    assert report.levels("smoke") == ["ok"]


# That it keeps up


def test_every_command_of_every_script_is_tried() -> None:
    everything = vars(scripts).values()
    sources = [each.source.decode() for each in everything if isinstance(each, scripts.Script)]
    used = set(re.findall(r"redis\.p?call\('(\w+)'", " ".join(sources)))
    store = store_on("default", "x")
    for watching in (store._free("k", 1.0), store._news("k", 1, "0", 1.0)):
        used |= {str(watching.block[0]), str(watching.look[0])}
    tried = {str(command[0]) for command in scratch_commands("x:")} | {"DEL"}
    assert used <= tried


class OnRedis(RedisStore):
    """A store as it should be, save for what its subclasses do."""

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(Link(alias), prefix)

    def examine(self, ttl: float) -> Iterator[Any]:
        return iter(())


class Refusing(OnRedis):
    def acquire(self, *args: Any) -> Any:
        return Conflict(1.0)


class Keeping(OnRedis):
    def release(self, key: str, token: str) -> bool:
        return True


class Coarse(OnRedis):
    def acquire(self, key: str, *args: Any) -> Any:
        return super().acquire("one for all", *args)

    def release(self, key: str, token: str) -> bool:
        return super().release("one for all", token)


class Immortal(OnRedis):
    def acquire(self, key: str, token: str, ttl: float, *args: Any) -> Any:
        return super().acquire(key, token, ttl * 100, *args)


class Leaderly(OnRedis):
    def join(self, key: str, joining: Joining) -> Any:
        return Led(1, None)


class Garbling(OnRedis):
    def publish(self, key: str, publishing: Publishing) -> Any:
        return super().publish(key, publishing._replace(payload=b"another"))


class Failing(OnRedis):
    def acquire(self, *args: Any) -> Any:
        raise StoreUnavailableError("away")


@pytest.mark.parametrize(
    ("store", "says"),
    [
        (Refusing, "Alone: nobody held the key, and it was refused"),
        (Keeping, "Alone: it was given back, and is still held"),
        (Coarse, "Different keys: with 4 keys only 1 of 4"),
        pytest.param(
            *(Immortal, "Crash: its holder was killed, and 5 s later"), marks=pytest.mark.soak
        ),
        (Leaderly, "Flight: of 4 processes at once 4 led"),
        pytest.param(
            *(Garbling, "Flight: not all followers got the leader's outcome"),
            marks=pytest.mark.soak,
        ),
        (Failing, "Alone: it could not be tried: StoreUnavailableError"),
    ],
)
def test_a_store_with_a_fault_is_found_out(settings: Any, store: type, says: str) -> None:
    settings.SINGLEFLIGHT_STORE = f"{__name__}.{store.__name__}"
    report = doctor()
    assert report.failed
    assert report.one("smoke")["text"].startswith(says)


def test_where_nothing_can_fork_the_smoke_test_says_so(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SINGLEFLIGHT_STORE = f"{__name__}.OnRedis"
    monkeypatch.delattr(os, "fork")
    assert doctor().one("smoke")["level"] == "unknown"


# Through the cache


class Generous(LocMemCache):
    """A cache whose add() has as many winners as callers."""

    def add(self, *args: Any, **kwargs: Any) -> bool:
        return True


def test_leases_that_go_through_a_good_cache(settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = "cache"
    report = doctor()
    assert not report.failed
    assert report.one("server")["level"] == "info"
    assert report.levels("atomicity") == report.levels("smoke") == ["ok"]


def test_a_cache_that_is_away_or_not_atomic(settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = "cache"
    generous = {"BACKEND": f"{__name__}.Generous", "LOCATION": "generous"}
    settings.CACHES = {**settings.CACHES, "generous": generous}
    assert "reach" in doctor("dead").errors()
    report = doctor("generous")
    assert "atomicity" in report.errors()
    assert "8 winners" in report.one("atomicity")["text"]


# Rare states of a server


def test_a_replica_that_does_not_say_so(sentinel: Sentinel, cache_at: CacheAt) -> None:
    with sentinel.replica.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "site", "reset", "on", ">secret", "~*", "+@all", "-info"
        )
    try:
        url = f"redis://site:secret@127.0.0.1:{sentinel.replica.port}/0"
        report = doctor(cache_at(url))
    finally:
        with sentinel.replica.client() as client:
            client.execute_command("ACL", "DELUSER", "site")
    assert report.errors() == {"writes"}


def test_a_server_that_can_not_save(cache_at: CacheAt) -> None:
    with Valkey() as server, server.client() as client:
        client.config_set("save", "3600 1")
        shutil.rmtree(server.directory)
        client.bgsave()
        until(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a failed save"
        )
        report = doctor(cache_at(server.url()))
    assert "writes" in report.errors()
    assert "disk" in report.one("writes")["cure"]


def test_replicas_that_have_to_be_there(sentinel: Sentinel, cache_at: CacheAt) -> None:
    with sentinel.primary.client() as client:
        client.config_set("min-replicas-to-write", 1)
        try:
            report = doctor(cache_at(sentinel.primary.url()))
        finally:
            client.config_set("min-replicas-to-write", 0)
    assert "less than 1 of them" in report.one("replicas")["text"]


# Rare states of a database


def test_a_database_that_is_far_and_an_hour_off(transactional_db: None, settings: Any) -> None:
    settings.SINGLEFLIGHT_STORE = "database"
    settings.SINGLEFLIGHT_TTL = 0.001
    with freeze_time("2031-05-05 12:00", tick=True):
        report = doctor()
    assert report.one("round-trip")["level"] == "warning"
    assert report.one("clock")["level"] == "warning"


@pytest.mark.parametrize(
    ("different", "name"),
    [
        ({"NAME": ":memory:", "OPTIONS": {}}, "server"),
        ({"NAME": "/nowhere/at/all.sqlite3"}, "reach"),
    ],
)
def test_a_database_that_nobody_shares_or_reaches(
    bare_database: str, different: dict[str, Any], name: str
) -> None:
    connections["bare"].close()
    connections["bare"].settings_dict.update(different)
    assert name in doctor().errors()
