"""The row of a flight's key, read and locked and written, and the outcomes of its flights."""

from __future__ import annotations

from typing import NamedTuple

from singleflight_django.stores.base import Landing, Status
from singleflight_django.stores.database.sessions import Session, there

# For how long an outcome is kept for followers beyond their longest wait, in µs.
GRACE = 1_000_000


class Row(NamedTuple):
    """See models.Lease. ``now``: the clock when it was read, or earlier."""

    now: int
    token: str
    ends: int
    fence: int
    flight: int
    fingerprint: str
    open: bool
    known: int
    followed: int
    takeovers: int
    failures: int
    again: bool
    apart: int
    until: int

    @property
    def is_held(self) -> bool:
        """Whether somebody leads."""
        return self.ends > self.now

    @property
    def is_known(self) -> bool:
        """Whether what the row says of a flight still counts."""
        return self.known > self.now

    @property
    def is_open(self) -> bool:
        """Whether a flight is under way, its leader alive or dead."""
        return self.is_known and bool(self.open)

    @property
    def keeps(self) -> bool:
        """Whether the outcome of the last flight is kept."""
        return self.is_known and not self.open

    @property
    def is_followed(self) -> bool:
        """Whether a follower of the flight may still be waiting."""
        return self.is_known and self.followed > self.now


_COLUMNS = ", ".join(f'"{name}"' for name in Row._fields[1:])
_READ = f'SELECT {{now}}, {_COLUMNS} FROM {{lease}} WHERE "digest" = %s AND "slot" = 0'  # noqa: S608
_OUTCOME = 'SELECT "status", "payload", "at" FROM {outcome} WHERE "digest" = %s AND "flight" = %s'
_LAND = """\
UPDATE {outcome} SET "status" = %s, "payload" = %s, "at" = {greatest}(%s, "at" + 1),
    "until" = {greatest}("until", %s)
WHERE "digest" = %s AND "flight" = %s"""
_LAND_FIRST = """\
{insert} INTO {outcome} ("status", "payload", "at", "until", "digest", "flight")
VALUES (%s, %s, %s, %s, %s, %s){or_nothing}"""


def read(session: Session, digest: str) -> Row | None:
    """Return the row of a key, as it is at this moment."""
    found = session.row(_READ, digest)
    return None if found is None else Row(*found)


def lock(session: Session, digest: str) -> Row:
    """Return the row of a key, which nobody else writes until the transaction's end."""
    return Row(*there(session.row(_READ + "{for_update}", digest)))


def write(session: Session, digest: str, changes: dict[str, object]) -> None:
    """Change columns of a row that is locked."""
    columns = ", ".join(f'"{name}" = %s' for name in changes)
    sql = f'UPDATE {{lease}} SET {columns} WHERE "digest" = %s AND "slot" = 0'  # noqa: S608
    session.change(sql, *changes.values(), digest)


def landing_of(session: Session, digest: str, flight: int, seen: str = "0") -> Landing | None:
    """Return what became of a flight, unless the caller has seen it."""
    found = session.row(_OUTCOME, digest, flight)
    if found is None or found[2] <= int(seen):
        return None
    status, payload, at = found
    return Landing(Status(status), bytes(payload), at / 1e6, str(at))


def land(session: Session, digest: str, row: Row, status: str, payload: bytes, until: int) -> None:
    """Put what became of the flight where its followers read it. The last landing is enough."""
    values = (status, payload, row.now, until + GRACE, digest, row.flight)
    if not session.change(_LAND, *values):
        session.change(_LAND_FIRST, *values)
