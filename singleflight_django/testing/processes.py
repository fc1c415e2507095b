"""Callers in processes of their own, which can die."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from django.core.cache import close_caches
from django.db import connections

from singleflight_django.guards import Seconds
from singleflight_django.signals import flight_led, flight_taken_over, lease_acquired
from singleflight_django.testing.racing import Outcome, outcome_of, refuse_unfinished
from singleflight_django.testing.switches import held

# What a child has of its parent's connections: closing them would end the parent's.
_not_ours: list[Any] = []


def crash_leader(
    leading: str | tuple[object, ...] | Callable[[], Any],
    *,
    namespace: str = "semaphore_lock",
    ttl: Seconds | None = None,
    cache: str | None = None,
    timeout: float = 30.0,
) -> None:
    """Let a process take a lease and die by SIGKILL, as in a crash: the lease has to lapse.

    ``leading``: a key, which is taken with ``namespace``, ``ttl`` and ``cache``; or a callable, say
    ``lambda: client.post(url)``, whose process is killed as soon as it has its lease, or leads its
    flight. Returns when the process is dead. Raises AssertionError if it never led.
    """
    call = leading
    if not callable(call):
        call = held(call, namespace=namespace, ttl=ttl, cache=cache).enable
    child = _Child(partial(_lead_and_die, call))
    ended = child.outcome(monotonic() + timeout)
    refuse_unfinished(ended is None, 1, timeout)
    if child.process.exitcode != -signal.SIGKILL:
        raise AssertionError(
            f"The process never led, so that it was not killed. It ended with {ended}."
        )


def in_processes(n: int, call: Callable[[], Any], timeout: float) -> list[Outcome]:
    """Make a call in ``n`` processes at once, and return what came of each."""
    # Memcached's clients would share their connections with the children, and mix up the answers.
    close_caches()
    start = _fork_context().Barrier(n, timeout=timeout)
    deadline = monotonic() + timeout
    children = [_Child(partial(_begin, start, call)) for _ in range(n)]
    try:
        outcomes = [child.outcome(deadline) for child in children]
    finally:
        for child in children:
            child.process.kill()
            child.process.join()
    ended = [outcome for outcome in outcomes if outcome is not None]
    refuse_unfinished(n - len(ended), n, timeout)
    return ended


def _begin(start: Any, call: Callable[[], Any]) -> Any:
    start.wait()
    return call()


def _lead_and_die(call: Callable[[], Any]) -> None:
    for event in (lease_acquired, flight_led, flight_taken_over):
        event.connect(_die)
    call()


def _die(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Child:
    """A process that makes one call, and sends what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        context = _fork_context()
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_report, args=(call, theirs), daemon=True)
        with warnings.catch_warnings():
            # The child begins no thread's work anew: it makes its call, and ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def outcome(self, deadline: float) -> Outcome | None:
        """Wait until the process has ended; None if it is still running at ``deadline``."""
        if not self._pipe.poll(max(0.0, deadline - monotonic())):
            self.process.kill()
            return None
        try:
            value, error = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 - our own child's
        except EOFError:
            value, error = None, None
        self._pipe.close()
        self.process.join()
        if self.process.exitcode:
            error = ChildProcessError(f"The process ended with {self.process.exitcode}.")
        return Outcome(value, error)


def _report(call: Callable[[], Any], pipe: Connection) -> None:
    for wrapper in connections.all(initialized_only=True):
        _not_ours.append(wrapper)
        del connections[wrapper.alias]
    pipe.send_bytes(packed(outcome_of(call)))


def packed(outcome: Outcome) -> bytes:
    """Return an outcome as bytes; one that can't travel becomes an error that says so."""
    value, error = outcome
    if error is not None:
        error.add_note("".join(traceback.format_exception(error)))
    try:
        data = pickle.dumps((value, error))
        # Some errors can be written, and not be read again.
        pickle.loads(data)  # noqa: S301 - our own
    except Exception as reason:
        what = "".join(traceback.format_exception(error)) if error else f"{value!r}"
        told = TypeError(f"A process can't send this to the test ({reason}): {what}")
        return pickle.dumps((None, told))
    return data


def _fork_context() -> Any:
    if not hasattr(os, "fork"):
        raise RuntimeError("Processes need os.fork(), which this system doesn't have: use threads.")
    return multiprocessing.get_context("fork")
