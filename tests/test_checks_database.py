"""The checks of constraints and tables: each turned on, and kept off, on real databases."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.db import connections, models

from singleflight_django import SingleFlight, constraints, locks, semaphore_lock
from singleflight_django.checks import database
from tests.checking import database_messages, messages, of_view
from tests.library.models import Queued


@pytest.fixture(autouse=True)
def _only_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guards of other tests, which share the process, are not on this site."""
    fresh: WeakSet[Any] = WeakSet()
    monkeypatch.setattr(constraints, "declared", fresh)
    monkeypatch.setattr(database, "declared", fresh)
    locks._remembered_options.cache_clear()
    yield
    locks._remembered_options.cache_clear()
    gc.collect()


@pytest.fixture
def offline(using: str) -> Iterator[None]:
    """The database can't be asked, and nothing of it is known yet."""
    connection = connections[using]
    connection.close()
    for name in ("mysql_server_data", "mysql_server_info", "mysql_is_mariadb"):
        vars(connection).pop(name, None)

    def refuse() -> None:
        raise AssertionError("a check opened a connection")

    # Ended before the database is emptied.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "connect", refuse)
        yield


class Lost:
    """A router that can't do without hints."""

    def db_for_write(self, model: type, **hints: object) -> str:
        raise RuntimeError("which tenant?")


class Elsewhere:
    """A router to an alias that there isn't."""

    def db_for_write(self, model: type, **hints: object) -> str:
        return "no_such_alias"


def guarded(unique: object, **options: Any) -> Any:
    return semaphore_lock("order:<pk>", unique=unique, **options)(lambda request, pk: None)


class TestConstraintsExist:
    @pytest.mark.parametrize("unique", ["library.Book.title", "library.Boook.uuid", "no_such_name"])
    def test_one_that_does_not(self, unique: str) -> None:
        view = guarded(unique)

        assert set(messages()) == {"E020"}
        del view

    @pytest.mark.parametrize("unique", ["library.Book.uuid", ["library_one_a_day"]])
    def test_one_that_does(self, unique: object) -> None:
        view = guarded(unique)

        assert messages() == {}
        del view


@pytest.mark.usefixtures("offline")
class TestConstraintsAreMade:
    def test_one_that_is_checked_at_commit(self, using: str) -> None:
        view = guarded("library.Queued.number")

        made = connections[using].vendor == "postgresql"
        assert set(messages()) == (set() if made else {"E021"})
        del view

    def test_one_with_a_condition(self, using: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _declare(
            monkeypatch,
            models.UniqueConstraint(
                fields=["number"], condition=models.Q(number__gt=0), name="library_some_numbers"
            ),
        )
        view = guarded("library_some_numbers")

        made = connections[using].vendor != "mysql"
        assert set(messages()) == (set() if made else {"E021"})
        del view

    def test_one_that_covers_more_columns(
        self, using: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _declare(
            monkeypatch,
            models.UniqueConstraint(
                fields=["number"], include=["title"], name="library_covers_title"
            ),
        )
        view = guarded("library_covers_title")

        made = connections[using].vendor == "postgresql"
        assert set(messages()) == (set() if made else {"E021"})
        del view

    def test_a_plain_one(self, using: str) -> None:
        view = guarded("library.Loan.library_one_a_day")

        assert messages() == {}
        del view


class TestADatabaseThatIsNotKnown:
    @pytest.mark.parametrize("router", [Lost(), Elsewhere()])
    def test_it_is_passed_over(self, settings: Any, router: Any) -> None:
        view = guarded(["library.Queued.number", "library.Book.isbn"])
        settings.DATABASE_ROUTERS = [router]

        assert messages() == {}
        del view

    def test_one_that_is_away(self, postgres: str) -> None:
        connections.settings["gone"] = {**connections.settings[postgres], "PORT": "1"}
        view = guarded("library.Queued.number")

        assert database_messages("gone") == {}
        del connections["gone"], connections.settings["gone"], view


class TestNullsCollide:
    def test_a_column_that_may_be_null(self) -> None:
        view = guarded("library.Book.isbn")

        assert "isbn may be NULL" in messages()["W022"].msg
        del view

    def test_a_column_that_may_not(self) -> None:
        view = guarded("library.Book.uuid")

        assert messages() == {}
        del view

    def test_a_constraint_for_which_nulls_are_equal(
        self, postgres: str, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _declare(
            monkeypatch,
            models.UniqueConstraint(fields=["number"], nulls_distinct=False, name="library_nulls"),
        )
        monkeypatch.setattr(Queued._meta.get_field("number"), "null", True)
        view = guarded("library_nulls")

        assert messages() == {}
        del view


def _declare(monkeypatch: pytest.MonkeyPatch, constraint: models.UniqueConstraint) -> None:
    monkeypatch.setattr(Queued._meta, "constraints", [constraint])


class TestTables:
    """`manage.py check --database`, which connects."""

    def test_a_table_that_has_the_constraint(self, using: str) -> None:
        views = [
            guarded(unique)
            for unique in ("library.Book.uuid", "library_one_a_day", "library.Card.pk")
        ]

        assert database_messages(using) == {}
        del views

    def test_one_that_was_not_migrated(self, using: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _declare(monkeypatch, models.UniqueConstraint(fields=["title"], name="library_one_title"))
        view = guarded("library_one_title")

        assert "library_queued" in database_messages(using)["W023"].msg
        assert database_messages() == {}
        del view

    def test_what_is_written_elsewhere(
        self, using: str, sqlite: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _declare(monkeypatch, models.UniqueConstraint(fields=["title"], name="library_one_title"))
        view = guarded("library_one_title")

        assert ("W023" in database_messages(sqlite)) is (using == sqlite)
        del view

    def test_an_expression_where_the_database_has_none(self, using: str) -> None:
        view = guarded("library_email_once")

        made = connections[using].features.supports_expression_indexes
        assert set(database_messages(using)) == (set() if made else {"W023"})
        del view

    @pytest.mark.parametrize("by", ["setting", "guard", "SingleFlight"])
    def test_leases_without_a_table(self, using: str, settings: Any, by: str) -> None:
        lease = apps.get_model("singleflight_django.Lease")
        used: list[Any] = []
        if by == "setting":
            settings.SINGLEFLIGHT_STORE = "database"
        elif by == "SingleFlight":
            used.append(SingleFlight("answers", on_store_error="database"))
        else:
            of_view(settings, guarded(None, on_store_error="database"))
        assert database_messages(using) == {}
        with connections[using].schema_editor() as editor:
            editor.alter_db_table(lease, lease._meta.db_table, "elsewhere")
        try:
            assert f"migrate --database {using}" in str(database_messages(using)["W024"].hint)
        finally:
            with connections[using].schema_editor() as editor:
                editor.alter_db_table(lease, "elsewhere", lease._meta.db_table)

    def test_no_leases_and_no_table(self, using: str) -> None:
        lease = apps.get_model("singleflight_django.Lease")
        with connections[using].schema_editor() as editor:
            editor.alter_db_table(lease, lease._meta.db_table, "elsewhere")
        try:
            assert database_messages(using) == {}
        finally:
            with connections[using].schema_editor() as editor:
                editor.alter_db_table(lease, "elsewhere", lease._meta.db_table)

    @pytest.mark.parametrize("migrated", [True, False])
    def test_the_first_migrate_is_not_told_to_migrate(
        self, using: str, settings: Any, migrated: bool
    ) -> None:
        """`migrate` runs this check before it makes the first table."""
        settings.SINGLEFLIGHT_STORE = "database"
        lease = apps.get_model("singleflight_django.Lease")
        migrations = "django_migrations"
        with connections[using].schema_editor() as editor:
            editor.alter_db_table(lease, lease._meta.db_table, "elsewhere")
            if not migrated:
                editor.alter_db_table(lease, migrations, "other_migrations")
        try:
            assert ("W024" in database_messages(using)) is migrated
        finally:
            with connections[using].schema_editor() as editor:
                editor.alter_db_table(lease, "elsewhere", lease._meta.db_table)
                if not migrated:
                    editor.alter_db_table(lease, "other_migrations", migrations)

    def test_it_is_bound_to_the_option(self, using: str) -> None:
        view = guarded("library.Queued.number")
        ids = {message.id for message in run_checks(databases=[using])}

        missing = connections[using].vendor != "postgresql"
        assert ("singleflight_django.W023" in ids) is missing
        assert "singleflight_django.W023" not in {message.id for message in run_checks()}
        del view
