"""What a caller brings to a flight, and what may come out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from singleflight_django.lease import Lease
from singleflight_django.seats import Seat
from singleflight_django.stores.base import Kept, Led, Status
from singleflight_django.tier import LocalFlight
from singleflight_django.waiting import Deadline

# The flight goes on, with another leader.
OPEN = (Status.AGAIN, Status.VACANT)


@dataclass(slots=True)
class Flight:
    """One caller's part in a flight. Times in seconds.

    ``lease``: what it will lead with, if it does; ``tell``: emits an event about the flight.
    """

    lease: Lease
    tell: Callable[..., None]
    wait: float
    fingerprint: str = ""
    retry: int = 0
    takeover: bool = True
    # How many callers of this colour may wait in this process, threads or tasks; None: any number.
    max_followers: int | None = None
    blocking: bool = True
    longest_pause: float = 0.5
    # What a long wait lets go of: an object with let_go() and its a-twin; or nothing.
    ballast: Any = None
    local: LocalFlight | None = None
    led: Led | None = None
    deadline: Deadline = field(init=False)
    seat: Seat = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.wait)
        self.seat = Seat(self.blocking, self.max_followers, self.key)

    @property
    def key(self) -> str:
        """The key, namespace included."""
        return self.lease.keys[0]


class Leading(NamedTuple):
    """The caller leads: it does the work, then lands the flight."""


class Shared(NamedTuple):
    """The outcome of the flight that the caller followed."""

    payload: bytes


class Alone(NamedTuple):
    """The outcome is for the leader's caller alone; ``reason`` says why."""

    reason: str


Outcome = Leading | Shared | Kept | Alone
