"""Many callers of one key at the same instant, in two processes: how soon all have the answer."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from testproject.benching.timing import requests

PROCESSES = 2
WORK = 0.05


@dataclass
class Burst:
    """What happened, in seconds after the callers began."""

    executions: list[tuple[float, float]] = field(default_factory=list)
    returns: list[tuple[float, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: int = 0

    @property
    def last(self) -> float:
        """How long after the end of the first work the last caller had its answer, in ms."""
        done = min((end for _, end in self.executions), default=float("nan"))
        return (max((end for _, end in self.returns), default=float("nan")) - done) * 1000


class Callers:
    """The processes of one peer."""

    def __init__(self, name: str, environ: dict[str, str]) -> None:
        self.name = name
        command = [sys.executable, "-m", "testproject.benching.callers", name]
        self.processes = [
            subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(PROCESSES)
        ]

    def are_ready(self) -> bool:
        """Wait for them; False if the peer isn't installed."""
        answers = [self._line(process) for process in self.processes]
        return all("ready" in answer for answer in answers)

    def burst(self, key: str, callers: int, server: redis.Redis) -> Burst:
        """Let ``callers`` of them ask for ``key``."""
        before = requests(server)
        # Time for the threads to start.
        begin = time.monotonic() + 0.03 + callers * 0.0006
        share = [callers // PROCESSES] * PROCESSES
        for process, count in zip(self.processes, share, strict=True):
            told = {"key": key, "callers": count, "work": WORK, "begin": begin}
            self._tell(process, told)
        burst = Burst()
        for answer in map(self._line, self.processes):
            burst.executions += [(a - begin, b - begin) for a, b in answer["executions"]]
            burst.returns += [(a - begin, b - begin) for a, b in answer["returns"]]
            burst.errors += answer["errors"]
        burst.requests = requests(server) - before - 1
        return burst

    def stop(self) -> None:
        """End them, whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()

    def _tell(self, process: subprocess.Popen[str], told: dict[str, Any]) -> None:
        if process.stdin is not None:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()

    def _line(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout is not None else ""
        answer: dict[str, Any] = json.loads(line or '{"missing": "it has ended"}')
        return answer


@contextmanager
def all_callers(names: Sequence[str], url: str) -> Iterator[list[Callers]]:
    """Give the processes of each peer that is installed."""
    environ = {**os.environ, "REDIS_URL": url}
    with ExitStack() as stack:
        present = []
        for name in names:
            callers = Callers(name, environ)
            stack.callback(callers.stop)
            if callers.are_ready():
                present.append(callers)
        yield present


def take_turns(
    present: Sequence[Callers], callers: int, turns: int, server: redis.Redis
) -> dict[str, list[Burst]]:
    """Return the bursts of each peer. The first of each opens the connections and isn't counted."""
    bursts: dict[str, list[Burst]] = {one.name: [] for one in present}
    order = list(present)
    for turn in range(-1, turns):
        random.shuffle(order)
        for one in order:
            burst = one.burst(f"bench:{callers}:{turn}:{one.name}", callers, server)
            if turn >= 0:
                bursts[one.name].append(burst)
    return bursts


def as_numbers(bursts: Sequence[Burst], callers: int) -> dict[str, Any]:
    """Return the figures of the report."""
    return {
        "last": statistics.median(burst.last for burst in bursts),
        "worst": max(burst.last for burst in bursts),
        "executions": max(len(burst.executions) for burst in bursts),
        "requests": statistics.median(burst.requests for burst in bursts),
        "answered": min(len(burst.returns) for burst in bursts) / callers,
        "errors": sorted({error for burst in bursts for error in burst.errors})[:3],
    }
