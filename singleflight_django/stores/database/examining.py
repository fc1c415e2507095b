"""The examination of the database that keeps leases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from singleflight_django.exceptions import SingleFlightError
from singleflight_django.models import Lease, Outcome
from singleflight_django.stores.database.flights import now
from singleflight_django.stores.database.running import Runner
from singleflight_django.stores.findings import Finding, Level

ROUNDS = 20

# How each says whether it takes writes, and at which level transactions are isolated.
_READ_ONLY = {
    "postgresql": "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'",
    "mysql": "SELECT @@global.read_only",
}
_ISOLATION = {
    "postgresql": "SELECT current_setting('default_transaction_isolation')",
    # MariaDB has come to the second name late, MySQL has lost the first one.
    "mysql": "SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')",
}


def examine(runner: Runner, alias: str, ttl: float) -> Iterator[Finding]:
    """Yield what is found. ``ttl``: of a usual lease, in seconds, to measure clocks and roads by."""
    connection = connections[alias]
    try:
        yield from _road(runner, ttl)
        yield _kind(alias)
        yield _clock(runner, ttl)
        missing = _missing_tables(alias)
        if missing:
            text = f"The database {alias!r} has no table {' and no '.join(missing)}."
            yield Finding("tables", Level.ERROR, text, f"manage.py migrate --database {alias}")
        else:
            yield Finding("tables", Level.OK, "The tables are there.")
        yield from _told(runner, connection.vendor)
    except (SingleFlightError, DatabaseError, ImproperlyConfigured) as error:
        cure = f"Is it running, and are DATABASES[{alias!r}] and its user's rights right?"
        yield Finding("reach", Level.ERROR, f"The database {alias!r} doesn't answer. {error}", cure)


def _road(runner: Runner, ttl: float) -> Iterator[Finding]:
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        runner.run(now)
        times.append(time.perf_counter() - begin)
    middle, longest = median(times[1:]), max(times[1:])
    text = f"{middle * 1000:.2f} ms (median of {ROUNDS}; the longest {longest * 1000:.2f} ms)."
    if middle > ttl / 100:
        cure = "Use a database nearby, or a longer ttl."
        yield Finding("round-trip", Level.WARNING, f"A slow road: {text}", cure)
    else:
        yield Finding("round-trip", Level.OK, text)


def _kind(alias: str) -> Finding:
    connection = connections[alias]
    if connection.vendor == "sqlite":
        if connection.is_in_memory_db():  # type: ignore[attr-defined]
            text = "It is in the memory of one process: other processes don't see its leases."
            return Finding("server", Level.ERROR, text, "Use a database that all processes share.")
        text = "SQLite: for one machine, one writer at a time, no lease inside a transaction."
        return Finding("server", Level.INFO, text)
    version = ".".join(map(str, connection.get_database_version()))
    return Finding("server", Level.OK, f"{connection.display_name} {version}.")


def _missing_tables(alias: str) -> list[str]:
    there = set(connections[alias].introspection.table_names())
    needed = (Lease._meta.db_table, Outcome._meta.db_table)
    return [repr(table) for table in needed if table not in there]


def _told(runner: Runner, vendor: str) -> Iterator[Finding]:
    if vendor not in _ISOLATION:
        return
    read_only, isolation = (
        _answer(runner, questions[vendor]) for questions in (_READ_ONLY, _ISOLATION)
    )
    if read_only:
        text = "It takes no writes: it is a replica, or set to read only."
        cure = "Route the models of singleflight_django to the primary."
        yield Finding("role", Level.ERROR, text, cure)
    else:
        yield Finding("role", Level.OK, "It takes writes.")
    if str(isolation).lower() == "serializable" and vendor == "mysql":
        text = (
            "Transactions are serializable here: to look at a lease locks it, and callers collide."
        )
        cure = "OPTIONS isolation_level 'read committed' for this alias."
        yield Finding("isolation", Level.WARNING, text, cure)
    else:
        yield Finding("isolation", Level.OK, f"{isolation}.")


def _answer(runner: Runner, sql: str) -> Any:
    rows, _ = runner.run(lambda session: session.rows(sql))
    return rows[0][-1]


def _clock(runner: Runner, ttl: float) -> Finding:
    begin = time.time()
    theirs, _ = runner.run(now)
    end = time.time()
    ahead = theirs - end if theirs > end else min(0.0, theirs - begin)
    text = f"The database's clock is {ahead:+.3f} s from this machine's."
    if abs(ahead) > ttl / 10:
        cure = (
            "Run NTP on both. Leases go by the database's clock alone; Redis beside it has its own."
        )
        return Finding("clock", Level.WARNING, text, cure)
    return Finding("clock", Level.OK, text)
