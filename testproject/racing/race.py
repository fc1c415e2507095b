"""The race itself: servers up, calls out, rows counted."""

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

from testproject.racing.client import Call, fire
from testproject.racing.database import count_lessons, migrate_database, student
from testproject.racing.forms import Form
from testproject.racing.servers import Server, redis, web_server
from testproject.racing.signals import uninterrupted
from testproject.racing.verdict import Result, Tally

T = TypeVar("T")

# Whether two processes meet in a window is chance; that they never do in so many rounds isn't.
PATIENCE = 10
# A thread holds memory and a database connection; the calls beyond wait for their turn.
MAX_THREADS = 40


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
        redis_url = self._keep(redis(directory))
        database_url = migrate_database(directory)
        user = self._keep(student())
        self.say(_without_password(f"Redis at {redis_url}, database at {database_url}"))
        self._start_servers(directory, {"REDIS_URL": redis_url, "DATABASE_URL": database_url})
        return {form.name: self._run_form(form, user) for form in self.forms}

    def _keep(self, manager: AbstractContextManager[T]) -> T:
        with uninterrupted():
            return self.stack.enter_context(manager)

    def _start_servers(self, directory: Path, urls: dict[str, str]) -> None:
        threads = min(self.requests, MAX_THREADS)
        for kind, store in dict.fromkeys((form.server, form.store) for form in self.forms):
            environ = {**os.environ, **urls}
            if store:
                environ["SINGLEFLIGHT_STORE"] = store
            server = self._keep(web_server(kind, self.workers, threads, environ, directory))
            self.servers[kind, store] = server
        for server in self.servers.values():
            server.wait_until_ready()
            self.say(f"{server.name} on port {server.port}: {self.workers} worker processes")

    def _run_form(self, form: Form, user: int) -> Result:
        result, server = Result(form.expectation), self.servers[form.server, form.store]
        for _ in range(self.rounds):
            self._volley(form, user, result.identical, [uuid.uuid4()] * self.requests)
            self._volley(form, user, result.different, [uuid.uuid4() for _ in range(self.requests)])
        if form.expectation.races:
            self._insist(form, user, result.identical)
        self.say(f"{form.name}: {result.identical_verdict}")
        if not result.held and (words := server.last_words()):
            self.say(f"{form.name} FAILED. {server.name} wrote last:\n{words}")
        return result

    def _insist(self, form: Form, user: int, tally: Tally) -> None:
        for _ in range(PATIENCE):
            if tally.raced:
                return
            self.say(f"{form.name}: not in this round; once more")
            self._volley(form, user, tally, [uuid.uuid4()] * self.requests)

    def _volley(self, form: Form, user: int, tally: Tally, uuids: list[uuid.UUID]) -> None:
        calls = [
            Call("POST", form.url, {"uuid": str(key), "user": str(user), "course": "Algebra"})
            for key in uuids
        ]
        answers = fire(self.servers[form.server, form.store].port, calls)
        rows = count_lessons(form.model, list(dict.fromkeys(uuids)))
        tally.add([answer.status for answer in answers], rows)


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)
