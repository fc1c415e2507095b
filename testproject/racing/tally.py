"""What volleys of calls have been answered, and what they have left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from testproject.racing.client import Answer


@dataclass(frozen=True, order=True)
class Left:
    """What the calls for one key have left behind: how much of it, and more in words."""

    count: int
    words: str = ""


@dataclass
class Tally:
    """``statuses``: how often each status was answered. ``left``: for each key of each volley."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    volleys: int = 0
    # Of each volley: how many different answers with a body there were, and how many in all.
    bodies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, answers: Sequence[Answer], left: Sequence[Left]) -> None:
        """Add a volley."""
        self.statuses.update(answer.status for answer in answers)
        self.left.extend(left)
        self.volleys += 1
        bodies = [answer.body for answer in answers if 200 <= answer.status < 300 and answer.body]
        self.bodies.append((len(set(bodies)), len(bodies)))

    @property
    def most(self) -> Left:
        """The key with the most left behind."""
        return max(self.left, default=Left(0))

    @property
    def total(self) -> int:
        return sum(left.count for left in self.left)

    @property
    def same(self) -> bool:
        """Whether within each volley all successful calls got one and the same answer."""
        return all(different <= 1 for different, _ in self.bodies)

    @property
    def distinct(self) -> bool:
        """Whether within each volley no two calls got one and the same answer."""
        return all(different == total for different, total in self.bodies)
