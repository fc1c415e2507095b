"""The store's laws on a table, in each database, and what only a table has to keep to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth.models import Group
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.views import View
from freezegun import freeze_time

from singleflight_django import semaphore_lock
from singleflight_django.exceptions import StoreUnavailableError, WaitInTransactionError
from singleflight_django.models import Lease, Outcome
from singleflight_django.stores.base import (
    Busy,
    Claim,
    Conflict,
    Grant,
    Joining,
    Landing,
    Led,
    Publishing,
    Status,
    Store,
)
from singleflight_django.stores.database import dialects, sessions, spares
from singleflight_django.stores.database.connections import own
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.registry import backed_by_database, get_store
from tests.flight_contract import FlightContract
from tests.meeting import listening
from tests.servers import until
from tests.store_contract import LONG, PATIENCE, StoreContract, at_once, grants

# The mark lets pytest-django make the database; it knows nothing of the others.
DEFAULT = pytest.param("default", marks=pytest.mark.django_db(transaction=True))
JOINING = Joining("", LONG, LONG)


@pytest.fixture(scope="module", params=[DEFAULT, "postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> str:
    """The alias of each database in turn."""
    if request.param != "default":
        request.getfixturevalue(request.param)
    return str(request.param)


class OnATable:
    """Empty tables, real transactions, and connections that are kept as where no test runs."""

    brief = 0.3

    @pytest.fixture
    def store(
        self,
        database: str,
        django_db_setup: None,
        django_db_blocker: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Store]:
        monkeypatch.delattr(mail, "outbox")
        with django_db_blocker.unblock():
            yield DatabaseStore("laws", database)
            spares.spares.close_idle()
            if spares.spares._reaper is not None:
                spares.spares._reaper.cancel()
                spares.spares._reaper = None
            for model in (Lease, Outcome, Group):
                model.objects.using(database).all().delete()
            connections[database].close()


class TestLeases(OnATable, StoreContract):
    def test_it_compares_and_sets_fences_and_wakes_nobody(self, store: Store) -> None:
        assert store.compares_and_sets
        assert store.fences
        assert not store.longest_block

    @pytest.mark.parametrize("rounds", [5, pytest.param(25, marks=pytest.mark.soak)])
    def test_an_expired_row_has_one_taker(self, store: Store, rounds: int) -> None:
        for number in range(rounds):
            key = f"k{number}"
            store.acquire(key, "dead", 0.0004, 1, 0.0)
            self.until_it_has_ended(store, key)
            answers = at_once(8, lambda i, key=key: store.acquire(key, f"t{i}", LONG, 1, 0.0))
            assert grants(answers) == 1, answers
            assert {type(answer) for answer in answers} == {Grant, Conflict}

    @pytest.mark.parametrize("rounds", [5, pytest.param(25, marks=pytest.mark.soak)])
    def test_expired_rows_have_as_many_takers_as_the_limit_says(
        self, store: Store, rounds: int
    ) -> None:
        for number in range(rounds):
            key = f"k{number}"
            for place in range(3):
                store.acquire(key, f"dead{place}", 0.0004, 3, 0.0)
            self.until_it_has_ended(store, key)
            answers = at_once(8, lambda i, key=key: store.acquire(key, f"t{i}", LONG, 3, 0.0))
            assert grants(answers) == 3, answers
            fences = [answer.fence for answer in answers if isinstance(answer, Grant)]
            assert len(set(fences)) == 3

    def until_it_has_ended(self, store: Store, key: str) -> None:
        """Ask the database's clock, and take nothing."""
        deadline = time.monotonic() + PATIENCE
        claims = [Claim(key, f"dead{place}", 0.0001) for place in ("", 0, 1, 2)]
        while any(store.renew(claims)):
            assert time.monotonic() < deadline

    def test_a_caller_with_another_limit_counts_all_holders(self, store: Store) -> None:
        for token in "abc":
            assert isinstance(store.acquire("k", token, LONG, 3, 0.0), Grant)
        store.release("k", "a")
        assert isinstance(store.acquire("k", "d", LONG, 1, 0.0), Conflict)
        assert isinstance(store.acquire("k", "c", LONG, 1, 0.0), Grant)
        assert isinstance(store.acquire("k", "d", LONG, 3, 0.0), Grant)

    def test_prefixes_do_not_contend(self, store: Store, database: str) -> None:
        other = DatabaseStore("other", database)
        store.acquire("k", "a", LONG, 1, 0.0)
        assert isinstance(other.acquire("k", "b", LONG, 1, 0.0), Grant)
        assert store.release("k", "b") is False

    def test_keys_that_the_database_takes_for_equal_do_not_contend(self, store: Store) -> None:
        for key in ("key", "KEY", "key ", "k%C3%A9y"):
            assert isinstance(store.acquire(key, "a", LONG, 1, 0.0), Grant), key

    def test_times_are_the_databases(self, store: Store) -> None:
        with freeze_time("2001-01-01"):
            first = store.acquire("k", "a", LONG, 1, 0.0)
        assert isinstance(first, Grant)
        assert first.fence is not None
        assert abs(first.fence - time.time_ns() // 1000) < 60_000_000
        with freeze_time("2101-01-01"):
            answer = store.acquire("k", "b", LONG, 1, 0.0)
            assert isinstance(answer, Conflict)
            assert LONG - PATIENCE < answer.remaining <= LONG


class TestFlights(OnATable, FlightContract):
    @pytest.mark.parametrize("rounds", [3, pytest.param(15, marks=pytest.mark.soak)])
    def test_of_the_followers_of_a_dead_leader_one_takes_over(
        self, store: Store, rounds: int
    ) -> None:
        for number in range(rounds):
            key = f"k{number}"
            led = store.join(key, JOINING._replace(token="dead", ttl=0.6))
            busy = store.join(key, JOINING._replace(token="t0"))
            assert isinstance(led, Led)
            assert isinstance(busy, Busy)
            time.sleep(busy.remaining + 0.002)
            joins = self.joins(store, key, led.flight)
            assert (joins.count(Led), joins.count(Busy)) == (1, 7)

    def joins(self, store: Store, key: str, flight: int) -> list[type]:
        again = JOINING._replace(flight=flight)
        answers = at_once(8, lambda i: store.join(key, again._replace(token=f"t{i}")))
        assert {answer.flight for answer in answers} == {flight}
        return [type(answer) for answer in answers]

    def test_an_own_flight_is_led_on_after_a_lost_reply(self, store: Store) -> None:
        led = store.join("k", JOINING._replace(token="a"))
        again = store.join("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        assert isinstance(again, Led)
        assert again[:3] == led[:3]

    def test_too_many_dead_leaders_are_nothing_to_a_newcomer(self, store: Store) -> None:
        """The flight's follower learns that it has failed; who comes by leads another one."""
        led = store.join("k", JOINING._replace(token="a", ttl=1.0))
        busy = store.join("k", JOINING._replace(token="b"))
        assert isinstance(led, Led)
        assert isinstance(busy, Busy)
        time.sleep(busy.remaining + 0.002)
        other = store.join("k", JOINING._replace(token="c", takeovers=0))
        assert isinstance(other, Led)
        assert other.flight > led.flight
        failed = store.join("k", JOINING._replace(token="b", flight=led.flight))
        assert isinstance(failed, Landing)
        assert failed.status == Status.FAILED

    def test_a_flight_that_nobody_knows_can_not_be_landed(self, store: Store) -> None:
        assert store.publish("unknown", Publishing("a", 7, Status.DONE)) is None

    def test_the_clock_of_landings_can_be_asked(self, store: Store) -> None:
        led = store.join("k", JOINING._replace(token="a"))
        now = store.now("k")
        assert isinstance(led, Led)
        assert now is not None
        assert led.now <= now < led.now + PATIENCE

    def test_async_callers_ask_the_same_clock(self, store: Store) -> None:
        led = store.join("k", JOINING._replace(token="a"))
        with freeze_time("2001-01-01"):
            now = async_to_sync(store.anow)("k")
        assert isinstance(led, Led)
        assert now is not None
        assert led.now <= now < led.now + PATIENCE


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
class TestInATransaction(OnATable):
    """A lease is neither hidden until the caller's COMMIT nor undone by its ROLLBACK."""

    def elsewhere(self, call: Callable[[], Any]) -> Any:
        return at_once(1, lambda _: call())[0]

    def test_a_lease_is_seen_at_once(self, store: Store, database: str) -> None:
        with transaction.atomic(using=database):
            Group.objects.using(database).create(name="business")
            assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
            answer = self.elsewhere(lambda: store.acquire("k", "b", LONG, 1, 0.0))
            assert isinstance(answer, Conflict)

    def test_a_rollback_undoes_the_business_and_not_the_lease(
        self, store: Store, database: str
    ) -> None:
        with suppress(ZeroDivisionError), transaction.atomic(using=database):
            Group.objects.using(database).create(name="business")
            store.acquire("k", "a", LONG, 1, 0.0)
            raise ZeroDivisionError
        assert not Group.objects.using(database).exists()
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)
        assert store.renew([Claim("k", "a", LONG)]) == [True]

    def test_a_release_is_seen_at_once(self, store: Store, database: str) -> None:
        store.acquire("k", "a", LONG, 1, 0.0)
        with suppress(ZeroDivisionError), transaction.atomic(using=database):
            Group.objects.using(database).create(name="business")
            assert store.release("k", "a") is True
            raise ZeroDivisionError
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Grant)

    def test_a_flight_is_led_and_landed(self, store: Store, database: str) -> None:
        with transaction.atomic(using=database):
            Group.objects.using(database).create(name="business")
            led = store.join("k", JOINING._replace(token="a"))
            assert isinstance(led, Led)
            following = JOINING._replace(token="b")
            assert isinstance(self.elsewhere(lambda: store.join("k", following)), Busy)
            done = Publishing("a", led.flight, Status.DONE, b"one", keep=LONG)
            assert store.publish("k", done) == Status.DONE
        assert Outcome.objects.using(database).count() == 1

    def test_the_callers_hooks_run_at_its_own_commit_only(
        self, store: Store, database: str
    ) -> None:
        ran: list[str] = []
        with transaction.atomic(using=database):
            transaction.on_commit(lambda: ran.append("hook"), using=database)
            store.join("k", JOINING._replace(token="a"))
            assert ran == []
        assert ran == ["hook"]

    def test_without_autocommit_it_is_the_same(self, store: Store, database: str) -> None:
        connection = connections[database]
        connection.set_autocommit(False)
        try:
            store.acquire("k", "a", LONG, 1, 0.0)
            connection.rollback()
        finally:
            connection.set_autocommit(True)
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)

    def test_a_transaction_that_failed_can_still_give_its_lease_back(
        self, store: Store, database: str
    ) -> None:
        store.acquire("k", "a", LONG, 1, 0.0)
        with suppress(Exception), transaction.atomic(using=database):
            with connections[database].cursor() as cursor, suppress(Exception):
                cursor.execute("SELECT no_such_column")
            assert store.release("k", "a") is True
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Grant)


class Routed:
    """The library's own tables are in another database."""

    alias = ""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.alias if model._meta.app_label == "singleflight_django" else None


@semaphore_lock(key="order:7")
def outermost(request: HttpRequest) -> HttpResponse:
    return _answer(request)


class Beneath(View):
    """Guarded where Django has opened the transaction already."""

    @semaphore_lock(key="order:7")
    def post(self, request: HttpRequest) -> HttpResponse:
        return _answer(request)


def _answer(request: HttpRequest) -> HttpResponse:
    in_transaction = connections[Routed.alias].in_atomic_block
    rival = at_once(1, lambda _: get_store().acquire(KEY, "rival", LONG, 1, 0.0))[0]
    if "fail" in request.GET:
        raise RuntimeError
    return HttpResponse(f"{in_transaction} {type(rival).__name__}")


KEY = "semaphore_lock:order:7"
urlpatterns = [path("outermost", outermost), path("beneath", Beneath.as_view())]


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
@pytest.mark.urls(__name__)
class TestInARequest(OnATable):
    """The real handler, with ATOMIC_REQUESTS on the database that leases are in."""

    @pytest.fixture(autouse=True)
    def _atomic_requests(
        self, store: Store, database: str, settings: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(Routed, "alias", database)
        monkeypatch.setattr(router, "routers", [Routed()])
        monkeypatch.setitem(connections.settings[database], "ATOMIC_REQUESTS", True)
        settings.SINGLEFLIGHT_STORE = "database"

    @pytest.mark.parametrize("url", ["/outermost", "/beneath"])
    def test_the_lease_is_held_and_given_back(self, client: Client, url: str) -> None:
        for _ in range(2):
            assert client.post(url).content == b"True Conflict"
        assert isinstance(get_store().acquire(KEY, "next", LONG, 1, 0.0), Grant)

    @pytest.mark.parametrize("url", ["/outermost", "/beneath"])
    def test_it_is_given_back_after_a_rollback(self, client: Client, url: str) -> None:
        client.raise_request_exception = False
        assert client.post(f"{url}?fail=1").status_code == 500
        free = lambda: isinstance(get_store().acquire(KEY, "next", LONG, 1, 0.0), Grant)  # noqa: E731
        until(free, "the keeper to give the lease back")


@pytest.mark.django_db(transaction=True)
class TestInATransactionOnSqlite:
    @pytest.fixture(autouse=True)
    def _sqlite(self) -> None:
        if connections["default"].vendor != "sqlite":
            pytest.skip("the default database is another one in this run")

    def test_a_second_writer_is_refused_with_the_cure(self) -> None:
        store = DatabaseStore("laws")
        with transaction.atomic():
            Group.objects.create(name="business")
            with pytest.raises(WaitInTransactionError, match="non_atomic_requests"):
                store.acquire("k", "a", LONG, 1, 0.0)
            with pytest.raises(WaitInTransactionError, match="Redis"):
                store.join("k", JOINING._replace(token="a"))
        assert Group.objects.count() == 1

    def test_a_lease_around_the_transaction_is_what_the_cure_says(self) -> None:
        store = DatabaseStore("laws")
        store.acquire("k", "a", LONG, 1, 0.0)
        with transaction.atomic():
            Group.objects.create(name="business")
        assert store.release("k", "a") is True

    def test_a_writer_is_waited_for_and_no_error(self) -> None:
        """D66: "database is locked" says nothing about who holds the lease."""
        store, writing, release = DatabaseStore("laws"), threading.Event(), threading.Event()

        def write(index: int) -> Any:
            if index:
                assert writing.wait(PATIENCE)
                threading.Timer(0.3, release.set).start()
                return store.acquire("k", "a", LONG, 1, 0.0)
            with transaction.atomic():
                Group.objects.create(name="business")
                writing.set()
                assert release.wait(PATIENCE)
            return None

        assert isinstance(at_once(2, write)[1], Grant)

    def test_a_writer_that_never_ends_makes_the_store_unavailable(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(sessions, "PATIENCE", 0.3)
        store, writing, release = DatabaseStore("laws"), threading.Event(), threading.Event()

        def write(index: int) -> None:
            if index:
                assert writing.wait(PATIENCE)
                with connections["default"].cursor() as cursor:
                    cursor.execute("PRAGMA busy_timeout = 50")
                try:
                    with pytest.raises(StoreUnavailableError, match="locked"):
                        store.acquire("k", "a", LONG, 1, 0.0)
                finally:
                    release.set()
                return
            with transaction.atomic():
                Group.objects.create(name="business")
                writing.set()
                assert release.wait(PATIENCE)

        at_once(2, write)


class TestContention(OnATable):
    """Deadlocks and serialization failures are the store's own business."""

    def test_many_keys_and_many_callers(self, store: Store) -> None:
        def work(index: int) -> int:
            taken = 0
            for turn in range(12):
                key, token = f"k{(index + turn) % 3}", f"t{index}.{turn}"
                taken += isinstance(store.acquire(key, token, LONG, 1 + turn % 2, 0.0), Grant)
                joined = store.join(f"f{key}", JOINING._replace(token=token))
                if isinstance(joined, Led):
                    done = Publishing(token, joined.flight, Status.DONE, b"x")
                    assert store.publish(f"f{key}", done) == Status.DONE
                store.release(key, token)
            return taken

        assert sum(at_once(8, work)) > 0

    def test_a_row_that_is_purged_in_between_is_made_anew(
        self, store: Store, database: str, monkeypatch: Any
    ) -> None:
        """The worst case of a purge: it comes between two statements of one step."""
        purged: list[int] = []

        def purge_first(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if sql.startswith(("BEGIN", "START")) and len(purged) < 2:
                with own(database) as connection, connection.cursor() as cursor:
                    cursor.execute("DELETE FROM singleflight_django_lease")
                purged.append(1)
            return execute(sql, params, many, context)

        with connections[database].execute_wrapper(purge_first):
            assert isinstance(store.join("f", JOINING._replace(token="a")), Led)
            purged.clear()
            assert isinstance(store.acquire("s", "a", LONG, 3, 0.0), Grant)


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
class TestALostConnection(OnATable):
    def kill(self, connection: Any) -> None:
        """End ``connection`` at the server."""
        which = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
        ends = {"postgresql": "SELECT pg_terminate_backend(%s, 5000)", "mysql": "KILL %s"}
        with connection.cursor() as cursor:
            cursor.execute(which[connection.vendor])
            (number,) = cursor.fetchone()
        with own(connection.alias) as other, other.cursor() as cursor:
            cursor.execute(ends[connection.vendor], [number])

    @contextmanager
    def lost_reply_to(self, start: str, database: str) -> Iterator[None]:
        """The server carries out a statement; before its reply comes, the connection ends."""
        struck: list[str] = []

        def strike(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            result = execute(sql, params, many, context)
            if not struck and sql.startswith(start):
                struck.append(sql)
                self.kill(connections[database])
                return execute("SELECT 1", None, False, context)
            return result

        with connections[database].execute_wrapper(strike):
            yield
        assert struck

    def test_a_connection_that_died_unseen_is_replaced(self, store: Store, database: str) -> None:
        connection = connections[database]
        connection.ensure_connection()
        self.kill(connection)
        assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
        assert Group.objects.using(database).count() == 0

    @pytest.mark.parametrize("limit", [1, 3])
    def test_a_lease_whose_grant_was_lost_is_ones_own(
        self, store: Store, database: str, limit: int
    ) -> None:
        with self.lost_reply_to("INSERT" if limit == 1 else "COMMIT", database):
            assert isinstance(store.acquire("k", "a", LONG, limit, 0.0), Grant)
        tokens = Lease.objects.using(database).values_list("token", flat=True)
        assert list(tokens) == ["a"]

    def test_a_release_whose_reply_was_lost_was_one(self, store: Store, database: str) -> None:
        store.acquire("k", "a", LONG, 1, 0.0)
        with self.lost_reply_to("UPDATE", database):
            assert store.release("k", "a") is True
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Grant)

    def test_a_flight_whose_start_was_lost_is_ones_own(self, store: Store, database: str) -> None:
        with self.lost_reply_to("COMMIT", database):
            led = store.join("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        assert led.takeovers == 0

    def test_an_outcome_whose_reply_was_lost_was_published(
        self, store: Store, database: str
    ) -> None:
        led = store.join("k", JOINING._replace(token="a"))
        assert isinstance(led, Led)
        done = Publishing("a", led.flight, Status.DONE, b"one", keep=LONG)
        with self.lost_reply_to("COMMIT", database):
            assert store.publish("k", done) == Status.DONE
        assert store.publish("k", done) is None


class TestADatabaseThatIsAway:
    """Guarantee 6: an outage is never "held by someone else"."""

    @pytest.fixture
    def store(self, settings: Any, django_db_blocker: Any) -> Iterator[Store]:
        away = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/no/such/directory/db"}
        connections.settings["away"] = connections.configure_settings(
            {**connections.settings, "away": away}
        )["away"]
        with django_db_blocker.unblock():
            yield DatabaseStore("laws", "away")
            connections["away"].close()
        del connections["away"]
        del connections.settings["away"]

    def test_nothing_is_granted_and_nothing_denied(self, store: Store) -> None:
        for call in (
            lambda: store.acquire("k", "a", LONG, 1, 0.0),
            lambda: store.release("k", "a"),
            lambda: store.renew([Claim("k", "a", LONG)]),
            lambda: store.join("k", JOINING._replace(token="a")),
            lambda: store.publish("k", Publishing("a", 1, Status.DONE)),
            lambda: store.followed("k"),
            lambda: store.forget("k"),
        ):
            with pytest.raises(StoreUnavailableError):
                call()

    async def test_nor_to_async_callers(self, store: Store) -> None:
        with pytest.raises(StoreUnavailableError):
            await store.aacquire("k", "a", LONG, 1, 0.0)
        with pytest.raises(StoreUnavailableError):
            await store.ajoin("k", JOINING._replace(token="a"))


@pytest.mark.django_db(transaction=True)
def test_a_table_that_is_missing_makes_the_store_unavailable() -> None:
    with connections["default"].schema_editor() as editor:
        editor.alter_db_table(Lease, "singleflight_django_lease", "elsewhere")
    try:
        with pytest.raises(StoreUnavailableError, match="singleflight_django_lease"):
            DatabaseStore("laws").acquire("k", "a", LONG, 1, 0.0)
    finally:
        with connections["default"].schema_editor() as editor:
            editor.alter_db_table(Lease, "elsewhere", "singleflight_django_lease")


@pytest.mark.django_db
class TestInATestCase:
    """Its transaction never commits: leases are part of it, and gone with it."""

    def test_leases_are_in_the_tests_transaction(self) -> None:
        store = DatabaseStore("laws")
        assert isinstance(store.acquire("k", "a", LONG, 1, 0.0), Grant)
        assert Lease.objects.count() == 1
        with transaction.atomic():
            assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)
            assert isinstance(store.join("f", JOINING._replace(token="a")), Led)

    def test_nothing_is_left_of_the_last_test(self) -> None:
        assert not Lease.objects.exists()

    def test_async_callers_get_there_too(self) -> None:
        store = DatabaseStore("laws")

        async def work() -> None:
            assert isinstance(await store.aacquire("k", "a", LONG, 1, 0.0), Grant)
            assert isinstance(await store.ajoin("f", JOINING._replace(token="a")), Led)
            assert await store.afollowed("f") is False
            assert await store.anow("f") is not None

        async_to_sync(work)()
        assert Lease.objects.count() == 2

    def test_no_other_thread_sees_a_lease_to_renew_it(self, settings: Any) -> None:
        """It lives for its ttl at most, and whoever holds it longer is told."""
        settings.SINGLEFLIGHT_STORE = "database"
        with listening("lease_lost") as told, semaphore_lock("k", ttl=0.3) as lease:
            assert Lease.objects.count() == 1
            until(lambda: lease.lost, "the end of the lease")
        assert len(told) == 1

    def test_a_failed_step_leaves_the_tests_transaction_usable(self) -> None:
        store = DatabaseStore("laws")
        with pytest.raises(StoreUnavailableError), connections["default"].execute_wrapper(_fail):
            store.join("k", JOINING._replace(token="a"))
        assert Lease.objects.count() == 1


def _fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    result = execute(sql, params, many, context)
    if sql.startswith("UPDATE"):
        return execute("SELECT no_such_column", None, False, context)
    return result


class TestSpareConnections(OnATable):
    """Async callers, renewals and callers inside a transaction have connections of our own."""

    @pytest.fixture
    def production(self, store: Store) -> spares.Spares:
        return spares.spares

    def kept(self) -> list[Any]:
        return [spare.connection for spare in spares.spares._spares]

    async def test_in_a_test_run_none_is_kept(self, store: Store, monkeypatch: Any) -> None:
        monkeypatch.setattr(mail, "outbox", [], raising=False)
        await store.aacquire("k", "a", LONG, 1, 0.0)
        assert self.kept() == []

    async def test_one_is_used_again(self, production: spares.Spares, store: Store) -> None:
        await store.aacquire("k", "a", LONG, 1, 0.0)
        (connection,) = self.kept()
        await store.arelease("k", "a")
        assert self.kept() == [connection]

    def test_few_are_kept(self, production: spares.Spares, database: str, monkeypatch: Any) -> None:
        monkeypatch.setattr(spares, "MOST", 1)
        with own(database) as first, own(database) as second:
            assert first is not second
        assert len(self.kept()) == 1
        assert first.connection is None

    def test_any_thread_may_have_it(self, production: spares.Spares, database: str) -> None:
        with own(database) as mine:
            pass
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(self.use, database).result(PATIENCE) is mine

    def use(self, database: str) -> Any:
        with own(database) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        return connection

    def test_one_that_failed_is_not_kept(self, production: spares.Spares, database: str) -> None:
        with suppress(ZeroDivisionError), own(database) as connection:
            raise ZeroDivisionError
        assert self.kept() == []
        assert connection.connection is None

    def test_one_that_nobody_comes_for_is_closed(
        self, production: spares.Spares, database: str, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(spares, "IDLE", 0.05)
        with own(database) as connection:
            pass
        reaper = production._reaper
        assert reaper is not None
        reaper.join(PATIENCE)
        if production._reaper is not None:
            production._reaper.join(PATIENCE)
        assert self.kept() == []
        assert connection.connection is None

    def test_one_that_was_just_used_is_looked_at_again_later(
        self, production: spares.Spares, database: str
    ) -> None:
        with own(database):
            pass
        first = production._reaper
        assert first is not None
        first.cancel()
        production._reap()
        assert len(self.kept()) == 1
        assert production._reaper not in (None, first)

    def test_a_database_with_another_name_gets_another_one(
        self, production: spares.Spares, database: str, monkeypatch: Any
    ) -> None:
        with own(database) as connection:
            pass
        with monkeypatch.context() as patch:
            patch.setitem(connections[database].settings_dict, "NAME", "another")
            assert production.take(database) is None
        assert production.take(database) is connection
        production.put(connection)

    def test_a_forked_child_leaves_its_parents_alone(
        self, production: spares.Spares, store: Store, database: str
    ) -> None:
        with own(database) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        child = os.fork()
        if not child:
            os._exit(0 if self.kept() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with own(database) as again, again.cursor() as cursor:
            cursor.execute("SELECT 1")
        assert again is connection


class TestConfiguration:
    def test_a_database_that_it_does_not_speak_to_is_refused_with_the_cure(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="PostgreSQL, MySQL, MariaDB or SQLite"):
            dialects.dialect_of("oracle")

    def test_the_setting_chooses_it(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = "database"
        store = get_store()
        assert isinstance(store, DatabaseStore)
        assert get_store() is store
        assert backed_by_database(store) is store

    def test_without_the_app_it_is_refused_with_the_cure(
        self, settings: Any, monkeypatch: Any
    ) -> None:
        settings.SINGLEFLIGHT_STORE = "database"
        settings.SINGLEFLIGHT_PREFIX = "no-app"
        monkeypatch.setattr(apps, "is_installed", lambda name: False)
        with pytest.raises(ImproperlyConfigured, match="INSTALLED_APPS"):
            get_store()
