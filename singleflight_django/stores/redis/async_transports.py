"""Transports of an event loop: the asyncio twins of ``transports``, on the same settings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from singleflight_django.stores.redis.clients import PORTABLE, Server
from singleflight_django.stores.redis.transports import (
    IDLE_LIMIT,
    MOST_IDLE,
    Call,
    pack,
    pack_call,
)
from singleflight_django.waiting import clock


class AsyncConnectionTransport:
    """See ConnectionTransport. One for each event loop: its connections can't leave it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: deque[tuple[Any, float]] = deque()
        self._make = _connections(server)
        self._closer: AsyncGenerator[None, None] | None = None
        errors = server.errors
        self._clean: Any = errors.ResponseError
        self._soiled = (errors.ReadOnlyError, errors.MasterDownError)
        self._hopeless = (
            errors.AuthenticationError,
            errors.AuthorizationError,
            errors.BusyLoadingError,
        )
        self._broken = (errors.ConnectionError, errors.ReadOnlyError)

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        try:
            return await self._run(call), False
        except self._broken as error:
            if isinstance(error, self._hopeless):
                raise
            await self.drop()
        return await self._run(call), True

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ConnectionTransport.run_all()."""
        replies = await self._exchange([pack_call(call) for call in calls])
        return [
            (await self.run(call))[0]
            if isinstance(reply, self.server.errors.NoScriptError)
            else reply
            for call, reply in zip(calls, replies, strict=True)
        ]

    async def ask(self, *command: str | int) -> Any:
        """See ConnectionTransport.ask()."""
        (reply,) = await self._exchange([pack(*command)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def drop(self) -> None:
        """See ConnectionTransport.drop()."""
        idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            await connection.disconnect(nowait=True)

    async def _run(self, call: Call) -> Any:
        (reply,) = await self._exchange([pack_call(call)])
        if isinstance(reply, self.server.errors.NoScriptError):
            (reply,) = await self._exchange([pack_call(call, source=True)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _exchange(self, commands: list[bytes]) -> list[Any]:
        connection = await self._take()
        replies: list[Any] = []
        try:
            await connection.send_packed_command(commands, check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response())
                except self._clean as error:
                    replies.append(error)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        soiled = any(isinstance(reply, self._soiled) for reply in replies)
        if soiled or len(self._idle) >= MOST_IDLE:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append((connection, clock()))
        return replies

    async def _take(self) -> Any:
        if self._closer is None:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        while self._idle:
            connection, used = self._idle.pop()
            if clock() - used <= IDLE_LIMIT:
                return connection
            await connection.disconnect(nowait=True)
        connection = self._make()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        # A loop that shuts down closes its suspended generators first: the one hook that it has.
        try:
            yield
        finally:
            await self.drop()


class AsyncClientTransport:
    """See ClientTransport: through a redis.asyncio client of the same cluster."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: Any = None
        self._closer: AsyncGenerator[None, None] | None = None

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        script, keys, args = call
        try:
            reply = await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except self.server.errors.NoScriptError:
            reply = await self._execute("EVAL", script.source, len(keys), *keys, *args)
        return reply, False

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ClientTransport.run_all()."""
        replies: list[Any] = []
        for call in calls:
            try:
                replies.append((await self.run(call))[0])
            except self.server.errors.ResponseError as error:
                replies.append(error)
        return replies

    async def ask(self, *command: str | int) -> Any:
        """See ConnectionTransport.ask()."""
        return await self._execute(*command)

    async def _execute(self, *args: Any) -> Any:
        if self._client is None:
            self._client = _async_cluster(self.server)
            self._closer = self._close_with_loop()
            await anext(self._closer)
        return await self._client.execute_command(*args)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._client.aclose()


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


def _connections(server: Server) -> Any:
    """Return what makes an asyncio connection like those of the blocking pool."""
    root = server.driver.__name__
    blocking = import_module(f"{root}.connection")
    module = import_module(f"{root}.asyncio.connection")
    settings = server.async_settings()
    if server.sentinel is not None:
        return _sentinel_connections(server, settings)
    cls = module.Connection
    for name in ("SSLConnection", "UnixDomainSocketConnection"):
        if issubclass(server.pool.connection_class, getattr(blocking, name)):
            cls = getattr(module, name)
    return lambda: cls(**settings)


def _sentinel_connections(server: Server, settings: dict[str, Any]) -> Any:
    module = import_module(f"{server.driver.__name__}.asyncio.sentinel")
    known = [s.connection_pool.connection_kwargs for s in server.sentinel.sentinels]
    manager = module.Sentinel(
        [(one["host"], one["port"]) for one in known],
        sentinel_kwargs={
            name: value
            for name, value in known[0].items()
            if name in PORTABLE and name not in ("host", "port")
        },
    )
    tls = "ssl" if hasattr(server.pool.connection_class, "ssl_context") else ""
    pool = module.SentinelConnectionPool(
        server.pool.service_name, manager, **({"ssl": True} if tls else {}), **settings
    )
    # The connections know their pool by a weak reference only.
    return lambda: (pool, pool.connection_class(**pool.connection_kwargs))[1]


def _async_cluster(server: Server) -> Any:
    module = import_module(f"{server.driver.__name__}.asyncio.cluster")
    nodes = server.client.nodes_manager
    settings = {
        name: value
        for name, value in nodes.connection_kwargs.items()
        if name in PORTABLE and name not in ("host", "port", "path", "db")
    }
    startup = [module.ClusterNode(n.host, n.port) for n in nodes.startup_nodes.values()]
    cluster = next(
        getattr(module, name) for name in ("RedisCluster", "ValkeyCluster") if hasattr(module, name)
    )
    return cluster(startup_nodes=startup, **settings)
