"""How long one call takes, and what it costs the server: peers take turns, so that all see the same
machine."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

CALLS = 50
_clock = time.perf_counter_ns


@dataclass
class Sample:
    """What one peer's calls took, in microseconds, and its medians of each turn."""

    calls: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    requests: float = 0.0

    def as_numbers(self, floor: Sample) -> dict[str, float]:
        """Return the figures of the report, beside those of ``floor``."""
        ratios = [mine / its for mine, its in zip(self.turns, floor.turns, strict=True)]
        return {
            "median": statistics.median(self.calls),
            "p99": statistics.quantiles(self.calls, n=100)[98],
            "ratio": statistics.median(ratios),
            "cpu": statistics.median(self.cpu),
            "requests": self.requests / len(self.calls),
        }


def measure(
    calls: Mapping[str, Callable[[str], Any]], server: redis.Redis, turns: int
) -> dict[str, Sample]:
    """Return a sample for each of ``calls``, which get a key of their own every time."""
    samples = {name: Sample() for name in calls}
    names = list(calls)
    for turn in range(-2, turns):
        random.shuffle(names)
        for name in names:
            keys = [f"bench:{name}:{turn}:{number}" for number in range(CALLS)]
            _take_turn(calls[name], keys, server, Sample() if turn < 0 else samples[name])
    return samples


def _take_turn(
    call: Callable[[str], Any], keys: list[str], server: redis.Redis, sample: Sample
) -> None:
    took = []
    before = requests(server)
    gc.collect()
    gc.disable()
    cpu = time.process_time()
    for key in keys:
        begin = _clock()
        call(key)
        took.append((_clock() - begin) / 1000)
    cpu = time.process_time() - cpu
    gc.enable()
    # The look itself is one.
    sample.requests += requests(server) - before - 1
    sample.calls += took
    sample.turns.append(statistics.median(took))
    sample.cpu.append(cpu / len(keys) * 1e6)


def requests(server: redis.Redis) -> int:
    """How often the server has read something that a client sent."""
    stats: Any = server.info("stats")
    return int(stats["total_reads_processed"])
