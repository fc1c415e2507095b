"""A cluster from an event loop: its client routes, and keeps connections of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from typing import Any

from singleflight_django.steadiness import steadily
from singleflight_django.stores.redis.clients import PORTABLE, Server
from singleflight_django.stores.redis.commands import Call, Watching


class AsyncClientTransport:
    """See ClientTransport: through a redis.asyncio client of the same cluster."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: Any = None
        self._beginning = asyncio.Lock()
        self._closer: AsyncGenerator[None, None] | None = None

    async def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run()."""
        return await steadily(self._run(call)), False

    async def _run(self, call: Call) -> Any:
        try:
            return await self._execute("EVALSHA", call.script.sha, *call.words)
        except self.server.errors.NoScriptError:
            return await self._execute("EVAL", call.script.source, *call.words)

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
