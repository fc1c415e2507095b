"""What a view's leader publishes: its outcome, or that it isn't for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from django.http.response import HttpResponseBase

from singleflight_django.callers import Flight
from singleflight_django.coalescing import SAFE_METHODS, Coalescer, tell_cache_status
from singleflight_django.exceptions import UnshareableResultError
from singleflight_django.flights import APART, ended_its_process
from singleflight_django.leading import Freight
from singleflight_django.outcomes import freeze_result
from singleflight_django.raised import freeze_raised, status_of_raised
from singleflight_django.sharing import (
    NEVER_SHARED,
    Traces,
    is_failure,
    is_never_shared,
    may_be_kept,
    traces,
    why_not,
)
from singleflight_django.stores.base import Status
from singleflight_django.values import touched


class Call(NamedTuple):
    """The call that leads a flight, as it was before the view ran."""

    guard: Coalescer
    flight: Flight
    request: Any
    kwargs: Mapping[str, Any]
    before: Traces

    @classmethod
    def begin(
        cls, guard: Coalescer, flight: Flight, request: Any, kwargs: Mapping[str, Any]
    ) -> Call:
        """Note what its request has done so far."""
        return cls(guard, flight, request, kwargs, traces(request))

    def freight(self, result: Any) -> Freight:
        """Return what is published of what the view returned, which tells its own client, too.

        Raises nothing: the flight has to land, and the leader's client has an answer.
        """
        freight = self._freight(result)
        if not getattr(result, "streaming", False):
            done = freight[0] == Status.DONE
            tell_cache_status(result, "fwd=miss; stored" if done else "fwd=miss")
        return freight

    def _freight(self, result: Any) -> Freight:
        try:
            # Our own 503 tells of no failure of the view's.
            if is_never_shared(result):
                return Status.AGAIN, b"", 0.0, 0.0
            if is_failure(result):
                return Status.FAILED, b"", 0.0, 0.0
            reason = self._why_not(result)
            if not reason:
                payload = freeze_result(result, method=self.request.method)
                keep = self.guard.keep if may_be_kept(result) else 0.0
                return Status.DONE, payload, keep, 0.0
        except UnshareableResultError as error:
            reason = str(error)
        except Exception as error:
            reason = repr(error)
        self.flight.tell("share_refused", reason=reason)
        # Not as a failure: the view has done its work, which nobody is to do again.
        apart = APART if self.request.method in SAFE_METHODS else 0.0
        return Status.UNSHAREABLE, b"", 0.0, apart

    def _why_not(self, result: Any) -> str:
        if not isinstance(result, HttpResponseBase) and touched(self.kwargs):
            return "headers beside a value"
        options = self.guard.options
        return why_not(
            self.request,
            result,
            options.scope,
            vary=options.vary,
            before=self.before,
            max_bytes=self.guard.max_bytes,
        )


def freight_of_error(error: BaseException) -> Freight:
    """Return what is published of what the view raised. Raises nothing, either."""
    if ended_its_process(error):
        return Status.VACANT, b"", 0.0, 0.0
    if status_of_raised(error) in NEVER_SHARED:
        return Status.AGAIN, b"", 0.0, 0.0
    try:
        payload = freeze_raised(error)
    except Exception:
        # The texts of an exception may be anything's str().
        payload = None
    if payload is None:
        return Status.FAILED, b"", 0.0, 0.0
    return Status.DONE, payload, 0.0, 0.0
