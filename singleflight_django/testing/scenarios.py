"""Three scenarios that show whether a guard guards: the user's own view against the real store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.test.client import ClientMixin

from singleflight_django.testing.racing import Outcome, Racer, returned, wait_for
from singleflight_django.testing.stage import Stage
from singleflight_django.testing.verdicts import Verdict, answered

Call = Callable[[Any], Any]


def assert_mutual_exclusion(
    target: Any,
    same: Call,
    other: Call,
    *,
    work: str | None = None,
    reset: Callable[[], Any] | None = None,
    succeeded: Callable[[Any], bool] | None = None,
    timeout: float = 10.0,
) -> None:
    """Assert that ``semaphore_lock`` lets one caller in at a time for one key, and only for one.

    1. One call succeeds. 2. Two at once with the same key: one is in, the other is refused, or has
    to wait. 3. Two at once with different keys: both succeed, and neither meets the other. The
    overlap is made at the store: whoever gets in is kept there until the others have been answered.

    ``target``: a test client (each call gets a copy), a view or any callable, sync or async.
    ``same``, ``other``: called with the target, in threads of their own, to make one call each:
    ``lambda client: client.post("/lessons/", {"uuid": A})``. Two calls of ``same`` have one key,
    ``other`` has another.
    ``work``: dotted path of what must not be done twice at once, where the view looks it up. It is
    watched: the lease has to cover it.
    ``reset``: called before each scenario, say to delete what the last one has made.
    ``succeeded``: what tells a success (default: an answer below 400, and no exception).
    ``timeout``: in seconds, for each scenario.

    Raises AssertionError, which says what is wrong with the guard.
    """
    _Trial(target, work, reset, succeeded or answered, timeout).run(same, other, flies=False)


def assert_single_flight(
    target: Any,
    same: Call,
    other: Call,
    *,
    work: str | None = None,
    reset: Callable[[], Any] | None = None,
    succeeded: Callable[[Any], bool] | None = None,
    timeout: float = 10.0,
) -> None:
    """Assert that of several calls with one key one does the work, and that all get its result.

    1. One call succeeds, and its result can be shared. 2. Two at once with the same key: one leads,
    the other follows, the results are equal. 3. Two at once with different keys: both lead.

    The arguments are those of assert_mutual_exclusion(). Calls of ``same`` have to be alike in all
    that makes an identity: the caller, the path, the query, and the body as well.
    """
    _Trial(target, work, reset, succeeded or answered, timeout).run(same, other, flies=True)


@dataclass
class _Trial:
    target: Any
    work: str | None
    reset: Callable[[], Any] | None
    succeeded: Callable[[Any], bool]
    timeout: float

    def run(self, same: Call, other: Call, *, flies: bool) -> None:
        alone = self._play(1, [same], flies)
        limit = alone.check_alone()
        self._play(2, [same] * (limit + 1), flies).check_same_key(limit)
        self._play(3, [same, other], flies).check_different_keys()

    def _play(self, number: int, calls: Sequence[Call], flies: bool) -> Verdict:
        if self.reset is not None:
            self.reset()
        stage = Stage(len(calls), self.timeout)
        racers = [Racer(partial(self._one, call), stage.end) for call in calls]
        with stage.set(self.work):
            for racer in racers:
                racer.start()
            outcomes = self._ends(number, racers)
            emptied = stage.emptied()
        for caller in stage.callers.values():
            if caller.flies:
                # What is kept of it would answer the next scenario.
                caller.store.forget(caller.key)
        return Verdict(number, stage, outcomes, self.succeeded, self.work, flies, emptied)

    def _ends(self, number: int, racers: list[Racer]) -> list[Outcome]:
        try:
            # They wait for each other twice, and for the store.
            return wait_for(racers, self.timeout * 3)
        except TimeoutError as error:
            raise AssertionError(f"Scenario {number}: {error}") from None

    def _one(self, call: Call) -> Any:
        target: Any = self.target
        if isinstance(target, ClientMixin):
            # A client notes cookies and errors of its last request: it is for one thread.
            target = copy(self.target)
            target.cookies = deepcopy(target.cookies)
        return _completed(returned(call(target)))


def _completed(result: Any) -> Any:
    """Do with a response what a server does, and what a view's lease may outlast."""
    if getattr(result, "is_rendered", True) is False:
        result = result.render()
    if getattr(result, "streaming", False):
        returned(_drained(result)) if result.is_async else list(result)
    if getattr(result, "closed", True) is False:
        result.close()
    return result


async def _drained(response: Any) -> None:
    async for _ in response:
        pass
