"""What is sent: runs of scripts, and ways to wait for news, written in the Redis protocol."""

from __future__ import annotations

from typing import NamedTuple

from singleflight_django.stores.redis.scripts import Script


class Call(NamedTuple):
    """One run of a script. ``payload`` is its last argument, if there is one: it may be long."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | int, ...] = ()
    payload: bytes | None = None

    @property
    def words(self) -> tuple[str | bytes | int, ...]:
        """What follows the script's name in a command."""
        last = () if self.payload is None else (self.payload,)
        return (len(self.keys), *self.keys, *self.args, *last)


class Watching(NamedTuple):
    """How to wait for news: ``block`` waits on the server, ``look`` asks whether there are any."""

    block: tuple[str | int, ...]
    look: tuple[str | int, ...]


def pack(*args: str | bytes | int) -> bytes:
    """Write a command in the Redis protocol."""
    out = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(out)


def pack_call(call: Call, source: bool = False) -> bytes:
    """Write ``call`` by the script's name, or with its ``source`` for a server that forgot it."""
    script, keys, args, payload = call
    # Short, and so often sent that it is written in one go.
    told = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, keys + args)])
    if source or not told.isascii():
        head: tuple[bytes, bytes] = (b"EVAL", script.source) if source else (b"EVALSHA", script.sha)
        return pack(*head, *call.words)
    words = 3 + len(keys) + len(args)
    if payload is None:
        return b"%b%b" % (script.call % (words, len(keys)), told.encode())
    begin = script.call % (words + 1, len(keys))
    return b"%b%b$%d\r\n%b\r\n" % (begin, told.encode(), len(payload), payload)
