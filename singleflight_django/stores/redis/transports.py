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
from typing import Any
from weakref import WeakSet

from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import Call, Watching, pack, pack_call
from singleflight_django.stores.redis.failures import Failures
from singleflight_django.stores.redis.permits import Permits
from singleflight_django.stores.redis.wires import Wire, wire_on
from singleflight_django.waiting import clock, pauses

# More idle connections than this are closed.
MOST_IDLE = 64
# The longest pause between two looks for news, in seconds.
LONGEST_PAUSE = 0.5
# Firewalls and load balancers drop silent connections, some of them without a word. Seconds.
IDLE_LIMIT = 60.0


class ConnectionTransport:
    """Commands on connections of our own, kept in a LIFO: no more of them than callers at once, and
    twice permits.MOST.

    A connection goes back only after its whole reply was read. Whatever interrupts an exchange
    (a timeout, SystemExit, a GreenletExit) closes it, for the late reply would be the next caller's.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: deque[Wire] = deque()
        self._exchanging = Permits(server.timeout)
        self._watching = Permits(server.timeout)
        self._sentinel = server.sentinel
        self._primary: Any = None
        self._errors = Failures(server)
        _transports.add(self)

    def run(self, call: Call) -> tuple[Any, bool]:
        """Run a script. Return its reply, and whether the call had to be sent a second time."""
        (reply,), resent = self._persist(pack_call(call))
        if isinstance(reply, Exception):
            if not isinstance(reply, self._errors.forgotten):
                raise reply
            (reply,), again = self._persist(pack_call(call, source=True))
            if isinstance(reply, Exception):
                raise reply
            return reply, resent or again
        return reply, resent

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip. An error reply stands in its place in the list."""
        if not calls:
            return []
        replies, _ = self._persist(b"".join(map(pack_call, calls)), len(calls))
        forgotten = [
            n for n, reply in enumerate(replies) if isinstance(reply, self._errors.forgotten)
        ]
        if forgotten:
            sources = b"".join([pack_call(calls[n], source=True) for n in forgotten])
            answers, _ = self._persist(sources, len(forgotten))
            for n, reply in zip(forgotten, answers, strict=True):
                replies[n] = reply
        return replies

    def ask(self, *command: str | int, within: float | None = None) -> Any:
        """Send one command and return its reply; None if that takes longer than ``within`` seconds."""
        ((reply,), _) = self._persist(pack(*command), within=within)
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
                self._idle.pop().close()

    def forget(self) -> None:
        """Leave the connections to the parent process: a forked child may not even close them."""
        self._idle = deque()
        self._exchanging = Permits(self.server.timeout)
        self._watching = Permits(self.server.timeout)

    def _persist(
        self, request: bytes, count: int = 1, within: float | None = None
    ) -> tuple[list[Any], bool]:
        """Exchange; once more on a new connection where one broke, as an idle one may have long ago.

        All that we send may be sent twice. Not after a timeout: the caller has waited long enough.
        """
        begin = clock()
        try:
            replies = self._exchange(request, count, within)
            if not self._errors.demoted(replies):
                return replies, False
        except self._errors.broken as error:
            if self._errors.final(error, clock() - begin, within):
                raise
        self.drop()
        return self._exchange(request, count, within and max(0.0, within - clock() + begin)), True

    def _exchange(self, request: bytes, count: int, within: float | None) -> list[Any]:
        # Who waits on the server has a permit for that.
        permits = self._exchanging if within is None else None
        if permits:
            permits.take()
        try:
            wire = self._take()
            try:
                if within is None:
                    replies = wire.exchange(request, count)
                else:
                    replies = [wire.exchange_within(request, within)]
            except BaseException:
                wire.close()
                raise
            self._put_back(wire, replies)
        finally:
            if permits:
                permits.give()
        return replies

    def _take(self) -> Wire:
        if self._sentinel is not None:
            self._notice_failover()
        try:
            wire = self._idle.pop()
        except IndexError:
            return self._connect()
        if clock() - wire.used > IDLE_LIMIT:
            wire.close()
            self.drop()
            return self._connect()
        return wire

    def _put_back(self, wire: Wire, replies: list[Any]) -> None:
        if not wire.is_open:
            return
        if self._errors.demoted(replies) or len(self._idle) >= MOST_IDLE:
            wire.close()
        else:
            wire.used = clock()
            self._idle.append(wire)

    def _connect(self) -> Wire:
        connection = self.server.connection()
        try:
            connection.connect()
            wire = wire_on(connection, self.server)
        except BaseException:
            connection.disconnect()
            raise
        self._notice_failover()
        return wire

    def _notice_failover(self) -> None:
        # The site's own connections and ours tell the pool what Sentinel told them.
        primary = self.server.primary
        if primary != self._primary:
            self._primary = primary
            self.drop()


class ClientTransport:
    """Commands through the client as it is: for clusters, which route, and for unknown clients."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def run(self, call: Call) -> tuple[Any, bool]:
        """See ConnectionTransport.run(). The client may send a call again without telling."""
        try:
            reply = self._execute("EVALSHA", call.script.sha, *call.words)
        except self.server.errors.NoScriptError:
            reply = self._execute("EVAL", call.script.source, *call.words)
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
