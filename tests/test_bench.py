"""``manage.py bench`` as a user runs it, on its own server, with the peers that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = "singleflight_django"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    command = [sys.executable, "manage.py", "bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.fixture(scope="module")
def told() -> dict:
    done = bench("--turns", "1", "--callers", "4", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_measurement_has_us_and_the_floor(told: dict) -> None:
    for name in ("cycle", "conflict"):
        assert {OURS, "raw redis-py (the floor)"} <= set(told[name])
        assert told[name]["raw redis-py (the floor)"]["ratio"] == 1.0
    assert {OURS, "no guard"} <= set(told["view"])


def test_a_cycle_is_two_round_trips_and_a_conflict_is_one(told: dict) -> None:
    """Counted by the server itself."""
    assert told["cycle"][OURS]["requests"] == pytest.approx(2, abs=0.05)
    assert told["conflict"][OURS]["requests"] == pytest.approx(1, abs=0.05)
    assert told["view"][OURS]["requests"] == pytest.approx(2, abs=0.05)
    assert told["view"]["no guard"]["requests"] == 0


def test_a_burst_is_executed_once_and_everyone_has_the_answer(told: dict) -> None:
    burst = told["bursts"]["4"][OURS]
    assert burst["executions"] == 1
    assert burst["answered"] == 1
    assert burst["errors"] == []


def test_tables_are_for_people() -> None:
    done = bench("--turns", "1", "--callers", "2")
    assert done.returncode == 0, done.stderr
    assert "A lock, taken and given back" in done.stdout
    assert "2 callers of one key in 2 processes" in done.stdout


@pytest.mark.parametrize("wrong", [("--turns", "0"), ("--callers", "3")])
def test_wrong_numbers_are_refused_at_once(wrong: tuple[str, str]) -> None:
    done = bench(*wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
