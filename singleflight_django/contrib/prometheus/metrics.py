"""What the signals tell, counted and measured."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

from singleflight_django import seats
from singleflight_django.contrib.prometheus.labels import Namespaces, reason_label
from singleflight_django.signals import SIGNALS, Facts

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:
    raise ImproperlyConfigured(
        "Metrics for Prometheus need prometheus_client: "
        'pip install "singleflight-django[prometheus]"'
    ) from error

# Seconds: from a store's round trip to the usual max_hold.
BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

# The events at the end of a wait, and how it ended.
_WAITS: Final = {
    "lease_acquired": "acquired",
    "lease_rejected": "rejected",
    "flight_joined": "joined",
    "flight_failed": "failed",
    "flight_timed_out": "timed out",
    "flight_taken_over": "taken over",
}


class Metrics:
    """The metrics of one registry. It listens from connect() to disconnect()."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._namespaces = Namespaces()
        self._events = Counter(
            "singleflight_events",
            "What happened to leases and flights, by the signal's name.",
            ("event", "namespace", "view", "reason"),
            registry=registry,
        )
        histogram = partial(Histogram, registry=registry, buckets=BUCKETS)
        self._holds = histogram(
            "singleflight_lease_hold_seconds",
            "How long a lock was held.",
            ("namespace",),
        )
        self._flights = histogram(
            "singleflight_flight_duration_seconds",
            "How long a flight took, from its leader's start to the outcome.",
            ("namespace", "outcome"),
        )
        self._waits = histogram(
            "singleflight_wait_seconds",
            "How long callers waited for a lock or for the outcome of a flight.",
            ("namespace", "outcome"),
        )
        self._followers = Gauge(
            "singleflight_followers",
            "How many callers are waiting for the outcome of a flight.",
            registry=registry,
            # Of a worker that has ended nobody waits any more.
            multiprocess_mode="livesum",
        )

    def connect(self) -> None:
        """Listen to all events."""
        for signal in SIGNALS.values():
            signal.connect(self._receive, weak=False, dispatch_uid=id(self))
        seats.watchers.append(self._count_followers)

    def disconnect(self) -> None:
        """Listen no more, and leave the registry."""
        for signal in SIGNALS.values():
            signal.disconnect(dispatch_uid=id(self))
        seats.watchers.remove(self._count_followers)
        for metric in (self._events, self._holds, self._flights, self._waits, self._followers):
            self._registry.unregister(metric)

    def _receive(self, signal: Any, facts: Facts, **kwargs: Any) -> None:
        event = next(name for name, known in SIGNALS.items() if known is signal)
        namespace = self._namespaces.label(facts.namespace)
        reason = reason_label(event, facts.reason)
        self._events.labels(event, namespace, facts.view, reason).inc()
        if event == "lease_released" and facts.duration is not None:
            if facts.variant == "flight":
                # What is only observed has no outcome.
                self._flights.labels(namespace, reason or "observed").observe(facts.duration)
            else:
                self._holds.labels(namespace).observe(facts.duration)
        # 0: who may not wait has not.
        if event in _WAITS and facts.wait:
            outcome = "kept" if reason == "kept" else _WAITS[event]
            self._waits.labels(namespace, outcome).observe(facts.wait)

    def _count_followers(self) -> None:
        # Several threads do this at once: whoever sets last has to look once more.
        while True:
            waiting = seats.waiting()
            self._followers.set(waiting)
            if seats.waiting() == waiting:
                return


_connected: dict[int, Metrics] = {}


def connect(registry: CollectorRegistry = REGISTRY) -> None:
    """Count and measure in ``registry`` from now on. Once for each registry, however often called."""
    if id(registry) not in _connected:
        metrics = _connected[id(registry)] = Metrics(registry)
        metrics.connect()


def disconnect(registry: CollectorRegistry = REGISTRY) -> None:
    """Undo connect()."""
    metrics = _connected.pop(id(registry), None)
    if metrics is not None:
        metrics.disconnect()
