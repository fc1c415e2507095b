"""How an async leader ends when its own caller goes away: for its followers the work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from singleflight_django.drivers import arun, in_background
from singleflight_django.flight import Flight, land, lapse
from singleflight_django.flights import ended_its_process
from singleflight_django.stores.base import Status

Freight = Callable[[Any], tuple[Status, bytes, float, float]]


async def complete(
    flight: Flight, work: Awaitable[Any], freight: Freight, max_run: float
) -> tuple[Any, bool]:
    """Do the work and land the flight. Returns the result, and whether the flight was ours to land.

    Cancelled, it leaves the work to the background if somebody follows, for ``max_run`` seconds at
    most; otherwise the work is cancelled as well, and the lease lapses: a thread that it was waiting
    for may still be running.
    """
    task = asyncio.ensure_future(work)
    landing = asyncio.ensure_future(_land(flight, task, freight))
    try:
        return await asyncio.shield(landing)
    except asyncio.CancelledError:
        if not landing.done():
            in_background(_go_on(flight, task, landing, max_run))
        raise


async def _land(flight: Flight, task: asyncio.Future[Any], freight: Freight) -> tuple[Any, bool]:
    try:
        result = await task
    except BaseException as error:
        await arun(land(flight, Status.VACANT if ended_its_process(error) else Status.FAILED))
        raise
    return result, await arun(land(flight, *freight(result)))


async def _go_on(
    flight: Flight, task: asyncio.Future[Any], landing: asyncio.Future[Any], max_run: float
) -> None:
    followed = flight.local is not None and flight.local.has_passengers
    if followed or await flight.lease.store.afollowed(flight.key):
        await asyncio.wait([landing], timeout=max_run)
    if not landing.done():
        lapse(flight)
        task.cancel()
        await asyncio.wait([landing])
    if not landing.cancelled():
        landing.exception()
