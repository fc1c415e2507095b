"""Many HTTP requests at the same instant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode

NO_ANSWER = 0


@dataclass(frozen=True)
class Call:
    method: str
    url: str
    data: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """``status`` is NO_ANSWER where the connection broke or nothing came in time."""

    status: int
    body: bytes = b""


def fire(port: int, calls: Sequence[Call], timeout: float = 30) -> list[Answer]:
    """
    Send all ``calls`` at once, each over a connection of its own, and return their answers.

    ``timeout``: seconds for all of them together.
    """
    with fired(port, calls, timeout) as answers:
        return answers()


@contextmanager
def fired(
    port: int, calls: Sequence[Call], timeout: float = 30
) -> Iterator[Callable[[], list[Answer]]]:
    """
    Send all ``calls`` at once; give what waits for their answers.

    All connections are open before the first byte is sent; then one thread writes one small
    request after the other, two milliseconds for twenty. A thread for each, released by a
    barrier, takes twice as long: they queue for the interpreter's lock.
    """
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=timeout)))
            for _ in calls
        ]
        for connection in connections:
            with suppress(OSError):
                connection.connect()
        for connection, call in zip(connections, calls, strict=True):
            with suppress(OSError):
                _send(connection, call)
        deadline = time.monotonic() + timeout
        yield lambda: [_answer(connection, deadline) for connection in connections]


def _send(connection: HTTPConnection, call: Call) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Connection": "close"}
    connection.request(call.method, call.url, urlencode(call.data).encode(), headers)


def _answer(connection: HTTPConnection, deadline: float) -> Answer:
    try:
        if connection.sock:
            connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        response = connection.getresponse()
        return Answer(response.status, response.read())
    except (HTTPException, OSError):
        return Answer(NO_ANSWER)
