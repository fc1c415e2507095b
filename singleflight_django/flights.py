"""What ``single_flight``, its mixin and ``SingleFlight`` share: options, and a caller's flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from singleflight_django import signals
from singleflight_django.callers import Flight
from singleflight_django.conf import conf
from singleflight_django.exceptions import (
    LeaseConflictError,
    LeaseLostError,
    StoreUnavailableError,
)
from singleflight_django.guards import (
    ON_STORE_ERROR,
    Guard,
    Options,
    Seconds,
    as_float,
    check_choice,
)
from singleflight_django.lease import Lease

# For how long an identity whose outcome could not be shared is not coalesced, in seconds.
APART = 30.0


@dataclass(frozen=True, kw_only=True)
class FlightOptions(Options):
    """The options that ``single_flight`` and ``SingleFlight`` have in common."""

    wait: Seconds | None = None
    result_ttl: Seconds | None = None
    retry: int = 0
    takeover: bool = True
    on_lost: str = "raise"
    max_bytes: int | None = None
    max_followers: int | None = None
    max_run: Seconds | None = None
    on_store_error: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds("wait", "result_ttl", zero=True)
        self._seconds("max_run")
        check_count("retry", self.retry, 0)
        check_count("max_bytes", self.max_bytes, 1)
        check_count("max_followers", self.max_followers, 0)
        check_choice("on_lost", self.on_lost, ("raise", "return"))
        if self.on_store_error is not None:
            check_choice("on_store_error", self.on_store_error, ON_STORE_ERROR)


class FlightGuard(Guard):
    """A namespace of flights."""

    options: FlightOptions
    variant = "flight"

    def flight(
        self, key: str, *, fingerprint: str = "", blocking: bool, max_followers: int | None = None
    ) -> Flight:
        """Return a caller's part in the flight of ``key``, not joined yet.

        ``blocking``: whether it waits as a thread. ``max_followers``: where the option has none.
        """
        options, lease = self.options, self.lease((key,))
        most = options.max_followers
        return Flight(
            lease,
            partial(self.tell, lease=lease),
            conf.SINGLEFLIGHT_WAIT if options.wait is None else as_float(options.wait),
            fingerprint,
            options.retry,
            options.takeover,
            max_followers if most is None else most,
            blocking,
            conf.SINGLEFLIGHT_POLL_INTERVAL,
        )

    @property
    def keep(self) -> float:
        """For how many seconds an outcome answers callers that come after the flight's end."""
        kept = self.options.result_ttl
        return conf.SINGLEFLIGHT_RESULT_TTL if kept is None else as_float(kept)

    @property
    def max_bytes(self) -> int:
        """The largest outcome that is shared."""
        most = self.options.max_bytes
        return conf.SINGLEFLIGHT_MAX_BYTES if most is None else most

    @property
    def max_run(self) -> float:
        """For how many seconds the work may go on for its followers without its own caller."""
        longest = self.options.max_run
        return conf.SINGLEFLIGHT_MAX_HOLD if longest is None else as_float(longest)

    def goes_on_without(self, error: StoreUnavailableError, policy: str) -> bool:
        """Whether the work is to run on its own since the store is away."""
        proceed = policy == "proceed"
        event = "unprotected_run" if proceed else "share_refused"
        signals.emit(event, self.facts(error.key, reason=signals.STORE_AWAY))
        return proceed

    def tell(self, name: str, lease: Lease, **facts: Any) -> None:
        """See Guard.tell(). What is only observed takes a lease: it is told of as of a flight."""
        if name == "lease_acquired":
            name = "flight_led"
        elif name == "lease_rejected":
            name, facts["reason"] = "flight_joined", signals.OBSERVED
        super().tell(name, lease, **facts)

    def tell_observed(self, error: Exception) -> None:
        """Tell of what kept a call from being observed, and would have kept it from running."""
        if isinstance(error, StoreUnavailableError):
            self.goes_on_without(error, "proceed")
        elif not isinstance(error, LeaseConflictError):
            # Of a conflict acquire() has told.
            reason = f"{signals.OBSERVED}: {type(error).__name__}"
            signals.emit("share_refused", self.facts(getattr(error, "key", ""), reason=reason))

    def check_landed(self, flight: Flight, landed: bool) -> None:
        """Raise LeaseLostError, unless told to return, where a flight wasn't ours at its end."""
        if not landed and self.options.on_lost == "raise":
            raise LeaseLostError(
                f"The lease of {flight.key!r} ended before its flight did: another leader may have "
                'done the same work. on_lost="return" returns the result all the same.',
                key=flight.key,
            )


def ended_its_process(error: BaseException) -> bool:
    """Whether ``error`` is the end of a worker rather than a failure of its work."""
    return not isinstance(error, Exception | asyncio.CancelledError)


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless ``value`` is None or a whole number of ``least`` or more."""
    if value is not None and (type(value) is not int or value < least):
        raise ValueError(f"{name} must be a whole number of {least} or more, not {value!r}.")
