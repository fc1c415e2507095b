"""Observe mode of flights: each call runs its own work, and is told of where it would have joined.

While it runs it holds the flight's place, by a plain lease of the same key, so that a duplicate
finds it there. Whatever goes wrong on the way is told, and disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from singleflight_django.callers import Flight
from singleflight_django.coalescing import Coalescer
from singleflight_django.drivers import arun, run
from singleflight_django.entering import ahold, hold
from singleflight_django.flights import FlightGuard
from singleflight_django.holding import leave
from singleflight_django.lease import Lease
from singleflight_django.locking import Terms, acquire
from singleflight_django.transactions import arefuse_to_wait, give_back, refuse_to_wait

_T = TypeVar("_T")


def observed(
    guard: Coalescer, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a view that is only observed."""
    lease = _take(guard, lambda: guard.flight_of(request, args, kwargs))
    return hold(call, guard, lease, request)


async def aobserved(
    guard: Coalescer, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """See observed()."""
    lease = await _atake(guard, lambda: guard.aflight_of(request, args, kwargs))
    return await ahold(call, guard, lease, request)


def observed_run(guard: FlightGuard, flight_of: Callable[[], Flight], work: Callable[[], _T]) -> _T:
    """Call a function that is only observed."""
    lease = _take(guard, flight_of)
    try:
        return work()
    finally:
        give_back(lease)


async def aobserved_run(
    guard: FlightGuard, flight_of: Callable[[], Flight], work: Callable[[], Awaitable[_T]]
) -> _T:
    """See observed_run()."""

    async def aflight_of() -> Flight:
        return flight_of()

    lease = await _atake(guard, aflight_of)
    try:
        result = await work()
    except BaseException as error:
        await leave(lease, error)
        raise
    await leave(lease)
    return result


def _take(guard: FlightGuard, flight_of: Callable[[], Flight | None]) -> Lease:
    """Return the lease to run with: the flight's own if it could be had."""
    try:
        flight = flight_of()
        if flight is not None:
            refuse_to_wait(flight.key)
            run(acquire(flight.lease, Terms()))
            return flight.lease
    except Exception as error:
        guard.tell_observed(error)
    return guard.unprotected()


async def _atake(guard: FlightGuard, flight_of: Callable[[], Awaitable[Flight | None]]) -> Lease:
    """See _take()."""
    try:
        flight = await flight_of()
        if flight is not None:
            await arefuse_to_wait(flight.key)
            await arun(acquire(flight.lease, Terms()))
            return flight.lease
    except Exception as error:
        guard.tell_observed(error)
    return guard.unprotected()
