"""Flights on Redis: how joining and publishing are asked for, and what the replies mean."""

from __future__ import annotations

import math
from typing import Any

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
from singleflight_django.stores.redis.commands import Call
from singleflight_django.stores.redis.scripts import FOLLOWED, FORGET, JOIN, NOW, PUBLISH


def ms(seconds: float) -> int:
    """Whole milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


def join_call(base: str, joining: Joining) -> Call:
    """Ask to join; ``base`` is what all entries of the key begin with."""
    return Call(
        JOIN,
        (
            base + "lease",
            base + "fence",
            base + "flight",
            f"{base}{joining.flight}",
            base + "apart",
        ),
        (
            joining.token,
            ms(joining.ttl),
            ms(joining.wait),
            joining.fingerprint,
            joining.flight,
            joining.seen,
            joining.takeovers,
            ms(joining.life),
            base,
        ),
    )


def publish_call(base: str, publishing: Publishing) -> Call:
    """Ask to publish."""
    return Call(
        PUBLISH,
        (base + "lease", base + "flight", f"{base}{publishing.flight}", base + "apart"),
        (
            publishing.token,
            publishing.status,
            ms(publishing.keep),
            ms(publishing.apart),
            publishing.retry,
            ms(publishing.linger) if publishing.passengers else 0,
        ),
        publishing.payload,
    )


def published(reply: Any, resent: bool, publishing: Publishing) -> Status | None:
    """Read the reply to a publish. Sent twice, it may have been the first that did it."""
    if reply is None:
        return publishing.status if resent else None
    return Status(bytes(reply).decode())


def forget_call(base: str) -> Call:
    """Ask to drop what is kept."""
    return Call(FORGET, (base + "flight",))


def followed_call(base: str) -> Call:
    """Ask whether anybody follows."""
    return Call(FOLLOWED, (base + "flight",))


def now_call(base: str) -> Call:
    """Ask what time it is."""
    return Call(NOW, (base + "flight",))


def joined(reply: list[Any]) -> Joined:
    """Read the reply to a join."""
    kind = bytes(reply[0])
    if kind == b"led":
        return Led(int(reply[1]), int(reply[2]), int(reply[3]), int(reply[4]) / 1e6)
    if kind == b"busy":
        return Busy(int(reply[1]), int(reply[2]) / 1000, int(reply[3]) / 1e6)
    if kind == b"landing":
        return landing(reply[1], reply[2])
    if kind == b"kept":
        return Kept(reply[1], int(reply[2]) / 1000)
    return Mismatch() if kind == b"mismatch" else Apart()


def first_landing(reply: Any) -> Landing | None:
    """Read the reply to XREAD: a list or a map of streams, parsed by a client or not."""
    if not reply:
        return None
    entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    # A client of RESP3 wraps the entries once more.
    entry = entries[0] if not isinstance(entries[0][0], list | tuple) else entries[0][0]
    return landing(*entry)


def landing(number: bytes, fields: Any) -> Landing:
    """Read one entry of an outcome's stream. Its number is the server's time in µs."""
    if not isinstance(fields, dict):
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    seen = bytes(number).decode()
    at = int(seen.partition("-")[0]) / 1e6
    return Landing(Status(bytes(fields[b"s"]).decode()), bytes(fields[b"p"]), at, seen)
