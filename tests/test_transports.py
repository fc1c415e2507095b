"""How commands reach the server: on connections of ours, never on one whose reply is still due."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from redis.client import Redis

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Claim, Conflict, Grant, RenewalInDoubtError
from singleflight_django.stores.redis import transports
from singleflight_django.stores.redis.clients import DEFAULT_SOCKET_TIMEOUT, Server, understood
from singleflight_django.stores.redis.commands import Call, pack
from singleflight_django.stores.redis.links import Link
from singleflight_django.stores.redis.scripts import ACQUIRE
from singleflight_django.stores.redis.store import RedisStore, store_on
from singleflight_django.stores.redis.transports import ConnectionTransport
from singleflight_django.waiting import clock
from tests.engine import PATIENCE, in_threads
from tests.proxy import Proxy
from tests.servers import Cluster, Sentinel, Valkey, until
from tests.store_contract import LONG, AsyncCalls, Calls
from tests.tls import TlsEnd

CacheAt = Callable[..., str]


@pytest.fixture
def store(proxy: Proxy, cache_at: CacheAt) -> RedisStore:
    """A store behind the proxy, whose server knows the scripts."""
    made = store_on(cache_at(proxy.url(), SOCKET_TIMEOUT=5, SOCKET_CONNECT_TIMEOUT=5), "t")
    made.acquire("warm", "a", 1.0, 1, 0.0)
    made.renew([Claim("warm", "a", 1.0)])
    made.release("warm", "a")
    proxy.reset()
    return made


def both(store: RedisStore) -> Iterator[Calls]:
    """The store, called from plain code and from an event loop."""
    yield Calls(store)
    with asyncio.Runner() as runner:
        yield AsyncCalls(store, runner.run)


def connections_of(server: Valkey) -> int:
    with server.client() as client:
        # The looker's own one doesn't count.
        return len(client.client_list()) - 1


# Interrupted between the command and its reply


class GreenletExit(BaseException):
    """As gevent's: not an Exception."""


@pytest.mark.parametrize("strike", [SystemExit, KeyboardInterrupt, GreenletExit])
def test_an_interrupted_connection_is_never_used_again(
    strike: type[BaseException], store: RedisStore, proxy: Proxy, redis_server: Valkey
) -> None:
    store.acquire("held", "x", LONG, 1, 0.0)
    trap = proxy.trap(b"mine", then="hold")

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise strike

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def kill() -> None:
        trap.wait()
        signal.pthread_kill(main, signal.SIGUSR1)

    in_threads([kill])
    try:
        with pytest.raises(strike):
            store.acquire("mine", "a", LONG, 1, 0.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    trap.release()
    # Each reply is the one to its own command: a grant would be the interrupted one's.
    for _ in range(5):
        assert isinstance(store.acquire("held", "b", LONG, 1, 0.0), Conflict)
    until(lambda: connections_of(redis_server) <= 1, "the interrupted connection to be closed")


def test_a_wait_that_ended_before_its_reply_leaves_no_late_reply_behind(
    store: RedisStore, proxy: Proxy
) -> None:
    for calls in both(store):
        key = type(calls).__name__
        calls.acquire(key, "x")
        calls.acquire(key, "y", wait=5.0)
        took: list[float] = []
        for _ in range(6):
            begin = clock()
            assert calls.wait_free(key, 0.03) is False
            took.append(clock() - begin)
            assert isinstance(calls.acquire(key, "b"), Conflict)
        # A busy machine delays some of them, never all.
        assert min(took) < 0.09


# Broken and refused


@pytest.mark.parametrize("restart", [False, True])
def test_stale_idle_connections_cost_one_retry_and_no_error(
    store: RedisStore, proxy: Proxy, redis_server: Valkey, restart: bool
) -> None:
    for calls in both(store):
        calls.acquire("k", "a")
        if restart:
            redis_server.restart()
            assert isinstance(calls.acquire("k", "b"), Grant)
            assert calls.release("k", "b") is True
        else:
            proxy.cut()
            assert calls.renew(Claim("k", "a", LONG)) == [True]
            proxy.cut()
            assert calls.wait_free("k", 0.05) is False
            proxy.cut()
            assert calls.release("k", "a") is True


def test_scripts_that_the_server_forgot_are_sent_again(
    store: RedisStore, redis_server: Valkey
) -> None:
    for calls in both(store):
        for number in range(3):
            with redis_server.client() as client:
                client.script_flush()
            key = f"k{number}"
            assert isinstance(calls.acquire(key, "a"), Grant)
            with redis_server.client() as client:
                client.script_flush()
            assert calls.renew(Claim(key, "a", LONG), Claim("?", "a", LONG)) == [True, False]
            with redis_server.client() as client:
                client.script_flush()
            assert calls.release(key, "a") is True


@pytest.fixture(params=["sync", "async"])
def calls(request: pytest.FixtureRequest, store: RedisStore) -> Iterator[Calls]:
    store._link.transport.drop()  # type: ignore[union-attr]
    plain, tasks = both(store), request.param == "async"
    one = next(plain)
    yield next(plain) if tasks else one
    list(plain)


@pytest.mark.parametrize("state", ["READONLY", "MASTERDOWN", "NOAUTH"])
def test_a_server_in_the_wrong_state_loses_its_connections(
    state: str, calls: Calls, redis_server: Valkey
) -> None:
    calls.acquire("k", "a")
    calls.release("k", "a")
    assert connections_of(redis_server) == 1
    with redis_server.client() as client:
        if state == "NOAUTH":
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        else:
            stale = "no" if state == "MASTERDOWN" else "yes"
            client.config_set("replica-serve-stale-data", stale)
            client.replicaof("127.0.0.1", 1)
    with pytest.raises(StoreUnavailableError):
        calls.acquire("k", "b")
    password = "secret" if state == "NOAUTH" else None
    with redis_server.client(password=password) as client:
        until(lambda: len(client.client_list(_type="normal")) == 1, "no connection to be left")
        if state == "NOAUTH":
            client.execute_command("ACL", "SETUSER", "default", "nopass")
        else:
            client.replicaof("NO", "ONE")
    assert isinstance(calls.acquire("k", "b"), Grant)


def test_some_answers_of_a_batch_are_kept_where_others_failed(
    store: RedisStore, redis_server: Valkey
) -> None:
    for calls in both(store):
        calls.acquire("sound", "a")
        with redis_server.client() as client:
            client.set("t:{spoilt}:lease", "not a lease")
        with pytest.raises(RenewalInDoubtError) as caught:
            calls.renew(
                Claim("sound", "a", LONG), Claim("spoilt", "a", LONG), Claim("?", "a", LONG)
            )
        assert caught.value.answers == [True, None, False]
        calls.release("sound", "a")


@pytest.mark.parametrize("within", [None, 0.2])
def test_a_second_try_does_not_double_the_budget(
    store: RedisStore, proxy: Proxy, within: float | None
) -> None:
    """A connection that breaks late was waited for already; one that breaks at once was stale."""
    errors = transports.Failures(store._link.server)
    broken = redis.ConnectionError("gone")
    assert not errors.final(broken, 0.01, within)
    assert errors.final(broken, 3.0, within) is (within is None)
    assert errors.final(redis.AuthenticationError("no"), 0.01, within)
    assert errors.final(redis.BusyLoadingError("loading"), 0.01, within)


# Fork


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_a_fork_parent_and_child_each_have_their_own(
    store: RedisStore, redis_server: Valkey
) -> None:
    store.acquire("k", "a", LONG, 1, 0.0)
    assert connections_of(redis_server) == 1
    child = os.fork()
    if child == 0:
        ok = isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)
        gc.collect()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = connections_of(redis_server)
    assert store.release("k", "a") is True
    # The parent's connection still works: it needed no new one.
    assert connections_of(redis_server) == before


# How many, and for how long


def test_connections_are_taken_last_in_first_out_and_bounded(
    store: RedisStore, redis_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "MOST_IDLE", 3)
    store.acquire("k", "a", LONG, 1, 0.0)
    store.acquire("k", "b", LONG, 1, 5.0)
    waiters = in_threads([lambda: store.wait_free("k", PATIENCE)] * 8)
    with redis_server.client() as client:
        until(lambda: client.info("clients")["blocked_clients"] == 8, "eight waiters")
        client.rpush("t:{k}:free", *range(8))
    for waiter in waiters:
        waiter.join(PATIENCE)
    until(lambda: connections_of(redis_server) <= 3, "the surplus to be closed")
    for _ in range(10):
        store.acquire("k", "b", LONG, 1, 0.0)
    assert connections_of(redis_server) <= 3


async def test_the_connections_of_a_loop_are_bounded_too(
    store: RedisStore, redis_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    from singleflight_django.stores.redis import async_transports

    monkeypatch.setattr(async_transports, "MOST_IDLE", 3)
    before = connections_of(redis_server)
    await asyncio.gather(*(store.aacquire("k", f"t{n}", LONG, 1, 0.0) for n in range(10)))
    await asyncio.to_thread(
        until, lambda: connections_of(redis_server) <= before + 3, "the surplus to be closed"
    )


async def test_a_connection_that_was_idle_for_too_long_is_not_used(
    store: RedisStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from singleflight_django.stores.redis import async_transports

    await store.aacquire("k", "a", LONG, 1, 0.0)
    store.acquire("k", "a", LONG, 1, 0.0)
    proxy.reset()
    monkeypatch.setattr(transports, "IDLE_LIMIT", -1.0)
    monkeypatch.setattr(async_transports, "IDLE_LIMIT", -1.0)
    store.acquire("k", "a", LONG, 1, 0.0)
    await store.aacquire("k", "a", LONG, 1, 0.0)
    assert proxy.connections == 2


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_the_sites_own_pool_is_left_alone(
    backend: str, redis_server: Valkey, cache_at: CacheAt
) -> None:
    options: dict[str, Any] = {"max_connections": 1}
    if backend == "django_redis":
        options = {"CONNECTION_POOL_KWARGS": options}
    alias = cache_at(redis_server.url(), backend=backend, **options)
    store = store_on(alias, "t")
    store.acquire("k", "a", LONG, 1, 0.0)
    store.acquire("k", "b", LONG, 1, 5.0)
    waiters = in_threads([lambda: store.wait_free("k", PATIENCE)] * 5)
    with redis_server.client() as client:
        until(lambda: client.info("clients")["blocked_clients"] == 5, "five waiters")
        # Its only connection is there for the site.
        caches[alias].set("site", 1)
        assert caches[alias].get("site") == 1
        client.rpush("t:{k}:free", *range(5))
    for waiter in waiters:
        waiter.join(PATIENCE)


def test_threads_that_share_a_store_never_read_each_others_replies(store: RedisStore) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(50):
            key = f"k{number}.{turn}"
            answers = (
                store.acquire(key, "a", LONG, 1, 0.0),
                store.acquire(key, "b", LONG, 1, 0.0),
                store.release(key, "a"),
            )
            if [type(answer) for answer in answers] != [Grant, Conflict, bool]:
                wrong.append(answers)
            if turn % 10 == number % 10:
                store._link.transport.drop()  # type: ignore[union-attr]

    for thread in in_threads([lambda number=number: ask(number) for number in range(8)]):
        thread.join(PATIENCE)
    assert wrong == []


# Event loops


def test_each_loop_has_its_own_connections_and_closes_them(
    store: RedisStore, redis_server: Valkey
) -> None:
    """An unclosed one would be a ResourceWarning, and so an error here."""
    store._link.transport.drop()  # type: ignore[union-attr]
    for number in range(3):

        async def use(number: int = number) -> None:
            keys = [f"k{number}.{one}" for one in range(4)]
            await asyncio.gather(*(store.aacquire(key, "a", LONG, 1, 0.0) for key in keys))
            await asyncio.gather(*(store.arelease(key, "a") for key in keys))
            assert connections_of(redis_server) >= 1

        asyncio.run(use())
        gc.collect()
        until(lambda: connections_of(redis_server) == 0, "the loop's connections to be closed")
    assert len(store._link.loops._by_loop) == 0


def test_a_task_that_works_on_while_its_loop_ends_closes_its_connection(
    store: RedisStore, redis_server: Valkey
) -> None:
    async def late() -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await asyncio.get_running_loop().shutdown_asyncgens()
            await store.aacquire("k", "a", LONG, 1, 0.0)

    async def main() -> None:
        await store.aacquire("first", "a", LONG, 1, 0.0)
        main.task = asyncio.create_task(late())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    store._link.transport.drop()  # type: ignore[union-attr]
    asyncio.run(main())
    gc.collect()
    until(lambda: connections_of(redis_server) == 0, "all connections to be closed")
    assert store.release("k", "a") is True


# Settings of the connection


def exercise(store: RedisStore) -> None:
    for calls in both(store):
        key = type(calls).__name__
        assert isinstance(calls.acquire(key, "a"), Grant)
        assert isinstance(calls.acquire(key, "b", wait=30.0), Conflict)
        assert calls.wait_free(key, 0.02) is False
        assert calls.renew(Claim(key, "a", LONG)) == [True]
        assert calls.release(key, "a") is True
        assert calls.wait_free(key, 5.0) is True


@pytest.mark.parametrize("backend", ["django_redis", "core"])
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_protocols_and_decoding_make_no_difference(
    backend: str, protocol: int, decode: bool, redis_url: str, cache_at: CacheAt
) -> None:
    options: dict[str, Any] = {"protocol": protocol, "decode_responses": decode}
    if backend == "django_redis":
        options = {"CONNECTION_POOL_KWARGS": options}
    exercise(store_on(cache_at(redis_url, backend=backend, **options), "t"))


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_a_user_with_a_password(backend: str, redis_server: Valkey, cache_at: CacheAt) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "anna", "on", ">se:cret", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")
    url = f"redis://anna:se%3Acret@127.0.0.1:{redis_server.port}/0"
    exercise(store_on(cache_at(url, backend=backend), "t"))
    wrong = store_on(cache_at(url.replace("cret", "crat"), backend=backend), "t")
    for calls in both(wrong):
        with pytest.raises(StoreUnavailableError):
            calls.acquire("k", "a")


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_another_database_and_a_client_name(
    backend: str, redis_server: Valkey, cache_at: CacheAt
) -> None:
    options: dict[str, Any] = {"client_name": "lessons"}
    if backend == "django_redis":
        options = {"CONNECTION_POOL_KWARGS": options}
    store = store_on(cache_at(redis_server.url(3), backend=backend, **options), "t")
    exercise(store)
    store.acquire("k", "a", LONG, 1, 0.0)
    with redis_server.client(db=3) as client:
        assert any(key.startswith(b"t:{k}") for key in client.scan_iter())
        assert "lessons" in [one["name"] for one in client.client_list()]


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_a_unix_socket(backend: str, tmp_path: Path, cache_at: CacheAt) -> None:
    path = tmp_path / "valkey.sock"
    with Valkey("--unixsocket", str(path)):
        exercise(store_on(cache_at(f"unix://{path}?db=1", backend=backend), "t"))


# A handshake that fails leaves asyncio's own transport open until it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_tls_with_a_certificate_that_is_checked(
    backend: str, redis_server: Valkey, tmp_path: Path, cache_at: CacheAt
) -> None:
    with TlsEnd(redis_server.port, tmp_path) as end:
        options: dict[str, Any] = {"ssl_ca_certs": str(end.certificate)}
        if backend == "django_redis":
            options = {"CONNECTION_POOL_KWARGS": options}
        url = f"rediss://127.0.0.1:{end.port}/0"
        store = store_on(cache_at(url, backend=backend, **options), "t")
        exercise(store)
        store._link.transport.drop()  # type: ignore[union-attr]
        distrusted = store_on(cache_at(url, backend=backend), "t")
        for calls in both(distrusted):
            with pytest.raises(StoreUnavailableError):
                calls.acquire("k", "a")
    gc.collect()


@pytest.mark.parametrize("backend", ["django_redis", "core"])
def test_where_no_timeout_is_configured_ours_applies(
    backend: str, proxy: Proxy, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("singleflight_django.stores.redis.clients.DEFAULT_SOCKET_TIMEOUT", 0.3)
    kinds = {
        "django_redis": "django_redis.cache.RedisCache",
        "core": "django.core.cache.backends.redis.RedisCache",
    }
    settings.CACHES = {
        **settings.CACHES,
        "unbounded": {"BACKEND": kinds[backend], "LOCATION": proxy.url()},
    }
    store = store_on("unbounded", "t")
    proxy.hang()
    for calls in both(store):
        begin = clock()
        with pytest.raises(StoreUnavailableError):
            calls.acquire("k", "a")
        assert clock() - begin < 4
    assert DEFAULT_SOCKET_TIMEOUT == 5.0


def test_a_very_short_timeout_does_not_break_a_wait(proxy: Proxy, cache_at: CacheAt) -> None:
    """A block may be longer than the socket's timeout: the two are not taken for each other."""
    store = store_on(cache_at(proxy.url(), SOCKET_TIMEOUT=1), "t")
    for calls in both(store):
        calls.acquire("k", "a")
        begin = clock()
        assert calls.wait_free("k", 1.5) is False
        assert 1.45 < clock() - begin < 5
        calls.release("k", "a")


def test_only_what_a_class_understands_is_handed_to_it() -> None:
    class Old:
        def __init__(self, path: str = "", **kwargs: Any) -> None: ...

    class New(Old):
        def __init__(self, timeout: float = 0.0, **kwargs: Any) -> None: ...

    assert understood(New, {"path": "x", "timeout": 1, "other": 2}) == {"path": "x", "timeout": 1}


def test_a_client_of_another_kind_is_refused() -> None:
    class Other:
        pass

    with pytest.raises(TypeError, match="neither"):
        Server(Other())


def test_a_client_without_a_pool_is_served_through_itself(redis_client: Redis) -> None:
    class Odd(Redis):
        """A client whose pool makes no connections that we know how to make."""

        def __init__(self) -> None:
            self.inner = redis_client
            self.connection_pool = None

        def execute_command(self, *args: Any, **options: Any) -> Any:
            return self.inner.execute_command(*args, **options)

        def close(self) -> None: ...

    server = Server(Odd())
    transport = transports.transport_to(server)
    assert isinstance(transport, transports.ClientTransport)
    call = Call(ACQUIRE, ("t:{k}:lease", "t:{k}:fence", "t:{k}:waiting"), ("a", 5000, 1, 0))
    assert transport.run(call)[0][0] == 1
    assert transport.run_all([call, call._replace(args=())])[0][0] == 1
    assert transport.ask("GET", "nothing", within=1.0) is None


def test_commands_are_written_as_the_protocol_says() -> None:
    assert pack("SET", b"\x00\xff", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\n\x00\xff\r\n$2\r\n12\r\n"
    assert pack("e\u0301") == "*1\r\n$3\r\ne\u0301\r\n".encode()


# Failover


def sentinel_alias(settings: Any, sentinel: Sentinel) -> str:
    settings.CACHES = {
        **settings.CACHES,
        "watched": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://{sentinel.service}/0",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": [("127.0.0.1", sentinel.watcher.port)],
                "SENTINEL_KWARGS": {"socket_timeout": 5},
                "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
                "SOCKET_TIMEOUT": 5,
            },
        },
    }
    return "watched"


def switched(sentinel: Sentinel) -> bool:
    """Whether Sentinel tells those who ask for its primaries, as redis-py does, of the new one."""
    with sentinel.watcher.client(decode_responses=True) as client:
        return bool(client.sentinel_masters()[sentinel.service]["port"] == sentinel.replica.port)


def test_after_a_failover_the_old_primary_is_not_spoken_to(settings: Any) -> None:
    with Sentinel() as sentinel:
        store = store_on(sentinel_alias(settings, sentinel), "t")
        transport = store._link.transport
        assert isinstance(transport, ConnectionTransport)
        with asyncio.Runner() as runner:
            for calls in (Calls(store), AsyncCalls(store, runner.run)):
                calls.acquire("k", "a")
                calls.release("k", "a")
            # The old primary lives on: whoever stays connected to it is told nothing.
            with sentinel.watcher.client() as client:
                client.sentinel_failover(sentinel.service)
            until(lambda: switched(sentinel), "the failover")
            # The site's own cache meets Sentinel, and our idle connections hear of it.
            store._link.server.pool.proxy.get_master_address()
            for calls in (Calls(store), AsyncCalls(store, runner.run)):
                assert isinstance(calls.acquire("k", "b"), Grant)
                assert calls.release("k", "b") is True
            assert [one._connection.port for one in transport._idle] == [sentinel.replica.port]
    caches["watched"].close()


def test_a_primary_that_is_killed_is_succeeded(settings: Any) -> None:
    with Sentinel() as sentinel:
        store = store_on(sentinel_alias(settings, sentinel), "t")
        with asyncio.Runner() as runner:
            both_colours = (Calls(store), AsyncCalls(store, runner.run))
            for number, calls in enumerate(both_colours):
                calls.acquire(f"k{number}", "a")
            sentinel.fail_over()
            until(lambda: switched(sentinel), "Sentinel to switch over")
            for calls in both_colours:
                assert isinstance(calls.acquire("new", "b"), Grant)
                assert calls.release("new", "b") is True
    caches["watched"].close()


# Cluster


def cluster_store(settings: Any, cluster: Cluster) -> RedisStore:
    settings.CACHES = {
        **settings.CACHES,
        "cluster": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": cluster.url(),
            "OPTIONS": {"CONNECTION_FACTORY": "tests.clusters.ClusterFactory", "SOCKET_TIMEOUT": 2},
        },
    }
    return RedisStore(Link("cluster"), "t")


def test_a_cluster_is_reached_through_its_client(settings: Any, cluster: Cluster) -> None:
    store = cluster_store(settings, cluster)
    assert isinstance(store._link.transport, transports.ClientTransport)
    exercise(store)
    for calls in both(store):
        for node in cluster.nodes:
            with node.client() as client:
                client.script_flush()
        claims = []
        for number in range(9):
            key = f"{type(calls).__name__}{number}"
            assert isinstance(calls.acquire(key, "a"), Grant)
            claims.append(Claim(key, "a", LONG))
        assert calls.renew(*claims) == [True] * 9
        for claim in claims:
            assert calls.release(claim.key, "a") is True


def test_a_batch_on_a_cluster_keeps_the_answers_that_it_got(
    settings: Any, cluster: Cluster
) -> None:
    store = cluster_store(settings, cluster)
    with redis.RedisCluster(host="127.0.0.1", port=cluster.port) as client:
        client.set("t:{spoilt}:lease", "not a lease")
    for calls in both(store):
        calls.acquire("sound", "a")
        with pytest.raises(RenewalInDoubtError) as caught:
            calls.renew(Claim("sound", "a", LONG), Claim("spoilt", "a", LONG))
        assert caught.value.answers == [True, None]
        calls.release("sound", "a")


async def test_a_cluster_that_can_not_be_reached_leaves_nothing_open(settings: Any) -> None:
    with Cluster() as cluster:
        store = cluster_store(settings, cluster)
        store.acquire("k", "a", LONG, 1, 0.0)
    with pytest.raises(StoreUnavailableError):
        await store.aacquire("k", "a", LONG, 1, 0.0)


def test_a_payload_is_never_turned_into_text() -> None:
    """A long one would hold the interpreter up; and Python's -bb forbids it."""
    program = (
        "from singleflight_django.stores.redis.scripts import PUBLISH\n"
        "from singleflight_django.stores.redis.commands import Call, pack_call\n"
        "packed = pack_call(Call(PUBLISH, ('a', 'b'), ('token', 7), b'payload'))\n"
        "assert packed.endswith(b'$1\\r\\n7\\r\\n$7\\r\\npayload\\r\\n'), packed\n"
    )
    subprocess.run([sys.executable, "-bb", "-c", program], check=True, timeout=60)
