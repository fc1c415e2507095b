"""Many flights with jittered arrivals and random kills. Run with ``-m soak``.

``SINGLEFLIGHT_TEST_FLIGHTS`` says how many flights there are to be; 300 by default.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest

from tests.fliers import Flier, fliers
from tests.servers import Valkey

FLIGHTS = int(os.environ.get("SINGLEFLIGHT_TEST_FLIGHTS", "300"))
# Longer than a loaded machine keeps a process from renewing its lease.
TTL = 1.5

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def arrive(crew: list[Flier], dice: random.Random, key: str) -> dict[Flier, int]:
    """Let a few callers arrive in each process, as threads and tasks; return how many."""
    callers = {flier: dice.randint(1, 4) for flier in dice.sample(crew, len(crew))}
    for flier, count in callers.items():
        work, how = str(dice.randint(0, 30)), dice.choice(["thread", "task"])
        flier.call(work, key=key, count=count, how=how)
    return callers


def check(dead: set[int], crew: list[Flier]) -> int:
    """No two runs of a flight at once, save after a kill; no answer that no run has given."""
    runs = sorted((e for f in crew for e in f.of("executing")), key=lambda event: event.at)
    ended = {event.value: event.at for flier in crew for event in flier.of("executed")}
    end, runner = 0.0, 0
    for run in runs:
        assert run.at >= end or runner in dead, (run, end)
        end, runner = ended.get(run.value, run.at), run.pid
    answers = {event.value for flier in crew for event in flier.of("answer")}
    assert answers <= {run.value for run in runs} | {"LeaderFailedError"}, answers
    assert not (answers & {"LeaderFailedError"}) or dead
    return len(runs)


@pytest.mark.parametrize("store", [None, "cache"])
def test_no_two_runs_at_once_and_no_other_flights_answer(
    store: str | None, redis_server: Valkey
) -> None:
    dice, totals = random.Random(20), defaultdict[str, int](int)
    options = {"ttl": TTL, "wait": 15}
    with fliers(4, redis_server.url(), store, **options) as crew:
        for number in range(FLIGHTS if store is None else FLIGHTS // 10):
            everyone = list(crew)
            for flier in crew:
                flier.events.clear()
            callers = arrive(crew, dice, f"k{number}")
            dead: set[int] = set()
            if dice.random() < 0.01 and store is None:
                victim = dice.choice(crew)
                dead.add(victim.process.pid or 0)
                victim.kill()
                crew[crew.index(victim)] = Flier(redis_server.url(), store, **options)
                totals["kills"] += 1
            for flier, count in callers.items():
                if flier in crew:
                    flier.answers(count)
            totals["runs"] += check(dead, everyone)
            totals["flights"] += 1
            totals["callers"] += sum(callers.values())
        assert [flier.state()["flights"] for flier in crew] == [0] * 4
    print(dict(totals))
