"""Several callers at once, as threads or as processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from inspect import isawaitable
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from asgiref.sync import async_to_sync
from django.core.cache import close_caches
from django.db import connections

_T = TypeVar("_T")


class Raced(NamedTuple, Generic[_T]):
    """What came of a race: what the callers returned, and what they raised, each in their order."""

    results: list[_T]
    errors: list[BaseException]


class Outcome(NamedTuple):
    """What one caller returned or raised."""

    value: Any = None
    error: BaseException | None = None


def race(
    n: int, call: Callable[[], Any], *, processes: bool = False, timeout: float = 30.0
) -> Raced[Any]:
    """Call ``call()`` ``n`` times at once, and return the results and the errors.

    The callers are threads, or ``processes`` forked from this one (what they return is pickled: not
    the response, but its status). All are ready before the first one begins. Each has a context
    and database connections of its own, which are closed afterwards; what it returns is awaited if
    it can be. Raises TimeoutError when one is not done in ``timeout`` seconds.

    In a TestCase, whose transaction nobody else sees, callers find none of the test's rows: use a
    TransactionTestCase.
    """
    if type(n) is not int or n < 1:
        raise ValueError(f"n must be a whole number of 1 or more, not {n!r}.")
    if processes:
        # Imported here: it needs fork.
        from singleflight_django.testing.processes import in_processes

        outcomes = in_processes(n, call, timeout)
    else:
        outcomes = _in_threads(n, call, timeout)
    results = [outcome.value for outcome in outcomes if outcome.error is None]
    return Raced(results, [outcome.error for outcome in outcomes if outcome.error is not None])


def _in_threads(n: int, call: Callable[[], Any], timeout: float) -> list[Outcome]:
    start = threading.Barrier(n, timeout=timeout)

    def begin() -> Any:
        start.wait()
        return call()

    racers = [Racer(begin) for _ in range(n)]
    for racer in racers:
        racer.start()
    return wait_for(racers, timeout)


class Racer(threading.Thread):
    """A thread that makes one call, and keeps what came of it."""

    def __init__(self, call: Callable[[], Any], done: Callable[[], None] = lambda: None) -> None:
        # A daemon: one that hangs must not keep the test run from ending.
        super().__init__(name="singleflight-racer", daemon=True)
        self._call = call
        self._tell = done
        self.outcome: Outcome | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self.outcome = Context().run(outcome_of, self._call)
        finally:
            self._tell()


def wait_for(racers: list[Racer], timeout: float) -> list[Outcome]:
    """Return what came of each racer; TimeoutError if one is not done in ``timeout`` seconds."""
    deadline = monotonic() + timeout
    for racer in racers:
        racer.join(max(0.0, deadline - monotonic()))
    outcomes = [racer.outcome for racer in racers if racer.outcome is not None]
    refuse_unfinished(len(racers) - len(outcomes), len(racers), timeout)
    return outcomes


def hint_of_transaction() -> str:
    """Say so where the test's own transaction may be why callers can't do their work."""
    if any(connection.in_atomic_block for connection in connections.all(initialized_only=True)):
        return (
            " This test runs in a transaction, whose rows nobody else sees, and whose locks others "
            "wait for: use a TransactionTestCase, or pytest.mark.django_db(transaction=True)."
        )
    return ""


def refuse_unfinished(running: int, n: int, timeout: float) -> None:
    """Raise TimeoutError if some of the callers are still running."""
    if running:
        raise TimeoutError(
            f"{running} of {n} callers were still running after {timeout:g} s. They wait for each "
            f"other, or for what the test itself holds.{hint_of_transaction()}"
        )


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Make a call in this thread, which ends after it: close what it leaves open."""
    try:
        return Outcome(returned(call()))
    except BaseException as error:
        return Outcome(error=error)
    finally:
        connections.close_all()
        close_caches()


def returned(result: Any) -> Any:
    """Return ``result``, or what it gives when it is awaited."""
    if not isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return async_to_sync(wait)()
