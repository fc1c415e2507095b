"""What ties a cache alias to its server: the settings, and the transports to it."""

from __future__ import annotations

from typing import Any

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.redis.async_transports import LoopTransports
from singleflight_django.stores.redis.clients import Server, primary_client
from singleflight_django.stores.redis.transports import transport_to


class Link:
    """A cache alias's server and the transports to it, for as long as its settings are the same."""

    def __init__(self, alias: str) -> None:
        self.server = Server(_reached(alias))
        self.transport = transport_to(self.server)
        self.loops = LoopTransports(self.server)


def _reached(alias: str) -> Any:
    """Return the client of ``alias``. That of a cluster asks for the slots before it is there."""
    try:
        return primary_client(alias)
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package in ("redis", "valkey") or isinstance(error, OSError):
            raise StoreUnavailableError(f"The store can't be reached: {error}") from error
        raise
