"""One step of the store: on a connection, in a short transaction if need be, and tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.models import Lease, Outcome
from singleflight_django.stores.database.connections import borrowed, caller_or_own, own
from singleflight_django.stores.database.dialects import dialect_of, is_contention
from singleflight_django.waiting import Deadline, pauses

_T = TypeVar("_T")

# For how many seconds a step is tried again when others are in its way.
PATIENCE = 10.0
LONGEST_PAUSE = 0.1

_TABLES = {"{lease}": Lease._meta.db_table, "{outcome}": Outcome._meta.db_table}


class Vanished(Exception):  # noqa: N818 - not an error: the step begins again
    """A row was purged between two statements."""


def there(found: _T | None) -> _T:
    """Return ``found``, unless it is None: then the step begins again."""
    if found is None:
        raise Vanished
    return found


class Session:
    """A connection, for the statements of one step."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._dialect = dialect_of(connection.vendor)

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a SELECT finds."""
        with self._connection.cursor() as cursor:
            cursor.execute(self._sql(sql), params)
            return list(cursor.fetchall())

    def row(self, sql: str, *params: Any) -> tuple[Any, ...] | None:
        """Return the one row that a SELECT finds, or None."""
        found = self.rows(sql, *params)
        return found[0] if found else None

    def change(self, sql: str, *params: Any) -> int:
        """Return how many rows an INSERT, UPDATE or DELETE was for."""
        with self._connection.cursor() as cursor:
            cursor.execute(self._sql(sql), params)
            return int(cursor.rowcount)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Do all of it or nothing. Not by ``atomic``, whose end runs the caller's hooks."""
        if self._connection.in_atomic_block:
            # A TestCase's.
            with transaction.atomic(using=self._connection.alias):
                yield
            return
        self._tell(self._dialect.begin)
        try:
            yield
            self._tell("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        try:
            self._tell("ROLLBACK")
        except Error:
            # Not to be left inside a transaction, whoever uses it next.
            with suppress(Error):
                self._connection.close()

    def _tell(self, command: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(command)

    def _sql(self, text: str) -> str:
        for placeholder, table in _TABLES.items():
            text = text.replace(placeholder, f'"{table}"')
        return self._dialect.sql(text)


def carry_out(
    alias: str, step: Callable[[Session], _T], *, key: str = "", opens: bool, apart: bool
) -> tuple[_T, bool]:
    """Return what ``step`` does, and whether it may have been done before: its reply was lost.

    Contention is tried again for a while, a connection that fails once on a fresh one.
    ``apart``: whether it must not be the caller's connection. Raises StoreUnavailableError.
    """
    deadline, pause, resent = Deadline(PATIENCE), pauses(LONGEST_PAUSE), False
    while True:
        try:
            with (
                own(alias, fresh=resent)
                if apart or resent
                else caller_or_own(alias, opens=opens) as connection
            ):
                return step(Session(connection)), resent
        except (Error, Vanished) as error:
            failure = error
        if _is_contention(alias, failure):
            if not deadline.left():
                break
            seconds = next(pause)
            time.sleep(seconds)
            deadline.spend(seconds)
        elif resent or not _is_outage(alias, failure):
            break
        else:
            # Closes the caller's connection if it is broken: the next one to use it opens it anew.
            connections[alias].close_if_unusable_or_obsolete()
            resent = True
    raise StoreUnavailableError(f"The database did not answer: {failure}", key=key) from failure


def _is_contention(alias: str, error: Exception) -> bool:
    return isinstance(error, Vanished) or is_contention(connections[alias].vendor, error)


def _is_outage(alias: str, error: Exception) -> bool:
    return isinstance(error, OperationalError | InterfaceError) and not borrowed(alias)
