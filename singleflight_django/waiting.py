"""Time, as callers and waiters see it: an honest clock, deadlines, and the pauses between two looks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

FIRST_PAUSE = 0.005


# Seconds on a clock that never steps, read from the kernel: test suites freeze ``time.monotonic``,
# which is for systems that have no other. (Wrapped, it is not what they look for in modules.)
clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    if hasattr(time, "clock_gettime")
    else partial(time.monotonic)
)


class Deadline:
    """How much of ``seconds`` is left, by the clock and by what was spent waiting, whichever is less.

    The second count is the backstop: a wait ends after a bounded number of pauses even where every
    clock of the process stands still.
    """

    __slots__ = ("_end", "_unspent")

    def __init__(self, seconds: float) -> None:
        self._end = clock() + seconds
        self._unspent = seconds

    def left(self) -> float:
        """Return the seconds that are left, never less than 0."""
        if self._unspent <= 0:
            return 0.0
        return max(0.0, min(self._end - clock(), self._unspent))

    def spend(self, seconds: float) -> None:
        """Count a pause of ``seconds`` as waited."""
        self._unspent -= seconds


def pauses(longest: float) -> Iterator[float]:
    """Yield pauses in seconds that double from a few milliseconds up to ``longest``.

    Each is shortened by up to a half at random, so that waiters who arrived together drift apart.
    """
    pause = min(FIRST_PAUSE, longest)
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 2, longest)
