"""The forms of the create view that ``race`` shows. A new one is one entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Expectation:
    """
    What identical calls may be answered, and whether one lesson is all that they may leave.

    A call that comes when everything is over finds the lesson: 204 is a right answer everywhere.
    """

    statuses: frozenset[int]
    races: bool = False


RACES = Expectation(frozenset({201, 204}), races=True)
FAILS = Expectation(frozenset({201, 204, 500}))
REJECTS = Expectation(frozenset({201, 204, 429}))
SKIPS = Expectation(frozenset({201, 204}))


@dataclass(frozen=True)
class Form:
    """
    One way to protect the create view.

    ``model`` is the label of the model that it writes to, ``server`` the kind of server that it
    needs, and ``store`` the SINGLEFLIGHT_STORE of that server ("": chosen by the cache's backend).
    """

    name: str
    url: str
    expectation: Expectation
    model: str = "lessons.LooseLessonSession"
    server: Literal["wsgi", "asgi"] = "wsgi"
    store: str = ""


FORMS = (
    Form("unprotected", "/lessons/unprotected/", RACES),
    Form("constraint", "/lessons/constraint/", FAILS, model="lessons.LessonSession"),
    Form("reject", "/lessons/reject/", REJECTS),
    Form("skip", "/lessons/skip/", SKIPS),
    Form("mixin", "/lessons/mixin/", REJECTS),
    Form("drf", "/lessons/drf/", REJECTS),
    Form("async", "/lessons/async/", REJECTS, server="asgi"),
    Form("cache-add", "/lessons/reject/", REJECTS, store="cache"),
)
