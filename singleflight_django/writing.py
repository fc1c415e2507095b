"""The transaction, or savepoint, around a write that a unique constraint may refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from django.db import connections, transaction

from singleflight_django.uniques import Constraint


class Committed:
    """True once a transaction of writing() is committed: what fails then is a hook of the site's."""

    def __init__(self) -> None:
        self._called = False

    def __call__(self) -> None:
        self._called = True

    def __bool__(self) -> bool:
        return self._called


@contextmanager
def writing(
    using: Iterable[str], constraints: Iterable[Constraint], committed: Committed
) -> Iterator[None]:
    """Open a transaction on each alias of ``using``, or a savepoint where one is open already.

    What a savepoint's rollback undoes has to show before the end of it: a deferred constraint of
    ``constraints`` is checked there, not only at the COMMIT of somebody else's transaction.
    """
    with ExitStack() as stack:
        for alias in using:
            nested = connections[alias].in_atomic_block
            with _write_lock_first(alias):
                stack.enter_context(transaction.atomic(using=alias))
            if nested:
                stack.enter_context(_checked_early(alias, constraints))
            else:
                transaction.on_commit(committed, alias)
        yield


@contextmanager
def _write_lock_first(using: str) -> Iterator[None]:
    """Let SQLite's transactions begin as IMMEDIATE ones.

    One that has read can't become a writer beside another writer: "database is locked", at once.
    """
    connection = connections[using]
    if connection.vendor != "sqlite":
        yield
        return
    # Connecting sets the mode.
    connection.ensure_connection()
    mode = connection.transaction_mode  # type: ignore[attr-defined]
    connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        connection.transaction_mode = mode  # type: ignore[attr-defined]


@contextmanager
def _checked_early(using: str, constraints: Iterable[Constraint]) -> Iterator[None]:
    yield
    connection = connections[using]
    names = sorted(each.name for each in constraints if each.deferred)
    if names and connection.vendor == "postgresql" and not connection.needs_rollback:
        quoted = ", ".join(connection.ops.quote_name(name) for name in names)
        with connection.cursor() as cursor:
            for when in ("IMMEDIATE", "DEFERRED"):
                cursor.execute(f"SET CONSTRAINTS {quoted} {when}")


def sees_only_its_snapshot(using: str) -> bool:
    """Whether the open transaction can't see what others have committed since it began."""
    connection = connections[using]
    if connection.vendor != "postgresql" or not connection.in_atomic_block:
        return False
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return bool(cursor.fetchone() != ("read committed",))
