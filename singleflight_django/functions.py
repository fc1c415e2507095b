"""``SingleFlight``: coalesced functions, in views, tasks and commands alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from singleflight_django.callers import Flight, Leading, Shared
from singleflight_django.calls import arguments_key, key_text
from singleflight_django.conf import conf
from singleflight_django.drivers import arun, run
from singleflight_django.exceptions import StoreUnavailableError, UnshareableResultError
from singleflight_django.flight import join
from singleflight_django.flights import APART, FlightGuard, FlightOptions, ended_its_process
from singleflight_django.guards import Seconds
from singleflight_django.landing import land
from singleflight_django.leading import Freight, lead_async
from singleflight_django.records import UNREADABLE
from singleflight_django.serializers import codec
from singleflight_django.stores.base import Kept, Status
from singleflight_django.transactions import refuse_to_wait

_Function = TypeVar("_Function", bound=Callable[..., Any])
_T = TypeVar("_T")

Key = str | tuple[object, ...]


class SingleFlight:
    """A namespace of keys; for each, at most one call is under way, and everyone gets its result.

    Like the Group of Go's singleflight, across processes and machines. It knows no user: whatever
    the value depends on, user and tenant included, belongs in the key.

    ``ttl``: life of a leader's lease in seconds, without renewal (SINGLEFLIGHT_TTL).
    ``wait``: how many seconds a follower waits at most (SINGLEFLIGHT_WAIT).
    ``result_ttl``: for how many seconds a result answers callers that come after the end
    (SINGLEFLIGHT_RESULT_TTL; 0: the next call runs again).
    ``retry``: how many failures of one flight are followed by another try.
    ``takeover``: whether a follower takes over when the leader has died.
    ``returns``: a model class: its primary key is sent, followers fetch the object themselves.
    ``serializer``: ``"json"`` or, by explicit choice, ``"pickle"``.
    ``on_lost``: ``"raise"`` LeaseLostError or ``"return"`` the result when the lease was lost.
    ``max_bytes``: largest result that is shared (SINGLEFLIGHT_MAX_BYTES).
    ``max_followers``: how many callers may wait in this process; None: any number.
    ``max_run``: for how many seconds an async leader that was cancelled goes on for its followers
    (SINGLEFLIGHT_MAX_HOLD).
    ``renew``, ``max_hold``, ``observe``, ``cache``: see ``semaphore_lock``.
    ``on_store_error``: ``"proceed"`` runs on its own when the store is away, ``"reject"`` raises,
    ``"database"`` goes to the database meanwhile.
    """

    def __init__(
        self,
        namespace: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        result_ttl: Seconds | None = None,
        retry: int = 0,
        takeover: bool = True,
        returns: Any = None,
        serializer: Literal["json", "pickle"] = "json",
        on_lost: Literal["raise", "return"] = "raise",
        max_bytes: int | None = None,
        max_followers: int | None = None,
        max_run: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        observe: bool = False,
        cache: str | None = None,
        on_store_error: Literal["reject", "proceed", "database"] = "proceed",
    ) -> None:
        if not isinstance(namespace, str) or not namespace:
            raise ValueError(f"namespace must be a non-empty str, not {namespace!r}.")
        options = FlightOptions(
            namespace=namespace,
            ttl=ttl,
            wait=wait,
            result_ttl=result_ttl,
            retry=retry,
            takeover=takeover,
            on_lost=on_lost,
            max_bytes=max_bytes,
            max_followers=max_followers,
            max_run=max_run,
            renew=renew,
            max_hold=max_hold,
            observe=observe,
            cache=cache,
            on_store_error=on_store_error,
        )
        self._guard = FlightGuard(options)
        self._codec = codec(serializer, returns)

    def run(self, key: Key, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Return ``function(*args, **kwargs)``, or the result of the call under way for ``key``.

        Raises FlightTimeoutError when ``wait`` is used up, LeaderFailedError when the leader
        raised, NestedFlightError, WaitInTransactionError, TooManyFollowersError, LeaseLostError,
        and StoreUnavailableError under ``on_store_error="reject"``; the leader's caller gets what
        ``function`` raises.
        """
        if not self._shares():
            return function(*args, **kwargs)
        flight = self._flight(key, blocking=True)
        refuse_to_wait(flight.key)
        try:
            outcome = run(join(flight))
        except StoreUnavailableError as error:
            self._excuse(error)
            return function(*args, **kwargs)
        if isinstance(outcome, Shared | Kept):
            shared = self._codec.decode(outcome.payload)
            if shared is not UNREADABLE:
                return cast(_T, shared)
        if not isinstance(outcome, Leading):
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
            freight = self._freight(flight, result)
        except BaseException as error:
            run(land(flight, *_freight_of_error(error)))
            raise
        self._guard.check_landed(flight, run(land(flight, *freight)))
        return result

    async def arun(
        self, key: Key, function: Callable[..., Awaitable[_T]], *args: Any, **kwargs: Any
    ) -> _T:
        """See run()."""
        if not self._shares():
            return await function(*args, **kwargs)
        flight = self._flight(key, blocking=False)
        refuse_to_wait(flight.key)
        try:
            outcome = await arun(join(flight))
        except StoreUnavailableError as error:
            self._excuse(error)
            return await function(*args, **kwargs)
        if isinstance(outcome, Shared | Kept):
            shared = await self._codec.adecode(outcome.payload)
            if shared is not UNREADABLE:
                return cast(_T, shared)
        if not isinstance(outcome, Leading):
            return await function(*args, **kwargs)
        landed = await lead_async(
            flight,
            _call(function, args, kwargs),
            partial(self._freight, flight),
            _freight_of_error,
            self._guard.max_run,
        )
        self._guard.check_landed(flight, landed.ours)
        return cast(_T, landed.result)

    def forget(self, key: Key) -> None:
        """Drop the result that is kept for ``key``; a flight under way goes on."""
        self._guard.store.forget(self._qualified(key))

    async def aforget(self, key: Key) -> None:
        """See forget()."""
        await self._guard.store.aforget(self._qualified(key))

    def coalesce(self, key: Any) -> Callable[[_Function], _Function]:
        """Decorate a function, sync or async, whose calls with one key are coalesced.

        ``key`` is a template whose fields are arguments of the function, or a callable with the
        function's own arguments that returns a str or a tuple.
        """

        def decorate(function: _Function) -> _Function:
            key_of = arguments_key(key, function)

            @wraps(function)
            def inner(*args: Any, **kwargs: Any) -> Any:
                return self.run(key_of(*args, **kwargs), function, *args, **kwargs)

            @wraps(function)
            async def ainner(*args: Any, **kwargs: Any) -> Any:
                return await self.arun(key_of(*args, **kwargs), function, *args, **kwargs)

            return cast(_Function, ainner if iscoroutinefunction(function) else inner)

        return decorate

    def _shares(self) -> bool:
        return conf.SINGLEFLIGHT_ENABLED is True and not self._guard.options.observe

    def _flight(self, key: Key, *, blocking: bool) -> Flight:
        return self._guard.flight(key_text(key), blocking=blocking)

    def _qualified(self, key: Key) -> str:
        return self._guard.qualified((key_text(key),))[0]

    def _excuse(self, error: StoreUnavailableError) -> None:
        policy = self._guard.options.on_store_error or "proceed"
        if not self._guard.goes_on_without(error, policy):
            raise error

    def _freight(self, flight: Flight, result: Any) -> Freight:
        """Return what to publish: the result, or that it can't be shared."""
        try:
            payload = self._codec.encode(result)
            if len(payload) > self._guard.max_bytes:
                raise UnshareableResultError(f"{len(payload)} bytes are over max_bytes")
        except Exception as error:
            reason = str(error) if isinstance(error, UnshareableResultError) else repr(error)
            flight.tell("share_refused", reason=reason)
            return Status.UNSHAREABLE, b"", 0.0, APART
        return Status.DONE, payload, self._guard.keep, 0.0


async def _call(function: Callable[..., Awaitable[_T]], args: Any, kwargs: Any) -> _T:
    # What it raises before there is anything to await is the work's failure, too.
    return await function(*args, **kwargs)


def _freight_of_error(error: BaseException) -> Freight:
    return (Status.VACANT if ended_its_process(error) else Status.FAILED), b"", 0.0, 0.0
