"""Where the databases differ: their clocks, how a row is locked, and how they report contention.

The rest of the SQL is the same for all. ``"key"`` is a quoted name in it, ``{now}`` the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

# A row is locked for one short transaction. Who waits longer waits for a process that is stopped.
LONGEST_LOCK = 5


@dataclass(frozen=True)
class Dialect:
    """One kind of database. The clock may be read before a row's lock is had: it is never late."""

    now: str
    begin: str
    greatest: str = "GREATEST"
    insert: str = "INSERT"
    or_nothing: str = " ON CONFLICT DO NOTHING"
    for_update: str = " FOR UPDATE"
    # What a connection of our own is told first.
    prepare: str = ""
    # Two transactions at once, each waiting for the end of the other's caller, are not possible.
    one_writer: bool = False
    backquotes: bool = False

    def sql(self, text: str) -> str:
        """Return ``text`` in this dialect."""
        text = text.replace("{now}", self.now).replace("{greatest}", self.greatest)
        text = text.replace("{insert}", self.insert).replace("{or_nothing}", self.or_nothing)
        text = text.replace("{for_update}", self.for_update)
        return text.replace('"', "`") if self.backquotes else text


_SECONDS = "CAST(strftime('%%s', 'now') AS INTEGER) * 1000000"
_FRACTION = "CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000"

_DIALECTS = {
    "postgresql": Dialect(
        # Not CURRENT_TIMESTAMP, which stands still in a transaction.
        now="CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)",
        begin=f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '{LONGEST_LOCK}s'",
        prepare=f"SET lock_timeout = '{LONGEST_LOCK}s'",
    ),
    "mysql": Dialect(
        # Not UNIX_TIMESTAMP(NOW(6)), which is ambiguous where summer time ends.
        now="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
        begin="START TRANSACTION",
        insert="INSERT IGNORE",
        or_nothing="",
        prepare=f"SET SESSION innodb_lock_wait_timeout = {LONGEST_LOCK}",
        backquotes=True,
    ),
    "sqlite": Dialect(
        # Milliseconds: SQLite has no finer clock.
        now=f"({_SECONDS} + {_FRACTION})",
        # The database is locked from the start: nobody can wait to upgrade a lock that he has.
        begin="BEGIN IMMEDIATE",
        greatest="MAX",
        for_update="",
        one_writer=True,
    ),
}

_CONTENTION: dict[str, set[object]] = {
    # Serialization failure, deadlock, lock not available.
    "postgresql": {"40001", "40P01", "55P03"},
    # Lock wait timeout, deadlock, record has changed since last read.
    "mysql": {1205, 1213, 1020},
    # Busy, locked.
    "sqlite": {5, 6},
}


def dialect_of(vendor: str) -> Dialect:
    """Return the dialect of a database; ImproperlyConfigured where there is none."""
    try:
        return _DIALECTS[vendor]
    except KeyError:
        raise ImproperlyConfigured(
            f"The database store does not speak to {vendor!r}: route the models of "
            "singleflight_django to PostgreSQL, MySQL, MariaDB or SQLite, or keep leases in Redis."
        ) from None


def is_contention(vendor: str, error: BaseException) -> bool:
    """Whether nothing was done because others were at it: worth another try."""
    return _code(vendor, error.__cause__ or error) in _CONTENTION[vendor]


def _code(vendor: str, cause: Any) -> object:
    if vendor == "postgresql":
        # psycopg 3 and 2.
        return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if vendor == "sqlite":
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return cause.args[0] if cause.args else None
