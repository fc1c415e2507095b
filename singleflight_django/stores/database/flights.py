"""Flights in the table: the steps of ``stores/redis/scripts``, each in one short transaction.

The row of the key is locked first, so that nothing happens between looking and leading: a caller
that saw "no result yet" and then won the lease would do the work a second time.
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
        settled = _settled(session, digest, row, joining)
        return _lead(session, digest, row, joining) if settled is None else settled


def _still_busy(row: Row, joining: Joining) -> Busy | None:
    """What a follower gets who is known as one already: one row says it all."""
    same = joining.flight == row.flight and joining.fingerprint == row.fingerprint
    known = row.is_open and row.followed >= row.now + _us(joining.wait) - _SLACK
    if row.is_held and row.token != joining.token and same and known:
        return _busy(row, row.flight)
    return None


# A caller's wait is counted down by its own clock. In µs.
_SLACK = 50_000


def _settled(session: Session, digest: str, row: Row, joining: Joining) -> Joined | None:
    """Everything but that the caller is to lead."""
    if joining.flight:
        landed = landing_of(session, digest, joining.flight, joining.seen)
        if landed:
            return landed
    if row.apart > row.now:
        return Apart()
    if row.is_held:
        return _follow(session, digest, row, joining)
    if row.keeps and (kept := landing_of(session, digest, row.flight)):
        if row.fingerprint != joining.fingerprint:
            return Mismatch()
        return Kept(kept.payload, (row.known - row.now) / 1e6)
    return None


def _follow(session: Session, digest: str, row: Row, joining: Joining) -> Joined:
    if not row.is_known:
        # No flight's lease: whoever comes waits for it to end.
        return _busy(row, 0)
    if row.token == joining.token:
        return Led(row.flight, row.fence, row.takeovers, row.now / 1e6)
    if row.fingerprint != joining.fingerprint:
        return Mismatch()
    till = row.now + _us(joining.wait)
    if till > row.followed:
        write(session, digest, {"followed": till})
    return _busy(row, row.flight)


def _lead(session: Session, digest: str, row: Row, joining: Joining) -> Led | Landing:
    follows = joining.flight == row.flight
    same = row.is_open and row.fingerprint == joining.fingerprint
    takes_over = same and (follows or row.is_followed)
    takeovers = row.takeovers + (not row.again) if takes_over else 0
    if takeovers > joining.takeovers:
        land(session, digest, row, Status.FAILED, b"", max(row.followed, row.now))
        write(session, digest, _CLOSED)
        if follows and (failed := landing_of(session, digest, row.flight, joining.seen)):
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
    if not takes_over:
        changes |= {"flight": fence, "fingerprint": joining.fingerprint, "open": True}
        changes |= {"followed": 0, "failures": 0}
    write(session, digest, changes)
    return Led(row.flight if takes_over else fence, fence, takeovers, row.now / 1e6)


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
    status, keep, apart = publishing.status, _us(publishing.keep), _us(publishing.apart)
    linger = _us(publishing.linger) if publishing.passengers else 0
    followed = row.is_open and (row.is_followed or linger > 0)
    changes: dict[str, object] = {"token": "", "ends": 0}
    if status == Status.FAILED and followed and row.failures < publishing.retry:
        changes["failures"] = row.failures + 1
        status = Status.AGAIN
    kept = 0
    if followed and status in (Status.AGAIN, Status.VACANT):
        changes["again"] = status == Status.AGAIN
        # Whoever comes next is to go on with this flight: another one would have its tries anew.
        changes["followed"] = max(row.followed, row.now + linger)
    elif row.is_open and status == Status.DONE and keep > 0:
        kept = row.now + keep
        changes |= {"open": False, "known": kept}
    else:
        changes |= _CLOSED
    if apart > 0:
        changes["apart"] = row.now + apart
    changes["until"] = max(row.until, row.now + max(keep, apart))
    write(session, digest, changes)
    if kept or row.is_followed:
        land(session, digest, row, status, publishing.payload, max(row.followed, kept))
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


def now(session: Session) -> float:
    """Return the clock of the database, in seconds."""
    ((microseconds,),) = session.rows("SELECT {now}")
    return float(microseconds) / 1e6


def _busy(row: Row, flight: int) -> Busy:
    return Busy(flight, (row.ends - row.now) / 1e6, row.now / 1e6)


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
