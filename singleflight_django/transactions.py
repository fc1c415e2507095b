"""Transactions and leases: a lease that ends before COMMIT protects nothing.

At the URL's callback the lease is outside of the transaction: acquire, BEGIN, view, COMMIT, on_commit
hooks, release. For that the guard opts out of what Django would wrap around it (ATOMIC_REQUESTS), and
opens the same transactions inside. Elsewhere the transaction may be open before the lease is taken:
then the lease ends with it. What this knows of Django's insides is all in this module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize

from asgiref.sync import AsyncToSync, SyncToAsync, iscoroutinefunction, sync_to_async
from django.core.signals import request_finished
from django.db import connections, transaction
from django.dispatch import receiver

from singleflight_django.bodies import unwrap
from singleflight_django.drivers import run
from singleflight_django.exceptions import WaitInTransactionError
from singleflight_django.lease import Lease
from singleflight_django.locking import release, release_again
from singleflight_django.renewal import keeper

_MARKER = "_non_atomic_requests"
# On a request while one of its guards has opened what ATOMIC_REQUESTS asks for.
_OPENED = "_singleflight_atomic"


class OptOut(set[str]):
    """Every alias, as Django asks; as a set, those that the site itself has opted out of."""

    def __contains__(self, alias: object) -> bool:
        return True

    def add(self, alias: str) -> None:
        """Opt one view out, as Django's ``non_atomic_requests`` asks for.

        The mark of a dispatch() is the mark of each view that as_view() has made of it, and of the
        subclasses: what is said of one of them must not take the transaction of the others away.
        """
        marked = sys._getframe(1).f_locals.get("view")
        if marked is None:
            # Not Django's own decorator: whoever it is means whatever has this mark.
            set.add(self, alias)
        else:
            setattr(_callback(marked), _MARKER, OptOut({*self, alias}))


def _callback(marked: Any) -> Any:
    """Return the URL's callback that ``non_atomic_requests`` means by ``marked``.

    On the dispatch() of a subclass, it is told anew at each request, and of the bound method.
    """
    method = getattr(marked, "func", None)
    request = getattr(getattr(method, "__self__", None), "request", None)
    match = getattr(request, "resolver_match", None)
    return getattr(match, "func", marked)


def opt_out(view: Any) -> None:
    """Let Django open no transaction around ``view``: with_transactions() does it inside.

    Not for async views: that they can't have one is for Django to say.
    """
    setattr(view, _MARKER, OptOut(getattr(view, _MARKER, ())))


def with_transactions(call: Callable[[], Any], request: Any) -> Callable[[], Any]:
    """Return ``call`` in the transactions that Django left to us for this request."""
    inner: Any = unwrap(request)
    match: Any = getattr(inner, "resolver_match", None)
    marker = getattr(getattr(match, "func", None), _MARKER, None)
    if not isinstance(marker, OptOut) or getattr(inner, _OPENED, False):
        return call
    asked = call
    for alias, options in connections.settings.items():
        if options["ATOMIC_REQUESTS"] and not set.__contains__(marker, alias):
            if iscoroutinefunction(match.func):
                # What Django says where dispatch() has not handed our mark on to an async view.
                raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
            call = partial(transaction.atomic(using=alias)(_call), call)
    return call if call is asked else partial(_opened, inner, call)


def _call(call: Callable[[], Any]) -> Any:
    return call()


def _opened(request: Any, call: Callable[[], Any]) -> Any:
    """Call what opens the transactions, which guards further in leave at that."""
    setattr(request, _OPENED, True)
    try:
        return call()
    finally:
        setattr(request, _OPENED, False)


def refuse_to_wait(key: str) -> None:
    """Raise WaitInTransactionError if a transaction is open here, other than TestCase's own.

    A wait would pin its connection, and its snapshot would not show what the leader commits.
    """
    for connection in _open_connections():
        raise WaitInTransactionError(
            f"{key!r} may have to wait, and a transaction is open on {connection.alias!r}. Put "
            "@transaction.non_atomic_requests on the URL's callback, use the mixin, or take the key "
            "before the transaction begins.",
            key=key,
        )


async def arefuse_to_wait(key: str) -> None:
    """See refuse_to_wait(). Async code opens no transactions, but a sync caller of it may have.

    Where the coroutine is run by ``async_to_sync``, the thread that waits for it is asked.
    """
    executors = getattr(AsyncToSync, "executors", None)
    if getattr(executors, "current", None) is not None:
        # A task may have outlived its caller, and has nobody to ask then.
        with suppress(RuntimeError):
            await sync_to_async(refuse_to_wait)(key)


class Connections:
    """The database connections of a request that waits: the leader may be in need of one.

    They are closed, which gives a pooled one back, and opened again by the next query. Not for
    functions, whose caller may be in the middle of reading rows, or has temporary tables.
    """

    def let_go(self) -> None:
        """Close those of this thread that are in no transaction."""
        for connection in connections.all(initialized_only=True):
            # Without autocommit it is in a transaction of the site's own making.
            if connection.autocommit and not connection.in_atomic_block:
                connection.close()

    async def alet_go(self) -> None:
        """Close those of the request's thread, if it has any: none is begun for that."""
        context = SyncToAsync.thread_sensitive_context.get(None)
        if context is not None and context in SyncToAsync.context_to_thread_executor:
            await sync_to_async(self.let_go)()


def can_roll_back() -> bool:
    """Whether it is up to us to let nothing be committed of the transactions that are open here.

    Django marks the innermost block only: where there are several, the error has to go on through
    all of them. TestCase's own don't count.
    """
    used = connections.all(initialized_only=True)
    return not any(len(_blocks(connection)) > 1 or _is_manual(connection) for connection in used)


def roll_back() -> None:
    """Let nothing be committed of them; from here to their ends no query is allowed either."""
    for connection in _open_connections():
        connection.set_rollback(True)


def give_back(lease: Lease) -> None:
    """Release ``lease``; where a transaction is open, at its end.

    Django tells of a commit, but not of a rollback: it drops the list of on_commit hooks then, and
    ours with it. (Or another hook has raised, which keeps ours from being called.)
    """
    for connection in _open_connections():
        if not lease.is_protected:
            break
        hook = _Committed(lease)
        # No savepoints: a rollback to one of them must not drop it.
        connection.run_on_commit.append((set(), hook, True))
        _ending.leases.append(_Ending(connection, _blocks(connection)[0], lease))
        return
    run(release(lease))


class _Committed:
    """An on_commit hook that also knows when it has been dropped."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._dropped = finalize(self, _rolled_back, lease)
        self._dropped.atexit = False

    def __call__(self) -> None:
        self._dropped.detach()
        _forget(self._lease)
        # On another connection a transaction may still be open.
        give_back(self._lease)


def _rolled_back(lease: Lease) -> None:
    # Called by the garbage collector, at any point of any code, of any thread: no I/O here. What the
    # keeper has not done by then the end of the request does.
    if lease.end():
        keeper.forget(lease)
        keeper.give_back_later(lease)


class _Ending(NamedTuple):
    connection: Any
    block: Any
    lease: Lease


class _Local(threading.local):
    def __init__(self) -> None:
        self.leases: list[_Ending] = []


_ending = _Local()


@receiver(request_finished, dispatch_uid="singleflight_django.transactions")
def give_back_ended(**kwargs: Any) -> None:
    """Release the leases of this thread whose transactions are over.

    Inside a TestCase there is no COMMIT to tell of it.
    """
    for ending in list(_ending.leases):
        if ending.block not in ending.connection.atomic_blocks:
            lease = ending.lease
            _forget(lease)
            if lease.is_ours:
                run(release(lease) if lease.held else release_again(lease))


def _forget(lease: Lease) -> None:
    _ending.leases = [ending for ending in _ending.leases if ending.lease is not lease]


def _open_connections() -> Iterator[Any]:
    for connection in connections.all(initialized_only=True):
        if _blocks(connection):
            yield connection


def _blocks(connection: Any) -> list[Any]:
    """Return the atomic blocks that are open on ``connection``, but for TestCase's own."""
    return [
        block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False)
    ]


def _is_manual(connection: Any) -> bool:
    """Whether the site itself says where transactions end: it has turned autocommit off."""
    connected = connection.connection is not None
    return connected and not connection.in_atomic_block and not connection.autocommit
