"""How a view is coalesced: what its callers share, and what they are told."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import PermissionDenied
from django.http.response import HttpResponseBase

from singleflight_django.bodies import unwrap
from singleflight_django.callers import Flight
from singleflight_django.constraints import aanswered, answered
from singleflight_django.exceptions import (
    FlightTimeoutError,
    KeyFieldError,
    SingleFlightError,
    StoreUnavailableError,
    UnshareableResultError,
)
from singleflight_django.fingerprints import afingerprint, fingerprint
from singleflight_django.flights import FlightGuard, FlightOptions
from singleflight_django.guards import checked_methods
from singleflight_django.identity import aidentity, checked_vary, identity
from singleflight_django.keys import KeySpec
from singleflight_django.lease import Lease
from singleflight_django.outcomes import replay
from singleflight_django.principals import Scope, check_scope
from singleflight_django.records import UNREADABLE
from singleflight_django.responses import aproblem, problem, refusal
from singleflight_django.transactions import Connections

ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
SAFE_METHODS = ("GET", "HEAD")

_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@dataclass(frozen=True, kw_only=True)
class ViewOptions(FlightOptions):
    """The options of ``single_flight``."""

    scope: Scope = "user"
    vary: tuple[str, ...] = ()
    methods: tuple[str, ...] = ALL_METHODS
    authorize: Callable[[Any], Any] | None = None
    on_timeout: Callable[[Any], Any] | None = None
    on_unshareable: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.scope)
        object.__setattr__(self, "vary", checked_vary(self.vary))
        object.__setattr__(self, "methods", checked_methods(self.methods))
        for name in ("authorize", "on_timeout", "on_unshareable"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a callable (request), not {value!r}.")


class Coalescer(FlightGuard):
    """A key and options of ``single_flight``, and what becomes of one request under them."""

    options: ViewOptions
    spec: KeySpec

    def __init__(self, key: Any, options: ViewOptions, view: str = "") -> None:
        super().__init__(options, view)
        if isinstance(key, list):
            raise TypeError("A flight has one key: write one template, or a callable for one.")
        self.spec = key if isinstance(key, KeySpec) else KeySpec(key)

    def flight_of(self, request: Any, args: tuple[Any, ...], kwargs: Any) -> Flight | None:
        """Return the request's part in its flight; None if its body can't be compared."""
        keys = self.spec.keys(request, args, kwargs)
        print_ = fingerprint(request)
        if print_ is None:
            return None
        who = identity(request, self.options.scope, self.options.vary)
        flight = self.flight(
            _one(keys, who),
            fingerprint=print_,
            blocking=True,
            max_followers=_half_of_the_workers(),
        )
        flight.ballast = Connections()
        return flight

    async def aflight_of(self, request: Any, args: tuple[Any, ...], kwargs: Any) -> Flight | None:
        """See flight_of()."""
        keys = await self.spec.akeys(request, args, kwargs)
        print_ = await afingerprint(request)
        if print_ is None:
            return None
        who = await aidentity(request, self.options.scope, self.options.vary)
        flight = self.flight(_one(keys, who), fingerprint=print_, blocking=False)
        flight.ballast = Connections()
        return flight

    def runs_without(self, request: Any, error: SingleFlightError) -> bool:
        """Whether the view is to run on its own although ``error`` came up."""
        if not isinstance(error, StoreUnavailableError):
            return False
        default = "proceed" if request.method in SAFE_METHODS else "reject"
        return self.goes_on_without(error, self.options.on_store_error or default)

    def catching(self, call: Callable[[], Any], request: Any, lease: Lease) -> Any:
        """Call the view where its answer is for its own caller alone."""
        return answered(call, request)

    async def acatching(self, call: Callable[[], Any], request: Any, lease: Lease) -> Any:
        """See catching()."""
        return await aanswered(call, request)

    def refusal(self, request: Any, error: SingleFlightError) -> Any:
        """Return the response to ``error``; raise it where it is a fault of the code."""
        chosen = self._chosen_answer(request, error)
        return problem(request, error) if chosen is None else refusal(chosen)

    async def arefusal(self, request: Any, error: SingleFlightError) -> Any:
        """See refusal()."""
        chosen = await self._achosen_answer(request, error)
        return await aproblem(request, error) if chosen is None else refusal(chosen)

    def _chosen_answer(self, request: Any, error: SingleFlightError) -> Any:
        if isinstance(error, FlightTimeoutError) and self.options.on_timeout:
            return self.options.on_timeout(request)
        if isinstance(error, UnshareableResultError) and self.options.on_unshareable:
            return self.options.on_unshareable(request)
        return None

    async def _achosen_answer(self, request: Any, error: SingleFlightError) -> Any:
        if not (self.options.on_timeout or self.options.on_unshareable):
            return None
        was_forgotten = await read_session_again(request)
        chosen = self._chosen_answer(request, error)
        if isawaitable(chosen):
            chosen = await chosen
        if was_forgotten:
            # Its leader has yet to save it.
            forget_session(request)
        return chosen

    def authorize(self, request: Any) -> Any:
        """Ask ``authorize`` whether this caller may have what another one was answered."""
        return True if self.options.authorize is None else self.options.authorize(request)

    async def aauthorize(self, request: Any) -> Any:
        """See authorize()."""
        if self.options.authorize is None or iscoroutinefunction(self.options.authorize):
            if self.options.authorize is not None:
                await read_session_again(request)
            allowed = self.authorize(request)
            return await allowed if isawaitable(allowed) else allowed
        return await sync_to_async(self.authorize)(request)


def shared(request: Any, payload: bytes, how: str) -> Any:
    """Return, or raise, what the leader's caller got. UNREADABLE if the record can't be read.

    Raises UnshareableResultError where that leaves a caller of an unsafe method without an answer.
    """
    result = replay(payload)
    if result is not UNREADABLE:
        tell_cache_status(result, how)
    elif request.method not in SAFE_METHODS:
        raise UnshareableResultError("The leader's answer can't be read here.")
    return result


def tell_cache_status(result: Any, how: str) -> None:
    """Say in the header of RFC 9211 where the answer came from. A bare value has no headers."""
    if isinstance(result, HttpResponseBase):
        line = f"singleflight; {how}"
        before = result.headers.get("Cache-Status")
        result.headers["Cache-Status"] = f"{before}, {line}" if before else line


def refuse_unauthorized(allowed: Any) -> None:
    """Raise PermissionDenied if ``authorize`` said no."""
    if not allowed:
        raise PermissionDenied("This caller may not have the answer that another one got.")


def forget_session(request: Any) -> None:
    """Forget a session that was read before a wait: the leader may have changed it since.

    It is read again when somebody wants it, as late as can be: its leader has yet to save it.
    """
    session = getattr(unwrap(request), "session", None)
    if session is not None and not getattr(session, "modified", True):
        vars(session).pop("_session_cache", None)


async def read_session_again(request: Any) -> bool:
    """Read a session that was forgotten, before sync code on the event loop may want it.

    Return whether it was.
    """
    session = getattr(unwrap(request), "session", None)
    if getattr(session, "accessed", False) and not hasattr(session, "_session_cache"):
        await unwrap(request).session.aget("")
        return True
    return False


def _half_of_the_workers() -> int:
    """Return how many threads may wait: the other half is for other requests."""
    # Its fellow workers are called as it is, but for the last number: "ThreadPoolExecutor-0_3".
    # Other threads of the process (the keeper's, a monitor's) answer no requests.
    pool = _LAST_NUMBER.sub("", threading.current_thread().name)
    names = [_LAST_NUMBER.sub("", thread.name) for thread in threading.enumerate()]
    return max(2, names.count(pool) // 2)


def _one(keys: tuple[str, ...], who: str) -> str:
    if len(keys) != 1:
        raise KeyFieldError("A flight has one key, and the callable returned several.")
    return f"{keys[0]}#{who}"
