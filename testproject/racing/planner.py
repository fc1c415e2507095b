"""
The service that a view of ``--kill-redis`` asks while it works. It is a thread of the race.

So the race knows that a request is inside the view, and keeps it there for as long as it needs to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Planner(ThreadingHTTPServer):
    """Answers at once, unless held() says otherwise."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep whoever asks in the block waiting, until let_go()."""
        self.asked = threading.Semaphore(0)
        self.may_answer.clear()
        try:
            yield
        finally:
            self.let_go()

    def is_asked(self, seconds: float) -> bool:
        """Wait for the next one that asks. Return whether somebody came."""
        return self.asked.acquire(timeout=seconds)

    def let_go(self) -> None:
        self.may_answer.set()


class _Handler(BaseHTTPRequestHandler):
    server: Planner

    def do_GET(self) -> None:
        self.server.asked.release()
        self.server.may_answer.wait()
        # Who has asked may have been stopped since.
        with suppress(OSError):
            self.send_response(204)
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def planner() -> Iterator[Planner]:
    """Run a planner."""
    with Planner() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.let_go()
            server.shutdown()
            thread.join()
