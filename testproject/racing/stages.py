"""Where a subject is raced: its calls, what there has to be before them, and what they leave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID, uuid4

from django.core.management import CommandError

from testproject.lessons.cascading import DRAFTS, draft_key
from testproject.racing.client import Call, fire
from testproject.racing.database import count_lessons
from testproject.racing.forms import Form
from testproject.racing.tally import Left


class Stage(Protocol):
    def prepare(self, keys: Sequence[UUID]) -> None:
        """Put there what the calls for ``keys`` need to find."""

    def call(self, url: str, key: UUID) -> Call:
        """Return a call for ``key`` at the view at ``url``."""

    def left(self, form: Form, keys: Sequence[UUID]) -> list[Left]:
        """Return what the calls for each of ``keys`` have left behind."""


@dataclass(frozen=True)
class LessonStage:
    """A key is a lesson's UUID. ``user``: whose lessons they are."""

    user: int

    def prepare(self, keys: Sequence[UUID]) -> None:
        pass

    def call(self, url: str, key: UUID) -> Call:
        return Call("POST", url, {"uuid": str(key), "user": str(self.user), "course": "Algebra"})

    def left(self, form: Form, keys: Sequence[UUID]) -> list[Left]:
        return [Left(count) for count in count_lessons(form.model, keys)]


@dataclass(frozen=True)
class ModelAnswerStage:
    """A key is a message of one session. ``port``: the model's, which counts the calls it saw."""

    port: int
    session: UUID = field(default_factory=uuid4)

    def prepare(self, keys: Sequence[UUID]) -> None:
        pass

    def call(self, url: str, key: UUID) -> Call:
        return Call("GET", f"{url}{self.session}/{key}/", {})

    def left(self, form: Form, keys: Sequence[UUID]) -> list[Left]:
        [answer] = fire(self.port, [Call("GET", "/calls/", {})])
        if answer.status != 200:
            raise CommandError("The model has gone.")
        calls = Counter(json.loads(answer.body))
        return [Left(calls[f"/answers/{self.session}/{key}"]) for key in keys]


@dataclass(frozen=True)
class CascadeStage:
    """A key is a session, at always the same step. ``cache``: where the servers keep the drafts."""

    cache: Any
    step: int = 3

    def prepare(self, keys: Sequence[UUID]) -> None:
        for key in keys:
            *names, _ = self._names(key)
            drafts = {name: _draft(number, key) for number, name in enumerate(names)}
            self.cache.set_many(drafts, timeout=60)

    def call(self, url: str, key: UUID) -> Call:
        return Call("POST", f"{url}{key}/{self.step}/", {})

    def left(self, form: Form, keys: Sequence[UUID]) -> list[Left]:
        return [self._damage(key) for key in keys]

    def _damage(self, key: UUID) -> Left:
        names = self._names(key)
        found = self.cache.get_many(names)
        self.cache.delete_many(names)
        now = [found.get(name) for name in names]
        lost = misplaced = 0
        for number in range(DRAFTS):
            draft = _draft(number, key)
            lost += draft not in now
            misplaced += draft in now and (now[number + 1] != draft or now.count(draft) > 1)
        words = [f"{lost} lost"] * bool(lost) + [f"{misplaced} misplaced"] * bool(misplaced)
        return Left(lost + misplaced, ", ".join(words))

    def _names(self, key: UUID) -> list[str]:
        return [draft_key(key, self.step, number) for number in range(DRAFTS + 1)]


def _draft(number: int, key: UUID) -> str:
    return f"draft {number} of {key}"
