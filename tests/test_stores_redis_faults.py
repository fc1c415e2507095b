"""Redis refused, hung, flushed, full, restarted, failed over: never a conflict, never for long."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from singleflight_django import SingleFlight, semaphore_lock
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Claim, Conflict, Grant, Store
from singleflight_django.stores.redis.store import store_on
from tests.proxy import Proxy
from tests.servers import Sentinel, Valkey, until
from tests.store_contract import LONG, PATIENCE, AsyncCalls, Calls

# Of a connection that a test lets run into it. All others wait for as long as a busy machine needs.
SOCKET_TIMEOUT = 1.5
CacheAt = Callable[..., str]

runs_into_the_timeout = pytest.mark.parametrize("socket_timeout", [SOCKET_TIMEOUT], ids=[""])


@pytest.fixture(params=["django_redis", "core"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def socket_timeout() -> float:
    return PATIENCE


@pytest.fixture
def store(proxy: Proxy, cache_at: CacheAt, backend: str, socket_timeout: float) -> Store:
    """A store whose road to its server can be cut."""
    name = {"django_redis": str.upper, "core": str.lower}[backend]
    options = dict.fromkeys(
        (name("socket_timeout"), name("socket_connect_timeout")), socket_timeout
    )
    return store_on(cache_at(proxy.url(), backend=backend, **options), "faults")


@pytest.fixture(params=["sync", "async"])
def calls(request: pytest.FixtureRequest, store: Store) -> Iterator[Calls]:
    if request.param == "sync":
        yield Calls(store)
        return
    with asyncio.Runner() as runner:
        yield AsyncCalls(store, runner.run)


VERBS: dict[str, Callable[[Calls], object]] = {
    "acquire": lambda calls: calls.acquire("k", "a"),
    "renew": lambda calls: calls.renew(Claim("k", "a", LONG)),
    "release": lambda calls: calls.release("k", "a"),
    "wait_free": lambda calls: calls.wait_free("k", 0.2),
}


@pytest.fixture(params=VERBS)
def verb(request: pytest.FixtureRequest) -> Callable[[Calls], object]:
    return VERBS[request.param]


# Round trips


def test_an_acquire_and_a_release_cost_one_round_trip_each(calls: Calls, proxy: Proxy) -> None:
    calls.acquire("warm", "a")
    calls.release("warm", "a")
    proxy.reset()
    calls.acquire("k", "a")
    assert proxy.count() == 1
    calls.acquire("k", "b")
    assert proxy.count() == 2
    calls.release("k", "a")
    assert proxy.count() == 3
    assert proxy.connections == 0


def test_renewals_of_many_leases_cost_one_round_trip(store: Store, proxy: Proxy) -> None:
    claims = [Claim(f"k{number}", "a", LONG) for number in range(20)]
    for claim in claims:
        store.acquire(*claim, 1, 0.0)
    store.renew(claims)
    proxy.reset()
    trap = proxy.trap(b"EVALSHA", then="hold")
    with ThreadPoolExecutor(1) as pool:
        renewed = pool.submit(store.renew, claims)
        trap.wait()
        # All are sent although no reply comes.
        until(lambda: proxy.count(b"EVALSHA") == 20, "the other commands", within=PATIENCE / 2)
        trap.release()
        assert renewed.result(PATIENCE) == [True] * 20


# Lost replies


@pytest.mark.parametrize("at", ["request", "reply"])
def test_an_acquire_whose_connection_breaks_gets_its_own_lease(
    calls: Calls, proxy: Proxy, at: str
) -> None:
    """Guarantee 2: the server has carried it out, and nobody has heard of it."""
    calls.acquire("warm", "a")
    trap = proxy.trap(b"EVALSHA", at=at)  # type: ignore[arg-type]
    try:
        answer = calls.acquire("k", "a")
    except StoreUnavailableError:
        answer = calls.acquire("k", "a")
    assert trap.sprung
    assert isinstance(answer, Grant)
    assert calls.release("k", "a") is True
    assert isinstance(calls.acquire("k", "b"), Grant)


def test_a_release_whose_reply_is_lost_has_released(calls: Calls, proxy: Proxy) -> None:
    calls.acquire("k", "a")
    proxy.trap(b"EVALSHA")
    try:
        calls.release("k", "a")
    except StoreUnavailableError:
        calls.release("k", "a")
    assert isinstance(calls.acquire("k", "b"), Grant)


@runs_into_the_timeout
def test_a_late_reply_is_never_taken_for_another_callers(calls: Calls, proxy: Proxy) -> None:
    """The reply to a timed-out acquire arrives when the connection could be in use again."""
    calls.acquire("held", "x")
    trap = proxy.trap(b"mine", then="hold")
    with pytest.raises(StoreUnavailableError):
        calls.acquire("mine", "a")
    trap.release()
    for _ in range(5):
        assert isinstance(calls.acquire("held", "b"), Conflict)


# Away


def test_a_server_that_refuses_is_away_and_comes_back(
    calls: Calls, proxy: Proxy, verb: Callable[[Calls], object]
) -> None:
    calls.acquire("k", "a")
    proxy.refuse()
    with pytest.raises(StoreUnavailableError):
        verb(calls)
    proxy.heal()
    verb(calls)


@runs_into_the_timeout
def test_a_server_that_hangs_costs_its_socket_timeout_and_no_more(
    calls: Calls, proxy: Proxy, verb: Callable[[Calls], object]
) -> None:
    calls.acquire("k", "a")
    proxy.hang()
    begin = time.monotonic()
    if verb is VERBS["wait_free"]:
        # A wait ends when it said it would, whoever does not answer: to acquire again tells.
        assert verb(calls) is False
    else:
        with pytest.raises(StoreUnavailableError):
            verb(calls)
    assert time.monotonic() - begin < 2 * SOCKET_TIMEOUT + 2
    proxy.heal()
    verb(calls)


@runs_into_the_timeout
def test_a_stopped_server_hangs_and_goes_on(calls: Calls, redis_server: Valkey) -> None:
    calls.acquire("k", "a")
    redis_server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailableError):
            calls.acquire("k", "b")
    finally:
        redis_server.signal(signal.SIGCONT)
    assert calls.release("k", "a") is True


def test_a_restarted_server_is_used_again(calls: Calls, redis_server: Valkey) -> None:
    calls.acquire("k", "a")
    redis_server.restart()
    assert isinstance(calls.acquire("k", "b"), Grant)


def test_a_restart_is_no_failure_of_the_next_call_whichever_it_is(
    calls: Calls, redis_server: Valkey, verb: Callable[[Calls], object]
) -> None:
    calls.acquire("k", "a")
    redis_server.restart()
    try:
        verb(calls)
    except StoreUnavailableError:
        # One failed renewal or wait is made up for by the next.
        assert verb in (VERBS["renew"], VERBS["wait_free"])
    verb(calls)


def test_what_a_flush_took_is_lost_and_nothing_else(calls: Calls, redis_server: Valkey) -> None:
    calls.acquire("k", "a")
    with redis_server.client() as client:
        client.flushall()
    assert calls.renew(Claim("k", "a", LONG)) == [False]
    assert isinstance(calls.acquire("k", "b"), Grant)
    assert calls.release("k", "a") is False
    assert isinstance(calls.acquire("k", "c"), Conflict)


def test_forgotten_scripts_are_sent_again(
    calls: Calls, redis_server: Valkey, verb: Callable[[Calls], object]
) -> None:
    calls.acquire("k", "a")
    with redis_server.client() as client:
        client.script_flush()
        verb(calls)
        client.script_flush()
    assert calls.renew(Claim("k", "a", LONG), Claim("k2", "a", LONG))[1] is False


def test_a_server_without_memory_never_says_that_someone_else_holds_it(
    calls: Calls, redis_server: Valkey
) -> None:
    calls.acquire("k", "a")
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        with contextlib.suppress(StoreUnavailableError):
            assert isinstance(calls.acquire("k2", "b"), Grant)
        with contextlib.suppress(StoreUnavailableError):
            assert calls.renew(Claim("k", "a", LONG)) == [True]
        assert calls.release("k", "a") is True
        client.config_set("maxmemory", 0)
    assert isinstance(calls.acquire("k", "b"), Grant)


def test_a_replica_that_was_a_primary_is_away(calls: Calls, redis_server: Valkey) -> None:
    """READONLY: what a demoted primary answers to those who haven't heard of it."""
    calls.acquire("k", "a")
    with redis_server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailableError):
            calls.acquire("k", "b")
        client.execute_command("REPLICAOF", "NO", "ONE")
    assert isinstance(calls.acquire("k2", "b"), Grant)


def test_a_wrong_password_is_an_outage_not_a_conflict(
    calls: Calls, redis_server: Valkey, proxy: Proxy, verb: Callable[[Calls], object]
) -> None:
    with redis_server.client() as client:
        client.config_set("requirepass", "secret")
    with pytest.raises(StoreUnavailableError):
        verb(calls)


def test_where_scripts_are_forbidden_that_is_told(calls: Calls, redis_server: Valkey) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@scripting")
    with pytest.raises(StoreUnavailableError, match=r"(?i)evalsha|script"):
        calls.acquire("k", "a")


def test_where_blocking_commands_are_forbidden_waiters_look_again(
    calls: Calls, redis_server: Valkey
) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-@blocking")
    calls.acquire("k", "a")
    calls.acquire("k", "b", wait=5.0)
    begin = time.monotonic()
    calls.wait_free("k", 0.3)
    assert 0.01 < time.monotonic() - begin < 3


def test_an_alias_that_ignores_errors_hides_no_outage(cache_at: CacheAt) -> None:
    """Guarantee 6."""
    store = store_on("dead_ignoring", "faults")
    with pytest.raises(StoreUnavailableError):
        store.acquire("k", "a", LONG, 1, 0.0)


# Interrupted exchanges


def test_a_connection_that_was_interrupted_is_never_used_again(store: Store, proxy: Proxy) -> None:
    """An exception that comes from outside, between a command and its reply."""
    store.acquire("held", "x", LONG, 1, 0.0)
    trap = proxy.trap(b"mine", then="hold")

    def raise_in_the_main_thread() -> None:
        trap.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def interrupt(*_: object) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=raise_in_the_main_thread)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            store.acquire("mine", "a", LONG, 1, 0.0)
    finally:
        thread.join(PATIENCE)
        signal.signal(signal.SIGUSR1, before)
    trap.release()
    for _ in range(5):
        assert isinstance(store.acquire("held", "b", LONG, 1, 0.0), Conflict)


async def test_an_async_exchange_that_was_cancelled_spoils_no_other(
    store: Store, proxy: Proxy
) -> None:
    await store.aacquire("held", "x", LONG, 1, 0.0)
    trap = proxy.trap(b"mine", then="hold")
    acquiring = asyncio.ensure_future(store.aacquire("mine", "a", LONG, 1, 0.0))
    await asyncio.to_thread(trap.wait)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    trap.release()
    for _ in range(5):
        assert isinstance(await store.aacquire("held", "b", LONG, 1, 0.0), Conflict)


# Failover


@pytest.mark.parametrize("way", ["sync", "async"])
def test_after_a_failover_the_new_primary_is_asked(way: str, settings: object) -> None:
    """Guarantee 24: bounded failures while it lasts, then leases again."""
    from tests.test_stores_redis import sentinel_alias

    with Sentinel() as sentinel, asyncio.Runner() as runner:
        settings.CACHES = {**settings.CACHES, "failing": sentinel_alias(sentinel)}  # type: ignore[attr-defined]
        store = store_on("failing", "faults")
        calls = Calls(store) if way == "sync" else AsyncCalls(store, runner.run)
        assert isinstance(calls.acquire("k", "a"), Grant)
        sentinel.fail_over()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                answer = calls.acquire("after", "b")
            except StoreUnavailableError:
                continue
            assert isinstance(answer, Grant)
            break
        with sentinel.replica.client() as client:
            assert [key for key in client.scan_iter() if b"after" in key]


def test_a_replica_is_never_asked(redis_server: Valkey, settings: object) -> None:
    """With two locations both caches write to the first and read from the others."""
    from tests.settings import django_redis

    with Valkey() as other, Proxy(other.port) as replica:
        urls = [redis_server.url(), replica.url()]
        settings.CACHES = {  # type: ignore[attr-defined]
            **settings.CACHES,  # type: ignore[attr-defined]
            "replicated": {**django_redis(""), "LOCATION": urls},
        }
        store = store_on("replicated", "faults")
        assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)
        assert store.renew([Claim("k", "a", LONG)]) == [True]
        assert store.release("k", "a") is True
        assert replica.connections == 0
        with redis.Redis(port=other.port) as client:
            assert client.dbsize() == 0


class TestAClusterThatIsNotThere:
    """Its client asks for the slots while it is made: the policy applies all the same."""

    @pytest.fixture(autouse=True)
    def dead_cluster(self, settings: Any) -> None:
        settings.CACHES = {
            **settings.CACHES,
            "dead-cluster": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": "redis://127.0.0.1:1",
                "OPTIONS": {"CONNECTION_FACTORY": "tests.clusters.ClusterFactory"},
            },
        }

    def test_a_lock_says_that_the_store_is_away(self) -> None:
        with (
            pytest.raises(StoreUnavailableError, match="can't be reached"),
            semaphore_lock("k", cache="dead-cluster"),
        ):
            pass
        with semaphore_lock("k", cache="dead-cluster", on_store_error="proceed") as lease:
            assert lease.acquired

    def test_a_call_runs_on_its_own(self) -> None:
        assert SingleFlight("f", cache="dead-cluster").run("k", lambda: 7) == 7

    async def test_a_call_in_async_code_runs_on_its_own(self) -> None:
        async def work() -> int:
            return 7

        assert await SingleFlight("f", cache="dead-cluster").arun("k", work) == 7
