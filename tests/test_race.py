"""The command ``race``: its words, its numbers, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testproject import database_url
from testproject.racing.client import NO_ANSWER
from testproject.racing.forms import FAILS, FORMS, RACES, REJECTS, SKIPS, Expectation
from testproject.racing.report import as_json, table
from testproject.racing.verdict import Result

ROOT = Path(__file__).resolve().parent.parent


def result_of(
    expectation: Expectation,
    statuses: dict[int, int],
    *rows: int,
    different: dict[int, int] | None = None,
) -> Result:
    """A result as if ``statuses`` (with their counts) had come, and left ``rows``."""
    result = Result(expectation)
    result.identical.add([s for s, count in statuses.items() for _ in range(count)], rows)
    others = [s for s, count in (different or {201: 20}).items() for _ in range(count)]
    result.different.add(others, [int(status == 201) for status in others])
    return result


class TestVerdict:
    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (result_of(RACES, {201: 7, 204: 13}, 7), "7 lessons created: the double create"),
            (result_of(FAILS, {201: 1, 500: 19}, 1), "1 lesson, 19 users saw a 500"),
            (result_of(FAILS, {201: 1, 500: 1}, 1), "1 lesson, 1 user saw a 500"),
            (result_of(REJECTS, {201: 1, 429: 19}, 1), "1 lesson, 19 told 429"),
            (result_of(SKIPS, {201: 1, 204: 19}, 1), "1 lesson, 19 told 204"),
            (
                result_of(REJECTS, {201: 1, 204: 2, 429: 17}, 1),
                "1 lesson, 17 told 429, 2 told 204",
            ),
            (
                result_of(REJECTS, {201: 3, 429: 57}, 1, 1, 1),
                "1 lesson in each of 3 rounds, 57 told 429",
            ),
            (
                result_of(RACES, {201: 9, 204: 31}, 2, 7),
                "up to 7 lessons created: the double create",
            ),
        ],
    )
    def test_right_outcomes_in_words(self, result: Result, words: str) -> None:
        assert words == result.identical_verdict
        assert result.held

    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (result_of(REJECTS, {201: 2, 429: 18}, 2), "2 lessons created: the double create"),
            (result_of(REJECTS, {201: 1, 500: 19}, 1), "1 lesson, 19 users saw a 500"),
            (result_of(REJECTS, {429: 20}, 0), "no lesson in 1 of 1 rounds, 20 told 429"),
            (result_of(REJECTS, {201: 1, NO_ANSWER: 19}, 1), "1 lesson, 19 got no answer"),
            (
                result_of(RACES, {201: 11, 204: 209}, *[1] * 11),
                "no race in 11 rounds: try more --requests or LESSON_WORK_MS=100",
            ),
        ],
    )
    def test_wrong_outcomes_in_words(self, result: Result, words: str) -> None:
        assert words == result.identical_verdict
        assert not result.held

    def test_two_lessons_in_one_round_are_not_made_up_for_by_none_in_another(self) -> None:
        assert not result_of(REJECTS, {201: 2, 429: 38}, 2, 0).held

    @pytest.mark.parametrize("expectation", [RACES, FAILS, REJECTS, SKIPS])
    def test_whoever_turns_different_uuids_away_has_not_held(
        self, expectation: Expectation
    ) -> None:
        statuses, rows = ({201: 20}, 20) if expectation.races else ({201: 1, 204: 19}, 1)

        served = result_of(expectation, statuses, rows)
        turned_away = result_of(expectation, statuses, rows, different={201: 17, 429: 3})

        assert served.different_verdict == "20 created"
        assert served.held
        assert turned_away.different_verdict == "17 created, 3 told 429"
        assert not turned_away.held


RESULTS = {
    "unprotected": result_of(RACES, {201: 7, 204: 13}, 7),
    "reject": result_of(REJECTS, {201: 1, 500: 19}, 1),
}


class TestReport:
    def test_the_table_is_aligned_and_tells_what_failed(self) -> None:
        heading, rule, *forms = table(RESULTS).splitlines()[:4]

        assert re.split(r"  +", heading)[:4] == ["form", "requests", "answers", "rows"]
        assert [re.split(r"  +", form) for form in forms] == [
            [
                "unprotected",
                "20",
                "7 x 201, 13 x 204",
                "7",
                "7 lessons created: the double create",
                "20 created",
                "ok",
            ],
            [
                "reject",
                "20",
                "1 x 201, 19 x 500",
                "1",
                "1 lesson, 19 users saw a 500",
                "20 created",
                "FAILED",
            ],
        ]
        gaps = [found.start() for found in re.finditer(" ", rule)]
        assert all({form[gap] for gap in gaps} == {" "} for form in forms)

    def test_the_json_has_the_same_numbers(self) -> None:
        said = json.loads(as_json(RESULTS, requests=20))

        assert said["requests"] == 20
        assert not said["held"]
        assert said["forms"]["unprotected"]["identical"]["statuses"] == {"201": 7, "204": 13}
        assert said["forms"]["unprotected"]["identical"]["rows"] == 7
        assert said["forms"]["reject"]["different"]["rows"] == 20


class TestForms:
    def test_names_are_unique(self) -> None:
        assert len({form.name for form in FORMS}) == len(FORMS)

    def test_only_the_unprotected_form_may_race(self) -> None:
        assert [form.name for form in FORMS if form.expectation.races] == ["unprotected"]


class TestDatabaseUrl:
    @pytest.mark.parametrize(
        ("url", "entry"),
        [
            (
                "postgres://u%40x:p%2Fw@db.example:5433/les%20sons?sslmode=require",
                {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": "les sons",
                    "USER": "u@x",
                    "PASSWORD": "p/w",
                    "HOST": "db.example",
                    "PORT": "5433",
                    "OPTIONS": {"sslmode": "require"},
                },
            ),
            (
                "postgresql://u@/lessons?host=/run/post%20gres&port=6000",
                {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": "lessons",
                    "USER": "u",
                    "PASSWORD": "",
                    "HOST": "/run/post gres",
                    "PORT": "6000",
                    "OPTIONS": {},
                },
            ),
            (
                "mysql://u:p@[::1]/lessons",
                {
                    "ENGINE": "django.db.backends.mysql",
                    "NAME": "lessons",
                    "USER": "u",
                    "PASSWORD": "p",
                    "HOST": "::1",
                    "PORT": "",
                    "OPTIONS": {},
                },
            ),
        ],
    )
    def test_servers(self, url: str, entry: dict[str, Any]) -> None:
        assert entry == database_url.parse(url)

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("sqlite:////var/a%20b.sqlite3", "/var/a b.sqlite3"),
            ("sqlite:///b.sqlite3", "b.sqlite3"),
            ("sqlite:///:memory:", ":memory:"),
        ],
    )
    def test_sqlite(self, url: str, name: str) -> None:
        entry = database_url.parse(url)

        assert name == entry["NAME"]
        assert entry["OPTIONS"]["transaction_mode"] == "IMMEDIATE"

    @pytest.mark.parametrize("url", ["oracle://u@h/n", "lessons", "postgres://u@h", "sqlite:///"])
    def test_anything_else_is_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match="DATABASE_URL"):
            database_url.parse(url)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``manage.py race`` with a directory for temporary files of its own."""
    started: list[subprocess.Popen[str]] = []
    # From a clean slate: the run starts its own Valkey and makes its own database.
    unset = {"REDIS_URL", "DATABASE_URL", "SINGLEFLIGHT_STORE", "LESSON_WORK_MS"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"DJANGO_SETTINGS_MODULE": "testproject.settings", "TMPDIR": str(tmp_path)}

    def start(*options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "race", *options],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def processes_of(directory: Path) -> list[str]:
    """The command lines of the processes whose temporary or working directory is ``directory``."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("looks for processes in /proc")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # A Valkey overwrites its environment with its title.
            known = (process / "environ").read_bytes() + os.readlink(process / "cwd").encode()
            if os.fsencode(directory) in known:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def assert_nothing_is_left(directory: Path) -> None:
    """What was killed a moment ago may take that moment to go."""
    deadline = time.monotonic() + 5
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []
    assert list(directory.glob("race-*")) == []


class TestCommand:
    def test_the_unprotected_form_races_and_the_others_hold(
        self, start: Start, tmp_path: Path
    ) -> None:
        """Real gunicorn, uvicorn and Valkey; exit status 0; nothing stays behind."""
        names = ["unprotected", "constraint", "reject", "async"]

        process = start("-n8", "--workers=2", "--json", *[f"--form={name}" for name in names])
        output, progress = process.communicate()

        assert process.returncode == 0, progress
        said = json.loads(output)
        assert names == list(said["forms"])
        assert said["held"]
        assert said["forms"]["unprotected"]["identical"]["rows"] > 1
        for name in names[1:]:
            assert said["forms"][name]["identical"]["rows"] == 1
        for form in said["forms"].values():
            assert form["different"]["statuses"] == {"201": 8}
        assert_nothing_is_left(tmp_path)

    def test_an_unprotected_form_that_never_races_is_told_by_the_exit_status(
        self, start: Start, tmp_path: Path
    ) -> None:
        process = start("-n1", "--workers=1", "--form=unprotected")
        output, progress = process.communicate()

        assert process.returncode == 1, progress
        assert "no race in 11 rounds" in output
        assert_nothing_is_left(tmp_path)

    @pytest.mark.parametrize(
        ("line", "number"),
        [
            ("Starting", signal.SIGINT),
            ("Redis at", signal.SIGTERM),
            ("uvicorn on port", signal.SIGINT),
        ],
    )
    def test_an_interrupted_run_leaves_nothing_behind(
        self, start: Start, tmp_path: Path, line: str, number: signal.Signals
    ) -> None:
        """Whether it is interrupted while it starts its servers or in the middle of its calls."""
        process = start("-n8", "--workers=2", "--rounds=1000", "--form=async")
        assert process.stderr is not None
        assert any(progress.startswith(line) for progress in process.stderr)
        # Or the check below would be content with finding nothing ever.
        assert processes_of(tmp_path)

        process.send_signal(number)
        process.communicate()

        assert 128 + number == process.returncode
        assert_nothing_is_left(tmp_path)
