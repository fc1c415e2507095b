"""On which connection a step of the store runs: never inside the caller's transaction.

A lease that is written in the caller's transaction is seen by nobody before its COMMIT, and undone
by its ROLLBACK. So the caller's connection serves while it is in autocommit; else one of our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from singleflight_django.exceptions import WaitInTransactionError
from singleflight_django.stores.database.dialects import dialect_of
from singleflight_django.stores.database.spares import close, spares


@contextmanager
def caller_or_own(alias: str, *, opens: bool) -> Iterator[BaseDatabaseWrapper]:
    """Yield the caller's connection if it will do, else one of our own.

    ``opens``: whether the caller's may be opened, since Django closes it at the request's end.
    """
    present = connections[alias]
    if borrowed(alias):
        yield present
    elif _in_transaction(present):
        _refuse_second_writer(present)
        with own(alias) as connection:
            yield connection
    elif present.connection is not None or opens:
        yield present
    else:
        with own(alias) as connection:
            yield connection


@contextmanager
def own(alias: str, *, fresh: bool = False) -> Iterator[BaseDatabaseWrapper]:
    """Yield a connection of our own: a spare one, unless it is to be a ``fresh`` one."""
    connection = None if fresh else spares.take(alias)
    if connection is None:
        connection = _opened(alias)
    try:
        yield connection
    except BaseException:
        close(connection)
        raise
    spares.put(connection)


def _opened(alias: str) -> Any:
    connection: Any = connections[alias].copy()
    # A pool may have no place left but the caller's.
    connection.settings_dict["OPTIONS"].pop("pool", None)
    # Any thread may have it next.
    connection.inc_thread_sharing()
    if prepare := dialect_of(connection.vendor).prepare:
        with connection.cursor() as cursor:
            cursor.execute(prepare)
    return connection


def borrowed(alias: str) -> bool:
    """Whether it has to be the caller's connection, in a transaction or not."""
    return in_test_case(alias) or _in_memory(connections[alias])


def in_test_case(alias: str) -> bool:
    """Whether a TestCase runs, which never commits: leases live and die with its transaction."""
    blocks: list[Any] = connections[alias].atomic_blocks
    return bool(blocks) and bool(blocks[0]._from_testcase)


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    # Somebody may also have turned autocommit off.
    return connection.in_atomic_block or (
        connection.connection is not None and not connection.autocommit
    )


def _in_memory(connection: Any) -> bool:
    """Whether there is no second connection to the same data."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def _refuse_second_writer(connection: BaseDatabaseWrapper) -> None:
    if dialect_of(connection.vendor).one_writer:
        raise WaitInTransactionError(
            "The database store can't be used inside a transaction on SQLite, which has one "
            "writer: it would wait for the caller's own transaction. Take the lease outside of it "
            "(transaction.non_atomic_requests on the URL's view), or keep leases in Redis, "
            "PostgreSQL or MariaDB."
        )
