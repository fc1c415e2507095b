"""The keeper: what is held lives on, what is lost is told once, what is over costs nothing."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from django.core.cache import caches

from singleflight_django.exceptions import LeaseLostError
from singleflight_django.renewal import Keeper, keeper
from singleflight_django.stores.base import Claim, Grant, Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis.links import Link
from singleflight_django.stores.redis.scripts import RENEW
from singleflight_django.stores.redis.store import RedisStore
from singleflight_django.stores.registry import get_store
from singleflight_django.waiting import clock
from tests.engine import PATIENCE, Ear, entries, give_back, in_threads, lease_on, take
from tests.engine import fresh_context as fresh_context
from tests.proxy import Proxy
from tests.servers import until

CacheAt = Callable[..., str]


@pytest.fixture
def store() -> Store:
    return get_store("default")


@pytest.fixture
def distant(proxy: Proxy, cache_at: CacheAt) -> Store:
    """A store behind the proxy."""
    return get_store(cache_at(proxy.url()))


@pytest.fixture
def impatient(proxy: Proxy, cache_at: CacheAt) -> Store:
    """A store behind the proxy that is soon given up."""
    return get_store(cache_at(proxy.url(), SOCKET_TIMEOUT=0.5, SOCKET_CONNECT_TIMEOUT=0.5))


@pytest.fixture
def own() -> Keeper:
    """A keeper for this test alone."""
    return Keeper()


# A lease lives for two thirds of its ttl without its renewal, and a machine that runs other tests
# stands still for a second now and then: a ttl that must not end is 1.5 s and more.


def renewals(client: redis.Redis) -> int:
    info: dict[str, Any] = client.info("commandstats")
    calls: int = info.get("cmdstat_pexpire", {"calls": 0})["calls"]
    return calls


# Living on


def test_a_lease_is_renewed_for_as_long_as_it_is_held(distant: Store, proxy: Proxy) -> None:
    ear = Ear()
    lease = take(lease_on(distant, ttl=1.5, emit=ear))
    begin = clock()
    until(lambda: proxy.count(RENEW.sha) >= 4, "four renewals")
    # Four thirds of its ttl: it is renewed no more often than it needs to be.
    assert clock() - begin > 1.7
    lease.check()
    assert isinstance(distant.acquire("k", lease.token, 1.5, 1, 0.0), Grant)
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_released"]


def test_after_its_release_it_is_not_renewed_any_more(distant: Store, proxy: Proxy) -> None:
    lease = take(lease_on(distant, ttl=0.6))
    until(lambda: proxy.count(RENEW.sha) >= 1, "a renewal")
    give_back(lease)
    other = take(lease_on(distant, "other", ttl=1.5))
    before = proxy.count(lease.token.encode())
    seen = proxy.count(other.token.encode())
    until(lambda: proxy.count(other.token.encode()) >= seen + 2, "renewals of another lease")
    assert proxy.count(lease.token.encode()) == before
    give_back(other)


def test_a_lease_that_ends_early_never_meets_the_keeper(distant: Store, proxy: Proxy) -> None:
    give_back(take(lease_on(distant, ttl=30.0)))
    assert proxy.count(RENEW.sha) == 0


def test_a_lease_that_asks_for_no_renewal_gets_none(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, ttl=0.05, max_hold=0, emit=ear))
    until(lambda: lease.lost, "the end of the ttl")
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_lost", "lease_released"]


def test_many_leases_are_renewed_in_one_round_trip_by_one_thread(
    own: Keeper, redis_client: redis.Redis
) -> None:
    asked: list[int] = []

    class Counting(RedisStore):
        def renew(self, claims: Sequence[Claim]) -> list[bool]:
            asked.append(len(claims))
            return super().renew(claims)

    store = Counting(Link("default"), "counting")
    leases = [lease_on(store, f"k{number}", ttl=2.4, max_hold=60) for number in range(50)]
    for lease in leases:
        asked_at = clock()
        answer = store.acquire(lease.key, lease.token, lease.ttl, 1, 0.0)
        assert isinstance(answer, Grant)
        lease.grant(lease.key, answer.fence, asked_at)
        own.watch(lease)
    until(lambda: sum(asked) >= 100, "two renewals of each")
    assert len(asked) <= 20
    assert sum(thread.name == "singleflight-keeper" for thread in threading.enumerate()) <= 2
    for lease in leases:
        own.forget(lease)
        assert not lease.lost
        assert lease.end()


def test_renewal_stops_at_max_hold_and_the_loss_is_told_then(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, ttl=1.8, max_hold=1.3, emit=ear))
    begin = lease.since
    until(lambda: ear.names.count("lease_lost") == 1, "the end of max_hold")
    # The renewal at two thirds of its ttl was the last one.
    assert 1.2 + 1.8 - 0.1 < clock() - begin < 10
    assert ear.reasons("lease_lost") == ["it was held for longer than max_hold"]
    with pytest.raises(LeaseLostError):
        lease.check()
    assert isinstance(store.acquire("k", "successor", 9.0, 1, 0.0), Grant)
    give_back(lease)
    assert ear.names.count("lease_lost") == 1
    assert store.release("k", "successor") is True


def test_an_extension_is_renewed_at_its_own_pace(distant: Store, proxy: Proxy) -> None:
    """Shortened, it would end before the renewal that was planned for the longer ttl."""
    lease = take(lease_on(distant, ttl=60.0))
    lease.extend(1.5)
    until(lambda: proxy.count(RENEW.sha) >= 3, "renewals of the shorter ttl")
    lease.check()
    lease.extend(30.0)
    assert lease.expires > clock() + 25
    give_back(lease)


def test_an_extension_that_crosses_a_renewal_is_not_undone_by_it(
    distant: Store, proxy: Proxy, redis_server: Any
) -> None:
    """The server may hear the two in either order, and the shorter ttl last."""
    lease = take(lease_on(distant, ttl=2.4))
    crossing = proxy.trap(RENEW.sha, at="request", then="hold")
    crossing.wait()
    lease.extend(30.0)
    crossing.release()
    with redis_server.client() as client:

        def left() -> float:
            (entry,) = entries(client, "lease")
            score = client.zscore(entry, lease.token)
            seconds, micros = client.time()
            return float(score) / 1e6 - seconds - micros / 1e6

        until(lambda: proxy.count(RENEW.sha) >= 3 and left() > 25, "the renewal after them")
    until(lambda: lease.expires > clock() + 25, "the lease to know")
    give_back(lease)


# Losing it


@pytest.mark.parametrize("how", ["deleted", "flushed", "taken over"])
def test_a_lost_lease_is_told_once_and_its_successor_is_left_alone(
    how: str, store: Store, redis_client: redis.Redis
) -> None:
    ear = Ear()
    lease = take(lease_on(store, ttl=0.3, emit=ear))
    if how == "flushed":
        redis_client.flushall()
    else:
        redis_client.delete(*entries(redis_client, "lease"))
    if how == "taken over":
        assert isinstance(store.acquire("k", "successor", 30.0, 1, 0.0), Grant)
    until(lambda: lease.lost, "the loss")
    with pytest.raises(LeaseLostError):
        lease.check()
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_lost", "lease_released"]
    if how == "taken over":
        assert store.release("k", "successor") is True


@pytest.mark.parametrize("alias", ["default", "core", "locmem"])
def test_on_a_cache_a_lost_lease_is_told_once_too(alias: str) -> None:
    """Culled, evicted, or cleared by somebody's cache.clear()."""
    ear, store = Ear(), CacheStore(alias)
    lease = take(lease_on(store, ttl=1.0, emit=ear))
    caches[alias].clear()
    assert isinstance(store.acquire("k", "successor", 30.0, 1, 0.0), Grant)
    until(lambda: lease.lost, "the loss")
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_lost", "lease_released"]
    assert store.release("k", "successor") is True


def test_a_renewal_that_crosses_the_release_tells_nothing(distant: Store, proxy: Proxy) -> None:
    ear = Ear()
    lease = take(lease_on(distant, ttl=2.4, emit=ear))
    crossing = proxy.trap(RENEW.sha, at="request", then="hold")
    crossing.wait()
    give_back(lease)
    crossing.release()
    other = take(lease_on(distant, "other", ttl=1.5))
    until(lambda: proxy.count(other.token.encode()) >= 2, "a later renewal")
    give_back(other)
    assert ear.names == ["lease_acquired", "lease_released"]
    assert not lease.lost
    assert lease not in keeper._watched


def test_on_a_cache_a_renewal_that_crosses_the_release_revives_nothing(
    proxy: Proxy, cache_at: CacheAt
) -> None:
    """renew reads its token -> release deletes the lease -> renew would write it anew."""
    store = CacheStore(cache_at(proxy.url()))
    store.acquire("k", "a", 30.0, 1, 0.0)
    crossing = proxy.trap(b"GET", then="hold")
    (renewing,) = in_threads([lambda: store.renew([Claim("k", "a", 30.0)])])
    crossing.wait()
    (releasing,) = in_threads([lambda: store.release("k", "a")])
    crossing.release()
    renewing.join(PATIENCE)
    releasing.join(PATIENCE)
    assert isinstance(store.acquire("k", "b", 30.0, 1, 0.0), Grant)
    assert store.release("k", "b") is True


def test_an_entry_of_somebody_elses_does_not_end_the_other_leases(
    store: Store, redis_client: redis.Redis
) -> None:
    """One error in the batch says nothing about the rest of it."""
    spoilt, sound = lease_on(store, "spoilt", ttl=1.8), lease_on(store, "sound", ttl=1.8)
    take(spoilt)
    take(sound)
    entry = next(key for key in entries(redis_client, "lease") if b"{spoilt}" in key)
    redis_client.set(entry, "not a lease")
    until(lambda: spoilt.lost, "the spoilt lease's end")
    before = sound.expires
    until(lambda: sound.expires > before, "one more renewal")
    sound.check()
    for lease in (spoilt, sound):
        give_back(lease)


# The store away


def test_a_store_that_is_away_for_less_than_the_ttl_costs_nothing(
    distant: Store, proxy: Proxy
) -> None:
    ear = Ear()
    lease = take(lease_on(distant, ttl=2.4, emit=ear))
    proxy.hang()
    until(lambda: proxy.count(RENEW.sha) >= 1, "a renewal that gets no answer")
    proxy.heal()
    before = lease.expires
    until(lambda: lease.expires > before, "the next renewal")
    lease.check()
    give_back(lease)
    assert ear.names == ["lease_acquired", "lease_released"]


def test_a_store_that_is_away_for_longer_loses_the_lease(distant: Store, proxy: Proxy) -> None:
    ear = Ear()
    lease = take(lease_on(distant, ttl=0.4, emit=ear))
    proxy.refuse()
    until(lambda: ear.names.count("lease_lost") == 1, "the loss")
    assert ear.reasons("lease_lost") == ["the store did not renew it within its ttl"]
    with pytest.raises(LeaseLostError):
        lease.check()
    give_back(lease)
    proxy.heal()
    assert ear.names.count("lease_lost") == 1


def test_connections_that_the_server_closed_meanwhile_cost_no_lease(
    distant: Store, proxy: Proxy
) -> None:
    """A restart, or `timeout` in the server's configuration: all idle connections are stale."""
    leases = [lease_on(distant, f"k{number}", ttl=2.4) for number in range(8)]
    for thread in in_threads([lambda lease=lease: take(lease) for lease in leases]):
        thread.join(PATIENCE)
    proxy.cut()
    proxy.reset()
    until(lambda: proxy.count(RENEW.sha) >= 2 * len(leases), "renewals after the cut")
    assert not any(lease.lost for lease in leases)
    for lease in leases:
        give_back(lease)


def test_a_store_that_hangs_does_not_take_the_leases_of_another_with_it(
    impatient: Store, store: Store, proxy: Proxy
) -> None:
    far = take(lease_on(impatient, "far", ttl=3.0))
    near = take(lease_on(store, "near", ttl=4.5))
    proxy.hang()
    until(lambda: far.lost, "the loss of the far one")
    before = near.expires
    until(lambda: near.expires > before, "a renewal of the near one")
    near.check()
    give_back(near)
    proxy.heal()
    give_back(far)


def test_what_could_not_be_given_back_is_given_back_once_the_store_is_there(
    distant: Store, proxy: Proxy, redis_server: Any
) -> None:
    """Many at once, and renewed ones too: one budget for the store, not one for each."""
    ear = Ear()
    leases = [lease_on(distant, f"k{number}", ttl=20.0, emit=ear) for number in range(10)]
    for lease in leases:
        take(lease)
        # As long held as a renewed lease is.
        lease.since -= 1000
    proxy.refuse()
    for lease in leases:
        give_back(lease)
    assert ear.names.count("lease_released") == 10
    assert "lease_lost" not in ear.names
    with redis_server.client() as client:
        assert len(entries(client, "lease")) == 10
        proxy.heal()
        until(lambda: not entries(client, "lease"), "the leases to be given back")
    until(lambda: not keeper._owed, "nothing owed")


def test_what_was_owed_is_forgotten_once_it_has_lapsed_anyway(distant: Store, proxy: Proxy) -> None:
    lease = take(lease_on(distant, ttl=0.6))
    proxy.refuse()
    give_back(lease)
    assert lease in keeper._owed
    until(lambda: lease not in keeper._owed, "the lapse")


def test_one_lease_that_can_not_be_given_back_does_not_hold_up_the_others(
    store: Store, redis_client: redis.Redis, own: Keeper
) -> None:
    spoilt, sound = lease_on(store, "spoilt"), lease_on(store, "sound")
    for lease in (spoilt, sound):
        take(lease)
        keeper.forget(lease)
        assert lease.end()
    entry = next(key for key in entries(redis_client, "lease") if b"{spoilt}" in key)
    redis_client.set(entry, "not a lease")
    for lease in (spoilt, sound):
        own.give_back_later(lease)
    until(lambda: sound not in own._owed, "the sound one to be given back")
    until(lambda: len(entries(redis_client, "lease")) == 1, "only the spoilt one to be left")
    own._owed.clear()


class Broken(CacheStore):
    """A store with a fault in its code."""

    def __init__(self) -> None:
        super().__init__("locmem")
        self.asked = 0

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        self.asked += 1
        raise ZeroDivisionError("a fault")

    def release(self, key: str, token: str) -> bool:
        self.asked += 1
        raise ZeroDivisionError("a fault")


def test_a_store_with_a_fault_is_asked_with_pauses_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, ear = Broken(), Ear()
    lease = take(lease_on(store, ttl=0.9, emit=ear))
    with caplog.at_level(logging.ERROR, "singleflight_django"):
        until(lambda: lease.lost, "the loss")
        until(lambda: "lease_lost" in ear.names, "the loss told")
    # At 0.3 s, then each sixth of the ttl.
    assert store.asked <= 7
    assert "unforeseen" in caplog.text
    assert keeper._thread is not None
    assert keeper._thread.is_alive()
    store.asked = 0
    give_back(lease)
    until(lambda: lease not in keeper._owed, "the lapse")
    assert store.asked <= 6


# The thread


def script(body: str) -> str:
    """Run ``body`` in a fresh process and return what it prints."""
    setup = "import django, os, sys, threading, time\ndjango.setup()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", setup + textwrap.dedent(body)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_thread_runs_before_the_first_lease() -> None:
    printed = script(
        """
        from singleflight_django import semaphore_lock
        from singleflight_django.renewal import keeper
        print(threading.active_count(), keeper._thread)
        with semaphore_lock("k"): print(threading.active_count(), keeper._thread.daemon)
        """
    )
    assert printed.split("\n")[:2] == ["1 None", "2 True"]


def test_a_forked_child_has_no_leases_and_a_keeper_of_its_own() -> None:
    """As gunicorn does: the parent holds a lease, and the children serve requests."""
    printed = script(
        """
        from singleflight_django import semaphore_lock
        from singleflight_django.renewal import keeper
        from singleflight_django.stores.registry import get_store
        with semaphore_lock("parents", ttl=4.5) as lease:
            child = os.fork()
            if child == 0:
                assert not keeper._watched and keeper._thread is None
                with semaphore_lock("childs", ttl=1.5) as own:
                    first = own.expires
                    while own.expires < first + 0.8: time.sleep(0.01)
                    own.check()
                    assert keeper._thread.is_alive() and list(keeper._watched) == [own]
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                # The child has left this very with, and closed nothing and given back nothing.
                lease.check()
                assert get_store().renew(lease.claims()) == [True]
                print("parent holds on")
        """
    )
    assert printed == "parent holds on\n"


def test_nothing_is_left_after_a_thousand_leases(store: Store, redis_client: redis.Redis) -> None:
    references = []
    for number in range(1000):
        lease = take(lease_on(store, f"k{number}", ttl=30.0))
        references.append(weakref.ref(lease))
        give_back(lease)
    del lease
    gc.collect()
    # The context remembers the last one until the next is taken.
    assert sum(reference() is not None for reference in references) <= 1
    assert not keeper._watched
    assert not keeper._owed
    assert entries(redis_client, "lease") == []


def test_leases_that_come_and_go_do_not_wake_the_thread(own: Keeper, store: Store) -> None:
    rounds: list[float] = []
    own.work = lambda: rounds.append(clock())  # type: ignore[method-assign]
    for number in range(2000):
        lease = lease_on(store, f"k{number}", ttl=600.0, max_hold=600)
        lease.grant(lease.key, None, clock())
        own.watch(lease)
        own.forget(lease)
    assert rounds == []


def test_a_system_without_threads_keeps_its_leases_for_their_ttl(
    own: Keeper, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or an interpreter that is about to end, in an atexit handler."""
    lease = lease_on(store, ttl=0.3, max_hold=60)
    lease.grant("k", None, clock())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "singleflight_django"):
        patched.setattr(threading.Thread, "start", refuse)
        own.watch(lease)
    assert "live for their ttl" in caplog.text
    own.watch(lease)
    assert own._thread is not None
    own.forget(lease)


def test_a_lease_that_ended_while_it_was_rescheduled_is_forgotten(
    own: Keeper, store: Store
) -> None:
    lease = lease_on(store, ttl=0.3, max_hold=60)
    lease.grant("k", None, clock() - 1)
    lease.end()
    own._watched[lease] = 0.0
    own.work()
    assert own._watched == {}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    watched = list(keeper._watched)
    keeper._owed.clear()
    keeper._watched.clear()
    assert watched == []
