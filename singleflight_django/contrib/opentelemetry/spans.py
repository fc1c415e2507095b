"""What the signals tell, as spans: an event that ends something is the span of what it ended.

It is made at the end, with a start in the past, as a child of the span that is current then. An
event that ends nothing is an event of the current span.
"""

from __future__ import annotations

import time
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from singleflight_django.signals import SIGNALS, STORE_AWAY, Facts

try:
    from opentelemetry import trace
except ImportError as error:
    raise ImproperlyConfigured(
        'Spans need OpenTelemetry: pip install "singleflight-django[opentelemetry]"'
    ) from error

HOLD: Final = "singleflight.hold"
LEAD: Final = "singleflight.lead"
FOLLOW: Final = "singleflight.follow"
WAIT: Final = "singleflight.wait"

# The span that an event ends, and which of its facts tells the length.
_ENDS: Final = {
    "lease_acquired": (WAIT, "wait"),
    "lease_rejected": (WAIT, "wait"),
    "lease_released": (HOLD, "duration"),
    "flight_joined": (FOLLOW, "wait"),
    "flight_failed": (FOLLOW, "wait"),
    "flight_timed_out": (FOLLOW, "wait"),
    "flight_taken_over": (FOLLOW, "wait"),
}
_OUTCOMES: Final = {
    "lease_acquired": "acquired",
    "lease_rejected": "rejected",
    "lease_released": "released",
    "flight_joined": "joined",
    "flight_failed": "failed",
    "flight_timed_out": "timed out",
    "flight_taken_over": "taken over",
}
# Outcomes that are an error: not a conflict, which is what a lock is for.
ERRORS: Final = ("failed", "timed out", "lost", "not published", STORE_AWAY)


class Spans:
    """Makes the spans of one tracer. ``show_keys``: whether they tell the key, as the log does."""

    def __init__(self, tracer: trace.Tracer, show_keys: bool = False) -> None:
        self._tracer, self._show_keys = tracer, show_keys

    def receive(self, signal: Any, facts: Facts, **kwargs: Any) -> None:
        """Make a span, or an event of the current one."""
        now = time.time_ns()
        event = next(name for name, known in SIGNALS.items() if known is signal)
        attributes = self._attributes(facts)
        name, fact = _ENDS.get(event, ("", ""))
        length = getattr(facts, fact) if fact else None
        if not length:
            trace.get_current_span().add_event(f"singleflight.{event}", attributes)
            return
        if event == "lease_released" and facts.variant == "flight":
            name = LEAD
        outcome = _outcome(event, facts.reason)
        span = self._tracer.start_span(
            name,
            attributes={**attributes, "singleflight.outcome": outcome},
            start_time=now - int(length * 1e9),
        )
        if outcome in ERRORS:
            span.set_attribute("error.type", outcome)
            span.set_status(trace.StatusCode.ERROR, facts.reason or outcome)
        span.end(now)

    def _attributes(self, facts: Facts) -> dict[str, str | int | float]:
        known = {
            "singleflight.namespace": facts.namespace,
            "singleflight.variant": facts.variant,
            "singleflight.key": facts.shown if self._show_keys else "",
            "singleflight.duration": facts.duration,
            "singleflight.wait": facts.wait,
            "singleflight.fence": facts.fence,
            "singleflight.reason": facts.reason,
            "code.function.name": facts.view,
        }
        return {name: value for name, value in known.items() if value not in ("", None)}


def _outcome(event: str, reason: str) -> str:
    """Return how it ended: of a lease and of a flight it is the reason, if there is one."""
    if event == "lease_released" or reason in ("kept", STORE_AWAY):
        return reason or _OUTCOMES[event]
    return _OUTCOMES[event]


_UID: Final = "singleflight_django.contrib.opentelemetry"


def connect(tracer_provider: trace.TracerProvider | None = None, show_keys: bool = False) -> None:
    """Make spans from now on, with ``tracer_provider`` or the global one. The last call counts."""
    disconnect()
    spans = Spans(trace.get_tracer("singleflight_django", None, tracer_provider), show_keys)
    for signal in SIGNALS.values():
        signal.connect(spans.receive, weak=False, dispatch_uid=_UID)


def disconnect() -> None:
    """Undo connect()."""
    for signal in SIGNALS.values():
        signal.disconnect(dispatch_uid=_UID)
