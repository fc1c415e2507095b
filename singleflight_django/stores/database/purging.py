"""Rows that say nothing any more are removed: a few now and then, all of them by the command."""

from __future__ import annotations

from django.db import router

from singleflight_django.models import Lease
from singleflight_django.stores.database.sessions import Session, carry_out

BATCH = 200

_TABLES = ("{lease}", "{outcome}")


def purge(using: str | None = None) -> int:
    """Remove all rows that are out of date; return how many there were.

    ``using``: the database's alias; None: the one that the router names for the model ``Lease``.
    """
    alias = using or router.db_for_write(Lease)
    total = 0
    while True:
        removed, _ = carry_out(alias, purge_some, opens=True, apart=False)
        total += removed
        if not removed:
            return total


def purge_some(session: Session) -> int:
    """Remove at most ``BATCH`` rows of each table."""
    return sum(_purge(session, table) for table in _TABLES)


def _purge(session: Session, table: str) -> int:
    old = session.rows(
        f'SELECT "id" FROM {table} WHERE "until" <= {{now}} ORDER BY "id" LIMIT {BATCH}'  # noqa: S608
    )
    if not old:
        return 0
    marks = ", ".join(["%s"] * len(old))
    # A row that has come to life since then stays.
    sql = f'DELETE FROM {table} WHERE "id" IN ({marks}) AND "until" <= {{now}}'  # noqa: S608
    return session.change(sql, *(number for (number,) in old))
