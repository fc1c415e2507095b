"""Acquire and release, as steps that do no I/O themselves: a driver carries out what they ask for."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

from singleflight_django.context import enter, refuse_nested
from singleflight_django.exceptions import LeaseConflictError, StoreUnavailableError
from singleflight_django.lease import Lease
from singleflight_django.renewal import keeper
from singleflight_django.steps import Ask, Steps
from singleflight_django.stores.base import Conflict
from singleflight_django.waiting import Deadline, clock, pauses


class Terms(NamedTuple):
    """How a lease is asked for. ``wait`` and ``longest_pause`` are in seconds."""

    wait: float = 0.0
    limit: int = 1
    longest_pause: float = 0.5


def acquire(lease: Lease, terms: Terms) -> Steps:
    """Take every key of ``lease``, in its order, or none.

    Raises LeaseConflictError if one stays held for longer than ``terms.wait``, StoreUnavailableError
    if the store can't tell, NestedFlightError if this context holds one of them already.
    """
    refuse_nested(lease.keys)
    deadline = Deadline(terms.wait)
    try:
        for key in lease.keys:
            yield from _acquire_key(lease, key, terms, deadline)
    except BaseException as error:
        yield from _undo(lease, error)
        if isinstance(error, LeaseConflictError):
            lease.emit("lease_rejected", lease, wait=terms.wait - deadline.left())
        raise
    enter(lease)
    lease.emit("lease_acquired", lease, wait=terms.wait - deadline.left())


def _undo(lease: Lease, error: BaseException) -> Steps:
    """Give back, without a word, what an acquire that came to nothing got or may have got."""
    keeper.forget(lease)
    if not lease.end() or not lease.fences:
        return
    # The caller has waited for the store long enough, or is a generator that is closed and may not
    # ask any more: the keeper has the time.
    if isinstance(error, StoreUnavailableError | GeneratorExit):
        keeper.give_back_later(lease)
    else:
        yield from _give_back(lease)


def _acquire_key(lease: Lease, key: str, terms: Terms, deadline: Deadline) -> Steps:
    pause: Iterator[float] | None = None
    while True:
        asked, left = clock(), deadline.left()
        args = (key, lease.token, lease.ttl, terms.limit, left)
        try:
            answer = yield lease.store, "acquire", args
        except BaseException:
            # The store may have carried out what it did not answer.
            lease.grant(key, None, clock())
            raise
        if not isinstance(answer, Conflict):
            lease.grant(key, answer.fence, asked)
            keeper.watch(lease)
            return
        if left <= 0:
            raise LeaseConflictError(
                f"{key!r} is held by someone else.", key=key, retry_after=answer.remaining
            )
        if block := lease.store.longest_block:
            seconds = min(left, block, answer.remaining + 0.001)
        else:
            pause = pause or pauses(terms.longest_pause)
            seconds = min(left, next(pause))
        woken = yield lease.store, "wait_free", (key, seconds)
        if not woken:
            deadline.spend(seconds)


def release(lease: Lease) -> Steps:
    """Give back what ``lease`` holds, once. What the store can't do now is done later.

    Raises nothing of its own: the caller has a result, or an exception, that matters more.
    """
    lost = lease.lost
    if not lease.end() or not lease.fences:
        return
    keeper.forget(lease)
    ours = yield from _give_back(lease)
    if lost or not ours:
        lease.lose("it had ended before it was released")
    reason = "lost" if lease.lost else ""
    lease.emit("lease_released", lease, reason=reason, duration=clock() - lease.since)


def _give_back(lease: Lease) -> Generator[Ask, Any, bool]:
    """Return whether all keys were ours until now, as far as the store can tell."""
    ours = True
    try:
        for key in reversed(lease.fences):
            answer = yield lease.store, "release", (key, lease.token)
            ours = ours and answer
    except Exception:
        keeper.give_back_later(lease)
    except BaseException:
        keeper.give_back_later(lease)
        raise
    return ours


def release_again(lease: Lease) -> Steps:
    """Give back at once what the keeper has been given to give back: it may not have come to it."""
    yield from _give_back(lease)


def hand_over(lease: Lease) -> None:
    """Let the keeper release ``lease``, at once but not here, where it could not be waited for."""
    if lease.end():
        keeper.forget(lease)
        keeper.give_back_later(lease)
        # The garbage collector may be closing the caller, at any point of any code, a listener's
        # or a lock's included.
        duration = clock() - lease.since
        keeper.later(partial(lease.emit, "lease_released", lease, duration=duration))


def lapse(lease: Lease) -> None:
    """Renew ``lease`` no more, and don't give it back: its work may still be going on."""
    if lease.end():
        keeper.forget(lease)
        lease.emit(
            "lease_released", lease, reason="cancelled: it lapses", duration=clock() - lease.since
        )
