"""Events are told as facts, to listeners and to the log, and telling them can't break anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
from django.dispatch import Signal

from singleflight_django import signals
from singleflight_django.signals import STORE_AWAY, Facts, emit, heard

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


def test_the_levels_above_are_all_the_events_there_are() -> None:
    names: dict[str, Any] = {k: v for k, v in vars(signals).items() if isinstance(v, Signal)}

    assert set(LEVELS) == set(names)
