"""A TCP proxy between a client and Redis that loses, holds and cuts on demand.

It reads the protocol, so that a fault strikes one chosen command or its reply, and a test waits for
the fault to strike instead of sleeping.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import deque
from typing import Literal, Self

from tests.servers import free_port

PATIENCE = 20.0


def value_end(data: bytes | bytearray, start: int = 0) -> int | None:
    """The index after the RESP value at ``start``; None while it isn't complete."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, position = data[start : start + 1], line_end + 2
    if kind in (b"$", b"=", b"!"):
        length = int(data[start + 1 : line_end])
        end = position if length < 0 else position + length + 2
        return end if end <= len(data) else None
    if kind in (b"*", b"~", b">", b"%"):
        items = int(data[start + 1 : line_end]) * (2 if kind == b"%" else 1)
        for _ in range(items):
            after = value_end(data, position)
            if after is None:
                return None
            position = after
    return position


def has(command: bytes, words: bytes) -> bool:
    """Whether whole words of ``command`` are ``words``, in any case: SET isn't SETINFO."""
    return bool(re.search(rb"(?<!\w)" + re.escape(words) + rb"(?!\w)", command, re.IGNORECASE))


class Trap:
    """What happens to the ``nth`` command that has the words ``pattern``; see ``Proxy.trap``."""

    def __init__(self, pattern: bytes, at: str, then: str, nth: int) -> None:
        self.pattern, self.at, self.then = pattern, at, then
        self._left = nth
        self._sprung, self._released = threading.Event(), threading.Event()

    def takes(self, command: bytes) -> bool:
        """Whether this is the command; its only one."""
        if not has(command, self.pattern):
            return False
        self._left -= 1
        return self._left == 0

    def spring(self) -> bool:
        """Strike. Returns whether the connection lives on."""
        self._sprung.set()
        if self.then == "hold":
            self._released.wait(PATIENCE)
        return self.then == "hold"

    def wait(self, seconds: float = PATIENCE) -> None:
        """Return when the fault has struck."""
        assert self._sprung.wait(seconds), f"no command with {self.pattern!r} came by"

    @property
    def sprung(self) -> bool:
        return self._sprung.is_set()

    def release(self) -> None:
        """Let what is held go on."""
        self._released.set()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server = socket.create_connection(("127.0.0.1", proxy.target), timeout=PATIENCE)
        # One entry for each command that the server hasn't answered yet.
        self.pending: deque[Trap | None] = deque()
        for sock in (self.client, self.server):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.threads = [
            threading.Thread(target=self._pump, args=pump, daemon=True)
            for pump in (
                (self.client, self.server, self._command),
                (self.server, self.client, self._reply),
            )
        ]
        for thread in self.threads:
            thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, passes: object) -> None:
        assert callable(passes)
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                buffer += data
                while buffer and (end := value_end(buffer)) is not None:
                    value = bytes(buffer[:end])
                    del buffer[:end]
                    if not passes(value):
                        return self.close()
                    if not self.proxy.hanging:
                        sink.sendall(value)
        self.close()

    def _command(self, command: bytes) -> bool:
        trap = self.proxy.note(command)
        self.pending.append(trap if trap and trap.at == "reply" else None)
        return trap.spring() if trap and trap.at == "request" else True

    def _reply(self, reply: bytes) -> bool:
        # Pushes and published messages answer no command.
        if reply.startswith(b">") or not self.pending:
            return True
        trap = self.pending.popleft()
        return trap.spring() if trap else True

    def close(self) -> None:
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Proxy:
    """Listens on a port of its own for the server at ``target``. Works as a context manager."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.hanging = False
        self.connections = 0
        self.commands: list[bytes] = []
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._open: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def trap(
        self,
        pattern: bytes,
        *,
        at: Literal["request", "reply"] = "reply",
        then: Literal["drop", "hold"] = "drop",
        nth: int = 1,
    ) -> Trap:
        """Catch the ``nth`` command from now on that has ``pattern`` as whole words, in any case.

        At "request" the server never sees it; at "reply" the server has carried it out. "drop"
        closes the connection instead; "hold" keeps it until ``release()``.
        """
        trap = Trap(pattern, at, then, nth)
        with self._lock:
            self._traps.append(trap)
        return trap

    def note(self, request: bytes) -> Trap | None:
        """Count a command, kept as its words joined by spaces, and return the trap for it."""
        command = b" ".join(re.split(rb"\r\n(?:\$\d+\r\n)?", request)[1:]).strip()
        with self._lock:
            self.commands.append(command)
            return next((trap for trap in self._traps if trap.takes(command)), None)

    def count(self, pattern: bytes = b"") -> int:
        """How many commands with the words ``pattern`` came by since the last ``reset()``."""
        with self._lock:
            return sum(not pattern or has(command, pattern) for command in self.commands)

    def reset(self) -> None:
        """Forget the counts."""
        with self._lock:
            self.connections = 0
            self.commands.clear()

    def hang(self) -> None:
        """Accept and read everything, and pass nothing on, in either direction."""
        self.hanging = True

    def refuse(self) -> None:
        """Refuse new connections and cut the open ones."""
        self._close_listener()
        self.cut()

    def cut(self) -> None:
        """Close the open connections; new ones are welcome."""
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            connection.close()

    def heal(self) -> None:
        """Pass everything on again. What was swallowed stays lost: open connections are cut."""
        if self.hanging:
            self.cut()
        self.hanging = False
        if self._listener is None:
            self.start()

    def start(self) -> Self:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._thread.start()
        return self

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    connection = _Connection(self, client)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self.connections += 1
                    self._open.append(connection)

    def _close_listener(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        self._listener = None

    def stop(self) -> None:
        for trap in self._traps:
            trap.release()
        with self._lock:
            connections = list(self._open)
        self.refuse()
        for connection in connections:
            for thread in connection.threads:
                thread.join(PATIENCE)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
