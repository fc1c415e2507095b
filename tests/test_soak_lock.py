"""Soaks: many processes on one key, and holders that are killed. Full counts by environment variables.

``SINGLEFLIGHT_SOAK_SECONDS`` (30 for the full run) and ``SINGLEFLIGHT_SOAK_KILLS`` (200).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import redis

from tests.servers import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("SINGLEFLIGHT_SOAK_SECONDS", "6"))
KILLS = int(os.environ.get("SINGLEFLIGHT_SOAK_KILLS", "25"))
PROCESSES = 8
TTL = 0.6

PREAMBLE = """
import os, sys, time, django
django.setup()
import redis
from singleflight_django import semaphore_lock
plain = redis.Redis.from_url(os.environ["COUNTER_URL"])
"""

# Not atomic on purpose: two at once lose an increment.
HAMMER = """
import asyncio
ends, mine, lost = time.monotonic() + float(sys.argv[1]), 0, 0
def count():
    value = int(plain.get("counter") or 0)
    plain.set("counter", value + 1)
async def main():
    global mine
    while time.monotonic() < ends:
        async with semaphore_lock("hammer", wait=60, ttl=5, cache=sys.argv[2]):
            count()
            mine += 1
if sys.argv[3] == "async":
    asyncio.run(main())
else:
    while time.monotonic() < ends:
        with semaphore_lock("hammer", wait=60, ttl=5, cache=sys.argv[2]):
            count()
            mine += 1
print(mine)
"""

# Each holder says so on the server, in one step: two at once would find each other there. Its note
# ends by itself a little before the lease of a dead holder does.
HOLD = """
me = str(os.getpid())
plain.rpush("ready", me)
while True:
    with semaphore_lock("mortal", wait=60, ttl=float(sys.argv[1])) as lease:
        other = plain.getset("inside", me)
        if other not in (None, b""):
            gone = plain.sismember("killed", other)
            if not gone:
                plain.rpush("wrong", f"{me} met {other.decode()}")
        plain.rpush("turns", me)
        time.sleep(0.02)
        if lease.lost:
            plain.rpush("wrong", f"{me} lost it")
        plain.set("inside", "")
"""


@contextmanager
def processes(code: str, *arguments: str, number: int) -> Iterator[list[subprocess.Popen[str]]]:
    url = os.environ["SINGLEFLIGHT_RUN_REDIS_URL_" + os.environ.get("PYTEST_XDIST_WORKER", "main")]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "COUNTER_URL": url}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_hammering_one_key_loses_no_increment(colour: str, redis_client: redis.Redis) -> None:
    with processes(HAMMER, str(SECONDS), "default", colour, number=PROCESSES) as started:
        turns = [int(process.communicate(timeout=SECONDS + 120)[0]) for process in started]
    counted = int(redis_client.get("counter") or 0)
    print(f"{colour}: {PROCESSES} processes, {SECONDS} s, {sum(turns)} turns, {counted} counted")
    assert counted == sum(turns) > 0
    # Nobody is shut out.
    assert min(turns) > 0


def test_a_killed_holder_is_succeeded_within_its_ttl_and_never_joined(
    redis_client: redis.Redis,
) -> None:
    late: list[float] = []
    with ExitStack() as stack:
        started = list(stack.enter_context(processes(HOLD, str(TTL), number=4)))
        for number in range(KILLS):
            ready = 4 + number
            until(lambda ready=ready: redis_client.llen("ready") == ready, "four", within=60)
            # A random holder, at a random moment of its turn.
            victim = _holder(redis_client)
            time.sleep(random.uniform(0, 0.015))
            process = next(one for one in started if str(one.pid) == victim)
            process.send_signal(signal.SIGSTOP)
            held = redis_client.get("inside") == victim.encode()
            redis_client.sadd("killed", victim)
            begin, turns = time.monotonic(), redis_client.llen("turns")
            process.kill()
            process.wait()
            until(lambda turns=turns: redis_client.llen("turns") > turns, "a successor", within=30)
            if held:
                late.append(time.monotonic() - begin)
            assert redis_client.lrange("wrong", 0, -1) == [], number
            started[started.index(process)] = stack.enter_context(
                processes(HOLD, str(TTL), number=1)
            )[0]
    late.sort()
    print(
        f"{KILLS} kills, {len(late)} of holders; free after: median {late[len(late) // 2]:.3f} s, "
        f"max {late[-1]:.3f} s with a ttl of {TTL} s"
    )
    assert late[-1] < TTL + 0.5


def _holder(client: redis.Redis) -> str:
    found: list[str] = []

    def look() -> bool:
        inside = client.get("inside")
        if inside:
            found.append(inside.decode())
        return bool(inside)

    until(look, "a holder")
    return found[0]
