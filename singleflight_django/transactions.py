"""Transactions and leases: a lease that ends before COMMIT protects nothing.

At the URL's callback the lease is outside of the transaction: acquire, BEGIN, view, COMMIT, on_commit
hooks, release. For that the guard opts out of what Django would wrap around it (ATOMIC_REQUESTS), and
opens the same transactions inside. Elsewhere the transaction may be open before the lease is taken:
then the lease ends with it. What this knows of Django's insides is all in this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize

from asgiref.sync import iscoroutinefunction
from django.core.signals import request_finished
from django.db import connections, transaction
from django.dispatch import receiver

from singleflight_django.bodies import unwrap
from singleflight_django.drivers import run
from singleflight_django.exceptions import WaitInTransactionError
from singleflight_django.lease import Lease
from singleflight_django.locking import release
from singleflight_django.renewal import keeper

_MARKER = "_non_atomic_requests"


class OptOut(set[str]):
    """Every alias, as Django asks; as a set, those that the site itself has opted out of."""

    def __contains__(self, alias: object) -> bool:
        return True


def opt_out(view: Any) -> None:
    """Let Django open no transaction around ``view``: with_transactions() does it inside.

    Not for async views: that they can't have one is for Django to say.
    """
    setattr(view, _MARKER, OptOut(getattr(view, _MARKER, ())))


def with_transactions(call: Callable[[], Any], request: Any) -> Callable[[], Any]:
    """Return ``call`` in the transactions that Django left to us for this request."""
    match: Any = getattr(unwrap(request), "resolver_match", None)
    marker = getattr(getattr(match, "func", None), _MARKER, None)
    if not isinstance(marker, OptOut) or any(_open_connections()):
        return call
    for alias, options in connections.settings.items():
        if options["ATOMIC_REQUESTS"] and not set.__contains__(marker, alias):
            if iscoroutinefunction(match.func):
                # What Django says where dispatch() has not handed our mark on to an async view.
                raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
            call = partial(transaction.atomic(using=alias)(_call), call)
    return call


def _call(call: Callable[[], Any]) -> Any:
    return call()


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


def give_back(lease: Lease) -> None:
    """Release ``lease``; where a transaction is open, at its end.

    Django tells of a commit, but not of a rollback: it drops the list of on_commit hooks then, and
    ours with it. (Or another hook has raised, which keeps ours from being called.)
    """
    for connection in _open_connections():
        hook = _Committed(lease)
        # No savepoints: a rollback to one of them must not drop it.
        connection.run_on_commit.append((set(), hook, True))
        block = next(b for b in connection.atomic_blocks if not b._from_testcase)
        _ending.leases.append(_Ending(connection, block, lease))
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
    # Called by the garbage collector, at any point of any code: no I/O here.
    _forget(lease)
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
            _forget(ending.lease)
            run(release(ending.lease))


def _forget(lease: Lease) -> None:
    _ending.leases = [ending for ending in _ending.leases if ending.lease is not lease]


def _open_connections() -> Iterator[Any]:
    for connection in connections.all(initialized_only=True):
        if any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
            yield connection
