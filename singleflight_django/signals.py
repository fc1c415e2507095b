"""What happened, told as facts: to Django's signals, and to the logger ``singleflight_django``.

A listener is a plain function, runs where the event happens and should be quick::

    @receiver(lease_lost)
    def alarm(facts, **kwargs): ...
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from django.dispatch import Signal

logger = logging.getLogger("singleflight_django")

# The reason of an event that happened because the store is away, not because of another caller.
STORE_AWAY = "store unavailable"
# The reason of an event that was only observed, and of one with more to it: "observe: <what>".
OBSERVED = "observe"

lease_acquired = Signal()
lease_rejected = Signal()
lease_lost = Signal()
lease_released = Signal()
flight_led = Signal()
flight_joined = Signal()
flight_taken_over = Signal()
flight_failed = Signal()
flight_timed_out = Signal()
share_refused = Signal()
duplicate_caught = Signal()
unprotected_run = Signal()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about one event. ``duration`` and ``wait`` are in seconds.

    ``key`` has its namespace, and may have secrets of a header or of the session in it: ``shown`` is
    what may be logged of it. ``duration`` is how long the lease was held or the flight took,
    ``wait`` how long the caller waited for it. ``variant`` is "lock" or "flight".
    """

    key: str
    namespace: str = ""
    view: str = ""
    duration: float | None = None
    wait: float | None = None
    fence: int | None = None
    reason: str = ""
    variant: str = ""
    shown: str = ""

    def __post_init__(self) -> None:
        if not self.shown:
            object.__setattr__(self, "shown", self.key)


class _Event(NamedTuple):
    signal: Signal
    usual_level: int

    def level(self, reason: str) -> int:
        # An outage must not look like everyday contention.
        if reason == STORE_AWAY:
            return logging.ERROR
        # Who observes wants to read it, though it would be nothing special otherwise.
        return max(self.usual_level, logging.INFO) if reason == OBSERVED else self.usual_level


_EVENTS = {
    "lease_acquired": _Event(lease_acquired, logging.DEBUG),
    "lease_rejected": _Event(lease_rejected, logging.INFO),
    "lease_lost": _Event(lease_lost, logging.WARNING),
    "lease_released": _Event(lease_released, logging.DEBUG),
    "flight_led": _Event(flight_led, logging.DEBUG),
    "flight_joined": _Event(flight_joined, logging.DEBUG),
    "flight_taken_over": _Event(flight_taken_over, logging.WARNING),
    "flight_failed": _Event(flight_failed, logging.WARNING),
    "flight_timed_out": _Event(flight_timed_out, logging.WARNING),
    "share_refused": _Event(share_refused, logging.INFO),
    "duplicate_caught": _Event(duplicate_caught, logging.WARNING),
    "unprotected_run": _Event(unprotected_run, logging.ERROR),
}

# What tells of the events, by their names.
SIGNALS: Final = {name: event.signal for name, event in _EVENTS.items()}


def heard(name: str, reason: str = "") -> bool:
    """Whether anybody may listen to the event ``name``: if not, its facts need not be gathered."""
    signal, level = event = _EVENTS[name]
    return bool(signal.receivers) or logger.isEnabledFor(event.level(reason) if reason else level)


def emit(name: str, facts: Facts) -> None:
    """Tell the listeners and the log that the event ``name`` happened. Never raises.

    A listener that raises is logged by ``Signal.send_robust()``, with its traceback.
    """
    event = _EVENTS[name]
    for tell in (_log, _send):
        try:
            tell(name, event, facts)
        except Exception:
            # What gets here isn't a listener's own error but, say, a log handler that raises.
            with suppress(Exception):
                logger.exception("%s could not be told", name)


def _send(name: str, event: _Event, facts: Facts) -> None:
    event.signal.send_robust(sender=None, facts=facts)


# Called directly: the hot path can't afford a listener that mostly finds its level disabled.
def _log(name: str, event: _Event, facts: Facts) -> None:
    level = event.level(facts.reason)
    if not logger.isEnabledFor(level):
        return
    known = [
        (word, value)
        for word in ("view", "duration", "wait", "fence", "reason")
        if (value := getattr(facts, word)) not in ("", None)
    ]
    message = " ".join(["%s key=%s namespace=%s", *(f"{word}=%s" for word, _ in known)])
    values = (facts.shown, facts.namespace, *(value for _, value in known))
    logger.log(level, message, name, *map(_loggable, values))


def _loggable(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, str):
        value = value[:200]
        # A line break in a key must not forge a second log line.
        return value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    return value
