"""How an async leader works: when its own caller goes away, the work goes on for its followers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from singleflight_django.callers import Flight
from singleflight_django.context import leave
from singleflight_django.drivers import arun, in_background
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.landing import land, lapse
from singleflight_django.stores.base import Status

Freight = tuple[Status, bytes, float, float]


class Landed(NamedTuple):
    """What the work returned, and whether the flight was still the leader's own at its end."""

    result: Any
    ours: bool


async def lead_async(
    flight: Flight,
    work: Awaitable[Any],
    freight: Callable[[Any], Freight | None],
    freight_of_error: Callable[[BaseException], Freight],
    max_run: float,
) -> Landed:
    """Do the work and land the flight with what ``freight`` makes of it; None: it lands later.

    Cancelled, the work goes on in the background if somebody follows, for ``max_run`` seconds at
    most. Otherwise it is cancelled as well, and the lease lapses by itself: a thread that it waited
    for may still be running.
    """
    if max_run <= 0:
        return await _lead(flight, work, freight, freight_of_error)
    task = asyncio.ensure_future(_lead(flight, work, freight, freight_of_error))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            in_background(_go_on(flight, task, max_run))
        # It isn't this caller's any more: another call from here is not a nested one.
        leave(flight.lease)
        raise


async def _lead(
    flight: Flight,
    work: Awaitable[Any],
    freight: Callable[[Any], Freight | None],
    freight_of_error: Callable[[BaseException], Freight],
) -> Landed:
    try:
        result = await work
        load = freight(result)
    except BaseException as error:
        if _is_given_up(error):
            lapse(flight, closing=isinstance(error, GeneratorExit))
        else:
            await arun(land(flight, *freight_of_error(error)))
        raise
    return Landed(result, True if load is None else await arun(land(flight, *load)))


def _is_given_up(error: BaseException) -> bool:
    """Whether nobody awaits the work any more, which may go on in a thread."""
    if isinstance(error, GeneratorExit):
        # Nor may anything else be awaited here.
        return True
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _go_on(flight: Flight, task: asyncio.Task[Landed], max_run: float) -> None:
    if await _followed(flight):
        await asyncio.wait([task], timeout=max_run)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        # Told to its followers already; read here, so that asyncio doesn't report it once more.
        task.exception()


async def _followed(flight: Flight) -> bool:
    if flight.local is not None and flight.local.has_passengers:
        return True
    try:
        followed: bool = await flight.lease.store.afollowed(flight.key)
    except StoreUnavailableError:
        # Nobody else could be told of the outcome.
        return False
    return followed
