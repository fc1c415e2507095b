"""Blocking transports: how a script reaches the server and its reply comes back.

The fast one keeps connections of its own. It leaves out what a client does for each command; the
connections themselves, with their authentication, TLS and Sentinel, are the driver's.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.permits import Permits
from singleflight_django.stores.redis.scripts import Script
from singleflight_django.waiting import clock, pauses

# More idle connections than this are closed.
MOST_IDLE = 64
# The longest pause between two looks for news, in seconds.
LONGEST_PAUSE = 0.5
# Firewalls and load balancers drop silent connections, some of them without a word. Seconds.
IDLE_LIMIT = 60.0
# How much later than it was told to a server may answer that nothing came. It looks at its clock ten
# times a second only (measured: up to 0.1 s late); we leave sooner. Seconds.
GRACE = 0.01


class Watching(NamedTuple):
    """How to wait for news: ``block`` waits on the server, ``look`` asks whether there are any."""

    block: tuple[str | int, ...]
    look: tuple[str | int, ...]


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
    script, keys, args = call
    # A payload is bytes, and may be long. The rest is short, and is written in one go.
    if not source and bytes not in map(type, args):
        told = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, keys + args)])
        if told.isascii():
            return (script.call % (3 + len(keys) + len(args), len(keys))) + told.encode()
    head: tuple[bytes, bytes] = (b"EVAL", script.source) if source else (b"EVALSHA", script.sha)
    return pack(*head, len(keys), *keys, *args)


class ConnectionTransport:
    """Commands on connections of our own, kept in a LIFO: no more of them than callers at once, and
    twice permits.MOST.

    A connection goes back only after its whole reply was read. Whatever interrupts an exchange
    (a timeout, SystemExit, a GreenletExit) closes it, for the late reply would be the next caller's.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: deque[tuple[Any, float]] = deque()
        self._exchanging = Permits(server.timeout)
        self._watching = Permits(server.timeout)
        self._sentinel = server.sentinel
        self._primary: Any = None
        self._errors = Failures(server)
        _transports.add(self)

    def run(self, call: Call) -> tuple[Any, bool]:
        """Run a script. Return its reply, and whether the call had to be sent a second time."""
        (reply,), resent = self._persist([pack_call(call)])
        if isinstance(reply, Exception):
            if not isinstance(reply, self._errors.forgotten):
                raise reply
            (reply,), again = self._persist([pack_call(call, source=True)])
            if isinstance(reply, Exception):
                raise reply
            return reply, resent or again
        return reply, resent

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip. An error reply stands in its place in the list."""
        replies, _ = self._persist([pack_call(call) for call in calls])
        forgotten = [
            n for n, reply in enumerate(replies) if isinstance(reply, self._errors.forgotten)
        ]
        if forgotten:
            sources, _ = self._persist([pack_call(calls[n], source=True) for n in forgotten])
            for n, reply in zip(forgotten, sources, strict=True):
                replies[n] = reply
        return replies

    def ask(self, *command: str | int, within: float | None = None) -> Any:
        """Send one command and return its reply; None if that takes longer than ``within`` seconds."""
        ((reply,), _) = self._persist([pack(*command)], within)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def watch(self, watching: Watching, within: float) -> Any:
        """Wait on the server for news, for ``within`` seconds; None if there are none.

        If as many callers as may do so wait there already, have a look now and then.
        """
        permits = self._watching
        if not permits.take_at_once():
            return self._look(watching.look, clock() + within)
        try:
            return self.ask(*watching.block, within=within)
        finally:
            permits.give()

    def _look(self, command: tuple[str | int, ...], deadline: float) -> Any:
        for pause in pauses(LONGEST_PAUSE):
            news, left = self.ask(*command), deadline - clock()
            if news is not None or left <= 0:
                return news
            time.sleep(min(pause, left))

    def drop(self) -> None:
        """Close what is idle: the server behind it has gone, or changed."""
        # One by one: a connection is in one hand only, whoever else takes or drops.
        while self._idle:
            with suppress(IndexError):
                self._idle.pop()[0].disconnect()

    def forget(self) -> None:
        """Leave the connections to the parent process: a forked child may not even close them."""
        self._idle = deque()
        self._exchanging = Permits(self.server.timeout)
        self._watching = Permits(self.server.timeout)

    def _persist(
        self, commands: list[bytes], within: float | None = None
    ) -> tuple[list[Any], bool]:
        """Exchange; once more on a new connection where one broke, as an idle one may have long ago.

        All that we send may be sent twice. Not after a timeout: the caller has waited long enough.
        """
        begin = clock()
        try:
            replies = self._exchange(commands, within)
            if not self._errors.demoted(replies):
                return replies, False
        except self._errors.broken as error:
            if self._errors.final(error, clock() - begin, within):
                raise
        self.drop()
        return self._exchange(commands, within and max(0.0, within - clock() + begin)), True

    def _exchange(self, commands: list[bytes], within: float | None) -> list[Any]:
        if within is not None:
            return self._exchange_on(self._take(), commands, within)
        permits = self._exchanging
        permits.take()
        try:
            return self._exchange_on(self._take(), commands, None)
        finally:
            permits.give()

    def _exchange_on(
        self, connection: Any, commands: list[bytes], within: float | None
    ) -> list[Any]:
        replies: list[Any] = []
        try:
            connection.send_packed_command(commands, check_health=False)
            if within is not None and not connection.can_read(timeout=within + GRACE):
                connection.disconnect()
                return [None]
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except self._errors.clean as error:
                    replies.append(error)
        except BaseException:
            connection.disconnect()
            raise
        if self._errors.demoted(replies) or len(self._idle) >= MOST_IDLE:
            connection.disconnect()
        else:
            self._idle.append((connection, clock()))
        return replies

    def _take(self) -> Any:
        if self._sentinel is not None:
            self._notice_failover()
        try:
            connection, used = self._idle.pop()
        except IndexError:
            return self._connect()
        if clock() - used > IDLE_LIMIT:
            connection.disconnect()
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
        self._notice_failover()
        return connection

    def _notice_failover(self) -> None:
        # The site's own connections and ours tell the pool what Sentinel told them.
        primary = self.server.primary
        if primary != self._primary:
            self._primary = primary
            self.drop()


class Failures:
    """What the driver's exceptions mean for a connection, and for sending a command again."""

    def __init__(self, server: Server) -> None:
        errors = server.errors
        self._half = server.timeout / 2
        self.clean: Any = errors.ResponseError
        self.forgotten: Any = errors.NoScriptError
        self.broken: Any = errors.ConnectionError
        self._demoted = (errors.ReadOnlyError, errors.MasterDownError)
        self._hopeless = (
            errors.AuthenticationError,
            errors.AuthorizationError,
            errors.BusyLoadingError,
        )

    def demoted(self, replies: list[Any]) -> bool:
        """Whether the server is a replica: the primary is elsewhere now."""
        for reply in replies:
            # Older drivers have no class for MASTERDOWN.
            if isinstance(reply, Exception) and (
                isinstance(reply, self._demoted) or str(reply).startswith("MASTERDOWN")
            ):
                return True
        return False

    def final(self, error: Exception, seconds: float, within: float | None) -> bool:
        """Whether to leave it at ``error``, which came after so many seconds."""
        return isinstance(error, self._hopeless) or (within is None and seconds > self._half)


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
            except self.server.failures as error:
                replies.append(error)
        return replies

    def ask(self, *command: str | int, within: float | None = None) -> Any:
        """See ConnectionTransport.ask(). The client waits for as long as the server takes."""
        return self._execute(*command)

    def watch(self, watching: Watching, within: float) -> Any:
        """See ConnectionTransport.watch(). How many connections there are is the client's to say."""
        return self._execute(*watching.block)

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
