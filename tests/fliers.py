"""Processes that take part in flights: started, told what to do, stopped and killed by a test.

Each is forked from one warm server process, so that starting it costs milliseconds. It tells what
happens as events; times are CLOCK_MONOTONIC, the same clock in every process of the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PATIENCE = 20.0
NAMESPACE = "fliers"

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.fliers_child"])


class Event(NamedTuple):
    """``kind``: "ready", "executing", "executed", "answer", "error", "state" or "event"."""

    kind: str
    pid: int
    at: float
    value: Any = None


class Flier:
    """One process. ``options`` are those of its ``SingleFlight``."""

    def __init__(self, url: str, store: str | None = None, **options: Any) -> None:
        from tests import fliers_child

        self.pipe, theirs = _forks.Pipe()
        self.process = _forks.Process(
            target=fliers_child.main, args=(theirs, url, store, options), daemon=True
        )
        self.process.start()
        theirs.close()
        self.events: list[Event] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(self.pipe,), daemon=True)
        self._reader.start()
        self.wait_for("ready")

    def _read(self, pipe: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                event = Event(*pipe.recv())
                with self._news:
                    self.events.append(event)
                    self._news.notify_all()

    def call(
        self, work: str = "gate", *, key: str = "k", count: int = 1, how: str = "thread"
    ) -> None:
        """Let ``count`` callers arrive as threads or tasks. ``work``: see fliers_child."""
        self.pipe.send(("call", (work, key, count, how)))

    def open_gate(self) -> None:
        """Let the work that waits at the gate end."""
        self.pipe.send(("open", ()))

    def close_gate(self) -> None:
        self.pipe.send(("close", ()))

    def cancel(self) -> None:
        """Cancel all tasks that are callers."""
        self.pipe.send(("cancel", ()))

    def state(self) -> dict[str, int]:
        """How many flights and passengers there are in the process."""
        seen = self.count("state")
        self.pipe.send(("state", ()))
        state: dict[str, int] = self.wait_for("state", seen + 1)[-1].value
        return state

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def of(self, kind: str) -> list[Event]:
        with self._news:
            return [event for event in self.events if event.kind == kind]

    def count(self, kind: str) -> int:
        return len(self.of(kind))

    def wait_for(self, kind: str, count: int = 1, within: float = PATIENCE) -> list[Event]:
        """Return the events of ``kind`` as soon as there are ``count`` of them."""
        with self._news:
            ample = self._news.wait_for(
                lambda: sum(event.kind == kind for event in self.events) >= count, within
            )
        assert ample, f"no {count} {kind} within {within} s; there are {self.events}"
        return self.of(kind)

    def answers(self, count: int = 1, within: float = PATIENCE) -> list[Any]:
        """What ``count`` callers got."""
        return [event.value for event in self.wait_for("answer", count, within)]

    def close(self) -> None:
        with suppress(OSError, ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.kill()
        self._reader.join(PATIENCE)
        self.pipe.close()
        self.process.close()


@contextmanager
def fliers(
    number: int, url: str, store: str | None = None, **options: Any
) -> Iterator[list[Flier]]:
    """``number`` processes that share a server."""
    crew: list[Flier] = []
    try:
        for _ in range(number):
            crew.append(Flier(url, store, **options))
        yield crew
    finally:
        for flier in crew:
            flier.close()


def executions(crew: list[Flier]) -> list[Event]:
    """Every run of the work in any of the processes, in order."""
    runs = [event for flier in crew for event in flier.of("executing")]
    return sorted(runs, key=lambda event: event.at)


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
