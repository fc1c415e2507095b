"""The smoke test, between real processes: is the key right, and does the lock keep it?

1. One request succeeds. 2. Two at once with the same key: exactly one does the work. 3. Two at once
with different keys: both succeed, without contention. A key that is too coarse fails 3, one that is
too fine fails 2; each of the three is needed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.meeting import PATIENCE

ROUNDS = 20


class Process:
    """A process of its own that serves one request at a time."""

    def __init__(self, said: queue.Queue[tuple[Process, str]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.scenario_child"],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._listener.start()

    def _listen(self, said: queue.Queue[tuple[Process, str]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.put((self, line.strip()))

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Site:
    """Two processes, and what they say."""

    def __init__(self) -> None:
        self._said: queue.Queue[tuple[Process, str]] = queue.Queue()
        self.processes = [Process(self._said), Process(self._said)]

    def begin(self) -> None:
        assert [self.hear()[1] for _ in self.processes] == ["ready", "ready"]

    def hear(self) -> tuple[Process, str]:
        return self._said.get(timeout=PATIENCE * 3)

    def send(self, *paths: str) -> tuple[list[str], list[str]]:
        """Send one request to each process, all at once.

        Return what was heard from each first, while nobody could leave the view, and their status.
        """
        for number, (process, path) in enumerate(zip(self.processes, paths, strict=False)):
            process.tell(json.dumps({"url": path, "request_id": str(number)}))
        first = [self.hear() for _ in paths]
        inside = [process for process, word in first if word == "inside"]
        for process in inside:
            process.tell()
        last = [self.hear()[1] for _ in inside]
        answers = [word for _, word in first if word != "inside"] + last
        return sorted(word for _, word in first), sorted(answers)

    def end(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    started = Site()
    try:
        started.begin()
        yield started
    finally:
        started.end()


def one_request_succeeds(site: Site, view: str) -> None:
    assert site.send(f"{view}/7/") == (["inside"], ["201"])


def of_two_with_one_key_exactly_one_works(site: Site, view: str) -> None:
    assert site.send(f"{view}/7/", f"{view}/7/") == (["429", "inside"], ["201", "429"])


def two_with_different_keys_do_not_contend(site: Site, view: str) -> None:
    assert site.send(f"{view}/7/", f"{view}/8/") == (["inside", "inside"], ["201", "201"])


SCENARIOS: list[Any] = [
    one_request_succeeds,
    of_two_with_one_key_exactly_one_works,
    two_with_different_keys_do_not_contend,
]
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)


@pytest.mark.parametrize("colour", ["sync", "async"])
class TestScenarios:
    @each_scenario
    def test_the_right_key(self, site: Site, scenario: Any, colour: str) -> None:
        for _ in range(ROUNDS):
            scenario(site, f"/{colour}/right")

    @pytest.mark.parametrize(
        ("key", "fails"),
        [
            ("too-coarse", two_with_different_keys_do_not_contend),
            ("too-fine", of_two_with_one_key_exactly_one_works),
        ],
    )
    def test_a_bad_key_fails_one_of_them(
        self, site: Site, key: str, fails: Any, colour: str
    ) -> None:
        for scenario in SCENARIOS:
            if scenario is fails:
                with pytest.raises(AssertionError):
                    scenario(site, f"/{colour}/{key}")
            else:
                scenario(site, f"/{colour}/{key}")
