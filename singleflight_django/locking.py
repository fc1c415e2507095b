"""Acquire and release, as steps that do no I/O themselves: a driver carries out what they ask for."""

from __future__ import annotations

from dataclasses import dataclass

from singleflight_django.exceptions import LeaseConflictError, StoreUnavailableError
from singleflight_django.lease import Lease, enter, refuse_nested
from singleflight_django.renewal import keeper
from singleflight_django.steps import Ask, Steps
from singleflight_django.stores.base import Conflict
from singleflight_django.waiting import Deadline, clock, pauses


@dataclass(frozen=True, slots=True)
class Terms:
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
    asking = lease.keys[0]
    try:
        for asking in lease.keys:
            yield from _acquire_key(lease, asking, terms, deadline)
    except LeaseConflictError:
        yield from release(lease)
        lease.emit("lease_rejected", lease, wait=terms.wait - deadline.left())
        raise
    except BaseException as error:
        # The store may have carried out what it did not answer.
        lease.grant(asking, None, clock())
        yield from _undo(lease, error)
        raise
    enter(lease)
    lease.emit("lease_acquired", lease, wait=terms.wait - deadline.left())


def _undo(lease: Lease, error: BaseException) -> Steps:
    if not isinstance(error, StoreUnavailableError):
        yield from release(lease)
    elif lease.end():
        # The caller has waited for the store long enough: the keeper has the time to wait on.
        keeper.forget(lease)
        keeper.give_back_later(lease)


def _acquire_key(lease: Lease, key: str, terms: Terms, deadline: Deadline) -> Steps:
    pause, block = pauses(terms.longest_pause), lease.store.longest_block
    while True:
        asked, left = clock(), deadline.left()
        answer = yield Ask(lease.store, "acquire", (key, lease.token, lease.ttl, terms.limit, left))
        if not isinstance(answer, Conflict):
            lease.grant(key, answer.fence, asked)
            keeper.watch(lease)
            return
        if left <= 0:
            raise LeaseConflictError(
                f"{key!r} is held by someone else.", key=key, retry_after=answer.remaining
            )
        seconds = min(left, block, answer.remaining + 0.001) if block else min(left, next(pause))
        woken = yield Ask(lease.store, "wait_free", (key, seconds))
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
    try:
        for key in reversed(lease.fences):
            ours = yield Ask(lease.store, "release", (key, lease.token))
            lost = lost or not ours
    except Exception:
        keeper.give_back_later(lease)
    except BaseException:
        keeper.give_back_later(lease)
        raise
    if lost:
        lease.lose("it had ended before it was released")
    lease.emit("lease_released", lease, duration=clock() - lease.since)


def lapse(lease: Lease) -> None:
    """Renew ``lease`` no more, and don't give it back: its work may still be going on."""
    if lease.end():
        keeper.forget(lease)
        lease.emit(
            "lease_released", lease, reason="cancelled: it lapses", duration=clock() - lease.since
        )
