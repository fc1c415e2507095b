"""Events are told as facts, to listeners and to the log, and telling them can't break anything."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.db import connections
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.views import View

from singleflight_django import (
    SemaphoreLockMixin,
    SingleFlightMixin,
    semaphore_lock,
    signals,
    single_flight,
)
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.parts import qualify
from singleflight_django.signals import SIGNALS, STORE_AWAY, Facts, emit, heard
from singleflight_django.stores.outages import Breaker
from tests.conftest import OneDatabase
from tests.library.models import Book
from tests.meeting import Room, listening, request_like
from tests.telling import EVENTS, SCENES, SITES, Async, Scenes, Site

LEVELS = {
    "lease_acquired": "DEBUG",
    "lease_rejected": "INFO",
    "lease_lost": "WARNING",
    "lease_released": "DEBUG",
    "flight_led": "DEBUG",
    "flight_joined": "DEBUG",
    "flight_taken_over": "WARNING",
    "flight_failed": "WARNING",
    "flight_timed_out": "WARNING",
    "share_refused": "INFO",
    "duplicate_caught": "WARNING",
    "unprotected_run": "ERROR",
}


@pytest.fixture(autouse=True)
def listeners() -> Iterator[None]:
    """No listener outlives its test."""
    every = [getattr(signals, name) for name in LEVELS]
    before = [list(signal.receivers) for signal in every]
    yield
    for signal, receivers in zip(every, before, strict=True):
        signal.receivers[:] = receivers


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "singleflight_django")
    return caplog


class TestListeners:
    @pytest.mark.parametrize("name", LEVELS)
    def test_each_event_is_a_signal_that_carries_the_facts(self, name: str) -> None:
        heard_facts: list[Facts] = []

        def listen(sender: object, facts: Facts, **kwargs: object) -> None:
            heard_facts.append(facts)

        signal: Signal = getattr(signals, name)
        signal.connect(listen)
        facts = Facts("import:7", "semaphore_lock", duration=0.5, fence=3)

        emit(name, facts)

        assert heard_facts == [facts]

    def test_facts_are_frozen(self) -> None:
        """One listener can't change what the next one hears."""
        facts = Facts("import:7")

        with pytest.raises(FrozenInstanceError):
            facts.key = "import:8"  # type: ignore[misc]

    def test_an_unknown_event_is_a_mistake_of_ours_and_shows(self) -> None:
        with pytest.raises(KeyError):
            emit("lease_aquired", Facts("import:7"))


class TestAListenerThatRaises:
    def test_it_changes_nothing_and_the_others_still_hear(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard_facts: list[Facts] = []

        def fail(**kwargs: object) -> None:
            raise RuntimeError("the listener's own fault")

        def listen(facts: Facts, **kwargs: object) -> None:
            heard_facts.append(facts)

        signals.lease_released.connect(fail)
        signals.lease_released.connect(listen)

        emit("lease_released", Facts("import:7"))

        assert len(heard_facts) == 1
        [record] = [record for record in caplog.records if record.exc_info]
        assert record.levelname == "ERROR"
        assert "the listener's own fault" in caplog.text

    def test_one_without_a_name_changes_nothing_either(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Signal.send_robust() itself fails when it wants to name a partial that failed."""

        def fail(reason: str, **kwargs: object) -> None:
            raise RuntimeError(reason)

        listener = partial(fail, "the listener's own fault")
        signals.lease_lost.connect(listener)

        emit("lease_lost", Facts("import:7"))

        assert "lease_lost could not be told" in caplog.text
        assert "the listener's own fault" in caplog.text

    async def test_a_coroutine_function_beneath_a_running_loop_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def listen(**kwargs: object) -> None:
            raise AssertionError("not reached")

        signals.lease_lost.connect(listen)

        emit("lease_lost", Facts("import:7"))

        assert "lease_lost could not be told" in caplog.text

    def test_a_log_handler_that_raises_changes_nothing(self) -> None:
        heard_facts: list[Facts] = []

        class Broken(logging.Handler):
            def handle(self, record: logging.LogRecord) -> bool:
                raise RuntimeError("disk full")

        def listen(facts: Facts, **kwargs: object) -> None:
            heard_facts.append(facts)

        signals.unprotected_run.connect(listen)
        handler = Broken()
        signals.logger.addHandler(handler)
        try:
            emit("unprotected_run", Facts("import:7"))
        finally:
            signals.logger.removeHandler(handler)

        assert len(heard_facts) == 1


class TestLog:
    @pytest.mark.parametrize(("name", "level"), LEVELS.items())
    def test_each_event_has_the_level_that_people_expect(
        self, log: pytest.LogCaptureFixture, name: str, level: str
    ) -> None:
        emit(name, Facts("import:7", "semaphore_lock"))

        [record] = log.records
        assert level == record.levelname
        assert record.getMessage() == f"{name} key=import:7 namespace=semaphore_lock"
        assert record.args, "the text is made only if a handler wants it"

    def test_a_refusal_because_the_store_is_away_is_an_error(
        self, log: pytest.LogCaptureFixture
    ) -> None:
        """An outage that answers 503 is not everyday contention."""
        emit("lease_rejected", Facts("import:7", reason=STORE_AWAY))

        assert log.records[0].levelname == "ERROR"

    def test_facts_that_are_known_are_told(self, log: pytest.LogCaptureFixture) -> None:
        emit(
            "lease_released",
            Facts("7", "lock", "shop.views.pay", duration=0.51239, wait=0.0, fence=9, reason="end"),
        )

        assert log.records[0].getMessage() == (
            "lease_released key=7 namespace=lock view=shop.views.pay duration=0.512 wait=0.000 "
            "fence=9 reason=end"
        )

    def test_a_long_key_is_cut(self, log: pytest.LogCaptureFixture) -> None:
        emit("lease_lost", Facts("k" * 1000))

        assert log.records[0].getMessage() == f"lease_lost key={'k' * 200} namespace="

    def test_a_line_break_in_a_key_forges_no_second_line(
        self, log: pytest.LogCaptureFixture
    ) -> None:
        emit("lease_lost", Facts("7\nlease_lost key=8 é", reason="bei Ärger"))

        assert log.records[0].getMessage() == (
            r"lease_lost key=7\nlease_lost key=8 \xe9 namespace= reason=bei Ärger"
        )


class TestHeard:
    """Whoever emits may ask first, and so save the time that gathering facts takes."""

    @pytest.fixture(autouse=True)
    def quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "singleflight_django")

    def test_nobody_hears_what_is_below_the_logs_level(self) -> None:
        assert not heard("lease_acquired")
        assert heard("lease_lost")

    def test_a_listener_hears(self) -> None:
        def listen(**kwargs: object) -> None: ...

        signals.lease_acquired.connect(listen)

        assert heard("lease_acquired")

    def test_the_reason_counts(self) -> None:
        assert not heard("lease_rejected")
        assert heard("lease_rejected", STORE_AWAY)


@pytest.fixture(params=SITES)
def site(
    request: pytest.FixtureRequest, settings: Any, sqlite: str, django_db_blocker: Any
) -> Iterator[Site]:
    settings.DATABASE_ROUTERS = [OneDatabase(sqlite)]
    with django_db_blocker.unblock():
        yield SITES[request.param](settings)
        Book.objects.all().delete()
        connections.close_all()


def told_by(scene: str, site: Site, scenes: Scenes | None = None) -> list[tuple[str, Facts]]:
    with listening(*LEVELS) as told:
        getattr(scenes or Scenes(), scene)(site)
    return told


def those(told: list[tuple[str, Facts]], name: str) -> list[Facts]:
    return [facts for event, facts in told if event == name]


def one(told: list[tuple[str, Facts]], name: str) -> Facts:
    [facts] = those(told, name)
    return facts


class TestThroughTheLibrary:
    """The real views, on the real store."""

    def test_the_scenes_have_every_event(self) -> None:
        assert set(SCENES) == set(EVENTS)
        assert {name for names in EVENTS.values() for name in names} == set(LEVELS)

    @pytest.mark.parametrize("scene", SCENES)
    def test_each_event_says_whose_it_is(self, scene: str, site: Site) -> None:
        told = told_by(scene, site)

        expected = list(EVENTS[scene])
        if scene == "taken_over" and isinstance(site, Async):
            # A leader that is cancelled, which a thread is not, has time to say so.
            expected.append("flight_failed")
        assert sorted(name for name, _ in told) == sorted(expected)
        for _, facts in told:
            view = type(site).create if scene == "duplicate" else type(site).view
            own = f"{view.__module__}.{view.__qualname__}.<locals>.create"
            if scene == "taken_over" and isinstance(site, Async):
                own = own.replace("view.<locals>", "take_over.<locals>.cancelled.<locals>")
            assert facts.view == own
            assert facts.namespace == ("semaphore_lock" if facts.variant == "lock" else own)
            assert facts.variant in ("lock", "flight")
            assert facts.key.startswith(qualify(facts.namespace, "lesson:7"))
            assert facts.shown == facts.key

    @pytest.mark.parametrize("scene", SCENES)
    def test_a_listener_that_raises_changes_nothing(
        self, scene: str, site: Site, log: pytest.LogCaptureFixture
    ) -> None:
        def fail(**kwargs: object) -> None:
            raise RuntimeError("the listener's own fault")

        for signal in SIGNALS.values():
            signal.connect(fail)
        told = told_by(scene, site)

        assert {name for name, _ in told} >= set(EVENTS[scene])
        faults = [record for record in log.records if record.name == "django.dispatch"]
        assert len(faults) == len(told)

    def test_a_lock(self, site: Site) -> None:
        told = told_by("conflict", site)

        acquired, released = one(told, "lease_acquired"), one(told, "lease_released")
        assert acquired.wait is not None
        assert 0 < acquired.wait <= 0.05
        assert acquired.fence is not None
        assert acquired.fence > 0
        assert released.fence == acquired.fence
        assert released.duration is not None
        # As long as the other one waited, at least.
        assert released.duration > 0.05
        assert released.reason == ""
        rejected = one(told, "lease_rejected")
        assert rejected.wait == pytest.approx(0.05)
        assert (rejected.fence, rejected.reason) == (None, "")

    @pytest.mark.parametrize(
        ("scene", "reason"),
        [
            ("lost_lease", "it had ended before it was released"),
            ("lost_flight", "it had ended before the outcome was published"),
        ],
    )
    def test_a_lease_that_was_lost(self, scene: str, reason: str, site: Site) -> None:
        told = told_by(scene, site)

        lost, released = one(told, "lease_lost"), one(told, "lease_released")
        assert lost.reason == reason
        assert lost.fence is not None
        assert lost.duration is not None
        assert released.reason == "lost"
        assert released.duration is not None
        assert released.duration >= lost.duration > 0

    def test_a_flight(self, site: Site) -> None:
        told = told_by("shared", site)

        led, released = one(told, "flight_led"), one(told, "lease_released")
        joined, kept = those(told, "flight_joined")
        assert led.wait is not None
        assert led.wait >= 0
        assert led.fence is not None
        assert released.fence == led.fence
        assert released.reason == "done"
        assert released.duration is not None
        assert joined.wait is not None
        assert kept.wait is not None
        assert joined.wait > 0
        assert released.duration > 0
        assert [joined.reason, kept.reason] == ["", "kept"]

    def test_a_flight_that_failed(self, site: Site) -> None:
        told = told_by("failed", site)

        assert one(told, "lease_released").reason == "failed"
        failed = one(told, "flight_failed")
        assert failed.reason == "the leader failed"
        assert failed.wait is not None
        assert failed.wait > 0

    def test_a_flight_that_took_too_long(self, site: Site) -> None:
        assert one(told_by("timed_out", site), "flight_timed_out").wait == 0.05

    def test_a_flight_that_was_taken_over(self, site: Site) -> None:
        told = told_by("taken_over", site)

        taken = one(told, "flight_taken_over")
        assert taken.wait is not None
        assert taken.wait > 0
        assert taken.fence is not None
        assert taken.fence > (one(told, "flight_led").fence or 0)
        first = those(told, "lease_released")[0]
        if isinstance(site, Async):
            given_up = one(told, "flight_failed")
            assert given_up.reason == "abandoned"
            assert given_up.duration is not None
            assert first.reason == "cancelled: it lapses"
        else:
            assert first.reason == "vacant"

    @pytest.mark.parametrize(
        ("scene", "name", "reason"),
        [
            ("not_for_sharing", "share_refused", "cookie"),
            ("duplicate", "duplicate_caught", "library.Book.uuid"),
            ("unprotected", "unprotected_run", STORE_AWAY),
            ("refused_by_an_outage", "lease_rejected", STORE_AWAY),
            ("refused_by_an_outage", "share_refused", STORE_AWAY),
        ],
    )
    def test_a_reason(self, scene: str, name: str, reason: str, site: Site) -> None:
        told = told_by(scene, site)

        assert {facts.reason for facts in those(told, name)} == {reason}

    def test_a_flight_that_could_not_be_published(
        self, redis_server: Any, cache_at: Any, settings: Any, site: Site
    ) -> None:
        alias = cache_at(redis_server.url())

        def stop() -> HttpResponse:
            redis_server.stop()
            return HttpResponse(status=201)

        view = site.view(Room(open=True), stop)
        with listening(*LEVELS) as told:
            assert site.alone(single_flight(key="lesson:<pk>", cache=alias)(view)) == 201

        assert one(told, "share_refused").reason == STORE_AWAY
        assert one(told, "lease_released").reason == "not published"


SECRET = "s3cret-Zq7é/x"


class TestSecrets:
    """What a header or the session says is in the key, and nowhere in the log."""

    @pytest.fixture
    def sending(self, site: Site) -> Site:
        site.sent = {"headers": {"Idempotency-Key": SECRET}}
        return site

    @pytest.mark.parametrize("scene", SCENES)
    def test_no_line_has_it(self, scene: str, sending: Site, log: pytest.LogCaptureFixture) -> None:
        key = "pay:<header.Idempotency-Key>:<pk>"
        scenes = Scenes(partial(semaphore_lock, key=key), partial(single_flight, key=key))
        told = told_by(scene, sending, scenes)

        assert told
        assert all("s3cret" in facts.key for _, facts in told)
        assert "s3cret" not in log.text
        shown = {re.sub(r"#\w+$", "", facts.shown) for _, facts in told}
        for text in shown:
            assert re.fullmatch(r"\S+:pay:<[0-9a-f]{8}>:7", text)
        lines = [
            record.getMessage() for record in log.records if record.name == "singleflight_django"
        ]
        assert len([line for line in lines if "key=" in line]) == len(told)
        for line in lines:
            assert "key=" not in line or any(f"key={text}" in line for text in shown)

    @pytest.mark.parametrize("colour", ["sync", "async"])
    def test_nor_do_mixins_tell(
        self, colour: str, settings: Any, log: pytest.LogCaptureFixture
    ) -> None:
        class Locked(SemaphoreLockMixin, View):
            lock_key = ["order:<pk>", "pay:<header.Idempotency-Key>"]  # noqa: RUF012

        class Coalesced(SingleFlightMixin, View):
            flight_key = "pay:<header.Idempotency-Key>"

        def post(self: View, request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse(status=201)

        async def apost(self: View, request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse(status=201)

        for cls in (Locked, Coalesced):
            cls.post = post if colour == "sync" else apost  # type: ignore[attr-defined]
            site = SITES[colour](settings, {"headers": {"Idempotency-Key": SECRET}})
            assert site.alone(cls.as_view()) == 201

        assert "semaphore_lock:order:7,semaphore_lock:pay:<" in log.text
        assert "s3cret" not in log.text

    def test_a_session_is_not_shown(self, log: pytest.LogCaptureFixture) -> None:
        @semaphore_lock(key="cart:<session>")
        def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse(status=201)

        request = request_like()
        request.session = SessionStore("s3cretsessionkey")
        view(request)

        assert re.search(r"lease_acquired key=semaphore_lock:cart:<[0-9a-f]{8}> ", log.text)
        assert "s3cret" not in log.text

    def test_nor_is_it_where_a_cache_complains_of_the_key(
        self, log: pytest.LogCaptureFixture, settings: Any
    ) -> None:
        breaker = Breaker()

        breaker.trip(StoreUnavailableError("bad key: ':1:pay:s3cret'", key="pay:s3cret"))

        assert "bad key: ':1:(key)'" in log.text
        assert "s3cret" not in log.text


def test_the_levels_above_are_all_the_events_there_are() -> None:
    names: dict[str, Any] = {k: v for k, v in vars(signals).items() if isinstance(v, Signal)}

    assert set(LEVELS) == set(names)
