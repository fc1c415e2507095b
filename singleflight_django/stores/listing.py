"""What a store can tell of those who hold something in it, and how people are told of it."""

from __future__ import annotations

from typing import Literal, NamedTuple

LEASE: Literal["lease"] = "lease"
FLIGHT: Literal["flight"] = "flight"


class Holding(NamedTuple):
    """One live lease. Times are seconds by the store's clock; None is what the store can't tell.

    ``key``: with its namespace, as ``lease.key``; ``kind``: "flight" where it is a leader's;
    ``holder``: ``host:pid``, or ""; ``token``: the owner token, a secret that is never shown;
    ``age``: since it was acquired (of a semaphore's holders, the store may know the last one's);
    ``remaining``: until it ends unless renewed; ``followers``: how many processes have joined the
    flight, each of which has one waiter for all its callers; ``flight``: the flight's number, or 0.
    """

    key: str
    kind: Literal["lease", "flight"]
    holder: str
    token: str
    age: float | None
    remaining: float
    followers: int | None = None
    fence: int | None = None
    flight: int = 0

    def __repr__(self) -> str:
        return f"<Holding {self.kind} {self.key} of {self.holder or '?'}>"


def seconds_text(seconds: float | None) -> str:
    """Return a duration for people: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds is None:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def whose(holding: Holding) -> str:
    """Return who holds it and for how long, for people who are asked whether it is to end."""
    who = holding.holder or "a process that didn't say its name"
    age = "" if holding.age is None else f" for {seconds_text(holding.age)}"
    number = holding.followers
    followers = f", {number} follower{'' if number == 1 else 's'}" if number else ""
    return f"{who}{age} ({holding.kind}{followers}; {seconds_text(holding.remaining)} left)"


def evicted(holding: Holding, done: bool) -> str:
    """Return what has become of a lease that was to end: ``done`` is what Store.evict() returned."""
    who = holding.holder or "its holder"
    if not done:
        return f"It has ended by itself: {who} gave it back, or its ttl was over."
    then = "A follower takes it over, if it has one. " if holding.kind == FLIGHT else ""
    return f"Released: it was {who}'s. {then}What {who} was doing has not been stopped."
