"""The two drivers: equal, and nothing is left half done, however a task is interrupted."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import redis

from singleflight_django import drivers
from singleflight_django.drivers import arun, in_background, run
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.locking import release
from singleflight_django.renewal import keeper
from singleflight_django.steadiness import Wait, steadily
from singleflight_django.steps import Steps
from singleflight_django.stores.base import Claim, Grant, Store
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.failover import FailoverStore
from singleflight_django.stores.redis.scripts import ACQUIRE, RELEASE
from singleflight_django.stores.registry import get_store
from singleflight_django.waiting import clock
from tests.engine import PATIENCE, Ear, agive_back, atake, entries, lease_on
from tests.engine import fresh_context as fresh_context
from tests.proxy import Proxy
from tests.servers import Valkey, until

CacheAt = Callable[..., str]


@pytest.fixture
def distant(proxy: Proxy, cache_at: CacheAt) -> Store:
    """A store behind the proxy."""
    store = get_store(cache_at(proxy.url(), SOCKET_TIMEOUT=10))
    # So that the server knows the scripts.
    store.acquire("warm", "a", 1.0, 1, 0.0)
    store.renew([Claim("warm", "a", 1.0)])
    store.release("warm", "a")
    proxy.reset()
    return store


class Echo:
    """Something to ask, in both colours."""

    def say(self, word: str) -> str:
        if word == "raise":
            raise ZeroDivisionError
        if word == "exit":
            raise GreenletExit
        return word

    async def asay(self, word: str) -> str:
        await asyncio.sleep(0)
        return self.say(word)


class GreenletExit(BaseException):
    """As gevent's: not an Exception."""


def talk(words: list[str], heard: list[str]) -> Steps:
    for word in words:
        try:
            heard.append((yield Echo(), "say", (word,)))
        except BaseException as error:
            heard.append(type(error).__name__)
            if isinstance(error, GreenletExit):
                raise
    return len(heard)


@pytest.mark.parametrize("words", [[], ["a"], ["a", "raise", "b"]])
async def test_both_drivers_do_the_same(words: list[str]) -> None:
    heard: list[str] = []
    aheard: list[str] = []
    assert run(talk(words, heard)) == await arun(talk(words, aheard)) == len(words)
    assert heard == aheard


async def test_what_is_no_exception_passes_both() -> None:
    heard: list[str] = []
    aheard: list[str] = []
    with pytest.raises(GreenletExit):
        run(talk(["a", "exit"], heard))
    with pytest.raises(GreenletExit):
        await arun(talk(["a", "exit"], aheard))
    assert heard == aheard == ["a", "GreenletExit"]


# Cancelled


def left(server: Valkey) -> list[bytes]:
    with server.client() as client:
        return entries(client, "lease")


async def eventually(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(until, condition, what)


async def struck(trap: Any) -> None:
    await asyncio.to_thread(trap.wait)


async def test_cancelled_in_an_acquire_it_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    ear = Ear()
    trap = proxy.trap(ACQUIRE.sha, then="hold")
    task = asyncio.create_task(atake(lease_on(distant, emit=ear)))
    await struck(trap)
    assert len(left(redis_server)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trap.release()
    await eventually(lambda: not left(redis_server), "the lease to be given back")
    assert ear.names == []
    assert isinstance(await distant.aacquire("k", "next", 5.0, 1, 0.0), Grant)


async def test_cancelled_before_the_acquire_reached_the_server_it_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    trap = proxy.trap(ACQUIRE.sha, at="request", then="hold")
    task = asyncio.create_task(atake(lease_on(distant)))
    await struck(trap)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trap.release()
    await eventually(lambda: proxy.count(RELEASE.sha) >= 1, "the undoing")
    await eventually(lambda: not left(redis_server), "the lease to be given back")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_in_a_release_the_key_is_free_all_the_same(
    distant: Store, proxy: Proxy, redis_server: Valkey, times: int
) -> None:
    ear = Ear()
    lease = await atake(lease_on(distant, emit=ear))
    trap = proxy.trap(RELEASE.sha, at="request", then="hold")
    task = asyncio.create_task(agive_back(lease))
    await struck(trap)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    trap.release()
    await eventually(lambda: not left(redis_server), "the lease to be given back")
    await eventually(lambda: "lease_released" in ear.names, "the release told")
    assert ear.names == ["lease_acquired", "lease_released"]


async def test_cancelled_right_before_its_release_the_key_is_free_all_the_same(
    distant: Store, redis_server: Valkey
) -> None:
    async def hold() -> None:
        lease = await atake(lease_on(distant))
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await agive_back(lease)

    task = asyncio.create_task(hold())
    await eventually(lambda: left(redis_server), "the lease")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(redis_server) == []


async def test_cancelled_in_its_wait_it_goes_at_once_and_had_nothing_to_give_back(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    holder = await asyncio.create_task(atake(lease_on(distant)))
    ear = Ear()
    task = asyncio.create_task(atake(lease_on(distant, emit=ear), wait=PATIENCE))
    await eventually(lambda: proxy.count(b"BLPOP") >= 1, "the wait")
    begin = clock()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock() - begin < 5
    assert proxy.count(RELEASE.sha) == 0
    assert ear.names == []
    holder.check()
    await agive_back(holder)


async def test_cancelled_in_its_wait_it_gives_back_the_keys_that_it_had(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    holder = await asyncio.create_task(atake(lease_on(distant, "b")))
    task = asyncio.create_task(atake(lease_on(distant, "a", "b"), wait=PATIENCE))
    await eventually(lambda: proxy.count(b"BLPOP") >= 1, "the wait for the second key")
    assert len(left(redis_server)) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: len(left(redis_server)) == 1, "the first key to be given back")
    await agive_back(holder)


async def test_a_timeout_around_an_acquire_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    trap = proxy.trap(ACQUIRE.sha, then="hold")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await atake(lease_on(distant))
    await struck(trap)
    trap.release()
    await eventually(lambda: not left(redis_server), "the lease to be given back")


async def test_cancelled_while_the_store_fails_it_says_only_that_it_was_cancelled(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    """And nothing is "never retrieved" afterwards."""
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    for verb, sha in (("acquire", ACQUIRE.sha), ("release", RELEASE.sha)):
        lease = lease_on(distant, verb)
        if verb == "release":
            await atake(lease)
        trap = proxy.trap(sha, then="hold")
        steps = atake(lease) if verb == "acquire" else agive_back(lease)
        task = asyncio.create_task(steps)
        await struck(trap)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.refuse()
        trap.release()
        running, _ = drivers._background[loop]
        while running:
            await asyncio.wait(running)
        proxy.heal()
    await eventually(lambda: not left(redis_server), "the leases to be given back")
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


class Slow:
    """Something to take and give back that takes its time, and minds its task or doesn't."""

    def __init__(self, steady: bool) -> None:
        self.steady = steady
        self.asked, self.calls = asyncio.Event(), list[str]()
        self.go_on = Wait(asyncio.get_running_loop())
        self.tasks: list[Any] = []

    async def aacquire(self, word: str) -> str:
        self.tasks.append(asyncio.current_task())
        self.asked.set()
        if self.steady:
            await self.go_on
        else:
            async with asyncio.timeout(PATIENCE):
                await steadily(asyncio.wait_for(_ended(self.go_on), PATIENCE))
        self.tasks.append(asyncio.current_task())
        self.calls.append(word)
        return word

    async def arelease(self, word: str) -> None:
        self.calls.append(f"release {word}")


async def _ended(wait: Wait) -> None:
    await wait


def taking(slow: Slow) -> Steps:
    try:
        yield slow, "acquire", ("k",)
    except asyncio.CancelledError:
        yield slow, "release", ("k",)
        raise


@pytest.mark.parametrize("steady", [True, False])
async def test_an_interrupted_acquire_is_carried_on_and_undone(steady: bool) -> None:
    """In the task that it began in, where it minds that: in one of its own from the beginning."""
    slow = Slow(steady)
    task = asyncio.create_task(arun(taking(slow)))
    await slow.asked.wait()
    assert (slow.tasks == [task]) is steady
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.calls == []
    slow.go_on.end(None)
    running, _ = drivers._background[asyncio.get_running_loop()]
    while running:
        await asyncio.wait(running)
    assert slow.calls == ["k", "release k"]
    assert (slow.tasks[0] is slow.tasks[1]) is (not steady)


def test_a_store_is_steady_if_all_of_it_is(redis_url: str) -> None:
    """Threads of the database's store mind the task; a site's own store is not asked to know."""
    assert get_store("default").steady
    assert not FailoverStore(get_store("default"), DatabaseStore("t")).steady
    assert not Store.steady


@pytest.mark.parametrize("warm", [True, False])
async def test_cancelled_in_an_acquire_that_has_to_connect_it_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey, warm: bool
) -> None:
    if warm:
        # The connection that is there turns out to be a dead one.
        await distant.aacquire("other", "a", 0.001, 1, 0.0)
        proxy.trap(ACQUIRE.sha, then="drop")
    trap = proxy.trap(b"CLIENT", at="request", then="hold")
    task = asyncio.create_task(atake(lease_on(distant)))
    await struck(trap)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trap.release()
    running, _ = drivers._background[asyncio.get_running_loop()]
    while running:
        await asyncio.wait(running)
    assert proxy.count(RELEASE.sha) == 1
    await eventually(lambda: not left(redis_server), "the lease to be given back")


# The end of the loop


def test_a_loop_that_ends_in_the_middle_of_an_acquire_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    async def main() -> None:
        trap = proxy.trap(ACQUIRE.sha, then="hold")
        main.task = asyncio.create_task(atake(lease_on(distant)))  # type: ignore[attr-defined]
        await struck(trap)
        asyncio.get_running_loop().call_later(0.1, trap.release)

    asyncio.run(main())
    assert left(redis_server) == []


def test_a_loop_that_ends_in_the_middle_of_a_release_leaves_no_orphan(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    async def main() -> None:
        lease = await atake(lease_on(distant))
        trap = proxy.trap(RELEASE.sha, at="request", then="hold")
        main.task = asyncio.create_task(agive_back(lease))  # type: ignore[attr-defined]
        await struck(trap)
        asyncio.get_running_loop().call_later(0.1, trap.release)

    asyncio.run(main())
    until(lambda: left(redis_server) == [], "the lease to be given back")


def test_a_loop_that_just_stops_leaves_its_leases_to_the_keeper(
    distant: Store, proxy: Proxy, redis_server: Valkey
) -> None:
    """No shutdown of any kind: its tasks are destroyed."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    trap = proxy.trap(ACQUIRE.sha, then="hold")
    task = loop.create_task(atake(lease_on(distant)))
    loop.run_until_complete(struck(trap))
    assert len(left(redis_server)) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    # Destroyed as the collector does, without a loop.
    task.get_coro().close()  # type: ignore[union-attr]
    trap.release()
    until(lambda: left(redis_server) == [], "the lease to be given back")
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_what_goes_on_in_the_background_is_cut_short_when_the_loop_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drivers, "LAST_WORK", 0.05)
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            # Cancelled by the end of the loop; it goes on nevertheless, once.
            ended.append("once")
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                ended.append("twice")

    async def late() -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            in_background(endless())

    async def main() -> None:
        main.task = asyncio.create_task(late())  # type: ignore[attr-defined]
        in_background(asyncio.sleep(0))  # type: ignore[arg-type]
        await asyncio.sleep(0)

    begin = clock()
    asyncio.run(main())
    assert ended == ["once", "twice"]
    assert clock() - begin < 5


def test_a_loop_is_not_remembered_once_it_has_ended(distant: Store) -> None:
    loops: list[weakref.ref[Any]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        task = asyncio.create_task(atake(lease_on(distant)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await agive_back(await atake(lease_on(distant), wait=5))

    for _ in range(5):
        asyncio.run(main())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 5
    assert len(drivers._background) == 0


async def test_a_store_that_is_away_says_so_to_tasks_as_well(cache_at: CacheAt) -> None:
    ear = Ear()
    with pytest.raises(StoreUnavailableError):
        await atake(lease_on(get_store("dead"), emit=ear))
    lease = lease_on(get_store("default"), emit=ear)
    await atake(lease)
    lease.store = get_store("dead")
    await arun(release(lease))
    assert ear.names == ["lease_acquired", "lease_released"]
    keeper._owed.clear()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12")
async def test_eager_tasks_do_as_well(redis_client: redis.Redis) -> None:
    loop, store = asyncio.get_running_loop(), get_store("default")
    before = loop.get_task_factory()
    loop.set_task_factory(asyncio.eager_task_factory)
    try:
        await agive_back(await atake(lease_on(store)))
    finally:
        loop.set_task_factory(before)
    assert entries(redis_client, "lease") == []
