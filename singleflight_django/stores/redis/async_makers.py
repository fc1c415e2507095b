"""Where the connections of an event loop come from: the asyncio twins of those that the site has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from singleflight_django.stores.redis.clients import PORTABLE, Server, understood


class Maker:
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


class SentinelMaker(Maker):
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
        """See Maker.connection()."""
        return self._pool.connection_class(**self._pool.connection_kwargs)

    async def aclose(self) -> None:
        """See Maker.aclose()."""
        for client in self._manager.sentinels:
            await client.aclose()


def maker_for(server: Server) -> Maker:
    """Return what makes connections to ``server``."""
    return Maker(server) if server.sentinel is None else SentinelMaker(server)
