"""The live leases of a prefix, a chunk of rows at a time."""

from __future__ import annotations

from typing import Any

from singleflight_django.owners import holder_of
from singleflight_django.stores.database.leases import digest_of
from singleflight_django.stores.database.sessions import Session
from singleflight_django.stores.listing import FLIGHT, LEASE, Holding

CHUNK = 500

# Of a semaphore the first place's row has the last fence of all places: see leases.
_CHUNK = f"""\
SELECT "id", "digest", "key", "token", "fence", "ends" - {{now}}, {{now}} - "fence",
    "slot" = 0 AND "open" AND "known" > {{now}}, "flight", "followed" > {{now}}
FROM {{lease}} WHERE "id" > %s AND "ends" > {{now}} ORDER BY "id" LIMIT {CHUNK}"""  # noqa: S608


def some_holdings(
    session: Session, after: int, prefix: str, contains: str
) -> tuple[list[Holding], int]:
    """Return those among the next rows after a row's number, and the last one's number; 0: no more."""
    rows = session.rows(_CHUNK, after)
    found = [
        _read(*row[2:])
        for row in rows
        # The table is shared by all prefixes; and no database's LIKE compares as Python does.
        if contains in row[2] and row[1] == digest_of(prefix, row[2])
    ]
    return found, int(rows[-1][0]) if len(rows) == CHUNK else 0


def _read(
    key: str, token: str, fence: int, left: int, age: int, flies: Any, flight: int, followed: Any
) -> Holding:
    # The row tells until when somebody may be waiting, not how many.
    followers = None if followed or not flies else 0
    return Holding(
        key,
        FLIGHT if flies else LEASE,
        holder_of(token),
        token,
        max(0, age) / 1e6,
        left / 1e6,
        followers,
        fence,
        flight if flies else 0,
    )
