"""The smoke test of flights, between real servers: gunicorn and uvicorn, sync and async views.

1. One request succeeds. 2. Several at once with one key, on both servers: exactly one does the work
and all get its answer. 3. Two at once with different keys: both do the work.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests import settings as run
from tests.servers import free_port, until

ROUNDS = 5
PATIENCE = 30.0
Answer = tuple[int, bytes, str | None]


class Server:
    """One server process with one worker."""

    def __init__(self, *command: str) -> None:
        self.port = free_port()
        arguments = [one.format(port=self.port) for one in command]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def send(self, path: str, method: str = "POST") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            # One site, whatever the server's own port.
            connection.request(method, path, headers={"Host": "site.example"})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("Cache-Status")
        finally:
            connection.close()

    def waiting(self) -> int:
        return int(self.send("/waiting", "GET")[1])

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Site:
    """The servers, and the door of the view."""

    def __init__(self) -> None:
        self.gunicorn = Server(
            "gunicorn", "--bind=127.0.0.1:{port}", "--threads=16", "tests.flight_site:wsgi()"
        )
        self.uvicorn = Server(
            "uvicorn", "--port={port}", "--lifespan=off", "--factory", "tests.flight_site:asgi"
        )
        self.servers = (self.gunicorn, self.uvicorn)
        self.pool = ThreadPoolExecutor(16)
        self.store = redis.Redis.from_url(run.REDIS_URL)

    def begin(self) -> None:
        for server in self.servers:
            until(lambda server=server: server.waiting() == 0, "a server", PATIENCE)

    def go(self, server: Server, key: str) -> Future[Answer]:
        return self.pool.submit(server.send, f"/lessons/{key}/")

    def visits(self, key: str) -> int:
        return int(self.store.get(f"test:visits:{key}") or 0)  # type: ignore[arg-type]

    def inside(self, key: str) -> None:
        until(lambda: self.visits(key), f"somebody in the view for {key}", PATIENCE)

    def followed(self, number: int) -> None:
        def enough() -> bool:
            return sum(server.waiting() for server in self.servers) == number

        until(enough, f"{number} followers", PATIENCE)

    def open(self, key: str) -> None:
        # For more than may come: who isn't expected shows in the visits, and need not wait.
        self.store.rpush(f"test:door:{key}", *["open"] * 20)

    def end(self) -> None:
        for server in self.servers:
            server.stop()
        self.pool.shutdown()
        self.store.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    pytest.importorskip("gunicorn")
    pytest.importorskip("uvicorn")
    started = Site()
    try:
        started.begin()
        yield started
    finally:
        started.end()


@pytest.fixture(params=["gunicorn", "uvicorn"])
def servers(request: pytest.FixtureRequest, site: Site) -> list[Server]:
    """Both servers, the leader's first."""
    first: Server = getattr(site, request.param)
    return [first, *(server for server in site.servers if server is not first)]


def test_one_request_succeeds(site: Site, servers: list[Server]) -> None:
    site.open("one")
    assert site.go(servers[0], "one").result(PATIENCE)[::2] == (
        201,
        "singleflight; fwd=miss; stored",
    )


def test_of_several_with_one_key_exactly_one_works(site: Site, servers: list[Server]) -> None:
    for number in range(ROUNDS):
        key = f"same-{number}"
        leader = site.go(servers[0], key)
        site.inside(key)
        followers = [site.go(server, key) for server in [*servers, *servers, *servers]]
        site.followed(len(followers))
        site.open(key)
        status, body, _ = leader.result(PATIENCE)
        assert status == 201
        answers = [follower.result(PATIENCE) for follower in followers]
        assert answers == [(201, body, "singleflight; fwd=miss; collapsed")] * 6
        assert site.visits(key) == 1


def test_all_at_once_nobody_first(site: Site, servers: list[Server]) -> None:
    for number in range(ROUNDS):
        key = f"burst-{number}"
        running = [site.go(server, key) for server in servers * 4]
        site.inside(key)
        site.followed(len(running) - 1)
        site.open(key)
        answers: list[Any] = [one.result(PATIENCE) for one in running]
        assert {answer[:2] for answer in answers} == {answers[0][:2]}
        assert sum("stored" in answer[2] for answer in answers) == site.visits(key) == 1


def test_two_with_different_keys_do_not_contend(site: Site, servers: list[Server]) -> None:
    for number in range(ROUNDS):
        keys = [f"{word}-{number}" for word in ("this", "that")]
        running = [site.go(server, key) for server, key in zip(servers, keys, strict=True)]
        for key in keys:
            site.inside(key)
        for key in keys:
            site.open(key)
        assert [one.result(PATIENCE)[0] for one in running] == [201, 201]
        assert [site.visits(key) for key in keys] == [1, 1]
