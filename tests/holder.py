"""Processes that take turns under one lock: ``python -m tests.holder hold|count KEY ...``.

One process sets Django up and forks another for each line that it reads; when it reads no more, all
end. Each writes one line for each event, with the time by CLOCK_MONOTONIC: the same for all.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import django


def tell(kind: str, value: float) -> None:
    """One write, so that a line is there as a whole or not at all."""
    os.write(1, f"{os.getpid()} {kind} {value}\n".encode())


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def hold(key: str, ttl: str, longest: str) -> None:
    """Take the lease again and again, and keep it for a random time each, until killed."""
    from singleflight_django import semaphore_lock

    pause = threading.Event()
    while True:
        with semaphore_lock(key, ttl=float(ttl), wait=60):
            tell("in", now())
            pause.wait(random.uniform(0, float(longest)))
            tell("out", now())


def count(key: str, seconds: str, path: str) -> None:
    """Raise the number in a file, read first and written later, for so many seconds."""
    from singleflight_django import semaphore_lock

    turns, end = 0, now() + float(seconds)
    while now() < end:
        with semaphore_lock(key, ttl=5, wait=60):
            with open(path) as file:
                number = int(file.read())
            with open(path, "w") as file:
                file.write(str(number + 1))
        turns += 1
    tell("turns", turns)


def main(what: str, *args: str) -> None:
    django.setup()
    # The kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            random.seed()
            {"hold": hold, "count": count}[what](*args)
            os._exit(0)
        children.append(child)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
