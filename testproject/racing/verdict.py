"""What has become of a form, in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from testproject.racing.client import NO_ANSWER
from testproject.racing.forms import Expectation
from testproject.racing.subjects import LESSON, Subject
from testproject.racing.tally import Tally


@dataclass
class Result:
    """What has become of one form: calls with ``identical`` keys, and with ``different`` ones."""

    expectation: Expectation
    subject: Subject = LESSON
    variant: str = ""
    identical: Tally = field(default_factory=Tally)
    different: Tally = field(default_factory=Tally)

    @property
    def held(self) -> bool:
        """Whether the form did what is expected of it (an unguarded one: it raced)."""
        return self._identical_held and self._different_held

    @property
    def raced(self) -> bool:
        return bool(self.subject.harm(self.identical))

    @property
    def _identical_held(self) -> bool:
        tally, expected = self.identical, self.expectation
        if not set(tally.statuses) <= expected.statuses:
            return False
        if expected.races:
            return self.raced
        return self._fine(tally) and not self.raced and (tally.same or not expected.shares)

    @property
    def _different_held(self) -> bool:
        tally = self.different
        served = set(tally.statuses) == {self.subject.success}
        return served and self._fine(tally) and tally.distinct

    def _fine(self, tally: Tally) -> bool:
        return {left.count for left in tally.left} == {self.subject.fine}

    @property
    def identical_verdict(self) -> str:
        """What callers with one and the same key have got."""
        tally, subject = self.identical, self.subject
        if self.raced:
            return ", ".join([subject.harm(tally), *self._crashes(tally)])
        if self.expectation.races:
            return f"no race in {tally.volleys} rounds: {subject.no_race}"
        verdict = subject.right(tally) if self._fine(tally) else subject.wrong(tally)
        return ", ".join([verdict, *self._told(tally), *self._shared(tally)])

    @property
    def different_verdict(self) -> str:
        """What callers with keys of their own have got: each should be served."""
        tally = self.different
        mixed_up = [] if tally.distinct else ["some got another one's answer"]
        return ", ".join([self.subject.served(tally), *self._told(tally), *mixed_up])

    def _shared(self, tally: Tally) -> list[str]:
        if not self.expectation.shares:
            return []
        right = self.expectation.statuses
        served = sum(tally.statuses[status] for status in right)
        article, what = ("a", self.subject.success) if len(right) == 1 else ("an", "answer")
        if not tally.same:
            return [f"{served} got {article} {what}, but not the same one"]
        everyone = served == tally.statuses.total()
        return [f"{'all ' * everyone}{served} got the same {what}"]

    def _told(self, tally: Tally, known: Collection[int] = ()) -> list[str]:
        """What those were told who were not served, the highest status first."""
        return [
            _phrase(status, count)
            for status, count in sorted(tally.statuses.items(), reverse=True)
            if status not in (self.subject.success, *known)
        ]

    def _crashes(self, tally: Tally) -> list[str]:
        """What nobody should have been told, beside the harm."""
        known = self.expectation.statuses | self.subject.harmful
        return self._told(tally, known)


def _phrase(status: int, count: int) -> str:
    if status == NO_ANSWER:
        return f"{count} got no answer"
    if status >= 500:
        return f"{count} user{'s' * (count != 1)} saw a {status}"
    return f"{count} told {status}"
