"""The forms of the views that ``race`` shows. A new one is one entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from testproject.racing.subjects import CASCADE, LESSON, MODEL_ANSWER, Subject


@dataclass(frozen=True)
class Expectation:
    """
    What identical calls may be answered.

    ``races``: whether they are to do one another harm. ``shares``: whether they are to get one
    and the same answer.
    """

    statuses: frozenset[int]
    races: bool = False
    shares: bool = False


# A call that comes when everything is over finds the lesson: 204 is right where nothing is shared,
# and where somebody looks for it.
RACES = Expectation(frozenset({201, 204}), races=True)
FAILS = Expectation(frozenset({201, 204, 500}))
REJECTS = Expectation(frozenset({201, 204, 429}))
SKIPS = Expectation(frozenset({201, 204}))
COALESCES = Expectation(frozenset({201}), shares=True)
REFUSES = Expectation(frozenset({201, 409}))
FINDS = Expectation(frozenset({200, 201}), shares=True)
SECURES = Expectation(frozenset({201, 204, 409, 429}))

RUNS_LATE = Expectation(frozenset({200, 504}), races=True)
ANSWERS_ALL = Expectation(frozenset({200}), shares=True)

CORRUPTS = Expectation(frozenset({200, 204}), races=True)
KEEPS = Expectation(frozenset({200, 204, 429}))


@dataclass(frozen=True)
class Form:
    """
    One way to protect a view, or to leave it alone.

    ``variant`` is the section of the table, ``model`` the label of the model that the create view
    writes to, ``server`` the kind of server that it needs, and ``store`` the SINGLEFLIGHT_STORE of
    that server ("": chosen by the cache's backend). ``kills_redis``: whether Redis is to die while
    the view works, which then has to ask the planner.
    """

    variant: str
    name: str
    url: str
    expectation: Expectation
    subject: Subject = LESSON
    model: str = "lessons.LooseLessonSession"
    server: Literal["wsgi", "asgi"] = "wsgi"
    store: str = ""
    kills_redis: bool = False


# Forms of one variant follow one another.
FORMS = (
    Form("unprotected", "unprotected", "/lessons/unprotected/", RACES),
    Form("unprotected", "constraint", "/lessons/constraint/", FAILS, model="lessons.LessonSession"),
    Form("reject", "reject", "/lessons/reject/", REJECTS),
    Form("reject", "skip", "/lessons/skip/", SKIPS),
    Form("reject", "mixin", "/lessons/mixin/", REJECTS),
    Form("reject", "drf", "/lessons/drf/", REJECTS),
    Form("reject", "async", "/lessons/async/", REJECTS, server="asgi"),
    Form("reject", "cache-add", "/lessons/reject/", REJECTS, store="cache"),
    Form("reject", "database", "/lessons/reject/", REJECTS, store="database"),
    Form("coalesce", "coalesce", "/lessons/coalesce/", COALESCES),
    Form("coalesce", "coalesce-async", "/lessons/coalesce-async/", COALESCES, server="asgi"),
    Form("coalesce", "coalesce-mixin", "/lessons/coalesce-mixin/", COALESCES),
    Form("coalesce", "coalesce-drf", "/lessons/coalesce-drf/", COALESCES),
    Form("coalesce", "coalesce-cache-add", "/lessons/coalesce/", COALESCES, store="cache"),
    Form("coalesce", "coalesce-database", "/lessons/coalesce/", COALESCES, store="database"),
    Form(
        "constraint",
        "constraint-caught",
        "/lessons/constraint-caught/",
        REFUSES,
        model="lessons.LessonSession",
    ),
    Form(
        "constraint",
        "create-or-existing",
        "/lessons/create-or-existing/",
        FINDS,
        model="lessons.LessonSession",
    ),
    Form(
        "constraint",
        "lock-constraint",
        "/lessons/lock-constraint/",
        SECURES,
        model="lessons.LessonSession",
    ),
    Form(
        "Redis killed in mid-run",
        "redis-killed",
        "/lessons/redis-killed/",
        SECURES,
        model="lessons.LessonSession",
        kills_redis=True,
    ),
    Form(
        "Redis killed in mid-run",
        "redis-killed-async",
        "/lessons/redis-killed-async/",
        SECURES,
        model="lessons.LessonSession",
        server="asgi",
        kills_redis=True,
    ),
    Form(
        "Redis killed in mid-run",
        "redis-killed-coalesce",
        "/lessons/redis-killed-coalesce/",
        FINDS,
        model="lessons.LessonSession",
        # Only for other processes: those that have met an outage leave Redis alone for a while.
        store="redis",
        kills_redis=True,
    ),
    Form(
        "model answer", "answer-unguarded", "/lessons/answers/unguarded/", RUNS_LATE, MODEL_ANSWER
    ),
    Form(
        "model answer", "answer-function", "/lessons/answers/function/", ANSWERS_ALL, MODEL_ANSWER
    ),
    Form("model answer", "answer-view", "/lessons/answers/view/", ANSWERS_ALL, MODEL_ANSWER),
    Form(
        "model answer",
        "answer-async",
        "/lessons/answers/async/",
        ANSWERS_ALL,
        MODEL_ANSWER,
        server="asgi",
    ),
    Form("cascade", "cascade-unguarded", "/lessons/cascades/unguarded/", CORRUPTS, CASCADE),
    Form("cascade", "cascade-lock", "/lessons/cascades/lock/", KEEPS, CASCADE),
)
