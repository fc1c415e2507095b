"""How a leader's flight ends: published, or left to lapse."""

from __future__ import annotations

from functools import partial

from singleflight_django.callers import OPEN, Flight
from singleflight_django.lease import Lease
from singleflight_django.renewal import keeper
from singleflight_django.steps import Steps
from singleflight_django.stores.base import Landing, Publishing, Status
from singleflight_django.tier import LocalFlight
from singleflight_django.waiting import clock

# As signals.STORE_AWAY has it: the engine knows no signals.
AWAY = "store unavailable"


def land(
    flight: Flight, status: Status, payload: bytes = b"", keep: float = 0.0, apart: float = 0.0
) -> Steps:
    """Publish what became of a flight that the caller led. Returns whether it still was its own.

    Raises nothing of its own: the caller has a result, or an exception, that matters more.
    """
    lease, local, led = flight.lease, flight.local, flight.led
    if local is None or led is None or not lease.end():
        return True
    keeper.forget(lease)
    # From here on newcomers ask the store themselves: the flight ends when it is published.
    local.close()
    publishing = Publishing(
        lease.token,
        led.flight,
        status,
        payload,
        keep,
        apart,
        flight.retry,
        local.has_passengers,
        flight.wait,
    )
    try:
        seen = yield lease.store, "publish", (flight.key, publishing)
    except BaseException as error:
        keeper.give_back_later(lease)
        # What the store may not have heard, this process can know all the same.
        _tell_passengers(local, status, payload)
        if not isinstance(error, Exception):
            raise
        flight.tell("share_refused", reason=AWAY)
        _tell_of_end(lease, "not published")
        return True
    if seen is None:
        lease.lose("it had ended before the outcome was published")
    _tell_passengers(local, seen, payload)
    _tell_of_end(lease, "lost" if seen is None else status)
    return seen is not None


def _tell_of_end(lease: Lease, reason: str) -> None:
    # How long the flight took is how long its leader held the lease.
    lease.emit("lease_released", lease, reason=str(reason), duration=clock() - lease.since)


def _tell_passengers(local: LocalFlight, status: Status | None, payload: bytes) -> None:
    if status is None or status in OPEN:
        local.hand_over()
    else:
        local.land(Landing(status, payload))


def lapse(flight: Flight, *, closing: bool = False) -> None:
    """Leave a flight whose work may still be going on: nobody's until the lease has lapsed.

    ``closing``: whether the caller's coroutine is being closed, maybe by the garbage collector.
    """
    if flight.local is None or not flight.lease.end():
        return
    keeper.forget(flight.lease)
    flight.local.hand_over()
    tell = partial(_tell_of_lapse, flight, clock() - flight.lease.since)
    if closing:
        # Here a listener could wait for a lock that this very thread holds.
        keeper.later(tell)
    else:
        tell()


def _tell_of_lapse(flight: Flight, duration: float) -> None:
    flight.tell("flight_failed", reason="abandoned", duration=duration)
    _tell_of_end(flight.lease, "cancelled: it lapses")
