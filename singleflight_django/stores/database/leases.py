"""Leases in the table: an expired row is taken by one conditional UPDATE, and so by one caller.

The database does the comparing, by its own clock; what was read before only tells what is worth
trying. A row that looked free may be held by now: then nothing is updated, and it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from singleflight_django.stores.base import Claim, Conflict, Grant
from singleflight_django.stores.database.sessions import Session, there

# How long a fencing token is remembered, in lives of its lease.
REMEMBERED = 10
# For how long a row that was made for a transaction to lock is safe from being purged, in µs.
BLANK = 60_000_000

_LOOK = 'SELECT "slot", "token", "ends" - {now} FROM {lease} WHERE "digest" = %s'
_INSERT = """\
{insert} INTO {lease} ("digest", "slot", "key", "token", "ends", "fence", "until",
    "flight", "fingerprint", "open", "known", "followed", "takeovers", "failures", "again", "apart")
VALUES (%s, %s, %s, %s, {now} + %s, {now}, {now} + %s,
    0, '', %s, 0, 0, 0, 0, %s, 0){or_nothing}"""
_TAKE = """\
UPDATE {lease} SET "token" = %s, "ends" = {now} + %s, "fence" = {greatest}({now}, "fence" + 1),
    "until" = {greatest}("until", {now} + %s)
WHERE "digest" = %s AND "slot" = %s AND ("ends" <= {now} OR "token" = %s)"""
_FENCE = 'SELECT "fence" FROM {lease} WHERE "digest" = %s AND "slot" = 0'
_NEXT_FENCE = """\
UPDATE {lease} SET "fence" = {greatest}({now}, "fence" + 1),
    "until" = {greatest}("until", {now} + %s)
WHERE "digest" = %s AND "slot" = 0"""
_RENEW = """\
UPDATE {lease} SET "ends" = {now} + %s, "until" = {greatest}("until", {now} + %s)
WHERE "digest" = %s AND "token" = %s AND "ends" > {now}"""
_RELEASE = """\
UPDATE {lease} SET "token" = '', "ends" = 0
WHERE "digest" = %s AND "token" = %s AND "ends" > {now}"""


def us(seconds: float) -> int:
    """Whole microseconds, at least one."""
    return max(1, round(seconds * 1_000_000))


def digest_of(prefix: str, key: str) -> str:
    """Return what stands for ``key`` in every comparison."""
    return blake2b(f"{prefix}:{key}".encode(), digest_size=16).hexdigest()


def acquire(
    session: Session, digest: str, key: str, token: str, ttl: float, limit: int
) -> Grant | Conflict:
    """Take a place of ``key``, or tell how long the first of its holders has it for."""
    while True:
        place = _look(session, digest, token, limit)
        if isinstance(place, Conflict):
            return place
        if limit > 1 or place > 0:
            add_blank(session, digest, key)
            with session.transaction():
                return _acquire_of_several(session, digest, key, token, ttl, limit)
        if _take(session, digest, 0, key, token, ttl) and (
            mine := session.row(_FENCE + ' AND "token" = %s', digest, token)
        ):
            return Grant(int(mine[0]))


def _acquire_of_several(
    session: Session, digest: str, key: str, token: str, ttl: float, limit: int
) -> Grant | Conflict:
    """The first place's row has the fence of all, and is locked since counting takes a while."""
    there(session.change(_NEXT_FENCE, us(ttl) * REMEMBERED, digest) or None)
    place = _look(session, digest, token, limit)
    if isinstance(place, Conflict):
        return place
    there(_take(session, digest, place, key, token, ttl) or None)
    (fence,) = there(session.row(_FENCE, digest))
    return Grant(int(fence))


def _look(session: Session, digest: str, token: str, limit: int) -> int | Conflict:
    """Return a place that is free, or the token's already; the conflict if there is none."""
    left = {}
    for slot, owner, ends in session.rows(_LOOK, digest):
        if ends > 0:
            if owner == token:
                return int(slot)
            left[slot] = ends
    if len(left) >= limit:
        return Conflict(min(left.values()) / 1e6)
    return next(slot for slot in range(limit) if slot not in left)


def _take(session: Session, digest: str, slot: int, key: str, token: str, ttl: float) -> bool:
    life, memory = us(ttl), us(ttl) * REMEMBERED
    if session.change(_TAKE, token, life, memory, digest, slot, token):
        return True
    values = (digest, slot, key[:255], token, life, memory, False, False)
    return session.change(_INSERT, *values) == 1


def add_blank(session: Session, digest: str, key: str) -> None:
    """Make the row of the key's first place, if there is none, for a transaction to lock.

    Not in that transaction: two that have both looked for a row in vain would wait for each other.
    """
    session.change(_INSERT, digest, 0, key[:255], "", 0, BLANK, False, False)


def renew(session: Session, claims: Iterable[tuple[str, Claim]]) -> list[bool]:
    """Let each claim, given with its key's digest, live for its ttl from now."""
    return [
        session.change(_RENEW, us(ttl), us(ttl) * REMEMBERED, digest, token) > 0
        for digest, (_, token, ttl) in claims
    ]


def release(session: Session, digest: str, token: str) -> bool:
    """Give the place of ``token`` back."""
    return session.change(_RELEASE, digest, token) > 0
