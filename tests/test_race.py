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
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.cache.backends.locmem import LocMemCache
from django.core.management import CommandError, call_command

from testproject import database_url
from testproject.lessons.answering import TIMEOUT
from testproject.lessons.cascading import DRAFTS, draft_key
from testproject.lessons.management.commands.race import Command
from testproject.racing.client import NO_ANSWER, Answer
from testproject.racing.forms import (
    ANSWERS_ALL,
    COALESCES,
    CORRUPTS,
    FAILS,
    FINDS,
    FORMS,
    KEEPS,
    RACES,
    REFUSES,
    REJECTS,
    RUNS_LATE,
    SECURES,
    SKIPS,
    Expectation,
)
from testproject.racing.model import SECONDS
from testproject.racing.report import as_json, table
from testproject.racing.stages import CascadeStage
from testproject.racing.subjects import CASCADE, LESSON, MODEL_ANSWER, Subject
from testproject.racing.tally import Left
from testproject.racing.verdict import Result

ROOT = Path(__file__).resolve().parent.parent


def result_of(
    expectation: Expectation,
    statuses: dict[int, int],
    *left: int | Left,
    different: dict[int, int] | None = None,
    subject: Subject = LESSON,
    same: bool = True,
    variant: str = "",
) -> Result:
    """A result as if ``statuses`` (with their counts) had come, and ``left`` been counted.

    ``same``: whether the successful calls got one answer.
    """
    result = Result(expectation, subject, variant)
    mine = [s for s, count in statuses.items() for _ in range(count)]
    bodies = [b"the same" if same else b"%d" % number for number in range(len(mine))]
    answers = list(map(Answer, mine, bodies))
    counted = [it if isinstance(it, Left) else Left(it) for it in left]
    # One key and one volley for each count; whom the calls belong to makes no difference.
    result.identical.add(answers, counted[:1])
    for count in counted[1:]:
        result.identical.add([], [count])
    others = [s for s, count in (different or {subject.success: 20}).items() for _ in range(count)]
    result.different.add(
        [Answer(status, b"%d" % number) for number, status in enumerate(others)],
        [Left(subject.fine if status == subject.success else 0) for status in others],
    )
    return result


def answer_of(expectation: Expectation, statuses: dict[int, int], *calls: int) -> Result:
    return result_of(expectation, statuses, *calls, subject=MODEL_ANSWER)


def cascade_of(expectation: Expectation, statuses: dict[int, int], *damage: Left) -> Result:
    return result_of(expectation, statuses, *damage, subject=CASCADE)


INTACT = Left(0)
DAMAGED = Left(4, "1 lost, 3 misplaced")


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
            (result_of(COALESCES, {201: 20}, 1), "1 lesson, all 20 got the same 201"),
            (result_of(REFUSES, {201: 1, 409: 19}, 1), "1 lesson, 19 told 409"),
            (
                result_of(FINDS, {200: 19, 201: 1}, 1),
                "1 lesson, 19 told 200, all 20 got the same answer",
            ),
            (
                result_of(SECURES, {201: 1, 204: 2, 409: 3, 429: 14}, 1),
                "1 lesson, 14 told 429, 3 told 409, 2 told 204",
            ),
            (
                answer_of(RUNS_LATE, {200: 2, 504: 18}, 20),
                "18 users saw a 504: 20 model calls, one at a time",
            ),
            (answer_of(ANSWERS_ALL, {200: 20}, 1), "1 model call, all 20 got the same 200"),
            (
                answer_of(ANSWERS_ALL, {200: 40}, 1, 1),
                "1 model call in each of 2 rounds, all 40 got the same 200",
            ),
            (
                cascade_of(CORRUPTS, {200: 8, 204: 12}, DAMAGED),
                "4 of 4 drafts damaged: 1 lost, 3 misplaced",
            ),
            (
                cascade_of(CORRUPTS, {200: 40}, INTACT, DAMAGED),
                "up to 4 of 4 drafts damaged: 1 lost, 3 misplaced",
            ),
            (cascade_of(KEEPS, {200: 1, 429: 19}, INTACT), "all 4 drafts intact, 19 told 429"),
        ],
    )
    def test_right_outcomes_in_words(self, result: Result, words: str) -> None:
        assert words == result.identical_verdict
        assert result.held

    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (result_of(REJECTS, {201: 2, 429: 18}, 2), "2 lessons created: the double create"),
            (
                result_of(RACES, {201: 2, 500: 18}, 2),
                "2 lessons created: the double create, 18 users saw a 500",
            ),
            (result_of(REJECTS, {201: 1, 500: 19}, 1), "1 lesson, 19 users saw a 500"),
            (result_of(REJECTS, {429: 20}, 0), "no lesson in 1 of 1 rounds, 20 told 429"),
            (result_of(REJECTS, {201: 1, NO_ANSWER: 19}, 1), "1 lesson, 19 got no answer"),
            (
                result_of(RACES, {201: 11, 204: 209}, *[1] * 11),
                "no race in 11 rounds: try more --requests or LESSON_WORK_MS=100",
            ),
            (
                result_of(COALESCES, {201: 12, 503: 8}, 1),
                "1 lesson, 8 users saw a 503, 12 got the same 201",
            ),
            (
                result_of(COALESCES, {201: 20}, 1, same=False),
                "1 lesson, 20 got a 201, but not the same one",
            ),
            (
                result_of(COALESCES, {201: 1, 204: 19}, 1),
                "1 lesson, 19 told 204, 1 got the same 201",
            ),
            (result_of(REFUSES, {201: 1, 204: 19}, 1), "1 lesson, 19 told 204"),
            (
                result_of(FINDS, {200: 19, 201: 1}, 1, same=False),
                "1 lesson, 19 told 200, 20 got an answer, but not the same one",
            ),
            (
                result_of(SECURES, {201: 1, 429: 18, 503: 1}, 1),
                "1 lesson, 1 user saw a 503, 18 told 429",
            ),
            (
                answer_of(RUNS_LATE, {200: 22}, *[2] * 11),
                "no race in 11 rounds: try more --requests",
            ),
            (
                answer_of(ANSWERS_ALL, {200: 19, 504: 1}, 2),
                "1 user saw a 504: 2 model calls, one at a time",
            ),
            (
                answer_of(RUNS_LATE, {504: 19, 500: 1}, 20),
                "19 users saw a 504: 20 model calls, one at a time, 1 user saw a 500",
            ),
            (
                answer_of(ANSWERS_ALL, {200: 20}, 2),
                "2 model calls for one answer, all 20 got the same 200",
            ),
            (
                cascade_of(CORRUPTS, {200: 1, 204: 19}, INTACT),
                "no race in 1 rounds: try more --requests or LESSON_WORK_MS=100",
            ),
            (
                cascade_of(KEEPS, {200: 2, 429: 18}, DAMAGED),
                "4 of 4 drafts damaged: 1 lost, 3 misplaced",
            ),
        ],
    )
    def test_wrong_outcomes_in_words(self, result: Result, words: str) -> None:
        assert words == result.identical_verdict
        assert not result.held

    def test_two_lessons_in_one_round_are_not_made_up_for_by_none_in_another(self) -> None:
        assert not result_of(REJECTS, {201: 2, 429: 38}, 2, 0).held

    @pytest.mark.parametrize("expectation", [RACES, FAILS, REJECTS, SKIPS, COALESCES])
    def test_whoever_turns_different_uuids_away_has_not_held(
        self, expectation: Expectation
    ) -> None:
        statuses, rows = ({201: 20}, 20) if expectation.races else ({201: 20}, 1)

        served = result_of(expectation, statuses, rows)
        turned_away = result_of(expectation, statuses, rows, different={201: 17, 429: 3})

        assert served.different_verdict == "20 created"
        assert served.held
        assert turned_away.different_verdict == "17 created, 3 told 429"
        assert not turned_away.held

    def test_whoever_gives_one_caller_the_answer_of_another_has_not_held(self) -> None:
        result = answer_of(ANSWERS_ALL, {200: 20}, 1)
        assert result.held

        result.different.add([Answer(200, b"to message 1")] * 2, [Left(1), Left(1)])

        assert result.different_verdict.endswith("some got another one's answer")
        assert not result.held


RESULTS = {
    "unprotected": result_of(RACES, {201: 7, 204: 13}, 7, variant="unprotected"),
    "reject": result_of(REJECTS, {201: 1, 500: 19}, 1, variant="reject"),
    "answer": result_of(
        ANSWERS_ALL, {200: 20}, 1, subject=MODEL_ANSWER, different={200: 2}, variant="model answer"
    ),
}


class TestReport:
    def test_the_table_is_aligned_and_tells_what_failed(self) -> None:
        sections = [section.splitlines() for section in table(RESULTS).split("\n\n")[:-1]]

        assert [re.split(r"  +", headings) for headings, *_ in sections] == [
            ["unprotected", "requests", "answers", "lessons", "verdict", "different UUIDs"],
            ["reject", "requests", "answers", "lessons", "verdict", "different UUIDs"],
            ["model answer", "requests", "answers", "model calls", "verdict", "different messages"],
        ]
        assert [re.split(r"  +", form) for _, _, form in sections] == [
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
            [
                "answer",
                "20",
                "20 x 200",
                "1",
                "1 model call, all 20 got the same 200",
                "2 answered, 2 calls",
                "ok",
            ],
        ]
        [rule] = {rule for _, rule, _ in sections}
        gaps = [found.start() for found in re.finditer(" ", rule)]
        assert all({form[gap] for gap in gaps} == {" "} for _, _, form in sections)

    def test_the_json_has_the_same_numbers(self) -> None:
        said = json.loads(as_json(RESULTS, requests=20))

        assert said["requests"] == 20
        assert not said["held"]
        assert said["forms"]["unprotected"]["variant"] == "unprotected"
        assert said["forms"]["unprotected"]["identical"]["statuses"] == {"201": 7, "204": 13}
        assert said["forms"]["unprotected"]["identical"]["rows"] == 7
        assert said["forms"]["reject"]["different"]["rows"] == 20
        assert said["forms"]["answer"]["identical"]["model_calls"] == 1


class TestForms:
    def test_names_are_unique(self) -> None:
        assert len({form.name for form in FORMS}) == len(FORMS)

    def test_only_the_unguarded_forms_may_race(self) -> None:
        racing = [form.name for form in FORMS if form.expectation.races]

        assert racing == ["unprotected", "answer-unguarded", "cascade-unguarded"]

    def test_forms_of_one_variant_follow_one_another(self) -> None:
        """Or the table would have two sections of one name."""
        variants = [variant for variant, _ in groupby(FORMS, key=lambda form: form.variant)]

        assert len(set(variants)) == len(variants)


class TestModel:
    def test_it_answers_two_calls_before_a_caller_gives_up_and_never_three(self) -> None:
        assert 2 * SECONDS < TIMEOUT < 3 * SECONDS


class TestCascade:
    @pytest.mark.parametrize(
        ("numbers", "damage"),
        [
            ({1: 0, 2: 1, 3: 2, 4: 3}, Left(0)),
            ({0: 0, 1: 1, 2: 2, 3: 3}, Left(4, "4 misplaced")),
            ({0: 0, 1: 0, 2: 1, 3: 2, 4: 3}, Left(1, "1 misplaced")),
            ({2: 0, 3: 1, 4: 2}, Left(4, "1 lost, 3 misplaced")),
            ({}, Left(4, "4 lost")),
        ],
    )
    def test_damage_in_words(self, numbers: dict[int, int], damage: Left) -> None:
        """``numbers``: under which number which draft is found."""
        cache = LocMemCache("drafts", {})
        stage, key = CascadeStage(cache), uuid4()
        stage.prepare([key])
        seeded = [cache.get(draft_key(key, stage.step, number)) for number in range(DRAFTS)]
        cache.clear()
        for number, draft in numbers.items():
            cache.set(draft_key(key, stage.step, number), seeded[draft])

        assert stage.left(FORMS[-1], [key]) == [damage]


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


CONSTRAINTS = ["constraint-caught", "create-or-existing", "lock-constraint"]
KILLERS = ["redis-killed", "redis-killed-async", "redis-killed-coalesce"]
ANSWERS = ["answer-unguarded", "answer-function"]
CASCADES = ["cascade-unguarded", "cascade-lock"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``manage.py race`` with a directory for temporary files of its own."""
    started: list[subprocess.Popen[str]] = []
    # From a clean slate: the run starts its own Valkey and makes its own database.
    unset = {"REDIS_URL", "DATABASE_URL", "SINGLEFLIGHT_STORE", "LESSON_WORK_MS", "MODEL_URL"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"DJANGO_SETTINGS_MODULE": "testproject.settings", "TMPDIR": str(tmp_path)}

    def start(*options: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "race", *options],
            cwd=ROOT,
            env=environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests in the background has it ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def signals_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the test's own process, where the command is called in it."""
    monkeypatch.setattr(f"{Command.__module__}.terminate_cleanly", lambda: None)


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
    # Three web servers, each with its workers, beside whatever else the machine has to do.
    @pytest.mark.timeout(180)
    def test_the_unguarded_forms_race_and_the_others_hold_redis_killed_or_not(
        self, start: Start, tmp_path: Path
    ) -> None:
        """Real gunicorn, uvicorn and Valkey; exit status 0; nothing stays behind.

        Redis is killed with a request in the view each time; the forms that follow have it again.
        """
        locks = ["constraint", "reject", "async", "database"]
        flights = ["coalesce", "coalesce-async", "coalesce-mixin", "coalesce-drf"]
        plain = ["unprotected", *locks, *flights, *CONSTRAINTS, *ANSWERS]
        names = [form.name for form in FORMS if form.name in [*plain, *KILLERS, *CASCADES]]
        assert names.index(KILLERS[-1]) < names.index("cascade-lock")

        process = start(
            "-n8", "--workers=2", "--json", "--kill-redis", *[f"--form={name}" for name in names]
        )
        output, progress = process.communicate()

        assert process.returncode == 0, progress
        said = json.loads(output)
        assert names == list(said["forms"])
        assert said["held"]
        identical = {name: form["identical"] for name, form in said["forms"].items()}
        different = {name: form["different"] for name, form in said["forms"].items()}
        assert identical["unprotected"]["rows"] > 1
        assert all(identical[name]["rows"] == 1 for name in [*locks, *flights, *CONSTRAINTS])
        assert all(identical[name]["statuses"] == {"201": 8} for name in flights)
        assert identical["constraint-caught"]["statuses"] == {"201": 1, "409": 7}
        assert identical["create-or-existing"]["statuses"] == {"200": 7, "201": 1}
        assert identical["answer-unguarded"]["statuses"]["504"] >= 1
        assert identical["answer-function"]["statuses"] == {"200": 8}
        assert identical["answer-function"]["model_calls"] == 1
        assert identical["cascade-unguarded"]["drafts_damaged"] >= 1
        assert identical["cascade-lock"]["drafts_damaged"] == 0
        for name in ["unprotected", *locks, *flights, *CONSTRAINTS]:
            assert different[name]["statuses"] == {"201": 8}

        assert progress.count("Redis killed in mid-run: a request is in the view") == len(KILLERS)
        assert progress.count("Redis started again") == len(KILLERS)
        for name in KILLERS:
            assert identical[name]["rows"] == 1
            assert identical[name]["requests"] == 8
            assert set(identical[name]["statuses"]) <= {"200", "201", "204", "409", "429"}
            # Before it was killed, and while it was away.
            assert different[name]["statuses"] == {"201": 16}
        assert_nothing_is_left(tmp_path)

    @pytest.mark.usefixtures("signals_left_alone")
    def test_a_redis_that_is_not_ours_is_not_killed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:6379/0")
        with pytest.raises(CommandError, match="kills the server that race has started itself"):
            call_command("race", "--kill-redis")
        assert capsys.readouterr() == ("", "")

    @pytest.mark.usefixtures("signals_left_alone")
    @pytest.mark.parametrize(
        "options", [["--form=redis-killed"], ["--kill-redis", "--form=reject"]]
    )
    def test_the_option_and_its_forms_go_together(
        self, monkeypatch: pytest.MonkeyPatch, options: list[str]
    ) -> None:
        monkeypatch.delenv("REDIS_URL", raising=False)
        with pytest.raises(CommandError, match="--kill-redis and its forms go together") as caught:
            call_command("race", *options)
        assert str(caught.value).endswith(f": {', '.join(KILLERS)}.")

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
            pytest.param("Redis at", signal.SIGTERM, marks=pytest.mark.soak),
            pytest.param("uvicorn on port", signal.SIGINT, marks=pytest.mark.soak),
            ("Redis killed", signal.SIGTERM),
        ],
    )
    def test_an_interrupted_run_leaves_nothing_behind(
        self, start: Start, tmp_path: Path, line: str, number: signal.Signals
    ) -> None:
        """Whether it is interrupted while it starts its servers or in the middle of its calls."""
        forms = ["--form=async", "--form=redis-killed-async", "--form=answer-async"]
        rounds = 1 if line == "Redis killed" else 1000
        process = start("-n8", "--workers=2", f"--rounds={rounds}", "--kill-redis", *forms)
        assert process.stderr is not None
        assert any(progress.startswith(line) for progress in process.stderr)
        # Or the check below would be content with finding nothing ever.
        assert processes_of(tmp_path)

        process.send_signal(number)
        process.communicate()

        assert 128 + number == process.returncode
        assert_nothing_is_left(tmp_path)
