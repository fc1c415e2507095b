"""Metrics are what happened, read from the real registry of the real library."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from django.apps import AppConfig, apps
from django.db import connections
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from singleflight_django import seats, semaphore_lock, signals, single_flight
from singleflight_django.contrib.prometheus import connect, disconnect
from singleflight_django.contrib.prometheus.labels import (
    KNOWN,
    MOST_NAMESPACES,
    OTHER,
    reason_label,
)
from singleflight_django.signals import SIGNALS, STORE_AWAY, Facts, emit
from tests.conftest import OneDatabase
from tests.flying import acall, afly, call, fly, they_wait
from tests.library.models import Book
from tests.meeting import PATIENCE, Room
from tests.servers import until
from tests.telling import EVENTS, SITES, Scenes, Site, every_scene

APP = "singleflight_django.contrib.prometheus"
ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads(
    files("singleflight_django.contrib").joinpath("grafana-dashboard.json").read_text()
)


class Scrape:
    """What a Prometheus reads from a registry: samples by their name and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples = [
            sample
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def values(self, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if label in sample.labels}


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    connect(registry)
    yield registry
    disconnect(registry)


@pytest.fixture
def sync_site(settings: Any, sqlite: str, django_db_blocker: Any) -> Iterator[Site]:
    settings.DATABASE_ROUTERS = [OneDatabase(sqlite)]
    with django_db_blocker.unblock():
        yield SITES["sync"](settings)
        Book.objects.all().delete()
        connections.close_all()


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, settings: Any, sync_site: Site) -> Site:
    return SITES[request.param](settings)


class TestEvents:
    @pytest.mark.parametrize("scene", EVENTS)
    def test_each_is_counted(self, scene: str, site: Site, registry: CollectorRegistry) -> None:
        getattr(Scenes(), scene)(site)

        scrape = Scrape(registry)
        for event in set(EVENTS[scene]):
            counted = scrape.sum("singleflight_events_total", event=event)
            assert counted == EVENTS[scene].count(event)

    def test_labels_say_where_and_why(self, site: Site, registry: CollectorRegistry) -> None:
        Scenes().duplicate(site)

        [sample] = [
            sample
            for sample in Scrape(registry).samples
            if sample.labels.get("event") == "duplicate_caught" and sample.name.endswith("_total")
        ]
        assert sample.labels == {
            "event": "duplicate_caught",
            "namespace": "semaphore_lock",
            "view": f"tests.telling.{type(site).__name__}.create.<locals>.create",
            "reason": "library.Book.uuid",
        }

    def test_a_key_is_never_a_label(self, site: Site, registry: CollectorRegistry) -> None:
        every_scene(site, "secretive:<pk>")

        assert b"secretive" not in generate_latest(registry)


class TestTimes:
    def test_of_a_lock(self, site: Site, registry: CollectorRegistry) -> None:
        Scenes().conflict(site)

        scrape, lock = Scrape(registry), {"namespace": "semaphore_lock"}
        assert scrape.sum("singleflight_lease_hold_seconds_count", **lock) == 1
        assert scrape.sum("singleflight_lease_hold_seconds_sum", **lock) > 0.05
        rejected = {**lock, "outcome": "rejected"}
        assert scrape.sum("singleflight_wait_seconds_count", **rejected) == 1
        assert scrape.sum("singleflight_wait_seconds_sum", **rejected) == pytest.approx(0.05)
        assert scrape.sum("singleflight_flight_duration_seconds_count") == 0

    def test_who_may_not_wait_is_no_wait(self, site: Site, registry: CollectorRegistry) -> None:
        room = Room()
        site.meet(semaphore_lock(key="lesson:<pk>")(site.view(room)), room)

        assert Scrape(registry).sum("singleflight_wait_seconds_count") == 0

    @pytest.mark.parametrize(
        ("scene", "outcomes", "waits"),
        [
            ("shared", {"done"}, {"joined", "kept"}),
            ("failed", {"failed"}, {"failed"}),
            ("timed_out", {"done"}, {"timed out"}),
            ("lost_flight", {"lost"}, set()),
            ("not_for_sharing", {"unshareable"}, set()),
        ],
    )
    def test_of_a_flight(
        self,
        scene: str,
        outcomes: set[str],
        waits: set[str],
        site: Site,
        registry: CollectorRegistry,
    ) -> None:
        getattr(Scenes(), scene)(site)

        scrape = Scrape(registry)
        assert scrape.sum("singleflight_flight_duration_seconds_count") == 1
        assert scrape.values("outcome") == outcomes | waits
        for outcome in waits:
            assert scrape.sum("singleflight_wait_seconds_count", outcome=outcome) == 1
        assert scrape.sum("singleflight_lease_hold_seconds_count") == 0

    def test_of_a_take_over(self, site: Site, registry: CollectorRegistry) -> None:
        Scenes().taken_over(site)

        taken = {"outcome": "taken over"}
        assert Scrape(registry).sum("singleflight_wait_seconds_count", **taken) == 1


class TestFollowers:
    """The gauge shows who waits now."""

    def test_threads(self, settings: Any, registry: CollectorRegistry) -> None:
        room, seen = Room(), []
        site = SITES["sync"](settings)
        site.urls(single_flight(key="lesson:<pk>", max_followers=10)(site.view(room)))

        def look() -> None:
            # Whoever has its seat tells of it a moment later.
            self.reaches(registry, 3)
            seen.append(Scrape(registry).sum("singleflight_followers"))

        fly(room, call(), call(), call(), call(), meanwhile=[look])

        assert seen == [3]
        assert Scrape(registry).sum("singleflight_followers") == 0

    async def test_tasks(self, settings: Any, registry: CollectorRegistry) -> None:
        room = Room()
        site = SITES["async"](settings)
        site.urls(single_flight(key="lesson:<pk>")(site.view(room)))
        most = 0.0

        def note() -> None:
            nonlocal most
            most = max(most, Scrape(registry).sum("singleflight_followers"))

        seats.watchers.append(note)
        try:
            await afly(room, acall(), acall(), acall())
        finally:
            seats.watchers.remove(note)

        assert most == 2
        assert Scrape(registry).sum("singleflight_followers") == 0

    def test_who_is_overtaken_while_it_sets_the_number_sets_it_again(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread has read 1 when another comes and sets 2; the first one's 1 must not stay."""
        first, second = (seats.Seat(True, None, "k") for _ in range(2))
        plain, values = Gauge.set, []

        def overtaken(gauge: Gauge, value: float) -> None:
            values.append(value)
            if len(values) == 1:
                second.take()
            plain(gauge, value)

        monkeypatch.setattr(Gauge, "set", overtaken)
        with first, second:
            first.take()
            assert values == [1, 2, 2]
            assert Scrape(registry).sum("singleflight_followers") == 2

    def test_a_watcher_that_fails_is_nobodys_fault(self) -> None:
        def fail() -> None:
            raise RuntimeError

        seats.watchers.append(fail)
        try:
            with seats.Seat(True, None, "k") as seat:
                seat.take()
                assert seats.waiting() == 1
        finally:
            seats.watchers.remove(fail)
        assert seats.waiting() == 0

    def test_steps_that_are_closed_tell_nobody(self) -> None:
        """The garbage collector does that, maybe while this thread has a lock of the registry."""
        changes: list[int] = []

        def steps() -> Iterator[None]:
            with seats.Seat(True, None, "k") as seat:
                seat.take()
                yield

        watcher = lambda: changes.append(seats.waiting())  # noqa: E731
        seats.watchers.append(watcher)
        try:
            running = steps()
            next(running)
            running.close()  # type: ignore[attr-defined]
        finally:
            seats.watchers.remove(watcher)
        assert changes == [1]
        assert seats.waiting() == 0

    @staticmethod
    def reaches(registry: CollectorRegistry, number: int) -> None:
        they_wait(number)
        shown = lambda: Scrape(registry).sum("singleflight_followers") == number  # noqa: E731
        until(shown, f"{number} followers shown", PATIENCE)


class TestLabelsAreFew:
    def test_of_what_only_one_error_says_the_reason_is_other(self) -> None:
        assert reason_label("share_refused", "ValueError('of caller 7')") == OTHER
        assert reason_label("share_refused", "It has 9 bytes, over max_bytes=1.") == "too large"
        assert reason_label("lease_rejected", "observe: KeyFieldError") == "observe"
        assert reason_label("lease_rejected", STORE_AWAY) == STORE_AWAY

    def test_every_reason_in_the_code_is_known(self) -> None:
        told = re.compile(r'(?:lose\((?:lease, )?|reason=|_tell_of_end\([a-z_.]+, )"([^"]+)"')
        sources = [
            path.read_text()
            for path in (ROOT / "singleflight_django").rglob("*.py")
            if "testing" not in path.parts
        ]
        found = {reason for source in sources for reason in told.findall(source)}

        assert len(found) > 8
        assert found <= KNOWN

    def test_namespaces_made_of_data_end_up_as_other(self, registry: CollectorRegistry) -> None:
        for number in range(MOST_NAMESPACES + 10):
            emit("lease_acquired", Facts("k", f"tenant-{number}"))

        scrape = Scrape(registry)
        assert scrape.sum("singleflight_events_total", namespace=OTHER) == 10
        assert len(scrape.values("namespace")) == MOST_NAMESPACES + 1


class TestSwitchingOn:
    def test_the_app_connects_the_default_registry_once(self, settings: Any) -> None:
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, APP]
        try:
            config = apps.get_app_config("singleflight_prometheus")
            assert isinstance(config, AppConfig)
            config.ready()
            before = Scrape(REGISTRY).sum("singleflight_events_total", event="lease_lost")
            emit("lease_lost", Facts("k"))
            after = Scrape(REGISTRY).sum("singleflight_events_total", event="lease_lost")
            assert after - before == 1
        finally:
            disconnect()

    def test_two_registries_are_two_counts(self, registry: CollectorRegistry) -> None:
        other = CollectorRegistry()
        for _ in range(2):
            connect(other)
        emit("lease_lost", Facts("k"))
        disconnect(other)
        emit("lease_lost", Facts("k"))

        assert Scrape(registry).sum("singleflight_events_total") == 2
        assert Scrape(other).samples == []
        disconnect(other)

    def test_without_the_library_the_cure_is_told(self) -> None:
        code = (
            "import sys; sys.modules['prometheus_client'] = None; import django; "
            f"from django.conf import settings; settings.configure(INSTALLED_APPS=['{APP}']); "
            "django.setup()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
        )

        assert done.returncode != 0
        assert 'pip install "singleflight-django[prometheus]"' in done.stderr


MULTIPROCESS = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
from django.conf import settings
settings.INSTALLED_APPS.append("singleflight_django.contrib.prometheus")
django.setup()
from singleflight_django import seats, signals
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess

def work():
    signals.emit("lease_released", signals.Facts("k", "n", variant="lock", duration=0.02))
    seat = seats.Seat(True, None, "k")
    seat.take()
    return seat

read, write = os.pipe()
ready, tell = os.pipe()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        seat = work()
        os.write(tell, b".")
        os.read(read, 1)
        os._exit(0)
    children.append(child)
seat = work()
for _ in range(2):
    os.read(ready, 1)

def show():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    print("=====")

show()
os.write(write, b"..")
for child in children:
    os.waitpid(child, 0)
    multiprocess.mark_process_dead(child)
show()
"""


def test_several_processes_are_one_sum(tmp_path: Path) -> None:
    """As under gunicorn, with PROMETHEUS_MULTIPROC_DIR; a worker that has died waits no more."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", MULTIPROCESS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        timeout=PATIENCE * 3,
    )
    assert done.returncode == 0, done.stderr
    alive, later, _ = done.stdout.split("=====")
    for text, followers in ((alive, 3), (later, 1)):
        assert f"singleflight_followers {followers}.0" in text
        assert 'singleflight_lease_hold_seconds_count{namespace="n"} 3.0' in text
        assert re.search(r'singleflight_events_total\{event="lease_released".*\} 3\.0', text)


def dashboard_queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [
        *panels,
        *(v["definition"] for v in DASHBOARD["templating"]["list"] if "definition" in v),
    ]


class TestDashboard:
    def test_what_it_asks_for_exists(self, sync_site: Site, registry: CollectorRegistry) -> None:
        every_scene(sync_site)
        samples = Scrape(registry).samples
        labels = {
            name: {label for s in samples if s.name == name for label in s.labels}
            for name in {sample.name for sample in samples}
        }

        for query in dashboard_queries():
            [metric] = set(re.findall(r"singleflight_\w+", query))
            assert metric in labels, query
            asked = set(re.findall(r"(\w+)(?:!=|=~|=)\"", query))
            grouped = re.findall(r"by \(([^)]*)\)", query)
            asked |= {label.strip() for group in grouped for label in group.split(",")}
            assert asked <= labels[metric], query
            assert set(re.findall(r'event="(\w+)"', query)) <= set(SIGNALS)
            assert set(re.findall(r'reason!?="([^"]*)"', query)) <= KNOWN

    def test_it_shows_what_one_is_paged_for(self) -> None:
        titles = " ".join(panel["title"] for panel in DASHBOARD["panels"]).lower()

        for subject in (
            "conflicts by namespace",
            "hold: p50 and p99",
            "wait: p99",
            "followers",
            "leases lost",
            "outages",
            "take-overs",
            "duplicates caught",
        ):
            assert subject in titles

    def test_its_panels_do_not_overlap(self) -> None:
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
        assert len(set(places)) == len(places)
        assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


class TestTheDocumentation:
    """docs/metrics.md says what there is."""

    TEXT = (ROOT / "docs" / "metrics.md").read_text()

    def rows(self, title: str) -> dict[str, list[str]]:
        lines = iter(self.TEXT.splitlines())
        next(line for line in lines if line.startswith(f"| {title} |"))
        next(lines)
        cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        return {row[0].strip("`"): row[1:] for row in itertools.takewhile(lambda r: r[0], cells)}

    def test_has_every_metric_with_its_labels(self, registry: CollectorRegistry) -> None:
        kinds = {"counter": Counter, "histogram": Histogram, "gauge": Gauge}
        collectors = [c for c in registry._collector_to_names if hasattr(c, "_labelnames")]
        found = {
            f"{c._name}_total" if isinstance(c, Counter) else c._name: (type(c), c._labelnames)
            for c in collectors
        }
        said = {
            name: (kinds[kind], tuple(re.findall(r"`(\w+)`", labels)))
            for name, (kind, labels, _) in self.rows("metric").items()
        }
        assert said == found

    def test_has_every_signal_with_its_level(self) -> None:
        rows = self.rows("signal")

        assert set(rows) == set(SIGNALS)
        for name, (level, *_) in rows.items():
            assert level == logging.getLevelName(signals._EVENTS[name].usual_level)

    def test_has_every_outcome(self, sync_site: Site, registry: CollectorRegistry) -> None:
        every_scene(sync_site)

        for outcome in Scrape(registry).values("outcome"):
            assert f"`{outcome}`" in self.TEXT

    def test_queries_ask_for_what_there_is(self) -> None:
        for query in re.search(r"```promql\n(.*?)```", self.TEXT, re.DOTALL)[1].splitlines():  # type: ignore[index]
            assert "singleflight_events_total" in query
            assert set(re.findall(r'event="(\w+)"', query)) <= set(SIGNALS)
            assert set(re.findall(r'reason="([^"]+)"', query)) <= KNOWN
