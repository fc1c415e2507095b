"""Flights in the table: the steps of ``stores/redis/scripts``, each in one short transaction.

The row of the key is locked first, so that nothing happens between looking and leading: a caller that
saw "no result yet" and then won the lease would do the work a second time.
"""

from __future__ import annotations

from singleflight_django.stores.base import (
    Apart,
    Busy,
    Joined,
    Joining,
    Kept,
    Landing,
    Led,
    Mismatch,
    Publishing,
    Status,
)
from singleflight_django.stores.database.leases import REMEMBERED, add_blank, us
from singleflight_django.stores.database.rows import Row, land, landing_of, lock, read, write
from singleflight_django.stores.database.sessions import Session


def join(session: Session, digest: str, key: str, joining: Joining) -> Joined:
    """Say what the caller is. Whoever only looks again locks nothing."""
    row = read(session, digest)
    if row is None:
        add_blank(session, digest, key)
    elif busy := _still_busy(row, joining):
        return busy
    with session.transaction():
        row = lock(session, digest)
        return _settled(session, digest, row, joining) or _lead(session, digest, row, joining)


def _still_busy(row: Row, joining: Joining) -> Busy | None:
    """What a follower gets who is known as one already: one row says it all."""
    same = joining.flight == row.flight and joining.fingerprint == row.fingerprint
    known = row.is_open and row.followed >= row.now + _us(joining.wait) - _SLACK
    if row.is_held and row.token != joining.token and same and known:
        return _busy(row)
    return None


# A caller's wait is counted down by its own clock. In µs.
_SLACK = 50_000


def _settled(session: Session, digest: str, row: Row, joining: Joining) -> Joined | None:
    """Everything but that the caller is to lead."""
    if joining.flight and (
        landed := landing_of(session, digest, joining.flight, joining.seen)
    ):
        return landed
    if row.apart > row.now:
        return Apart()
    if row.is_held:
        return _follow(session, digest, row, joining)
    if row.keeps and (kept := landing_of(session, digest, row.flight, "0")):
        if row.fingerprint != joining.fingerprint:
            return Mismatch()
        return Kept(kept.payload, (row.known - row.now) / 1e6)
    return None


def _follow(session: Session, digest: str, row: Row, joining: Joining) -> Joined:
    if row.token == joining.token:
        return Led(row.flight, row.fence, row.takeovers)
    if not row.is_open or row.fingerprint != joining.fingerprint:
        return Mismatch()
    till = row.now + _us(joining.wait)
    if till > row.followed:
        write(session, digest, {"followed": till})
    return _busy(row)


def _lead(session: Session, digest: str, row: Row, joining: Joining) -> Led | Landing:
    follows = joining.flight == row.flight
    takes_over = row.is_open and (follows or row.is_followed)
    takeovers = row.takeovers + (not row.again) if takes_over else 0
    if takeovers > joining.takeovers:
        till = max(row.followed, row.now)
        land(session, digest, row.flight, Status.FAILED, b"", row.now, till)
        write(session, digest, _CLOSED)
        failed = landing_of(session, digest, row.flight, joining.seen) if follows else None
        if failed:
            return failed
        takes_over, takeovers = False, 0
    fence, life = max(row.now, row.fence + 1), us(joining.ttl)
    known = row.now + us(joining.life)
    changes = {
        "token": joining.token,
        "ends": row.now + life,
        "fence": fence,
        "takeovers": takeovers,
        "again": False,
        "known": known,
        "until": max(row.until, known, row.now + life * REMEMBERED),
    }
    flight = row.flight if takes_over else fence
    if not takes_over:
        changes |= {"flight": flight, "fingerprint": joining.fingerprint, "open": True}
        changes |= {"followed": 0, "failures": 0}
    write(session, digest, changes)
    return Led(flight, fence, takeovers)


_CLOSED: dict[str, object] = {"open": False, "known": 0, "followed": 0}


def publish(session: Session, digest: str, publishing: Publishing) -> Status | None:
    """Store what became of a flight, end its lease, and let its followers see it."""
    if read(session, digest) is None:
        return None
    with session.transaction():
        row = lock(session, digest)
        if row.token != publishing.token or not row.is_held:
            return None
        return _publish(session, digest, row, publishing)


def _publish(session: Session, digest: str, row: Row, publishing: Publishing) -> Status:
    status, keep = publishing.status, _us(publishing.keep)
    followed = row.is_followed or publishing.passengers
    changes: dict[str, object] = {"token": "", "ends": 0}
    failures = row.failures if row.known > row.now else 0
    if status == Status.FAILED and followed and failures < publishing.retry:
        changes["failures"] = failures + 1
        status = Status.AGAIN
    kept = status == Status.DONE and keep > 0
    if status == Status.AGAIN and followed:
        changes["again"] = True
    elif kept:
        changes |= {"open": False, "known": row.now + keep}
    elif status != Status.VACANT or not followed:
        changes |= _CLOSED
    if publishing.apart > 0:
        changes["apart"] = row.now + _us(publishing.apart)
    changes["until"] = max(row.until, row.now + max(keep, _us(publishing.apart)))
    write(session, digest, changes)
    if kept or row.is_followed:
        till = max(row.followed, row.now + keep if kept else 0)
        land(session, digest, publishing.flight, status, publishing.payload, row.now, till)
    return status


def forget(session: Session, digest: str) -> None:
    """Drop what is kept; never a flight under way."""
    session.change(
        'UPDATE {lease} SET "known" = 0 WHERE "digest" = %s AND "slot" = 0 AND NOT "open"', digest
    )


def followed(session: Session, digest: str) -> bool:
    """Whether a follower of the flight may still be waiting."""
    row = read(session, digest)
    return row is not None and row.is_followed


def _busy(row: Row) -> Busy:
    return Busy(row.flight, (row.ends - row.now) / 1e6, row.now / 1e6)


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
