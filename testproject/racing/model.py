"""
A model that is none: slow, and busy with one call at a time. It has nothing but Python.

``python -m testproject.racing.model`` serves it on port 8001, ``race`` on a socket of its own.
``/answers/<anything>`` is a call; ``/calls/`` tells how many there have been for each path.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = 0.3


class Model(ThreadingHTTPServer):
    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.one_at_a_time = threading.Lock()
        self.calls: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_GET(self) -> None:
        if self.path == "/worker/":
            self._tell(os.getpid())
        elif self.path == "/calls/":
            # Once nobody's call is being served: the next volley is to find a model that is free.
            with self.server.one_at_a_time:
                self._tell(Counter(self.server.calls))
        else:
            self.server.calls.append(self.path)
            self._answer(len(self.server.calls))

    def _answer(self, number: int) -> None:
        with self.server.one_at_a_time:
            if not self._client_has_gone():
                time.sleep(SECONDS)
                self._tell({"question": self.path, "answer": f"It was call number {number}."})

    def _client_has_gone(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _tell(self, value: Any) -> None:
        body = json.dumps(value).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a traceback would be the only thing worth reading in the log."""


def main() -> None:
    parser = ArgumentParser(description="A slow model that handles one call at a time.")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--fd", type=int, help="a socket that listens already")
    options = parser.parse_args()
    if options.fd is None:
        listener = socket.create_server(("127.0.0.1", options.port))
    else:
        listener = socket.socket(fileno=options.fd)
    with Model(listener) as model:
        model.serve_forever()


if __name__ == "__main__":
    main()
