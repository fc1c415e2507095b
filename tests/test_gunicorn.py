"""gunicorn itself: waiters beside its health check, and what its ways to end a worker leave behind."""

from __future__ import annotations

import http.client
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from singleflight_django.waiting import clock
from tests import servers
from tests.gunicorn_site import LONG, TTL
from tests.servers import until

pytest.importorskip("gunicorn")

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 15.0
# What "at once" is, in seconds. An idle machine needs a hundredth of it, a busy one may need more.
SOON = float(os.environ.get("SINGLEFLIGHT_TEST_SOON", "3.0"))
PROMPT = 8.0
DUPLICATES = 10
# Half of four threads: the leader has the third, and the fourth is for other requests.
FOLLOWERS = 2


class Answer(NamedTuple):
    status: int
    body: bytes
    location: str | None
    retry_after: str | None
    seconds: float


class Gunicorn(servers.Server):
    """One master that serves ``gunicorn_site``. ``options`` as on a command line."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    def command(self) -> list[str]:
        config = ROOT / "testproject" / "racing" / "gunicorn_conf.py"
        fixed = [f"--config={config}", f"--bind=127.0.0.1:{self.port}"]
        site = "tests.gunicorn_site:wsgi()"
        return [sys.executable, "-m", "gunicorn", *fixed, *self.options, site]

    def popen_options(self) -> dict[str, Any]:
        # A group of its own: what a master leaves behind ends with it.
        return {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "start_new_session": True}

    def ready(self) -> bool:
        return self.send("health").status == 200

    def send(self, view: str, lesson: str = "") -> Answer:
        """Call a view on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        headers = {"Host": "site.example", "Content-Type": "application/x-www-form-urlencoded"}
        began = clock()
        try:
            connection.request("POST", f"/{view}/", f"lesson={lesson}", headers)
            got = connection.getresponse()
            told = got.getheader("Location"), got.getheader("Retry-After")
            return Answer(got.status, got.read(), *told, clock() - began)
        finally:
            connection.close()

    def stop(self) -> None:
        # What there was to see has been seen, and a shutdown with grace takes a second.
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        super().stop()


class Lesson(NamedTuple):
    """A key: who works for it, and the door that keeps them there."""

    pk: str
    client: redis.Redis
    pool: ThreadPoolExecutor

    def go(self, server: Gunicorn, view: str) -> Future[Answer]:
        return self.pool.submit(server.send, view, self.pk)

    def runs(self) -> list[int]:
        """The processes that have done the work, or have begun it."""
        return [int(pid) for pid in self.client.lrange(f"test:runs:{self.pk}", 0, -1)]

    def held(self, server: Gunicorn, view: str) -> tuple[Future[Answer], int]:
        """Send one in; return it, and its process, when it is inside."""
        holder = self.go(server, view)
        until(self.runs, "the first to be inside", PATIENCE)
        return holder, self.runs()[0]

    def open(self) -> None:
        # For more than may come: what a dead process was given is lost.
        self.client.rpush(f"test:door:{self.pk}", *["open"] * 20)

    def served(self, server: Gunicorn, view: str, within: float) -> Answer:
        """The answer to the same request, sent again until it is no conflict."""
        self.open()
        answers: list[Answer] = []

        def through() -> bool:
            answers.append(server.send(view, self.pk))
            assert answers[-1].status in (201, 429), answers[-1]
            return answers[-1].status == 201

        until(through, "the key to be free", within)
        return answers[-1]


def broken_off(holder: Future[Answer]) -> bool:
    """Whether its work came to nothing: gunicorn answers 500 if it still can."""
    try:
        return holder.result(PATIENCE).status == 500
    except OSError:
        return True


@pytest.fixture
def lesson(redis_client: redis.Redis, request: pytest.FixtureRequest) -> Iterator[Lesson]:
    with ThreadPoolExecutor(DUPLICATES + 1) as pool:
        yield Lesson(request.node.name, redis_client, pool)


@contextmanager
def sync_workers(*options: str) -> Iterator[Gunicorn]:
    with Gunicorn("--worker-class=sync", "--workers=2", *options) as server:
        yield server


@pytest.fixture(scope="module")
def sync_server() -> Iterator[Gunicorn]:
    with sync_workers() as server:
        yield server


def test_waiters_leave_a_thread_to_the_health_check(lesson: Lesson) -> None:
    """All with default options: one process, four threads, and ten duplicates."""
    with Gunicorn("--worker-class=gthread", "--workers=1", "--threads=4") as server:
        leader, pid = lesson.held(server, "flight")
        duplicates = [lesson.go(server, "flight") for _ in range(DUPLICATES)]

        def refused() -> list[Answer]:
            checked = server.send("health")
            assert (checked.status, checked.body) == (200, b"well")
            assert checked.seconds < PROMPT
            return [one.result() for one in duplicates if one.done()]

        # Nobody has opened the door: they don't wait for it. One refusal says both seats are taken.
        until(lambda: len(refused()) == DUPLICATES - FOLLOWERS, "the refusals", PATIENCE)
        for answer in refused():
            assert (answer.status, answer.retry_after) == (503, "1")
            assert answer.seconds < PROMPT
        assert not leader.done()

        lesson.open()
        led = leader.result(PATIENCE)
        answers = [one.result(PATIENCE) for one in duplicates]
        followers = [answer for answer in answers if answer.status != 503]
        assert (led.status, led.body) == (201, b"run 1, by %d" % pid)
        assert [answer[:3] for answer in followers] == [led[:3]] * FOLLOWERS
        assert lesson.runs() == [pid]


def test_a_killed_workers_key_is_free_within_ttl(lesson: Lesson, sync_server: Gunicorn) -> None:
    holder, pid = lesson.held(sync_server, "lock")
    inside = clock()
    # Longer than the lease lives without renewal: as long as the worker lives it is held.
    while clock() - inside < 1.3 * TTL:
        assert sync_server.send("lock", lesson.pk).status == 429
    os.kill(pid, signal.SIGKILL)
    answer = lesson.served(sync_server, "lock", TTL + SOON)
    assert broken_off(holder)
    first, second = lesson.runs()
    assert first == pid != second
    assert answer.body == b"run 2, by %d" % second


def test_after_a_deploy_the_key_is_free_within_ttl(lesson: Lesson, sync_server: Gunicorn) -> None:
    """The new server is up before the old one goes, and the old one's handler outstays its grace."""
    with sync_workers("--graceful-timeout=1") as old:
        holder, pid = lesson.held(old, "lock")
        old.signal(signal.SIGTERM)
        # Once: when the worker is gone, and the lease has lapsed, the next one would be let in.
        assert sync_server.send("lock", lesson.pk).status == 429
        assert old.process is not None
        old.process.wait(PATIENCE)
        answer = lesson.served(sync_server, "lock", TTL + SOON)
        assert broken_off(holder)
    first, second = lesson.runs()
    assert first == pid != second
    assert answer.body == b"run 2, by %d" % second


def test_a_worker_timeout_frees_the_key_at_once(lesson: Lesson, sync_server: Gunicorn) -> None:
    """It raises SystemExit in the view: nobody waits for the lease to lapse."""
    assert LONG > 5 * SOON
    with sync_workers("--timeout=2") as server:
        holder, pid = lesson.held(server, "long-lock")
        assert sync_server.send("long-lock", lesson.pk).status == 429
        until(lambda: lesson.client.get(f"test:exit:{lesson.pk}"), "the timeout", PATIENCE)
        answer = lesson.served(sync_server, "long-lock", SOON)
        assert broken_off(holder)
    first, second = lesson.runs()
    assert first == pid != second
    assert answer.body == b"run 2, by %d" % second
