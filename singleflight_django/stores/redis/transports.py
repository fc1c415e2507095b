"""Blocking transports: how a script reaches the server and its reply comes back.

The fast one keeps connections of its own. It leaves out what a client does for each command; the
connections themselves, with their authentication, TLS and Sentinel, are the driver's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.scripts import Script
from singleflight_django.waiting import clock

# More idle connections than this are closed; busy ones are as many as there are callers.
MOST_IDLE = 64
# Firewalls and load balancers drop silent connections, some of them without a word. Seconds.
IDLE_LIMIT = 60.0


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


def pack(*args: str | bytes | int) -> bytes:
    """Write a command in the Redis protocol."""
    out = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(out)


def pack_call(call: Call, source: bool = False) -> bytes:
    """Write ``call`` by the script's name, or with its ``source`` for a server that forgot it."""
    script = call.script
    head: tuple[bytes, bytes] = (b"EVAL", script.source) if source else (b"EVALSHA", script.sha)
    return pack(*head, len(call.keys), *call.keys, *call.args)


class ConnectionTransport:
    """Commands on connections of our own, kept in a LIFO: no more of them than callers at once.

    A connection goes back only after its whole reply was read. Whatever interrupts an exchange
    (a timeout, SystemExit, a GreenletExit) closes it, for the late reply would be the next caller's.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: deque[tuple[Any, float]] = deque(maxlen=MOST_IDLE)
        errors = server.errors
        self._clean: Any = errors.ResponseError
        self._soiled = (errors.ReadOnlyError, errors.MasterDownError)
        self._hopeless = (
            errors.AuthenticationError,
            errors.AuthorizationError,
            errors.BusyLoadingError,
        )
        self._broken = (errors.ConnectionError, errors.ReadOnlyError)
        _transports.add(self)

    def run(self, call: Call) -> tuple[Any, bool]:
        """Run a script. Return its reply, and whether the call had to be sent a second time.

        It is sent again where the connection broke, as an idle one may have long ago: all of our
        scripts may be. It isn't after a timeout: the caller has waited long enough.
        """
        try:
            return self._run(call), False
        except self._broken as error:
            if isinstance(error, self._hopeless):
                raise
            self.drop()
        return self._run(call), True

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip. An error reply stands in its place in the list."""
        replies = self._exchange([pack_call(call) for call in calls])
        return [
            self.run(call)[0] if isinstance(reply, self.server.errors.NoScriptError) else reply
            for call, reply in zip(calls, replies, strict=True)
        ]

    def ask(self, *command: str | int) -> Any:
        """Send one command, once, and return its reply."""
        (reply,) = self._exchange([pack(*command)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def drop(self) -> None:
        """Close what is idle: the server behind it has gone, or changed."""
        idle, self._idle = self._idle, deque(maxlen=MOST_IDLE)
        for connection, _ in idle:
            connection.disconnect()

    def forget(self) -> None:
        """Leave the connections to the parent process: a forked child may not even close them."""
        self._idle = deque(maxlen=MOST_IDLE)

    def _run(self, call: Call) -> Any:
        (reply,) = self._exchange([pack_call(call)])
        if isinstance(reply, self.server.errors.NoScriptError):
            (reply,) = self._exchange([pack_call(call, source=True)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _exchange(self, commands: list[bytes]) -> list[Any]:
        connection = self._take()
        replies: list[Any] = []
        try:
            connection.send_packed_command(commands, check_health=False)
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except self._clean as error:
                    replies.append(error)
        except BaseException:
            connection.disconnect()
            raise
        if any(isinstance(reply, self._soiled) for reply in replies):
            connection.disconnect()
        else:
            self._idle.append((connection, clock()))
        return replies

    def _take(self) -> Any:
        try:
            connection, used = self._idle.pop()
        except IndexError:
            return self._connect()
        if clock() - used > IDLE_LIMIT:
            self._idle.append((connection, used))
            self.drop()
            return self._connect()
        return connection

    def _connect(self) -> Any:
        connection = self.server.connection()
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return connection


class ClientTransport:
    """Commands through the client as it is: for clusters, which route, and for unknown clients."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run(). The client may send a call again without telling."""
        script, keys, args = call
        try:
            reply = self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except self.server.errors.NoScriptError:
            reply = self._execute("EVAL", script.source, len(keys), *keys, *args)
        return reply, False

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """See ConnectionTransport.run_all(). The keys may live on different nodes: one by one."""
        replies: list[Any] = []
        for call in calls:
            try:
                replies.append(self.run(call)[0])
            except self.server.errors.ResponseError as error:
                replies.append(error)
        return replies

    def ask(self, *command: str | int) -> Any:
        """See ConnectionTransport.ask()."""
        return self._execute(*command)

    def _execute(self, *args: Any) -> Any:
        return self.server.client.execute_command(*args)


Transport = ConnectionTransport | ClientTransport


def transport_to(server: Server) -> Transport:
    """The fastest transport that can serve ``server``."""
    return ConnectionTransport(server) if server.connects else ClientTransport(server)


_transports: WeakSet[ConnectionTransport] = WeakSet()


def _after_fork() -> None:
    for transport in list(_transports):
        transport.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
