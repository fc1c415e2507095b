"""The leases that are held in this context, a thread's or a task's: none of them is taken twice."""

from __future__ import annotations

from contextvars import ContextVar

from singleflight_django.exceptions import NestedFlightError
from singleflight_django.lease import Lease

_held: ContextVar[tuple[Lease, ...]] = ContextVar("singleflight_held", default=())


def enter(lease: Lease) -> None:
    """Note in this context that ``lease`` is held here."""
    _held.set((*[other for other in _held.get() if other.held], lease))


def leave(lease: Lease) -> None:
    """Note that ``lease`` is held elsewhere from now on, if it still is."""
    _held.set(tuple(other for other in _held.get() if other is not lease))


def held_here() -> tuple[Lease, ...]:
    """The leases that were taken in this context, or one that it was copied from, and still are held."""
    return tuple(lease for lease in _held.get() if lease.held)


def refuse_nested(keys: tuple[str, ...]) -> None:
    """Raise NestedFlightError if one of ``keys`` is held in this context: it would wait for itself."""
    for lease in _held.get():
        if lease.held and not set(keys).isdisjoint(lease.keys):
            raise NestedFlightError(
                f"{lease.key!r} is already held in this very context, by a decorator, a mixin or a "
                "`with` further out: taking it again would wait for itself. Take it once, outermost, "
                "and pass `request.lease` or the lease along.",
                key=lease.key,
            )
