"""A coalesced call, sync and async: join the flight, then lead it or return what its leader did."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

from singleflight_django.callers import Flight, Leading, Outcome, Shared
from singleflight_django.drivers import arun, run
from singleflight_django.exceptions import StoreUnavailableError, UnshareableResultError
from singleflight_django.flight import join
from singleflight_django.flights import APART, FlightGuard, FlightOptions, ended_its_process
from singleflight_django.landing import land
from singleflight_django.leading import Freight, lead_async
from singleflight_django.observing import aobserved_run, observed_run
from singleflight_django.records import UNREADABLE
from singleflight_django.serializers import Codec
from singleflight_django.stores.base import Kept, Status
from singleflight_django.transactions import arefuse_to_wait, refuse_to_wait

_T = TypeVar("_T")

logger = logging.getLogger("singleflight_django")

# The namespaces and types that a warning has been given of, each by whoever came first.
_warned: dict[tuple[str, str], object] = {}


class CallGuard(FlightGuard):
    """A namespace of coalesced calls. ``cure``: what to do about values that ``codec`` can't carry."""

    def __init__(self, options: FlightOptions, codec: Codec, cure: str) -> None:
        super().__init__(options)
        self.codec, self._cure = codec, cure

    def excuse(self, error: StoreUnavailableError) -> None:
        """Raise ``error`` unless the work is to run without the store."""
        if not self.goes_on_without(error, self.options.on_store_error or "proceed"):
            raise error

    def freight(self, flight: Flight, result: Any) -> Freight:
        """Return what to publish: the result, or that it can't be shared."""
        try:
            payload = self.codec.encode(result)
        except Exception as error:
            reason = str(error) if isinstance(error, UnshareableResultError) else repr(error)
            self._warn_once(result, reason)
        else:
            if len(payload) <= self.max_bytes:
                return Status.DONE, payload, self.keep, 0.0
            reason = f"{len(payload)} bytes are over max_bytes"
        flight.tell("share_refused", reason=reason)
        return Status.UNSHAREABLE, b"", 0.0, APART

    def _warn_once(self, result: Any, reason: str) -> None:
        kind, mine = type(result).__qualname__, object()
        if _warned.setdefault((self.namespace, kind), mine) is mine:
            logger.warning(
                "SingleFlight(%r): a result of the type %s can't be shared, so its callers run one "
                "by one, each on its own. %s (%s)",
                self.namespace,
                kind,
                self._cure,
                reason,
            )


def called(guard: CallGuard, flight_of: Callable[[], Flight], work: Callable[[], _T]) -> _T:
    """Return what ``work()`` does, or the result of the call under way."""
    if guard.observing:
        return observed_run(guard, flight_of, work)
    try:
        flight = flight_of()
        refuse_to_wait(flight.key)
        outcome: Outcome = run(join(flight))
    except StoreUnavailableError as error:
        guard.excuse(error)
        return work()
    if isinstance(outcome, Shared | Kept):
        shared = guard.codec.decode(outcome.payload)
        if shared is not UNREADABLE:
            return cast(_T, shared)
    if not isinstance(outcome, Leading):
        return work()
    try:
        result = work()
        freight = guard.freight(flight, result)
    except BaseException as error:
        run(land(flight, *_freight_of_error(error)))
        raise
    guard.check_landed(flight, run(land(flight, *freight)))
    return result


async def acalled(
    guard: CallGuard, flight_of: Callable[[], Flight], work: Callable[[], Awaitable[_T]]
) -> _T:
    """See called()."""
    if guard.observing:
        return await aobserved_run(guard, flight_of, work)
    try:
        flight = flight_of()
        await arefuse_to_wait(flight.key)
        outcome: Outcome = await arun(join(flight))
    except StoreUnavailableError as error:
        guard.excuse(error)
        return await work()
    if isinstance(outcome, Shared | Kept):
        shared = await guard.codec.adecode(outcome.payload)
        if shared is not UNREADABLE:
            return cast(_T, shared)
    if not isinstance(outcome, Leading):
        return await work()
    landed = await lead_async(
        flight, _call(work), partial(guard.freight, flight), _freight_of_error, guard.max_run
    )
    guard.check_landed(flight, landed.ours)
    return cast(_T, landed.result)


async def _call(work: Callable[[], Awaitable[_T]]) -> _T:
    # What it raises before there is anything to await is the work's failure, too.
    return await work()


def _freight_of_error(error: BaseException) -> Freight:
    return (Status.VACANT if ended_its_process(error) else Status.FAILED), b"", 0.0, 0.0
