"""Spans are what happened, exported by the real SDK."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from django.apps import apps
from django.db import connections
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from singleflight_django import semaphore_lock, single_flight
from singleflight_django.contrib import opentelemetry
from singleflight_django.contrib.opentelemetry import connect, disconnect
from singleflight_django.contrib.opentelemetry.apps import OpenTelemetryConfig
from singleflight_django.signals import SIGNALS, STORE_AWAY, Facts, emit
from tests.conftest import OneDatabase
from tests.library.models import Book
from tests.meeting import Room
from tests.telling import EVENTS, SITES, Scenes, Site, every_scene

APP = "singleflight_django.contrib.opentelemetry"
ROOT = Path(__file__).parent.parent


class Tracing:
    """A provider, and what it exports. A request's own span is made as an instrumentation would."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def spans(self, name: str = "") -> list[ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if span.name.startswith(name or "singleflight.")]

    def one(self, name: str, **attributes: Any) -> ReadableSpan:
        wanted = {f"singleflight.{word}": value for word, value in attributes.items()}.items()
        [span] = [s for s in self.spans(name) if wanted <= dict(s.attributes or {}).items()]
        return span

    def events(self) -> dict[str, dict[str, Any]]:
        """The events of the requests' own spans."""
        spans = self.spans("request")
        return {event.name: dict(event.attributes or {}) for s in spans for event in s.events}


def middleware(get_response: Any) -> Any:
    """What an instrumentation of Django does: the request is the current span."""

    def handle(request: Any) -> Any:
        with _tracing.provider.get_tracer("site").start_as_current_span("request"):
            return get_response(request)

    return handle


_tracing: Tracing


@pytest.fixture
def tracing(settings: Any) -> Iterator[Tracing]:
    global _tracing
    _tracing = Tracing()
    settings.MIDDLEWARE = [f"{__name__}.middleware", *settings.MIDDLEWARE]
    connect(_tracing.provider)
    yield _tracing
    disconnect()
    _tracing.provider.shutdown()


@pytest.fixture(params=SITES)
def site(
    request: pytest.FixtureRequest, settings: Any, sqlite: str, django_db_blocker: Any
) -> Iterator[Site]:
    settings.DATABASE_ROUTERS = [OneDatabase(sqlite)]
    with django_db_blocker.unblock():
        yield SITES[request.param](settings)
        Book.objects.all().delete()
        connections.close_all()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


class TestSpans:
    def test_a_lock_is_held_and_waited_for(self, site: Site, tracing: Tracing) -> None:
        Scenes().conflict(site)

        hold = tracing.one("singleflight.hold")
        assert dict(hold.attributes or {}) == {
            "singleflight.namespace": "semaphore_lock",
            "singleflight.variant": "lock",
            "singleflight.outcome": "released",
            "singleflight.duration": pytest.approx(seconds(hold), abs=1e-6),
            "singleflight.fence": tracing.one("singleflight.wait", outcome="acquired").attributes[  # type: ignore[index]
                "singleflight.fence"
            ],
            "code.function.name": f"tests.telling.{type(site).__name__}.view.<locals>.create",
        }
        wait = tracing.one("singleflight.wait", outcome="rejected")
        assert seconds(wait) == pytest.approx(0.05)
        # The second caller waited while the first one held it.
        assert wait.end_time < hold.end_time  # type: ignore[operator]
        assert seconds(wait) < seconds(hold)
        # A conflict is what a lock is for.
        assert {s.status.status_code for s in (hold, wait)} == {StatusCode.UNSET}

    def test_they_are_children_of_the_request(self, site: Site, tracing: Tracing) -> None:
        Scenes().conflict(site)

        requests = {span.context.span_id for span in tracing.spans("request")}
        assert len(requests) == 2
        for span in tracing.spans():
            assert span.parent is not None
            assert span.parent.span_id in requests
        rejected = tracing.one("singleflight.wait", outcome="rejected")
        hold = tracing.one("singleflight.hold")
        assert rejected.parent != hold.parent

    def test_a_flight_is_led_and_followed(self, site: Site, tracing: Tracing) -> None:
        Scenes().shared(site)

        lead = tracing.one("singleflight.lead", outcome="done", variant="flight")
        follow = tracing.one("singleflight.follow", outcome="joined")
        kept = tracing.one("singleflight.follow", outcome="kept")
        assert seconds(follow) > 0
        assert seconds(lead) > 0
        assert kept.start_time > lead.start_time  # type: ignore[operator]
        assert "singleflight.flight_led" in tracing.events()
        assert len(tracing.spans()) == 3

    @pytest.mark.parametrize(
        ("scene", "name", "outcome", "why"),
        [
            ("lost_lease", "hold", "lost", "lost"),
            ("lost_flight", "lead", "lost", "lost"),
            ("failed", "lead", "failed", "failed"),
            ("failed", "follow", "failed", "the leader failed"),
            ("timed_out", "follow", "timed out", "timed out"),
        ],
    )
    def test_what_went_wrong_is_an_error(
        self, scene: str, name: str, outcome: str, why: str, site: Site, tracing: Tracing
    ) -> None:
        getattr(Scenes(), scene)(site)

        span = tracing.one(f"singleflight.{name}", outcome=outcome)
        assert span.status.status_code == StatusCode.ERROR
        assert span.status.description == why
        assert (span.attributes or {})["error.type"] == outcome

    @pytest.mark.parametrize(
        ("scene", "event", "reason"),
        [
            ("lost_lease", "lease_lost", "it had ended before it was released"),
            ("lost_flight", "lease_lost", "it had ended before the outcome was published"),
            ("not_for_sharing", "share_refused", "cookie"),
            ("duplicate", "duplicate_caught", "library.Book.uuid"),
            ("unprotected", "unprotected_run", STORE_AWAY),
            ("refused_by_an_outage", "lease_rejected", STORE_AWAY),
            ("refused_by_an_outage", "share_refused", STORE_AWAY),
        ],
    )
    def test_what_takes_no_time_is_an_event_of_the_request(
        self, scene: str, event: str, reason: str, site: Site, tracing: Tracing
    ) -> None:
        getattr(Scenes(), scene)(site)

        assert tracing.events()[f"singleflight.{event}"]["singleflight.reason"] == reason

    def test_every_event_is_somewhere(self, site: Site, tracing: Tracing) -> None:
        every_scene(site)

        spans = {(s.attributes or {})["singleflight.outcome"] for s in tracing.spans()}
        assert spans >= {"acquired", "rejected", "released", "joined", "failed", "timed out"}
        missing = set(SIGNALS) - {name.removeprefix("singleflight.") for name in tracing.events()}
        # Those always are spans.
        assert missing <= {
            "lease_released",
            "flight_joined",
            "flight_failed",
            "flight_timed_out",
            "flight_taken_over",
        }

    def test_a_take_over_is_the_end_of_following(self, site: Site, tracing: Tracing) -> None:
        Scenes().taken_over(site)

        follow = tracing.one("singleflight.follow", outcome="taken over")
        done = tracing.one("singleflight.lead", outcome="done")
        assert follow.start_time < done.start_time  # type: ignore[operator]
        assert follow.status.status_code == StatusCode.UNSET

    def test_without_a_current_span_nothing_breaks(self, tracing: Tracing) -> None:
        for name in EVENTS["lost_lease"]:
            emit(name, Facts("k", "n", duration=0.5, variant="lock"))

        [span] = tracing.spans()
        assert span.parent is None
        assert seconds(span) == 0.5


class TestKeys:
    def test_are_not_told(self, site: Site, tracing: Tracing) -> None:
        every_scene(site, "secretive:<pk>")

        told = "".join(span.to_json() for span in tracing.exporter.get_finished_spans())
        assert "singleflight.hold" in told
        assert "secretive" not in told

    def test_are_told_where_one_says_so_but_no_secret(self, site: Site, tracing: Tracing) -> None:
        connect(tracing.provider, show_keys=True)
        key = "secretive:<header.Idempotency-Key>"
        site.sent = {"headers": {"Idempotency-Key": "s3cret"}}
        lock, flight = partial(semaphore_lock, key=key), partial(single_flight, key=key)
        Scenes(lock, flight).conflict(site)

        keys = {(span.attributes or {})["singleflight.key"] for span in tracing.spans()}
        assert len(keys) == 1
        assert str(keys.pop()).startswith("semaphore_lock:secretive:<")
        told = "".join(span.to_json() for span in tracing.spans())
        assert "s3cret" not in told


class TestSwitchingOn:
    def test_the_app_uses_the_global_provider(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tracing = Tracing()
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracing.provider)
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, APP]
        try:
            apps.get_app_config("singleflight_opentelemetry").ready()
            site = SITES["sync"](settings)
            guarded = semaphore_lock(key="lesson:<pk>")(site.view(Room(open=True)))
            assert site.alone(guarded) == 201
            # Once, however often it was connected.
            assert [span.name for span in tracing.spans()] == ["singleflight.hold"]
            assert "singleflight.key" not in (tracing.spans()[0].attributes or {})
        finally:
            disconnect()

    def test_a_subclass_of_the_app_may_show_keys(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tracing = Tracing()
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracing.provider)
        config = type("Shown", (OpenTelemetryConfig,), {"show_keys": True})
        try:
            config(APP, opentelemetry).ready()
            with semaphore_lock("import:7"):
                pass
        finally:
            disconnect()
        assert tracing.one("singleflight.hold", key="semaphore_lock:import:7")

    def test_without_the_library_the_cure_is_told(self) -> None:
        code = (
            "import sys; sys.modules['opentelemetry'] = None; import django; "
            f"from django.conf import settings; settings.configure(INSTALLED_APPS=['{APP}']); "
            "django.setup()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
        )

        assert done.returncode != 0
        assert 'pip install "singleflight-django[opentelemetry]"' in done.stderr


def test_the_documentation_has_every_span_and_attribute(site: Site, tracing: Tracing) -> None:
    """docs/metrics.md says what there is."""
    connect(tracing.provider, show_keys=True)
    every_scene(site)
    text = (ROOT / "docs" / "metrics.md").read_text()

    for span in tracing.spans():
        assert f"| `{span.name}` |" in text
        assert f"`{(span.attributes or {})['singleflight.outcome']}`" in text
        for name in set(span.attributes or {}):
            assert f"`{name}`" in text
