"""What is raced: what counts as right and as wrong, and the words for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from testproject.lessons.cascading import DRAFTS
from testproject.racing.tally import Tally


class Subject(ABC):
    """
    One kind of view. ``fine`` is the count that each key is to leave behind.

    ``counted`` and ``others`` are headings: of that count, and of the calls with different keys,
    of which there are ``most_others`` at most. ``name`` is the count's in JSON. ``harmful`` are
    the statuses that harm() speaks of.
    """

    name: ClassVar[str]
    counted: ClassVar[str]
    others: ClassVar[str]
    success: ClassVar[int] = 200
    harmful: ClassVar[frozenset[int]] = frozenset()
    fine: ClassVar[int] = 1
    most_others: ClassVar[int | None] = None
    no_race: ClassVar[str]

    @abstractmethod
    def harm(self, tally: Tally) -> str:
        """Return what callers with one key have done to one another; "" if nothing."""

    @abstractmethod
    def right(self, tally: Tally) -> str:
        """Return what there is when nothing went wrong."""

    @abstractmethod
    def wrong(self, tally: Tally) -> str:
        """Return what is amiss with the counts although there was no harm()."""

    @abstractmethod
    def served(self, tally: Tally) -> str:
        """Return what callers with different keys have got."""


class Lesson(Subject):
    name = "rows"
    counted = "lessons"
    others = "different UUIDs"
    success = 201
    no_race = "try more --requests or LESSON_WORK_MS=100"

    def harm(self, tally: Tally) -> str:
        if tally.most.count < 2:
            return ""
        return f"{_up_to(tally)}{tally.most.count} lessons created: the double create"

    def right(self, tally: Tally) -> str:
        return "1 lesson" if tally.volleys == 1 else f"1 lesson in each of {tally.volleys} rounds"

    def wrong(self, tally: Tally) -> str:
        none = sum(left.count == 0 for left in tally.left)
        return f"no lesson in {none} of {tally.volleys} rounds"

    def served(self, tally: Tally) -> str:
        return f"{tally.total} created"


class ModelAnswer(Subject):
    name = "model_calls"
    counted = "model calls"
    others = "different messages"
    harmful = frozenset({504})
    # As many calls as the model can answer one after the other, before a caller gives up.
    most_others = 2
    no_race = "try more --requests"

    def harm(self, tally: Tally) -> str:
        if not (late := tally.statuses[504]):
            return ""
        calls = _some(tally.total, "model call")
        return f"{_some(late, 'user')} saw a 504: {calls}, one at a time"

    def right(self, tally: Tally) -> str:
        if tally.volleys == 1:
            return "1 model call"
        return f"1 model call in each of {tally.volleys} rounds"

    def wrong(self, tally: Tally) -> str:
        return f"{_up_to(tally)}{tally.most.count} model calls for one answer"

    def served(self, tally: Tally) -> str:
        return f"{tally.statuses[200]} answered, {_some(tally.total, 'call')}"


class Cascade(Subject):
    name = "drafts_damaged"
    counted = "damaged"
    others = "different steps"
    fine = 0
    no_race = "try more --requests or LESSON_WORK_MS=100"

    def harm(self, tally: Tally) -> str:
        if not tally.most.count:
            return ""
        return f"{_up_to(tally)}{tally.most.count} of {DRAFTS} drafts damaged: {tally.most.words}"

    def right(self, tally: Tally) -> str:
        intact = f"all {DRAFTS} drafts intact"
        return intact if tally.volleys == 1 else f"{intact} in each of {tally.volleys} rounds"

    def wrong(self, tally: Tally) -> str:
        return self.harm(tally)

    def served(self, tally: Tally) -> str:
        damaged = f", {_some(tally.total, 'draft')} damaged" if tally.total else ""
        return f"{tally.statuses[200]} done{damaged}"


def _some(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _up_to(tally: Tally) -> str:
    return "up to " * (tally.volleys > 1)


LESSON, MODEL_ANSWER, CASCADE = Lesson(), ModelAnswer(), Cascade()
