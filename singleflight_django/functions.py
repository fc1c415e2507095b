"""``SingleFlight``: coalesced functions, in views, tasks and commands alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet

from asgiref.sync import iscoroutinefunction

from singleflight_django.callers import Flight
from singleflight_django.calls import arguments_key, key_text
from singleflight_django.conf import conf
from singleflight_django.flight_calls import CallGuard, acalled, called
from singleflight_django.flights import FlightOptions
from singleflight_django.guards import Seconds
from singleflight_django.serializers import codec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_T = TypeVar("_T")

Key = str | tuple[object, ...]

# Those of each SingleFlight that is in use, for ``manage.py check``.
made: WeakSet[CallGuard] = WeakSet()

# What to do about results that are not shared, by how they are sent.
_CURES = {
    "json": 'Return what JSON gives back equal, or choose serializer="pickle", or returns=Model.',
    "pickle": "Return what pickle can carry.",
    "model": "Return a saved instance of the model that returns= says.",
}


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
    ``observe``: let every call run, and only tell which of them would have been followers.
    ``renew``, ``max_hold``, ``cache``: see ``semaphore_lock``.
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
        values = codec(serializer, returns)
        cure = _CURES["model" if returns is not None else serializer]
        self._guard = CallGuard(options, values, cure)
        made.add(self._guard)

    def run(self, key: Key, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Return ``function(*args, **kwargs)``, or the result of the call under way for ``key``.

        Raises FlightTimeoutError when ``wait`` is used up, LeaderFailedError when the leader
        raised, NestedFlightError, WaitInTransactionError, TooManyFollowersError, LeaseLostError,
        and StoreUnavailableError under ``on_store_error="reject"``; the leader's caller gets what
        ``function`` raises.
        """
        return self._run(lambda: key, partial(function, *args, **kwargs))

    async def arun(
        self, key: Key, function: Callable[..., Awaitable[_T]], *args: Any, **kwargs: Any
    ) -> _T:
        """See run().

        The loop's own thread has no transaction, but if ``async_to_sync`` runs this coroutine, the
        thread that called it may: then WaitInTransactionError is raised, too.
        """
        return await self._arun(lambda: key, partial(function, *args, **kwargs))

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
                call = partial(function, *args, **kwargs)
                return self._run(partial(key_of, *args, **kwargs), call)

            @wraps(function)
            async def ainner(*args: Any, **kwargs: Any) -> Any:
                call = partial(function, *args, **kwargs)
                return await self._arun(partial(key_of, *args, **kwargs), call)

            return cast(_Function, ainner if iscoroutinefunction(function) else inner)

        return decorate

    def _run(self, key_of: Callable[[], Key], work: Callable[[], _T]) -> _T:
        if conf.SINGLEFLIGHT_ENABLED is False:
            return work()
        return called(self._guard, partial(self._flight, key_of, blocking=True), work)

    async def _arun(self, key_of: Callable[[], Key], work: Callable[[], Awaitable[_T]]) -> _T:
        if conf.SINGLEFLIGHT_ENABLED is False:
            return await work()
        return await acalled(self._guard, partial(self._flight, key_of, blocking=False), work)

    def _flight(self, key_of: Callable[[], Key], *, blocking: bool) -> Flight:
        return self._guard.flight(key_text(key_of()), blocking=blocking)

    def _qualified(self, key: Key) -> str:
        return self._guard.qualified((key_text(key),))[0]
