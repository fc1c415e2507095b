"""The live leases of a prefix: found by SCAN, a batch at a time, on every primary.

Never by KEYS, which holds the server up for as long as it takes: a second for a million keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from singleflight_django.owners import holder_of
from singleflight_django.stores.listing import FLIGHT, LEASE, Holding
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import Call
from singleflight_django.stores.redis.scripts import HOLDERS
from singleflight_django.stores.redis.transports import Transport

# How many keys of the server, ours and others', it looks at in one step.
STEP = 1000
# How many leases are read in one round trip.
BATCH = 200


class Node(Protocol):
    """One primary: what it takes to walk over its keys."""

    def ask(self, *command: str | int) -> Any: ...

    def run_all(self, calls: list[Call]) -> list[Any]: ...


def holdings(
    server: Server, transport: Transport, prefix: str, contains: str = ""
) -> Iterator[Holding]:
    """Yield the live leases whose key contains a text; one that moves meanwhile may be missing."""
    pattern = f"{_plain(prefix)}:{{*{_plain(contains)}{'*' if contains else ''}}}:lease"
    head, tail = len(prefix) + 2, len("}:lease")
    for node in primaries(server, transport):
        for names in _batches(_scan(node, pattern)):
            replies = node.run_all([_holders_call(name) for name in names])
            for name, reply in zip(names, replies, strict=True):
                if not isinstance(reply, Exception):
                    yield from _read(name[head:-tail], reply)
                elif not _is_elsewhere(server, reply):
                    raise reply


def _is_elsewhere(server: Server, error: Exception) -> bool:
    """Whether the slot has moved to another node meanwhile, or the key is none of ours."""
    moved = ("MovedError", "AskError", "TryAgainError")
    kinds = tuple(getattr(server.errors, name) for name in moved)
    return isinstance(error, kinds) or "WRONGTYPE" in str(error)


def _plain(text: str) -> str:
    """Return ``text`` as a pattern that matches nothing else."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


def primaries(server: Server, transport: Transport) -> list[Node]:
    """Return each node that takes writes."""
    client = server.client
    if not hasattr(client, "get_primaries"):
        return [transport]
    return [_PrimaryOfCluster(server, node) for node in client.get_primaries()]


class _PrimaryOfCluster:
    """A node of a cluster, through the cluster client's own connections to it."""

    def __init__(self, server: Server, node: Any) -> None:
        self._client = server.client.get_redis_connection(node)

    def ask(self, *command: str | int) -> Any:
        return self._client.execute_command(*command)

    def run_all(self, calls: list[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command("EVAL", call.script.source, *call.words)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies


def _scan(node: Node, pattern: str) -> Iterator[str]:
    cursor: Any = 0
    while True:
        cursor, names = node.ask("SCAN", cursor, "MATCH", pattern, "COUNT", STEP)
        yield from map(_text, names)
        cursor = int(cursor)
        if not cursor:
            return


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _holders_call(name: str) -> Call:
    base = name.removesuffix("lease")
    return Call(HOLDERS, (name, base + "fence", base + "flight"))


def _read(key: str, reply: Any) -> Iterator[Holding]:
    now, members, fence, flight, followers = reply
    tokens, ends = members[::2], members[1::2]
    # Of several holders, the fence is the last one's, whoever that is.
    known = int(fence) if fence and len(tokens) == 1 else None
    for token, end in zip(map(_text, tokens), ends, strict=True):
        yield Holding(
            key,
            FLIGHT if flight else LEASE,
            holder_of(token),
            token,
            None if known is None else max(0, int(now) - known) / 1e6,
            (float(end) - int(now)) / 1e6,
            int(followers) if flight else None,
            known,
            int(flight or 0),
        )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
