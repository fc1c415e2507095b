"""Real servers with several worker processes, none of which stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from django.core.management import CommandError

from testproject.racing.client import Call, fire
from testproject.racing.signals import uninterrupted

# Where ``testproject`` is importable.
ROOT = Path(__file__).resolve().parents[2]
STARTUP = 30.0
GRACE = 3.0


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    workers: int
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self) -> None:
        """Return when each worker process has answered a call."""
        seen: set[bytes] = set()
        deadline = time.monotonic() + STARTUP
        while len(seen) < self.workers:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise CommandError(f"{self.name} did not start:\n{self.last_words()}")
            # More calls than workers, all at once, so that no worker can answer them all.
            answers = fire(self.port, [Call("GET", "/worker/", {})] * self.workers * 4, timeout=5)
            seen |= {answer.body for answer in answers if answer.status == 200}

    def last_words(self) -> str:
        """The end of the server's log: where something has gone wrong, most likely the reason."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def web_server(
    kind: str, workers: int, threads: int, environ: Mapping[str, str], directory: Path
) -> Iterator[Server]:
    """Start gunicorn ("wsgi") or uvicorn ("asgi")."""

    def command(file: int) -> list[str]:
        return _gunicorn(file, workers, threads) if kind == "wsgi" else _uvicorn(file, workers)

    with _serving(command, workers, environ, directory) as server:
        yield server


@contextmanager
def model_server(environ: Mapping[str, str], directory: Path) -> Iterator[Server]:
    """Start the fake model."""

    def command(file: int) -> list[str]:
        return ["testproject.racing.model", f"--fd={file}"]

    with _serving(command, 1, environ, directory) as server:
        yield server


@contextmanager
def _serving(
    command: Callable[[int], list[str]],
    workers: int,
    environ: Mapping[str, str],
    directory: Path,
) -> Iterator[Server]:
    """
    Run a module's ``command`` for a socket's file number, on a free port of the loopback.

    The server inherits a socket that listens already: nobody else can take the port meanwhile,
    and calls that come before the server is up wait in the socket's queue.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port, file = listener.getsockname()[1], listener.fileno()
        arguments = command(file)
        name = arguments[0].rpartition(".")[2]
        log = directory / f"{name}-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[file],
                # A group of its own: Ctrl-C reaches us alone, and we can stop the whole group.
                start_new_session=True,
            )
    try:
        yield Server(name, port, workers, process, log)
    finally:
        _stop(process)


def _gunicorn(file: int, workers: int, threads: int) -> list[str]:
    return [
        "gunicorn",
        "--config=python:testproject.racing.gunicorn_conf",
        f"--bind=fd://{file}",
        f"--workers={workers}",
        f"--threads={threads}",
        "testproject.wsgi:application",
    ]


def _uvicorn(file: int, workers: int) -> list[str]:
    return [
        "uvicorn",
        f"--fd={file}",
        f"--workers={workers}",
        "--lifespan=off",
        "--log-level=warning",
        "testproject.asgi:application",
    ]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop; whatever of its group is still there after GRACE is killed."""
    with uninterrupted():
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
