"""What a Redis or Valkey server says of itself; None where it doesn't, or mustn't."""

from __future__ import annotations

from typing import Any

from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.listing import Node


class Facts:
    """What one node says. Managed servers often forbid CONFIG, and some INFO."""

    def __init__(self, server: Server, node: Node) -> None:
        self.node = node
        self._refusal: Any = server.errors.ResponseError
        self.info = {
            section: _pairs(self._asked("INFO", section))
            for section in ("server", "replication", "memory", "persistence", "stats", "cluster")
        }

    def said(self, section: str, name: str) -> str | None:
        """Return one line of INFO."""
        return self.info[section].get(name)

    def config(self, name: str) -> str | None:
        """Return one setting of the server."""
        return _pairs(self._asked("CONFIG", "GET", name)).get(name)

    def cluster(self) -> dict[str, str]:
        """Return what it says of its cluster."""
        return _pairs(self._asked("CLUSTER", "INFO"))

    def clock(self) -> float | None:
        """Return its time in seconds."""
        reply = self._asked("TIME")
        return None if reply is None else int(reply[0]) + int(reply[1]) / 1e6

    @property
    def product(self) -> str | None:
        """Its name and version."""
        for name, kind in (
            ("valkey_version", "Valkey"),
            ("dragonfly_version", "Dragonfly"),
            ("redis_version", "Redis"),
        ):
            if version := self.said("server", name):
                return f"{kind} {version.removeprefix('df-v')}"
        return None

    def _asked(self, *command: str) -> Any:
        try:
            return self.node.ask(*command)
        except self._refusal:
            return None


def _pairs(reply: Any) -> dict[str, str]:
    """Read a reply: the text of INFO, a list of names and values, or a map that a client made."""
    if reply is None:
        return {}
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}
    if isinstance(reply, bytes | str):
        lines = [line.partition(":") for line in _text(reply).splitlines()]
        return {name: value for name, colon, value in lines if colon}
    texts = [_text(each) for each in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
