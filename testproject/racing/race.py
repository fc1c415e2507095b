"""The race itself: servers up, calls out, what they leave counted."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from django.conf import settings
from django.core.cache import DEFAULT_CACHE_ALIAS, BaseCache, CacheHandler

from testproject.lessons.workers import MAX_THREADS
from testproject.racing.client import Answer, Call, fire
from testproject.racing.database import migrate_database, student
from testproject.racing.forms import Form
from testproject.racing.outage import Outage
from testproject.racing.planner import planner
from testproject.racing.redis import redis
from testproject.racing.servers import Server, model_server, web_server
from testproject.racing.signals import uninterrupted
from testproject.racing.stages import CascadeStage, LessonStage, ModelAnswerStage, Stage
from testproject.racing.subjects import CASCADE, LESSON, MODEL_ANSWER, Subject
from testproject.racing.tally import Tally
from testproject.racing.verdict import Result

T = TypeVar("T")
Fire = Callable[[int, Sequence[Call]], list[Answer]]

# Whether two processes meet in a window is chance; that they never do in so many rounds isn't.
PATIENCE = 10


@dataclass
class Race:
    """
    ``requests`` calls at once at each of ``forms``, ``rounds`` times, on ``workers`` processes.

    ``say`` is called with each line of progress. To be used as a context manager, which stops
    whatever run() has started.
    """

    forms: Sequence[Form]
    requests: int
    rounds: int
    workers: int
    say: Callable[[str], None]
    stack: ExitStack = field(default_factory=ExitStack)
    servers: dict[tuple[str, str], Server] = field(default_factory=dict)
    stages: dict[Subject, Stage] = field(default_factory=dict)
    outage: Outage = field(init=False)

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *exception: object) -> None:
        with uninterrupted():
            # All at once, and only then one after the other: each takes a moment to stop.
            for server in self.servers.values():
                server.process.terminate()
            self.stack.close()

    def run(self) -> dict[str, Result]:
        """Return what became of each form, by its name."""
        self.say("Starting Redis, the database and the web servers ...")
        directory = Path(self._keep(tempfile.TemporaryDirectory(prefix="race-")))
        server = self._keep(redis(directory))
        database_url = migrate_database(directory)
        self.say(_without_password(f"Redis at {server.url}, database at {database_url}"))
        self.stages[LESSON] = LessonStage(self._keep(student()))
        self.stages[CASCADE] = CascadeStage(_cache_at(server.url))
        environ = {**os.environ, "REDIS_URL": server.url, "DATABASE_URL": database_url}
        if any(form.kills_redis for form in self.forms):
            self.outage = Outage(server, self._keep(planner()), self.say)
            environ["PLANNER_URL"] = self.outage.planner.url
        if any(form.subject is MODEL_ANSWER for form in self.forms):
            model = self._keep(model_server(environ, directory))
            self.servers["model", ""] = model
            self.stages[MODEL_ANSWER] = ModelAnswerStage(model.port)
            environ["MODEL_URL"] = f"http://127.0.0.1:{model.port}"
        self._start_servers(directory, environ)
        return {form.name: self._run_form(form) for form in self.forms}

    def _keep(self, manager: AbstractContextManager[T]) -> T:
        with uninterrupted():
            return self.stack.enter_context(manager)

    def _start_servers(self, directory: Path, environ: dict[str, str]) -> None:
        threads = min(self.requests, MAX_THREADS)
        for kind, store in dict.fromkeys((form.server, form.store) for form in self.forms):
            own = {**environ, "SINGLEFLIGHT_STORE": store} if store else environ
            server = self._keep(web_server(kind, self.workers, threads, own, directory))
            self.servers[kind, store] = server
        for server in self.servers.values():
            server.wait_until_ready()
            processes = f"{server.workers} worker process{'es' * (server.workers != 1)}"
            self.say(f"{server.name} on port {server.port}: {processes}")

    def _run_form(self, form: Form) -> Result:
        result = Result(form.expectation, form.subject, form.variant)
        server = self.servers[form.server, form.store]
        for _ in range(self.rounds):
            # These first: then every process has its imports and connections behind it, and the
            # identical calls meet.
            self._different(form, result)
            if form.kills_redis:
                self._kill_redis(form, result)
            else:
                self._identical(form, result)
        if form.expectation.races:
            self._insist(form, result)
        self.say(f"{form.name}: {result.identical_verdict}")
        if not result.held and (words := server.last_words()):
            self.say(f"{form.name} FAILED. {server.name} wrote last:\n{words}")
        return result

    def _insist(self, form: Form, result: Result) -> None:
        for _ in range(PATIENCE):
            if result.raced:
                return
            self.say(f"{form.name}: not in this round; once more")
            self._identical(form, result)

    def _kill_redis(self, form: Form, result: Result) -> None:
        with self.outage as outage:
            self._identical(form, result, outage.fire)
            # While it is away they are to be served, too.
            self._different(form, result)

    def _identical(self, form: Form, result: Result, fire: Fire = fire) -> None:
        self._volley(form, result.identical, [uuid.uuid4()] * self.requests, fire)

    def _different(self, form: Form, result: Result) -> None:
        number = min(self.requests, form.subject.most_others or self.requests)
        self._volley(form, result.different, [uuid.uuid4() for _ in range(number)])

    def _volley(self, form: Form, tally: Tally, keys: list[uuid.UUID], fire: Fire = fire) -> None:
        stage, different = self.stages[form.subject], list(dict.fromkeys(keys))
        stage.prepare(different)
        port = self.servers[form.server, form.store].port
        answers = fire(port, [stage.call(form.url, key) for key in keys])
        tally.add(answers, stage.left(form, different))


def _cache_at(redis_url: str) -> BaseCache:
    """The servers' cache: our own settings were read before anyone knew where it is."""
    there = {**settings.CACHES[DEFAULT_CACHE_ALIAS], "LOCATION": redis_url}
    return CacheHandler({DEFAULT_CACHE_ALIAS: there})[DEFAULT_CACHE_ALIAS]


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)
