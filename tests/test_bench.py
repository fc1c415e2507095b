"""``manage.py bench`` as a user runs it, on its own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from testproject.benching.report import tables

ROOT = Path(__file__).parents[1]
OURS, FLOOR, NAIVE = "singleflight_django", "raw redis-py (the floor)", "cache.add by hand"


def bench(*arguments: str) -> dict:
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    command = [sys.executable, "manage.py", "bench", "--json", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told() -> dict:
    return bench("--turns", "1", "--callers", "4", "--peer", NAIVE)


@pytest.mark.soak
def test_every_measurement_has_us_and_what_we_are_measured_by(told: dict) -> None:
    for name in ("cycle", "conflict"):
        assert set(told[name]) == {OURS, FLOOR, NAIVE}
        assert told[name][FLOOR]["ratio"] == 1.0
    assert set(told["view"]) == {OURS, FLOOR, NAIVE, "no guard"}
    assert set(told["bursts"]["4"]) == {OURS, NAIVE}


@pytest.mark.soak
def test_a_cycle_is_two_round_trips_and_a_conflict_is_one(told: dict) -> None:
    """Counted by the server itself."""
    assert told["cycle"][OURS]["requests"] == pytest.approx(2, abs=0.05)
    assert told["conflict"][OURS]["requests"] == pytest.approx(1, abs=0.05)
    assert told["view"][OURS]["requests"] == pytest.approx(2, abs=0.05)
    assert told["view"]["no guard"]["requests"] == 0


@pytest.mark.soak
def test_a_burst_is_executed_once_and_everyone_has_the_answer(told: dict) -> None:
    burst = told["bursts"]["4"][OURS]
    assert burst["executions"] == 1
    assert burst["answered"] == 1
    assert burst["errors"] == []


@pytest.mark.soak
def test_tables_are_for_people(told: dict) -> None:
    text = tables(told)
    assert "A lock, taken and given back" in text
    assert "4 callers of one key in 2 processes" in text
    assert text.count(OURS) == 4


@pytest.mark.soak
def test_every_peer_that_is_installed_takes_part() -> None:
    told = bench("--turns", "1", "--callers", "2")
    assert {OURS, FLOOR, NAIVE, "redis-py Lock", "django-redis cache.lock"} <= set(told["cycle"])


@pytest.mark.parametrize("wrong", [("--turns", "0"), ("--callers", "3"), ("--peer", "nobody")])
def test_what_can_not_be_is_refused_at_once(wrong: tuple[str, str]) -> None:
    with pytest.raises(CommandError, match=wrong[0]):
        call_command("bench", *wrong)
