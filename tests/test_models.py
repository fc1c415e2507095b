"""The tables, their migration, and how they are purged."""

from __future__ import annotations

import time
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection
from django.db.migrations.executor import MigrationExecutor

from singleflight_django.models import Lease, Outcome
from singleflight_django.stores.base import Conflict, Grant
from singleflight_django.stores.database import purging, running
from singleflight_django.stores.database.purging import purge
from singleflight_django.stores.database.store import DatabaseStore

LONG = 30.0


def now() -> int:
    return time.time_ns() // 1000


def old_rows(count: int, until: int = 1) -> None:
    Lease.objects.bulk_create(
        [Lease(digest=f"old{until}.{n}", key=f"k{n}", until=until) for n in range(count)]
    )
    Outcome.objects.bulk_create(
        [
            Outcome(digest=f"old{until}.{n}", flight=n, status="done", at=1, until=until)
            for n in range(count)
        ]
    )


@pytest.mark.django_db
class TestTables:
    def test_the_migrations_are_complete(self) -> None:
        call_command("makemigrations", "singleflight_django", check=True, dry_run=True, verbosity=0)

    def test_the_migration_can_be_undone(self) -> None:
        """Checked as a plan: SQLite can't change tables inside a test's transaction."""
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan([("singleflight_django", None)])
        assert [(migration.name, backwards) for migration, backwards in plan] == [
            ("0001_leases", True)
        ]
        assert all(operation.reversible for operation in plan[0][0].operations)

    def test_a_place_of_a_key_can_exist_once_only(self) -> None:
        Lease.objects.create(digest="d", slot=0, key="k", until=0)
        Lease.objects.create(digest="d", slot=1, key="k", until=0)
        with pytest.raises(IntegrityError):
            Lease.objects.create(digest="d", slot=0, key="k", until=0)

    def test_a_flight_has_one_outcome(self) -> None:
        Outcome.objects.create(digest="d", flight=7, status="done", at=0, until=0)
        with pytest.raises(IntegrityError):
            Outcome.objects.create(digest="d", flight=7, status="failed", at=0, until=0)

    def test_rows_are_named_for_people(self) -> None:
        assert str(Lease(key="semaphore_lock:import:7")) == "semaphore_lock:import:7"
        assert str(Outcome(status="done", flight=7)) == "done 7"


@pytest.mark.django_db
class TestPurge:
    def test_what_is_out_of_date_goes_and_the_rest_stays(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(purging, "BATCH", 4)
        old_rows(10)
        old_rows(1, until=now() + 60_000_000)
        assert purge() == 20
        assert (Lease.objects.count(), Outcome.objects.count()) == (1, 1)
        assert purge() == 0

    def test_a_lease_that_lives_stays(self) -> None:
        store = DatabaseStore("purge")
        store.acquire("k", "a", LONG, 1, 0.0)
        purge()
        assert isinstance(store.acquire("k", "b", LONG, 1, 0.0), Conflict)

    def test_the_last_fence_is_remembered_for_ten_lives(self) -> None:
        store = DatabaseStore("purge")
        store.acquire("k", "a", LONG, 1, 0.0)
        store.release("k", "a")
        row = Lease.objects.get()
        assert row.until >= now() + 9 * LONG * 1e6
        # As if the clock had been ahead.
        Lease.objects.update(fence=row.fence + 10**12)
        purge()
        answer = store.acquire("k", "b", LONG, 1, 0.0)
        assert isinstance(answer, Grant)
        assert answer.fence == row.fence + 10**12 + 1

    def test_now_and_then_taking_a_lease_removes_a_few(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(running, "PURGE_EVERY", 1)
        monkeypatch.setattr(purging, "BATCH", 4)
        old_rows(10)
        DatabaseStore("purge").acquire("k", "a", LONG, 1, 0.0)
        assert Outcome.objects.count() == 6

    def test_a_conflict_removes_nothing(self, monkeypatch: Any) -> None:
        store = DatabaseStore("purge")
        store.acquire("k", "a", LONG, 1, 0.0)
        monkeypatch.setattr(running, "PURGE_EVERY", 1)
        old_rows(10)
        store.acquire("k", "b", LONG, 1, 0.0)
        assert Outcome.objects.count() == 10


@pytest.mark.django_db
class TestCommand:
    def purge(self, **options: Any) -> str:
        out = StringIO()
        call_command("singleflight", "purge", stdout=out, **options)
        return out.getvalue()

    def test_it_says_how_many_rows_it_removed(self) -> None:
        old_rows(3)
        assert self.purge() == "6 rows removed.\n"
        Outcome.objects.create(digest="d", flight=7, status="done", at=0, until=0)
        assert self.purge(database="default") == "1 row removed.\n"

    def test_it_can_be_silent(self) -> None:
        assert self.purge(verbosity=0) == ""

    def test_it_wants_a_subcommand(self) -> None:
        with pytest.raises(CommandError):
            call_command("singleflight")
