"""What our user may do on the server: each command is tried on entries that nobody else uses."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from singleflight_django.stores.findings import Finding, Level
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import Call
from singleflight_django.stores.redis.scripts import NOTHING
from singleflight_django.stores.redis.transports import Transport

Command = tuple[str | int, ...]
# They do without, worse: waiters look again, and nobody can list.
DISPENSABLE = {
    "BLPOP": "who waits for a lease isn't woken, and looks again ten times a second",
    "LPOP": "where very many wait at once, some aren't woken, and look again ten times a second",
    "SCAN": "`list` and the admin page can't show who holds what",
}


def scratch_commands(base: str) -> list[Command]:
    """Return each command that the store or its scripts use, on entries that begin with ``base``."""
    lease, text, queue, flight, stream = (
        base + name for name in ("lease", "fence", "free", "flight", "1")
    )
    return [
        ("TIME",),
        ("SET", text, 1, "PX", 10_000),
        ("GET", text),
        ("PTTL", text),
        ("PEXPIRE", text, 10_000),
        ("EXISTS", text),
        ("ZADD", lease, 1, "x"),
        ("ZCARD", lease),
        ("ZSCORE", lease, "x"),
        ("ZRANGE", lease, 0, 0),
        ("ZRANGEBYSCORE", lease, "(0", "+inf"),
        ("ZREMRANGEBYSCORE", lease, "-inf", 0),
        ("ZREM", lease, "x"),
        ("RPUSH", queue, 1),
        ("LTRIM", queue, -16, -1),
        ("BLPOP", queue, "0.001"),
        ("LPOP", queue),
        ("HSET", flight, "x", 1),
        ("HGET", flight, "x"),
        ("HMGET", flight, "x"),
        ("HEXISTS", flight, "x"),
        ("HINCRBY", flight, "x", 1),
        ("HDEL", flight, "x"),
        ("XADD", stream, "*", "s", "done"),
        ("XREAD", "COUNT", 1, "STREAMS", stream, "0"),
        ("SCAN", 0, "MATCH", f"{base}lease", "COUNT", 1),
    ]


def examine_rights(server: Server, transport: Transport, prefix: str) -> Iterator[Finding]:
    """Yield what our user, or the state of the server, keeps us from doing."""
    base = f"{prefix}:{{doctor-{secrets.token_hex(6)}}}:"
    commands = scratch_commands(base)
    names = {str(part) for command in commands for part in command if str(part).startswith(base)}
    refusals = _refusals(server, transport, [*commands, ("DEL", *sorted(names))])
    try:
        transport.run(Call(NOTHING, (base + "flight",)))
    except server.errors.ResponseError as error:
        refusals["EVAL"] = str(error)
    if not refusals:
        yield Finding("rights", Level.OK, f"All {len(commands) + 2} commands in use are allowed.")
    yield from _judged(refusals, prefix)


def _refusals(server: Server, transport: Transport, commands: list[Command]) -> dict[str, str]:
    refused: dict[str, str] = {}
    for command in commands:
        try:
            transport.ask(*command)
        except server.errors.ResponseError as error:
            refused[str(command[0])] = f"{type(error).__name__}: {error}"
    return refused


def _judged(refusals: dict[str, str], prefix: str) -> Iterator[Finding]:
    left = dict(refusals)

    def those(*marks: str) -> str:
        """Take out the refusals with one of these texts, and return the first."""
        found = [name for name, text in left.items() if any(mark in text for mark in marks)]
        texts = [left.pop(name) for name in found]
        return texts[0] if texts else ""

    if text := those("ReadOnly", "READONLY"):
        yield Finding("writes", Level.ERROR, f"The server takes no writes: {text}.", _PRIMARY)
    if text := those("OutOfMemory", "OOM"):
        cure = "Raise maxmemory, or give leases an instance of their own, with noeviction."
        yield Finding("memory", Level.ERROR, "The server's memory is full: no lease fits.", cure)
    if text := those("MISCONF"):
        cure = "Look at its log: it can't write its snapshot to the disk."
        yield Finding("writes", Level.ERROR, "The server refuses writes (MISCONF).", cure)
    if text := those("to access"):
        cure = f"ACL SETUSER <user> ~{prefix}:*"
        yield Finding("keys", Level.ERROR, f"The user may not use our keys: {text}.", cure)
    if text := left.pop("EVAL", ""):
        lost = (
            "leases and flights go through cache.add, with a release in two steps, without fences, "
            "and nobody can list them"
        )
        cure = "ACL SETUSER <user> +eval +evalsha (or stop renaming these commands)."
        yield Finding("scripts", Level.WARNING, f"Scripts are forbidden: {lost}. ({text})", cure)
    for name, lost in DISPENSABLE.items():
        if left.pop(name, ""):
            cure = f"ACL SETUSER <user> +{name.lower()}"
            yield Finding("rights", Level.WARNING, f"{name} is forbidden: {lost}.", cure)
    if left:
        cure = "ACL SETUSER <user> " + " ".join(f"+{name.lower()}" for name in left)
        names = ", ".join(left)
        text = f"Commands that the scripts need are refused: {names} ({next(iter(left.values()))})."
        yield Finding("rights", Level.ERROR, text, cure)


_PRIMARY = "Point LOCATION at the primary, or let Sentinel say where it is."
