"""Transports of an event loop: the asyncio twins of ``transports``, on the same settings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from singleflight_django.steadiness import steadily
from singleflight_django.stores.redis.async_clusters import AsyncClientTransport
from singleflight_django.stores.redis.async_makers import maker_for
from singleflight_django.stores.redis.async_permits import AsyncPermits
from singleflight_django.stores.redis.async_wires import AsyncWire, async_wire_on
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import Call, Watching, pack, pack_call
from singleflight_django.stores.redis.failures import Failures
from singleflight_django.stores.redis.transports import IDLE_LIMIT, LONGEST_PAUSE, MOST_IDLE
from singleflight_django.waiting import clock, pauses


class AsyncConnectionTransport:
    """See ConnectionTransport. One for each event loop: its connections can't leave it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: deque[AsyncWire] = deque()
        self._maker = maker_for(server)
        self._sentinel = server.sentinel is not None
        self._primary: Any = None
        self._errors = Failures(server)
        self._exchanging = AsyncPermits(server.timeout)
        self._watching = AsyncPermits(server.timeout)
        self._closer: AsyncGenerator[None, None] | None = None
        self._keeps = True

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        (reply,), resent = await self._persist(pack_call(call))
        if isinstance(reply, Exception):
            if not isinstance(reply, self._errors.forgotten):
                raise reply
            (reply,), again = await self._persist(pack_call(call, source=True))
            if isinstance(reply, Exception):
                raise reply
            return reply, resent or again
        return reply, resent

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ConnectionTransport.run_all()."""
        if not calls:
            return []
        replies, _ = await self._persist(b"".join(map(pack_call, calls)), len(calls))
        forgotten = [
            n for n, reply in enumerate(replies) if isinstance(reply, self._errors.forgotten)
        ]
        if forgotten:
            sources = b"".join([pack_call(calls[n], source=True) for n in forgotten])
            answers, _ = await self._persist(sources, len(forgotten))
            for n, reply in zip(forgotten, answers, strict=True):
                replies[n] = reply
        return replies

    async def ask(self, *command: str | int, within: float | None = None) -> Any:
        """See ConnectionTransport.ask()."""
        ((reply,), _) = await self._persist(pack(*command), within=within)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def watch(self, watching: Watching, within: float) -> Any:
        """See ConnectionTransport.watch()."""
        permits = self._watching
        if not permits.take_at_once():
            return await self._look(watching.look, clock() + within)
        try:
            return await self.ask(*watching.block, within=within)
        finally:
            permits.give()

    async def _look(self, command: tuple[str | int, ...], deadline: float) -> Any:
        for pause in pauses(LONGEST_PAUSE):
            news, left = await self.ask(*command), deadline - clock()
            if news is not None or left <= 0:
                return news
            await asyncio.sleep(min(pause, left))

    async def drop(self) -> None:
        """See ConnectionTransport.drop()."""
        while self._idle:
            await self._idle.pop().close()

    async def _persist(
        self, request: bytes, count: int = 1, within: float | None = None
    ) -> tuple[list[Any], bool]:
        begin = clock()
        try:
            replies = await self._exchange(request, count, within)
            if not self._errors.demoted(replies):
                return replies, False
        except self._errors.broken as error:
            if self._errors.final(error, clock() - begin, within):
                raise
        await self.drop()
        left = within and max(0.0, within - clock() + begin)
        return await self._exchange(request, count, left), True

    async def _exchange(self, request: bytes, count: int, within: float | None) -> list[Any]:
        # Who waits on the server has a permit for that.
        permits = self._exchanging if within is None else None
        if permits and not permits.take_at_once():
            await permits.take()
        try:
            wire = await self._take()
            try:
                if within is not None:
                    replies = [await wire.exchange_within(request, within)]
                elif wire.steady:
                    replies = await wire.exchange(request, count)
                else:
                    replies = await steadily(wire.exchange(request, count))
            except BaseException:
                await wire.close()
                raise
            await self._put_back(wire, replies)
        finally:
            if permits:
                permits.give()
        return replies

    async def _take(self) -> AsyncWire:
        if self._closer is None and self._keeps:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        if self._sentinel:
            await self._notice_failover()
        while self._idle:
            wire = self._idle.pop()
            if wire.is_open and clock() - wire.used <= IDLE_LIMIT:
                return wire
            await wire.close()
        made: list[AsyncWire] = []
        try:
            await steadily(self._connect(made))
        except BaseException:
            for wire in made:
                await wire.close()
            raise
        return made[0]

    async def _put_back(self, wire: AsyncWire, replies: list[Any]) -> None:
        if not wire.is_open:
            return
        if self._errors.demoted(replies) or len(self._idle) >= MOST_IDLE or not self._keeps:
            await wire.close()
        else:
            wire.used = clock()
            self._idle.append(wire)

    async def _connect(self, made: list[AsyncWire]) -> None:
        connection = self._maker.connection()
        try:
            await connection.connect()
            made.append(async_wire_on(connection, self._server))
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        await self._notice_failover()

    async def _notice_failover(self) -> None:
        primary = self._maker.primary
        if primary != self._primary:
            self._primary = primary
            await self.drop()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        # A loop that shuts down closes its suspended generators first: the one hook that it has.
        try:
            yield
        finally:
            # What still runs closes its own connection; the generator would keep its loop alive.
            self._keeps, self._closer = False, None
            await self.drop()
            await self._maker.aclose()


AsyncTransport = AsyncConnectionTransport | AsyncClientTransport


class LoopTransports:
    """The transport of each event loop that asked for one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._by_loop: WeakKeyDictionary[Any, AsyncTransport] = WeakKeyDictionary()

    def current(self) -> AsyncTransport:
        """The running loop's transport."""
        loop = asyncio.get_running_loop()
        transport = self._by_loop.get(loop)
        if transport is None:
            connects = self._server.connects
            kind = AsyncConnectionTransport if connects else AsyncClientTransport
            transport = self._by_loop[loop] = kind(self._server)
        return transport
