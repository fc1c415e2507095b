"""Transports of an event loop: the asyncio twins of ``transports``, on the same settings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from singleflight_django.stores.redis.clients import PORTABLE, Server, understood
from singleflight_django.stores.redis.commands import Call, Watching, pack, pack_call
from singleflight_django.stores.redis.failures import Failures
from singleflight_django.stores.redis.permits import MOST
from singleflight_django.stores.redis.transports import IDLE_LIMIT, LONGEST_PAUSE, MOST_IDLE
from singleflight_django.stores.redis.wires import GRACE
from singleflight_django.waiting import clock, pauses


class AsyncConnectionTransport:
    """See ConnectionTransport. One for each event loop: its connections can't leave it."""

    def __init__(self, server: Server) -> None:
        self._idle: deque[tuple[Any, float]] = deque()
        self._maker = _maker(server)
        self._primary: Any = None
        self._errors = Failures(server)
        self._patience = server.timeout
        self._exchanging = asyncio.Semaphore(MOST)
        self._watching = asyncio.Semaphore(MOST)
        self._closer: AsyncGenerator[None, None] | None = None
        self._keeps = True

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        (reply,), resent = await self._persist([pack_call(call)])
        if isinstance(reply, self._errors.forgotten):
            (reply,), again = await self._persist([pack_call(call, source=True)])
            resent = resent or again
        if isinstance(reply, Exception):
            raise reply
        return reply, resent

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ConnectionTransport.run_all()."""
        replies, _ = await self._persist([pack_call(call) for call in calls])
        forgotten = [
            n for n, reply in enumerate(replies) if isinstance(reply, self._errors.forgotten)
        ]
        if forgotten:
            sources, _ = await self._persist([pack_call(calls[n], source=True) for n in forgotten])
            for n, reply in zip(forgotten, sources, strict=True):
                replies[n] = reply
        return replies

    async def ask(self, *command: str | int, within: float | None = None) -> Any:
        """See ConnectionTransport.ask()."""
        ((reply,), _) = await self._persist([pack(*command)], within)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def watch(self, watching: Watching, within: float) -> Any:
        """See ConnectionTransport.watch()."""
        if self._watching.locked():
            return await self._look(watching.look, clock() + within)
        async with self._watching:
            return await self.ask(*watching.block, within=within)

    async def _look(self, command: tuple[str | int, ...], deadline: float) -> Any:
        for pause in pauses(LONGEST_PAUSE):
            news, left = await self.ask(*command), deadline - clock()
            if news is not None or left <= 0:
                return news
            await asyncio.sleep(min(pause, left))

    async def drop(self) -> None:
        """See ConnectionTransport.drop()."""
        while self._idle:
            await self._idle.pop()[0].disconnect(nowait=True)

    async def _persist(
        self, commands: list[bytes], within: float | None = None
    ) -> tuple[list[Any], bool]:
        begin = clock()
        try:
            replies = await self._exchange(commands, within)
            if not self._errors.demoted(replies):
                return replies, False
        except self._errors.broken as error:
            if self._errors.final(error, clock() - begin, within):
                raise
        await self.drop()
        left = within and max(0.0, within - clock() + begin)
        return await self._exchange(commands, left), True

    async def _exchange(self, commands: list[bytes], within: float | None) -> list[Any]:
        if within is not None:
            return await self._exchange_on(await self._take(), commands, within)
        if self._exchanging.locked():
            # However many wait before: the caller's patience is that of one socket.
            async with asyncio.timeout(self._patience):
                await self._exchanging.acquire()
        else:
            await self._exchanging.acquire()
        try:
            return await self._exchange_on(await self._take(), commands, None)
        finally:
            self._exchanging.release()

    async def _exchange_on(
        self, connection: Any, commands: list[bytes], within: float | None
    ) -> list[Any]:
        replies: list[Any] = []
        try:
            await connection.send_packed_command(commands, check_health=False)
            for _ in commands:
                try:
                    replies.append(await _read(connection, within))
                except self._errors.clean as error:
                    replies.append(error)
        except TimeoutError:
            # Ours, not the driver's: the reply took longer than ``within``.
            await connection.disconnect(nowait=True)
            return [None]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        if self._errors.demoted(replies) or len(self._idle) >= MOST_IDLE or not self._keeps:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append((connection, clock()))
        return replies

    async def _take(self) -> Any:
        if self._closer is None and self._keeps:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        await self._notice_failover()
        while self._idle:
            connection, used = self._idle.pop()
            if clock() - used <= IDLE_LIMIT:
                return connection
            await connection.disconnect(nowait=True)
        connection = self._maker.connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        await self._notice_failover()
        return connection

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


async def _read(connection: Any, within: float | None) -> Any:
    if within is None:
        return await connection.read_response()
    async with asyncio.timeout(within + GRACE):
        # The driver's own timeout has to be the later one: it does not tell nil from nothing.
        return await connection.read_response(timeout=within + 1)


class AsyncClientTransport:
    """See ClientTransport: through a redis.asyncio client of the same cluster."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: Any = None
        self._beginning = asyncio.Lock()
        self._closer: AsyncGenerator[None, None] | None = None

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        try:
            reply = await self._execute("EVALSHA", call.script.sha, *call.words)
        except self.server.errors.NoScriptError:
            reply = await self._execute("EVAL", call.script.source, *call.words)
        return reply, False

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ClientTransport.run_all()."""
        replies: list[Any] = []
        for call in calls:
            try:
                replies.append((await self.run(call))[0])
            except self.server.failures as error:
                replies.append(error)
        return replies

    async def ask(self, *command: str | int, within: float | None = None) -> Any:
        """See ConnectionTransport.ask()."""
        return await self._execute(*command)

    async def watch(self, watching: Watching, within: float) -> Any:
        """See ClientTransport.watch()."""
        return await self._execute(*watching.block)

    async def _execute(self, *args: Any) -> Any:
        if self._client is None:
            # Tasks that come meanwhile wait: begun twice, the client loses connections.
            async with self._beginning:
                await self._begin()
        return await self._client.execute_command(*args)

    async def _begin(self) -> None:
        if self._client is not None:
            return
        client = _async_cluster(self.server)
        try:
            await client.initialize()
        except BaseException:
            await client.aclose()
            raise
        self._client, self._closer = client, self._close_with_loop(client)
        await anext(self._closer)

    async def _close_with_loop(self, client: Any) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._client = self._closer = None
            await client.aclose()


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


class _Maker:
    """Makes asyncio connections like those of the blocking pool."""

    primary: Any = None

    def __init__(self, server: Server) -> None:
        root = server.driver.__name__
        blocking = import_module(f"{root}.connection")
        module = import_module(f"{root}.asyncio.connection")
        self._kind: Any = module.Connection
        for name in ("SSLConnection", "UnixDomainSocketConnection"):
            if issubclass(server.pool.connection_class, getattr(blocking, name)):
                self._kind = getattr(module, name)
        self._settings = understood(self._kind, server.async_settings())

    def connection(self) -> Any:
        """Return a new connection."""
        return self._kind(**self._settings)

    async def aclose(self) -> None:
        """Close what making connections needs."""


class _SentinelMaker(_Maker):
    """Lets an asyncio Sentinel pool tell its connections where the primary is."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        module = import_module(f"{server.driver.__name__}.asyncio.sentinel")
        known = [one.connection_pool.connection_kwargs for one in server.sentinel.sentinels]
        self._manager = module.Sentinel(
            [(one["host"], one["port"]) for one in known],
            sentinel_kwargs={
                name: value
                for name, value in known[0].items()
                if name in PORTABLE and name not in ("host", "port")
            },
        )
        tls = self._kind.__name__ == "SSLConnection"
        self._pool = module.SentinelConnectionPool(
            server.pool.service_name, self._manager, **{"ssl": tls} if tls else {}, **self._settings
        )

    @property
    def primary(self) -> Any:
        """The address that Sentinel named last."""
        return self._pool.master_address

    def connection(self) -> Any:
        """See _Maker.connection()."""
        return self._pool.connection_class(**self._pool.connection_kwargs)

    async def aclose(self) -> None:
        """See _Maker.aclose()."""
        for client in self._manager.sentinels:
            await client.aclose()


def _maker(server: Server) -> _Maker:
    return _Maker(server) if server.sentinel is None else _SentinelMaker(server)


def _async_cluster(server: Server) -> Any:
    module = import_module(f"{server.driver.__name__}.asyncio.cluster")
    nodes = server.client.nodes_manager
    settings = {
        name: value
        for name, value in server.async_settings().items()
        if name in PORTABLE and name not in ("host", "port", "path", "db")
    }
    startup = [module.ClusterNode(n.host, n.port) for n in nodes.startup_nodes.values()]
    cluster = next(
        getattr(module, name) for name in ("RedisCluster", "ValkeyCluster") if hasattr(module, name)
    )
    return cluster(startup_nodes=startup, **settings)
