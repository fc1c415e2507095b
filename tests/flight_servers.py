"""gunicorn and uvicorn, two processes each, that serve ``flight_site``; and who calls them."""

from __future__ import annotations

import http.client
import os
import signal
import sys
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import redis

from singleflight_django.waiting import clock
from tests import servers
from tests import settings as run
from tests.servers import until

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0
CLEAR = 0.1
PROCESSES = 2
# Connections to each process.
LINES = 3

COMMANDS = {
    "gunicorn": (
        *("gunicorn", "--config={root}/testproject/racing/gunicorn_conf.py"),
        *("--bind=127.0.0.1:{port}", "--workers={processes}", "--threads=16", "--keep-alive=75"),
        "tests.flight_site:wsgi()",
    ),
    "uvicorn": (
        *("uvicorn", "--port={port}", "--workers={processes}", "--timeout-keep-alive=75"),
        *("--lifespan=off", "--factory", "tests.flight_site:asgi"),
    ),
}


class Answer(NamedTuple):
    """What a client got. ``pid``: the process that served it; ``how``: Cache-Status."""

    pid: int
    status: int
    body: bytes
    headers: tuple[str | None, ...]
    run: str | None
    how: str | None

    @property
    def shared(self) -> tuple[object, ...]:
        """What is equal for all callers of a flight."""
        return self.status, self.body, self.headers


class Execution(NamedTuple):
    pid: int
    at: float


class Line:
    """A connection that is kept alive, and so one to the same process all the time."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            self.pid = self.send("/who").pid
        except BaseException:
            self.connection.close()
            raise

    def send(self, path: str, lesson: str = "") -> Answer:
        # One site, whatever the server's own port.
        headers = {"Host": "site.example", "Content-Type": "application/x-www-form-urlencoded"}
        self.connection.request("POST", path, f"lesson={lesson}", headers)
        answer = self.connection.getresponse()
        told = ("Location", "ETag", "Content-Language", "Content-Type")
        return Answer(
            int(answer.headers["X-Process"]),
            answer.status,
            answer.read(),
            tuple(answer.getheader(name) for name in told),
            answer.getheader("X-Run"),
            answer.getheader("Cache-Status"),
        )


class Server(servers.Server):
    """One server with PROCESSES worker processes, and LINES connections to each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.lines: defaultdict[int, list[Line]] = defaultdict(list)

    def command(self) -> list[str]:
        given = {"port": self.port, "processes": PROCESSES, "root": ROOT}
        return [sys.executable, "-m", *(one.format(**given) for one in COMMANDS[self.name])]

    def popen_options(self) -> dict[str, Any]:
        # A group of its own: what doesn't listen any more ends with it.
        return {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "start_new_session": True}

    def ready(self) -> bool:
        # Of its processes, connected() tells: two servers start at the same time.
        return True

    def connected(self) -> bool:
        """Whether there are enough connections. Tries one more."""
        self._ready_or_dead()
        line = Line(self.port)
        mine = self.lines[line.pid]
        if len(mine) < LINES:
            mine.append(line)
        else:
            line.connection.close()
        return [len(mine) for mine in self.lines.values()] == [LINES] * PROCESSES

    def hang_up(self, pid: int) -> None:
        for line in self.lines.pop(pid, ()):
            line.connection.close()

    def stop(self) -> None:
        for pid in list(self.lines):
            self.hang_up(pid)
        group = self.process and self.process.pid
        super().stop()
        if group:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


class Site:
    """The servers, what is told of them, and the door of the view."""

    def __init__(self) -> None:
        self.gunicorn, self.uvicorn = self.servers = Server("gunicorn"), Server("uvicorn")
        self.pool = ThreadPoolExecutor(2 * len(self.servers) * PROCESSES * LINES)
        self.store = redis.Redis.from_url(run.REDIS_URL, decode_responses=True)

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def connect(self) -> None:
        """Have LINES connections to each process, also where one of them is new."""
        for server in self.servers:
            until(server.connected, f"{PROCESSES} processes of {server.name}", 2 * PATIENCE)

    @property
    def pids(self) -> list[int]:
        return [pid for server in self.servers for pid in server.lines]

    def lines(self, first: int = 0) -> list[Line]:
        """All connections, those to process number ``first`` before the others."""
        each = [lines for server in self.servers for lines in server.lines.values()]
        first %= len(each)
        return [line for lines in each[first:] + each[:first] for line in lines]

    def go(self, line: Line, view: str, lesson: str) -> Future[Answer]:
        return self.pool.submit(line.send, f"/{view}/", lesson)

    def executions(self, key: str) -> list[Execution]:
        told = [entry.split() for entry in self.store.lrange(f"test:runs:{key}", 0, -1)]
        return [Execution(int(pid), float(at)) for pid, at in told]

    def inside(self, key: str, number: int = 1) -> Execution:
        """The execution of that number, as soon as it has begun."""
        until(lambda: len(self.executions(key)) >= number, f"run {number} of {key}", PATIENCE)
        return self.executions(key)[number - 1]

    def followed(self, number: int) -> None:
        """Return when exactly so many callers wait for somebody's flight, in all processes."""

        def enough() -> bool:
            return sum(map(int, self.store.hvals("test:waiting"))) == number

        until(enough, f"{number} followers", PATIENCE)
        # One that comes within a round trip of the end can't be told from one that comes after it,
        # and on a busy machine a round trip takes long. These have come well before.
        boarded = clock()
        until(lambda: clock() - boarded > CLEAR, "them to be clear of the end")

    def open(self, key: str, pid: int | None = None) -> None:
        """Let everyone leave the view for ``key``, or only who is in there in process ``pid``."""
        # For more than may come: who isn't expected shows in the executions, and need not wait.
        door = f"test:door:{key}" if pid is None else f"test:door:{key}:{pid}"
        self.store.rpush(door, *["open"] * 20)

    def strike(self, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)

    def hang_up(self, pid: int) -> None:
        """Close the connections to a process that is no more; its server starts another."""
        for server in self.servers:
            server.hang_up(pid)

    def end(self) -> None:
        for server in self.servers:
            server.stop()
        self.pool.shutdown()
        self.store.close()
