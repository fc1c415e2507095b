"""What every test gets: an empty store, an empty cache, and servers on demand."""

from __future__ import annotations

import gc
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import django
import pytest
import redis
from django.apps import apps
from django.core.cache import caches
from django.db import connections, transaction
from django.db.models import QuerySet
from django.test import TransactionTestCase
from django_redis.pool import ConnectionFactory

from singleflight_django import functions
from tests import servers
from tests import settings as run
from tests.proxy import Proxy

_session_servers = pytest.StashKey[list[servers.Server]]()


def pytest_configure(config: pytest.Config) -> None:
    # The controller of pytest-xdist runs no test.
    if config.getoption("numprocesses", None) and not os.environ.get("PYTEST_XDIST_WORKER"):
        return
    os.makedirs(run.RUN_DIRECTORY, exist_ok=True)
    config.stash[_session_servers] = []
    if os.environ.get("SINGLEFLIGHT_TEST_REDIS_URL"):
        _refuse_a_used_database()
    else:
        _start(config, servers.Valkey(port=servers.port_of(run.REDIS_URL)))
    if run.DEFAULT_DATABASE == "postgres":
        _start_postgres(config)


def pytest_collection_finish() -> None:
    """What there is by now stays: let no garbage collection look through thousands of tests again."""
    gc.collect()
    gc.freeze()


def _start(config: pytest.Config, server: servers.Server) -> None:
    config.stash[_session_servers].append(server)
    server.start()


def _start_postgres(config: pytest.Config) -> None:
    started = any(isinstance(s, servers.Postgres) for s in config.stash[_session_servers])
    if not started and not os.environ.get("SINGLEFLIGHT_TEST_POSTGRES_URL"):
        _start(config, servers.Postgres(port=servers.port_of(run.POSTGRES_URL)))


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in config.stash.get(_session_servers, []):
        server.stop()
    if os.environ.get("SINGLEFLIGHT_TEST_REDIS_URL") and _session_servers in config.stash:
        with redis.Redis.from_url(run.REDIS_URL) as client:
            client.flushdb()
    shutil.rmtree(run.RUN_DIRECTORY, ignore_errors=True)


def _refuse_a_used_database() -> None:
    with redis.Redis.from_url(run.REDIS_URL) as client:
        if client.dbsize():
            pytest.exit(f"{run.REDIS_URL} is not empty, and the tests empty it", returncode=3)


@pytest.fixture(scope="session")
def _flusher() -> Iterator[redis.Redis]:
    """One connection for all tests: to make one takes redis-py as long as an empty test."""
    with redis.Redis.from_url(run.REDIS_URL) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty_store(_flusher: redis.Redis) -> None:
    """No lease and no cached value outlives its test."""
    _flusher.flushdb()
    caches["locmem"].clear()


@pytest.fixture(autouse=True)
def _only_its_own_functions() -> Iterator[None]:
    """What a SingleFlight of another test names is nothing for this one's checks."""
    before, functions.made = functions.made, WeakSet()
    yield
    functions.made = before


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Tests with transactions of their own don't flush: that is 50 ms, for the content types again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", _empty_its_databases)
        yield


@pytest.fixture(scope="session")
def django_db_modify_db_settings() -> None:
    """Each worker of pytest-xdist has its own directory, so that its databases need no suffix."""


def service(variable: str, what: str) -> str:
    """Where a named service is. Without one the test is skipped, in CI it fails."""
    where = os.environ.get(variable, "")
    if not where and os.environ.get("CI") == "true":
        pytest.fail(f"CI has to run {what} and to set {variable}")
    if not where:
        pytest.skip(f"needs {what}: set {variable}")
    return where


def _add_database(alias: str, **different: Any) -> Iterator[str]:
    connections.settings[alias] = connections.configure_settings(
        {**connections.settings, alias: {**run.database(alias), **different}}
    )[alias]
    os.environ[run.MORE_DATABASES] = f"{os.environ.get(run.MORE_DATABASES, '')} {alias}"
    creation = connections[alias].creation
    # Django 6.0 has taken the serializing out, and warns of the argument.
    options = {} if django.VERSION >= (6, 0) else {"serialize": False}
    name = creation.create_test_db(verbosity=0, autoclobber=True, **options)
    yield alias
    creation.destroy_test_db(name, verbosity=0)


@pytest.fixture(scope="session")
def sqlite(django_db_blocker: Any, django_db_setup: None) -> Iterator[str]:
    """A second database on SQLite, with Django's own options; returns its alias."""
    name = os.path.join(run.RUN_DIRECTORY, "second.sqlite3")
    with django_db_blocker.unblock():
        yield from _add_database("sqlite", NAME=name, TEST={"NAME": name}, OPTIONS=run.UNSAFE)


@pytest.fixture(scope="session")
def postgres(
    request: pytest.FixtureRequest, django_db_blocker: Any, django_db_setup: None
) -> Iterator[str]:
    """A second database on PostgreSQL; returns its alias, for ``django_db(databases=[...])``."""
    _start_postgres(request.config)
    with django_db_blocker.unblock():
        yield from _add_database("postgres")


@pytest.fixture(scope="session")
def mariadb(django_db_blocker: Any, django_db_setup: None) -> Iterator[str]:
    """A second database on MariaDB; returns its alias. Needs SINGLEFLIGHT_TEST_MARIADB_URL."""
    service("SINGLEFLIGHT_TEST_MARIADB_URL", "MariaDB")
    with django_db_blocker.unblock():
        yield from _add_database("mariadb")


class OneDatabase:
    """A router that sends everything to one alias."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: object, **hints: object) -> str:
        return self.alias

    db_for_write = db_for_read


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def using(request: pytest.FixtureRequest, settings: Any, django_db_blocker: Any) -> Iterator[str]:
    """Each database in turn, emptied afterwards; what says no alias goes there.

    No TestCase: there are real transactions, in any number of threads.
    """
    alias: str = request.getfixturevalue(request.param)
    settings.DATABASE_ROUTERS = [OneDatabase(alias)]
    with django_db_blocker.unblock():
        yield alias
        _empty(alias, "library", "lessons")
        connections.close_all()


def _empty_its_databases(test: TransactionTestCase) -> None:
    # What "migrate" has written into the others stays.
    labels = ("admin", "auth", "library", "lessons", "sessions", "singleflight_django")
    for alias in test._databases_names(include_mirrors=False):
        _empty(alias, *labels)


def _empty(alias: str, *labels: str) -> None:
    """What ``flush`` does, a hundred times faster where next to nothing is there."""
    connection = connections[alias]
    with connection.constraint_checks_disabled(), transaction.atomic(using=alias):
        for label in labels:
            for model in apps.get_app_config(label).get_models(include_auto_created=True):
                if model._meta.label != "auth.Permission":
                    QuerySet(model, using=alias)._raw_delete(alias)


@pytest.fixture(scope="session")
def memcached() -> str:
    """host:port of a memcached. Needs SINGLEFLIGHT_TEST_MEMCACHED."""
    return service("SINGLEFLIGHT_TEST_MEMCACHED", "memcached")


@pytest.fixture(scope="session")
def sentinel() -> Iterator[servers.Sentinel]:
    """A primary, a replica and a Sentinel. Shared: a failover test starts its own."""
    with servers.Sentinel() as started:
        yield started


@pytest.fixture(scope="session")
def cluster() -> Iterator[servers.Cluster]:
    """A cluster of three primaries. Shared."""
    with servers.Cluster() as started:
        yield started


@pytest.fixture
def redis_url() -> str:
    """The URL of the run's own server. Shared: don't stop it, see ``redis_server``."""
    return run.REDIS_URL


@pytest.fixture
def redis_client() -> Iterator[redis.Redis]:
    """A plain client of the run's own server, for a look from outside."""
    with redis.Redis.from_url(run.REDIS_URL) as client:
        yield client


@pytest.fixture
def redis_server() -> Iterator[servers.Valkey]:
    """A server for this test alone: stop it, pause it, fill it."""
    with servers.Valkey() as server:
        yield server


@pytest.fixture
def proxy(redis_server: servers.Valkey) -> Iterator[Proxy]:
    """A proxy before ``redis_server`` that loses, holds and cuts on demand."""
    with Proxy(redis_server.port) as between:
        yield between


@pytest.fixture
def cache_at(settings: Any) -> Iterator[Callable[..., str]]:
    """``cache_at(url, **options)`` adds a django-redis alias for a URL and returns its name.

    ``backend="core"`` makes it Django's own Redis backend.
    """
    names: list[str] = []
    pools = dict(ConnectionFactory._pools)

    def add(url: str, backend: str = "django_redis", **options: Any) -> str:
        make = run.django_core if backend == "core" else run.django_redis
        name = f"extra_{len(names)}_{uuid.uuid4().hex[:6]}"
        names.append(name)
        # django-redis keeps one pool for each URL, whatever the options of the alias.
        ConnectionFactory._pools.pop(url, None)
        settings.CACHES = {**settings.CACHES, name: make(url, **options)}
        return name

    yield add
    for name in names:
        caches[name].close()
    for url, pool in ConnectionFactory._pools.items():
        if pools.get(url) is not pool:
            pool.disconnect()
    ConnectionFactory._pools.clear()
    ConnectionFactory._pools.update(pools)
