"""Faults as a site meets them: through ``semaphore_lock``, on views and in a ``with``.

Redis refused, hung, stopped, paused, restarted, flushed, full, read-only or under another password:
one budget, the documented policy, never a conflict that is none, and never a lease that stays.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from freezegun import freeze_time

from singleflight_django import LeaseConflictError, context, semaphore_lock, signals
from singleflight_django.exceptions import LeaseLostError, StoreUnavailableError
from singleflight_django.renewal import keeper
from singleflight_django.stores.redis.scripts import ACQUIRE, RELEASE
from singleflight_django.stores.registry import get_store
from singleflight_django.waiting import clock
from tests.engine import PATIENCE, entries, in_threads
from tests.engine import fresh_context as fresh_context
from tests.proxy import Proxy
from tests.servers import Valkey, until

CacheAt = Callable[..., str]
SOCKET_TIMEOUT = 1.2
# One budget and a busy machine; twice the budget is more.
BUDGET = 2 * SOCKET_TIMEOUT - 0.1


def alias_at(proxy: Proxy, cache_at: CacheAt, backend: str) -> str:
    """A cache behind the proxy, whose server knows the scripts and where a connection is idle."""
    name = {"django_redis": str.upper, "core": str.lower}[backend]
    options = {
        name("socket_timeout"): SOCKET_TIMEOUT,
        name("socket_connect_timeout"): SOCKET_TIMEOUT,
    }
    made = cache_at(proxy.url(), backend=backend, **options)
    with semaphore_lock("warm", cache=made):
        pass
    proxy.reset()
    return made


@pytest.fixture
def alias(proxy: Proxy, cache_at: CacheAt) -> str:
    return alias_at(proxy, cache_at, "django_redis")


@pytest.fixture
def told() -> Iterator[list[tuple[str, str]]]:
    """The signals that were sent, by name, with their reasons."""
    heard: list[tuple[str, str]] = []
    receivers = []
    for name in ("lease_acquired", "lease_rejected", "lease_lost", "unprotected_run"):

        def listen(facts: signals.Facts, name: str = name, **kwargs: Any) -> None:
            heard.append((name, facts.reason))

        sent = getattr(signals, name)
        sent.connect(listen)
        receivers.append((sent, listen))
    yield heard
    for sent, listen in receivers:
        sent.disconnect(listen)


@contextmanager
def refused(proxy: Proxy, server: Valkey) -> Iterator[None]:
    proxy.refuse()
    yield
    proxy.heal()


@contextmanager
def hung(proxy: Proxy, server: Valkey) -> Iterator[None]:
    proxy.hang()
    yield
    proxy.heal()


@contextmanager
def stopped(proxy: Proxy, server: Valkey) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    yield
    server.signal(signal.SIGCONT)


@contextmanager
def paused(proxy: Proxy, server: Valkey) -> Iterator[None]:
    with server.client() as client:
        # Not all commands, as the one to end it would have to wait, too.
        client.client_pause(60_000, all=False)
        yield
        client.client_unpause()


@contextmanager
def full(proxy: Proxy, server: Valkey) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextmanager
def read_only(proxy: Proxy, server: Valkey) -> Iterator[None]:
    with server.client() as client:
        client.replicaof("127.0.0.1", 1)
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def locked_out(proxy: Proxy, server: Valkey) -> Iterator[None]:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        proxy.cut()
        yield
        client.execute_command("ACL", "SETUSER", "default", "nopass")


FAULTS = [refused, hung, stopped, paused, read_only, locked_out]


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def fault(request: pytest.FixtureRequest, proxy: Proxy, redis_server: Valkey) -> Any:
    return lambda: request.param(proxy, redis_server)


def view_of(alias: str, **options: Any) -> Callable[[HttpRequest], HttpResponse]:
    @semaphore_lock(key="lesson:<query.uuid>", cache=alias, **options)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done", status=201)

    return view


def async_view_of(alias: str, **options: Any) -> Any:
    @semaphore_lock(key="lesson:<query.uuid>", cache=alias, **options)
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done", status=201)

    return view


def request() -> HttpRequest:
    return RequestFactory().post("/?uuid=6e0f0e4b-6f3c-4f7e-9df5-0c3f5fd0d6ae")


# While the store is away


def test_a_view_answers_503_within_one_budget_and_works_again(
    alias: str, fault: Any, told: list[tuple[str, str]]
) -> None:
    view = view_of(alias)
    with fault():
        begin = clock()
        response = view(request())
        assert clock() - begin < BUDGET
        assert response.status_code == 503
        assert response["Retry-After"] == "1"
        assert told == [("lease_rejected", signals.STORE_AWAY)]
    # What the store may have carried out is given back: nobody waits for a ttl.
    until(lambda: view(request()).status_code == 201, "the view to work again", within=8)


@pytest.mark.parametrize("strike", [refused, hung], ids=["refused", "hung"])
async def test_djangos_own_cache_is_no_different(
    strike: Any, proxy: Proxy, cache_at: CacheAt, redis_server: Valkey
) -> None:
    alias = alias_at(proxy, cache_at, "core")
    with strike(proxy, redis_server):
        assert view_of(alias)(request()).status_code == 503
        assert (await async_view_of(alias)(request())).status_code == 503
        assert view_of(alias, on_store_error="proceed")(request()).status_code == 201
    until(lambda: view_of(alias)(request()).status_code == 201, "the view to work", within=8)


async def test_an_async_view_answers_503_within_one_budget_and_works_again(
    alias: str, fault: Any, told: list[tuple[str, str]]
) -> None:
    view = async_view_of(alias)
    assert (await view(request())).status_code == 201
    told.clear()
    with fault():
        begin = clock()
        response = await view(request())
        assert clock() - begin < BUDGET
        assert response.status_code == 503
        assert told == [("lease_rejected", signals.STORE_AWAY)]
    for _ in range(500):
        response = await view(request())
        if response.status_code == 201:
            break
        await asyncio.sleep(0.01)
    assert response.status_code == 201


def test_proceed_runs_the_view_and_says_so(
    alias: str, fault: Any, told: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    view = view_of(alias, on_store_error="proceed")
    with fault():
        begin = clock()
        assert view(request()).status_code == 201
        assert clock() - begin < BUDGET
    assert told == [("unprotected_run", signals.STORE_AWAY)]
    assert "unprotected_run" in caplog.text


async def test_proceed_runs_the_async_view_and_says_so(
    alias: str, fault: Any, told: list[tuple[str, str]]
) -> None:
    view = async_view_of(alias, on_store_error="proceed")
    with fault():
        assert (await view(request())).status_code == 201
    assert told == [("unprotected_run", signals.STORE_AWAY)]


def test_a_with_says_what_is_the_matter(alias: str, fault: Any) -> None:
    with fault():
        for on_conflict in ("reject", "yield"):
            with (
                pytest.raises(StoreUnavailableError),
                semaphore_lock("k", cache=alias, on_conflict=on_conflict),  # type: ignore[arg-type]
            ):
                raise AssertionError("entered without a lease")
        with semaphore_lock("k", cache=alias, on_store_error="proceed") as lease:
            assert lease.acquired
            assert not lease.lost
            lease.check()


def test_waiting_does_not_multiply_the_budget(alias: str, fault: Any) -> None:
    with fault():
        begin = clock()
        assert view_of(alias, wait=5)(request()).status_code == 503
        assert clock() - begin < BUDGET


def test_several_keys_do_not_multiply_the_budget(alias: str, fault: Any) -> None:
    view = view_of(alias)
    view = semaphore_lock(key=["a:<query.uuid>", "b:<query.uuid>"], cache=alias)(
        lambda request: HttpResponse()
    )
    with fault():
        begin = clock()
        assert view(request()).status_code == 503
        assert clock() - begin < BUDGET


# The store goes away while the lease is held


def test_the_work_is_not_undone_when_only_the_release_fails(
    alias: str, fault: Any, told: list[tuple[str, str]], redis_server: Valkey
) -> None:
    """D01: the response stands; the lease is given back as soon as somebody listens."""
    faults = fault()

    @semaphore_lock(key="k", cache=alias)
    def view(request: HttpRequest) -> HttpResponse:
        faults.__enter__()
        return HttpResponse("done", status=201)

    begin = clock()
    assert view(request()).status_code == 201
    assert clock() - begin < BUDGET
    faults.__exit__(None, None, None)
    with redis_server.client() as client:
        until(lambda: not entries(client, "lease"), "the lease to be given back", within=8)
    assert told == [("lease_acquired", "")]


def hold(alias: str, faults: Any) -> None:
    with semaphore_lock("k", cache=alias):
        faults.__enter__()
        raise ZeroDivisionError


def test_the_works_own_exception_is_not_replaced(alias: str, fault: Any) -> None:
    faults = fault()
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            hold(alias, faults)
        assert caught.value.__context__ is None
    finally:
        faults.__exit__(None, None, None)


def test_a_flushed_store_is_a_loss_that_is_told(
    alias: str, redis_server: Valkey, told: list[tuple[str, str]]
) -> None:
    with semaphore_lock("k", cache=alias, ttl=0.3) as lease, redis_server.client() as client:
        client.flushall()
        until(lambda: lease.lost, "the loss")
        with pytest.raises(LeaseLostError):
            lease.check()
    until(lambda: told[1:], "the keeper to tell of it")
    assert [name for name, _ in told] == ["lease_acquired", "lease_lost"]


def test_a_restarted_store_is_a_loss_and_its_successor_is_left_alone(
    alias: str, redis_server: Valkey, told: list[tuple[str, str]]
) -> None:
    with semaphore_lock("k", cache=alias, ttl=30) as lease:
        redis_server.restart()
        successor = get_store(alias).acquire("semaphore_lock:k", "successor", 30.0, 1, 0.0)
        assert successor.fence is not None  # type: ignore[union-attr]
        assert not lease.lost
    assert [name for name, _ in told] == ["lease_acquired", "lease_lost"]
    assert get_store(alias).release("semaphore_lock:k", "successor") is True


def test_an_evicted_lease_is_a_loss_and_its_successor_is_left_alone(
    alias: str, redis_server: Valkey, told: list[tuple[str, str]]
) -> None:
    """D13: a cache that is full throws away what it likes, leases too."""
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 4_000_000)
        with semaphore_lock("k", cache=alias, ttl=0.5) as lease:
            for number in range(20_000):
                client.set(f"filler:{number}", b"x" * 2000)
                if number % 100 == 0 and not entries(client, "lease"):
                    break
            until(lambda: lease.lost, "the loss")
    assert [name for name, _ in told] == ["lease_acquired", "lease_lost"]


def test_a_culled_lease_is_a_loss_and_its_successor_is_left_alone(
    settings: Any, told: list[tuple[str, str]]
) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "small": {
            "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
            "LOCATION": "small",
            "OPTIONS": {"MAX_ENTRIES": 50},
        },
    }
    cache = caches["small"]
    with semaphore_lock("k", cache="small", ttl=1) as lease:
        for number in range(500):
            cache.set(f"filler:{number}", number)
        assert get_store("small").acquire("semaphore_lock:k", "successor", 30.0, 1, 0.0)[0] is None
        until(lambda: lease.lost, "the loss")
    assert [name for name, _ in told] == ["lease_acquired", "lease_lost"]
    assert get_store("small").release("semaphore_lock:k", "successor") is True


def test_a_full_store_still_keeps_leases_and_renews_them(
    alias: str, proxy: Proxy, redis_server: Valkey, told: list[tuple[str, str]]
) -> None:
    """A lease is a few bytes: the server lets a script go on that has begun to write."""
    with full(proxy, redis_server):
        with pytest.raises(Exception, match=r"OOM|memory"):
            caches[alias].set("site", 1)
        with semaphore_lock("k", cache=alias, ttl=1.5) as lease:
            before = lease.expires
            until(lambda: lease.expires > before, "a renewal")
            context._held.set(())
            assert view(alias)(request()).status_code == 429
        assert view(alias)(request()).status_code == 201
    assert "lease_lost" not in [name for name, _ in told]


@pytest.mark.parametrize("hides", [False, True])
def test_a_full_cache_that_can_not_keep_leases_is_away(
    hides: bool, proxy: Proxy, redis_server: Valkey, cache_at: CacheAt, settings: Any
) -> None:
    settings.SINGLEFLIGHT_STORE = "cache"
    alias = cache_at(proxy.url(), IGNORE_EXCEPTIONS=hides)
    with full(proxy, redis_server):
        assert view(alias)(request()).status_code == 503
        assert (
            semaphore_lock(key="k", cache=alias, on_store_error="proceed")(
                lambda request: HttpResponse(status=201)
            )(request()).status_code
            == 201
        )
    assert view(alias)(request()).status_code == 201


# Replies lost on the way


def test_a_lost_reply_to_an_acquire_is_a_lease_all_the_same(alias: str, proxy: Proxy) -> None:
    lost = proxy.trap(ACQUIRE.sha)
    assert view_of(alias)(request()).status_code == 201
    assert lost.sprung
    assert view_of(alias)(request()).status_code == 201


def test_a_lost_reply_to_a_release_is_no_loss(
    alias: str, proxy: Proxy, told: list[tuple[str, str]]
) -> None:
    lost = proxy.trap(RELEASE.sha)
    assert view_of(alias)(request()).status_code == 201
    assert lost.sprung
    assert told == [("lease_acquired", "")]
    assert view_of(alias)(request()).status_code == 201


async def test_lost_replies_to_an_async_view(
    alias: str, proxy: Proxy, told: list[tuple[str, str]]
) -> None:
    view = async_view_of(alias)
    assert (await view(request())).status_code == 201
    for sha in (ACQUIRE.sha, RELEASE.sha):
        lost = proxy.trap(sha)
        assert (await view(request())).status_code == 201
        assert lost.sprung
    assert {name for name, _ in told} == {"lease_acquired"}


# Caches that hide their errors


@pytest.mark.parametrize("store", ["redis", "cache"])
@pytest.mark.parametrize("alias", ["dead", "dead_core", "dead_ignoring"])
def test_a_dead_cache_is_never_a_conflict(alias: str, store: str, settings: Any) -> None:
    """D08: 429 for everybody, for ever, and no word in the log."""
    settings.SINGLEFLIGHT_STORE = store
    for _ in range(3):
        assert view_of(alias)(request()).status_code == 503
        assert view_of(alias, on_conflict="skip")(request()).status_code == 503
        assert view_of(alias, on_store_error="proceed")(request()).status_code == 201
    with pytest.raises(StoreUnavailableError), semaphore_lock("k", cache=alias):
        raise AssertionError("entered without a lease")
    keeper._owed.clear()


@pytest.mark.parametrize("store", ["redis", "cache"])
def test_a_cache_that_hides_its_errors_holds_leases_while_it_is_there(
    store: str, settings: Any
) -> None:
    settings.SINGLEFLIGHT_STORE = store
    with semaphore_lock("k", cache="ignoring"):
        (thread,) = in_threads([lambda: statuses.append(view("ignoring")(request()).status_code)])
        thread.join(PATIENCE)
    assert statuses.pop() == 429
    assert view("ignoring")(request()).status_code == 201


statuses: list[int] = []


def view(alias: str) -> Callable[[HttpRequest], HttpResponse]:
    return semaphore_lock(key="k", cache=alias)(lambda request: HttpResponse("done", status=201))


# Clocks


@pytest.mark.parametrize("alias", ["default", "core"])
def test_a_wait_under_frozen_time_is_bounded(alias: str) -> None:
    """D31: freezegun also freezes time.monotonic."""
    with semaphore_lock("k", cache=alias):
        context._held.set(())
        begin = clock()
        with (
            freeze_time("2031-01-01"),
            pytest.raises(LeaseConflictError),
            semaphore_lock("k", cache=alias, wait=0.2),
        ):
            raise AssertionError("two holders at once")
        # To freeze and to thaw takes time as well, more with each module that is imported.
        assert 0.2 <= clock() - begin < 5


# Wrong thread, wrong time


def test_where_blocking_commands_are_forbidden_waiters_look_again(
    alias: str, redis_server: Valkey
) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-blpop")
    done: list[float] = []

    def wait() -> None:
        with semaphore_lock("k", cache=alias, wait=PATIENCE):
            done.append(clock())

    with semaphore_lock("k", cache=alias):
        context._held.set(())
        with (
            pytest.raises(LeaseConflictError),
            semaphore_lock("k", cache=alias, wait=0.25),
        ):
            raise AssertionError("two holders at once")
        (waiter,) = in_threads([wait])
    begin = clock()
    waiter.join(PATIENCE)
    assert done[0] - begin < 5


async def test_where_blocking_commands_are_forbidden_waiting_tasks_look_again(
    alias: str, redis_server: Valkey
) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-blpop")

    async def wait() -> None:
        context._held.set(())
        async with semaphore_lock("k", cache=alias, wait=PATIENCE):
            pass

    async with semaphore_lock("k", cache=alias):
        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        assert not waiter.done()
    await asyncio.wait_for(waiter, 5)
