"""One connection of an event loop: the asyncio twins of ``wires``.

The short way takes the loop's transport out of the driver's connection: what the loop receives goes
right to a reader of the kind that the driver has, and the last reply wakes the caller.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from singleflight_django.steadiness import Wait
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.wires import GRACE
from singleflight_django.waiting import clock

# What the loop receives in one go; an outcome takes several. Bytes.
_ROOM = 1 << 14
# What the reader says while a reply is incomplete.
_MORE = object()


class AsyncWire:
    """See Wire."""

    # Whether another task may carry on an exchange: the driver's timeouts are bound to the first.
    steady = False

    def __init__(self, connection: Any, server: Server) -> None:
        self._connection = connection
        self._errors = server.errors
        # When it was used last, by our own clock.
        self.used = clock()
        self.is_open = True

    async def exchange(self, request: bytes, count: int) -> list[Any]:
        """See Wire.exchange()."""
        await self._connection.send_packed_command([request], check_health=False)
        return [await self._read() for _ in range(count)]

    async def exchange_within(self, request: bytes, seconds: float) -> Any:
        """See Wire.exchange_within()."""
        await self._connection.send_packed_command([request], check_health=False)
        try:
            async with asyncio.timeout(seconds + GRACE):
                # The driver's own timeout has to be the later one: it can't tell nil from nothing.
                return await self._read(timeout=seconds + 1)
        except TimeoutError:
            await self.close()
            return None

    async def close(self) -> None:
        """Close it."""
        self.is_open = False
        await self._connection.disconnect(nowait=True)

    async def _read(self, **options: float) -> Any:
        try:
            return await self._connection.read_response(**options)
        except self._errors.ResponseError as error:
            return error


class ShortAsyncWire(AsyncWire, asyncio.BufferedProtocol):
    """What the loop calls when bytes have come, in place of the driver's streams."""

    steady = True

    def __init__(self, connection: Any, server: Server, kind: Any) -> None:
        super().__init__(connection, server)
        reader = kind(
            protocolError=server.errors.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_MORE,
        )
        self._feed, self._next = reader.feed, reader.gets
        self._loop = asyncio.get_running_loop()
        self._patience = server.timeout
        self._room = bytearray(_ROOM)
        self._due, self._replies = 0, list[Any]()
        self._wait: Wait | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        # Let go of, an open one would complain.
        self._writer = connection._writer
        connection._reader = connection._writer = None
        self._transport = self._writer.transport
        self._transport.set_protocol(self)
        self._send = self._transport.write

    async def exchange(self, request: bytes, count: int) -> list[Any]:
        """See Wire.exchange()."""
        if not await self._answered(request, count, self._patience):
            raise self._errors.TimeoutError("Timeout on the socket.")
        self._wait = None
        return self._replies

    async def exchange_within(self, request: bytes, seconds: float) -> Any:
        """See Wire.exchange_within()."""
        if await self._answered(request, 1, seconds + GRACE):
            self._wait = None
            return self._replies[0]
        await self.close()
        return None

    async def close(self) -> None:
        """See Wire.close()."""
        self.is_open = False
        if self._alarm:
            self._alarm.cancel()
        # A task that is destroyed may do so after its loop was closed.
        with suppress(RuntimeError):
            self._transport.close()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the loop shall put what it receives."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Something has come."""
        try:
            self._feed(self._room, 0, nbytes)
            while (reply := self._next()) is not _MORE:
                if isinstance(reply, self._errors.ConnectionError):
                    raise reply
                self._replies.append(reply)
        except Exception as error:
            self._fail(error)
        else:
            if self._wait is None or len(self._replies) > self._due:
                self._fail(self._errors.ConnectionError("The server said more than it was asked."))
            elif len(self._replies) == self._due:
                self._wait.end(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed, by whichever side."""
        self._fail(self._errors.ConnectionError(f"Connection closed by server: {exc}"))

    def _answered(self, request: bytes, count: int, seconds: float) -> Wait:
        """Send ``request``. What is returned tells whether all replies came within ``seconds``."""
        if not self.is_open:
            raise self._errors.ConnectionError("Connection closed by server.")
        self._due, self._replies = count, []
        self._wait = wait = Wait(self._loop)
        self._set_alarm(self._loop.time() + seconds)
        self._send(request)
        return wait

    def _set_alarm(self, deadline: float) -> None:
        """See that the alarm goes at ``deadline`` or before; one is used for many exchanges."""
        self._deadline = deadline
        if self._alarm is None or self._alarm.when() > deadline:
            if self._alarm:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._wait is None:
            return
        if self._loop.time() < self._deadline:
            self._set_alarm(self._deadline)
        else:
            self._wait.end(False)

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._wait:
            self._wait.fail(error)


def async_wire_on(connection: Any, server: Server) -> AsyncWire:
    """Return the shortest wire on ``connection``, which is connected."""
    # See wire_on().
    reader = getattr(getattr(connection, "_parser", None), "_reader", None)
    if reader is None or getattr(connection, "_writer", None) is None:
        return AsyncWire(connection, server)
    return ShortAsyncWire(connection, server, type(reader))
