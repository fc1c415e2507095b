"""One connection to the server: the driver's own, and a short way over it.

The driver connects, authenticates and encrypts. What it does again at each command, for features
that we don't use, takes longer than the command itself: the short way sends and reads on the
connection's socket, with a reader of the kind that the driver has, and does nothing else.
"""

from __future__ import annotations

from typing import Any

from singleflight_django.stores.redis.clients import Server
from singleflight_django.waiting import clock

# How much later than it was told to a server may answer that nothing came. It looks at its clock ten
# times a second only (measured: up to 0.1 s late); we leave sooner. Seconds.
GRACE = 0.01
# Most replies are a few bytes long; what is longer is an outcome. Bytes.
_SHORT, _LONG = 4096, 1 << 16
# What the reader says while a reply is incomplete.
_MORE = object()


class Wire:
    """A connection that speaks to the server as the driver does."""

    def __init__(self, connection: Any, server: Server) -> None:
        self._connection = connection
        self._errors = server.errors
        # When it was used last, by our own clock.
        self.used = clock()
        self.is_open = True

    def exchange(self, request: bytes, count: int) -> list[Any]:
        """Send packed commands and return their ``count`` replies, errors of the commands included.

        Raises the driver's ConnectionError and TimeoutError. Whatever is raised, close it: a late
        reply would be the next caller's.
        """
        self._connection.send_packed_command([request], check_health=False)
        return [self._read() for _ in range(count)]

    def exchange_within(self, request: bytes, seconds: float) -> Any:
        """See exchange(), for one command. None, and closed, if that takes longer than ``seconds``."""
        self._connection.send_packed_command([request], check_health=False)
        if self._connection.can_read(timeout=seconds + GRACE):
            return self._read()
        self.close()
        return None

    def close(self) -> None:
        """Close it."""
        self.is_open = False
        self._connection.disconnect()

    def _read(self) -> Any:
        try:
            return self._connection.read_response()
        except self._errors.ResponseError as error:
            return error


class ShortWire(Wire):
    """A connection whose socket is used directly."""

    def __init__(self, connection: Any, server: Server, kind: Any) -> None:
        super().__init__(connection, server)
        errors, sock = server.errors, connection._sock
        self._broken = errors.ConnectionError
        reader = kind(
            protocolError=errors.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_MORE,
        )
        self._send, self._receive = sock.sendall, sock.recv
        self._feed, self._next = reader.feed, reader.gets

    def exchange(self, request: bytes, count: int) -> list[Any]:
        """See Wire.exchange()."""
        replies: list[Any] = []
        try:
            self._send(request)
            data = self._receive(_SHORT)
            while data:
                self._feed(data)
                while (reply := self._next()) is not _MORE:
                    if isinstance(reply, self._broken):
                        raise reply
                    replies.append(reply)
                if len(replies) == count:
                    return replies
                data = self._receive(_LONG)
        except TimeoutError as error:
            raise self._errors.TimeoutError("Timeout on the socket.") from error
        except OSError as error:
            raise self._errors.ConnectionError(f"Error on the socket: {error}") from error
        raise self._errors.ConnectionError("Connection closed by server.")


def wire_on(connection: Any, server: Server) -> Wire:
    """Return the shortest wire on ``connection``, which is connected."""
    # The driver parses in Python where hiredis, or libvalkey, is not installed.
    reader = getattr(getattr(connection, "_parser", None), "_reader", None)
    if reader is None or getattr(connection, "_sock", None) is None:
        return Wire(connection, server)
    return ShortWire(connection, server, type(reader))
