"""What a volley of calls has done, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from testproject.racing.client import NO_ANSWER
from testproject.racing.forms import Expectation


@dataclass
class Tally:
    """``statuses``: how often each status was answered. ``rows``: the lessons of each UUID."""

    statuses: Counter[int] = field(default_factory=Counter)
    rows: list[int] = field(default_factory=list)

    def add(self, statuses: Sequence[int], rows: Sequence[int]) -> None:
        self.statuses.update(statuses)
        self.rows.extend(rows)

    @property
    def raced(self) -> bool:
        return max(self.rows, default=0) > 1

    @property
    def once(self) -> bool:
        """Whether each UUID has got exactly one lesson."""
        return set(self.rows) == {1}


@dataclass
class Result:
    """What has become of one form: ``identical`` calls, and calls with ``different`` UUIDs."""

    expectation: Expectation
    identical: Tally = field(default_factory=Tally)
    different: Tally = field(default_factory=Tally)

    @property
    def held(self) -> bool:
        """Whether the form did what is expected of it (the unprotected one: it raced)."""
        return self._identical_held and self._different_held

    @property
    def _identical_held(self) -> bool:
        if self.expectation.races:
            return self.identical.raced
        return self.identical.once and set(self.identical.statuses) <= self.expectation.statuses

    @property
    def _different_held(self) -> bool:
        return self.different.once and set(self.different.statuses) == {201}

    @property
    def identical_verdict(self) -> str:
        """What callers with one and the same UUID have got."""
        tally, rounds = self.identical, len(self.identical.rows)
        if tally.raced:
            lessons = f"{'up to ' * (rounds > 1)}{max(tally.rows)} lessons"
            return f"{lessons} created: the double create"
        if self.expectation.races:
            return f"no race in {rounds} rounds: try more --requests or LESSON_WORK_MS=100"
        if not tally.once:
            return ", ".join(
                [f"no lesson in {tally.rows.count(0)} of {rounds} rounds", *_told(tally)]
            )
        lessons = "1 lesson" if rounds == 1 else f"1 lesson in each of {rounds} rounds"
        return ", ".join([lessons, *_told(tally)])

    @property
    def different_verdict(self) -> str:
        """What callers with UUIDs of their own have got: each should have its lesson."""
        return ", ".join([f"{sum(self.different.rows)} created", *_told(self.different)])


def _told(tally: Tally) -> list[str]:
    """What those were told who did not create a lesson, the highest status first."""
    return [
        _phrase(status, count)
        for status, count in sorted(tally.statuses.items(), reverse=True)
        if status != 201
    ]


def _phrase(status: int, count: int) -> str:
    if status == NO_ANSWER:
        return f"{count} got no answer"
    if status >= 500:
        return f"{count} user{'s' * (count != 1)} saw a {status}"
    return f"{count} told {status}"
