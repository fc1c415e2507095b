"""``semaphore_lock``: a decorator for views, and a context manager for everything else."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest

from singleflight_django.coalescing import ALL_METHODS, Coalescer, ViewOptions
from singleflight_django.conf import conf
from singleflight_django.drivers import arun, run
from singleflight_django.exceptions import LeaseConflictError, SingleFlightError
from singleflight_django.flight_views import flight_view
from singleflight_django.guards import UNSAFE_METHODS, Lock, LockOptions, OnConflict, Seconds
from singleflight_django.holding import outlives, was_cancelled
from singleflight_django.lease import Lease
from singleflight_django.locking import acquire, lapse, release
from singleflight_django.placement import (
    dispatches_async,
    expose,
    refuse_misplaced,
    split,
    view_name,
)
from singleflight_django.principals import Scope
from singleflight_django.transactions import (
    give_back,
    give_back_ended,
    opt_out,
    refuse_to_wait,
    with_transactions,
)

_View = TypeVar("_View", bound=Callable[..., Any])


class semaphore_lock:  # noqa: N801 - reads as a function, like Django's own decorators
    """One caller enters; a concurrent duplicate is a conflict.

    On a view: ``@semaphore_lock(key="lesson:<uuid>")`` answers a conflict with 429, with 204 if
    ``on_conflict="skip"``, or with what a callable ``on_conflict(request, conflict)`` returns.
    Elsewhere: ``with semaphore_lock("import:7") as lease:`` (or ``async with``) raises
    LeaseConflictError, or with ``on_conflict="yield"`` enters with ``lease.acquired`` False.

    ``key``: a template such as ``"lesson:<uuid>"``; a callable ``(request, *args, **kwargs)`` that
    returns a str or a tuple (one key) or a list (several keys, all or none); or a list of these.
    ``ttl``: life of the lease in seconds, without renewal: the net for a crash (SINGLEFLIGHT_TTL).
    ``namespace``: keeps keys apart that happen to be the same text.
    ``wait``: how many seconds to wait for the lease before it is a conflict.
    ``limit``: how many may hold it at once.
    ``methods``: HTTP methods that are guarded; the others pass.
    ``renew``, ``max_hold``: whether the lease is renewed while the work goes on, and for how many
    seconds at most (SINGLEFLIGHT_MAX_HOLD).
    ``observe``: refuse nothing, only tell what would have been refused.
    ``cache``: the alias of the cache that keeps the leases (SINGLEFLIGHT_CACHE).
    ``on_store_error``: ``"reject"`` answers 503 when the store is away, ``"proceed"`` runs
    unprotected and says so.

    Raises TypeError or ValueError for options that can't work; NestedFlightError where the same
    context holds the key already; in a ``with`` also LeaseConflictError and StoreUnavailableError.
    """

    def __init__(
        self,
        key: Any,
        *,
        ttl: Seconds | None = None,
        namespace: str = "semaphore_lock",
        on_conflict: Literal["reject", "skip", "yield"] | OnConflict = "reject",
        wait: Seconds = 0,
        limit: int = 1,
        methods: tuple[str, ...] = UNSAFE_METHODS,
        renew: bool = True,
        max_hold: Seconds | None = None,
        observe: bool = False,
        cache: str | None = None,
        on_store_error: Literal["reject", "proceed"] = "reject",
    ) -> None:
        options = LockOptions(
            ttl=ttl,
            namespace=namespace,
            on_conflict=on_conflict,
            wait=wait,
            limit=limit,
            methods=methods,
            renew=renew,
            max_hold=max_hold,
            observe=observe,
            cache=cache,
            on_store_error=on_store_error,
        )
        self._lock = Lock(key, options)
        self._entered: list[Lease] = []

    def __call__(self, view: _View) -> _View:
        """Guard ``view``."""
        if isinstance(view, type):
            raise TypeError(
                "semaphore_lock can't decorate a class: use "
                '@method_decorator(semaphore_lock(...), name="post") or SemaphoreLockMixin.'
            )
        if self._lock.options.on_conflict == "yield":
            raise ValueError('on_conflict="yield" is for `with`: a view uses "reject" or "skip".')
        return lock_view(view, self._lock)

    def __enter__(self) -> Lease:
        keys = self._keys()
        if conf.SINGLEFLIGHT_ENABLED is False:
            return self._enter(self._lock.unprotected(keys))
        lease = self._lock.lease(keys)
        try:
            take(lease, self._lock)
        except SingleFlightError as error:
            lease = self._excuse(error, lease, keys)
        return self._enter(lease)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        give_back(self._leave())

    async def __aenter__(self) -> Lease:
        keys = self._keys()
        if conf.SINGLEFLIGHT_ENABLED is False:
            return self._enter(self._lock.unprotected(keys))
        lease = self._lock.lease(keys)
        try:
            await arun(acquire(lease, self._lock.options.terms()))
        except SingleFlightError as error:
            lease = self._excuse(error, lease, keys)
        return self._enter(lease)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease = self._leave()
        if error is not None and was_cancelled(error):
            lapse(lease)
        else:
            await arun(release(lease))

    def _keys(self) -> tuple[str, ...]:
        if self._lock.options.on_conflict not in ("reject", "yield"):
            raise ValueError(
                'In a `with` on_conflict is "reject" (LeaseConflictError) or "yield" (look at '
                "lease.acquired): there is no response to answer with."
            )
        return self._lock.spec.static_keys()

    def _excuse(self, error: SingleFlightError, lease: Lease, keys: tuple[str, ...]) -> Lease:
        """Return the lease to enter with in spite of ``error``, or raise it."""
        if self._lock.goes_on_without(error):
            return self._lock.unprotected(keys)
        if isinstance(error, LeaseConflictError) and self._lock.options.on_conflict == "yield":
            return lease
        raise error

    # One object may be entered by many threads and tasks: each finds its own lease in its context.
    def _enter(self, lease: Lease) -> Lease:
        self._entered.append(lease)
        _entered.set((*_entered.get(), (self, lease)))
        return lease

    def _leave(self) -> Lease:
        stack = _entered.get()
        mine = [entry for entry in stack if entry[0] is self and entry[1] in self._entered]
        # Left in another context than entered in, by whoever closed the generator around it: of the
        # leases of this one key, take the one that least can be somebody else's.
        lease = mine[-1][1] if mine else min(self._entered, key=lambda lease: lease.held)
        self._entered.remove(lease)
        _entered.set(tuple(entry for entry in stack if entry[1] is not lease))
        return lease


def single_flight(
    key: Any,
    *,
    ttl: Seconds | None = None,
    wait: Seconds | None = None,
    result_ttl: Seconds | None = None,
    namespace: str | None = None,
    scope: Scope = "user",
    vary: tuple[str, ...] = (),
    methods: tuple[str, ...] = ALL_METHODS,
    retry: int = 0,
    takeover: bool = True,
    authorize: Callable[[Any], Any] | None = None,
    on_timeout: Callable[[Any], Any] | None = None,
    on_unshareable: Callable[[Any], Any] | None = None,
    on_lost: Literal["raise", "return"] = "raise",
    max_bytes: int | None = None,
    max_followers: int | None = None,
    max_run: Seconds | None = None,
    renew: bool = True,
    max_hold: Seconds | None = None,
    observe: bool = False,
    cache: str | None = None,
    on_store_error: Literal["reject", "proceed"] | None = None,
) -> Callable[[_View], _View]:
    """One of several concurrent requests with one identity runs the view; all get its response.

    ``key``: a template such as ``"lesson:<uuid>"``, or a callable ``(request, *args, **kwargs)``
    that returns a str or a tuple.
    ``ttl``: life of the leader's lease in seconds, without renewal (SINGLEFLIGHT_TTL).
    ``wait``: how many seconds a follower waits before it is answered 504 (SINGLEFLIGHT_WAIT).
    ``result_ttl``: for how many seconds a response answers callers that come after the flight's
    end (SINGLEFLIGHT_RESULT_TTL; 0: the next one runs the view again).
    ``namespace``: default: the view's qualified name.
    ``scope``: who may share: one caller with itself ("user"), everybody ("global"), or those for
    whom a callable ``(request)`` returns the same text.
    ``vary``: names of more headers that make another identity.
    ``methods``: HTTP methods that are coalesced; the others pass.
    ``retry``: how many failures of one flight are followed by another try.
    ``takeover``: whether a follower takes over when the leader has died; if not, 503.
    ``authorize``: a callable ``(request)`` that is asked for each follower; False: 403.
    ``on_timeout``, ``on_unshareable``: callables ``(request)`` that return the response instead of
    504, and of 409 to followers of an unsafe method whose leader's answer can't be shared.
    ``on_lost``: "raise" LeaseLostError or "return" the response when the lease was lost.
    ``max_bytes``: largest response that is shared (SINGLEFLIGHT_MAX_BYTES).
    ``max_followers``: how many may wait in this process, over it 503; default: for threads half of
    the process's, for tasks any number.
    ``max_run``: for how many seconds an async view whose client has gone goes on for its followers
    (SINGLEFLIGHT_MAX_HOLD).
    ``renew``, ``max_hold``, ``observe``, ``cache``: see ``semaphore_lock``.
    ``on_store_error``: "proceed" runs the view on its own when the store is away (default for GET
    and HEAD), "reject" answers 503 (default for the rest).

    Raises TypeError or ValueError for options that can't work; NestedFlightError where the same
    context leads the flight already; LeaseLostError; WaitInTransactionError.
    """
    options = ViewOptions(
        ttl=ttl,
        wait=wait,
        result_ttl=result_ttl,
        namespace=namespace,
        scope=scope,
        vary=vary,
        methods=methods,
        retry=retry,
        takeover=takeover,
        authorize=authorize,
        on_timeout=on_timeout,
        on_unshareable=on_unshareable,
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
    # What is wrong with the key shows here, not at the view.
    Coalescer(key, options)
    return lambda view: flight_view(view, Coalescer(key, options))


_entered: ContextVar[tuple[tuple[semaphore_lock, Lease], ...]] = ContextVar(
    "singleflight_entered", default=()
)


def lock_view(view: _View, lock: Lock) -> _View:
    """Return ``view`` guarded by ``lock``: of the same colour, with the same attributes."""
    refuse_misplaced(view)
    lock.view = lock.view or view_name(view)

    def unguarded(request: HttpRequest) -> bool:
        return conf.SINGLEFLIGHT_ENABLED is False or request.method not in lock.options.methods

    async def ainner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        if unguarded(request):
            return await view(*args, **kwargs)
        return await aguarded(partial(view, *args, **kwargs), lock, request, rest, kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        call = with_transactions(partial(view, *args, **kwargs), request)
        if unguarded(request):
            return call()
        enter = aguarded if dispatches_async(view, args) else guarded
        return enter(call, lock, request, rest, kwargs)

    if iscoroutinefunction(view):
        return cast(_View, wraps(view)(ainner))
    opt_out(wraps(view)(inner))
    return cast(_View, inner)


def take(lease: Lease, lock: Lock) -> None:
    """Acquire ``lease``, if it may have to be waited for outside of transactions only."""
    give_back_ended()
    terms = lock.options.terms()
    if terms.wait:
        refuse_to_wait(lease.key)
    run(acquire(lease, terms))


def guarded(
    call: Callable[[], Any], lock: Lock, request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a view under its lease, or return what refuses the request."""
    lease = None
    try:
        keys = lock.spec.keys(request, args, kwargs)
        lease = lock.lease(keys)
        take(lease, lock)
    except SingleFlightError as error:
        if not lock.goes_on_without(error):
            return lock.refusal(request, error)
        lease = lock.unprotected(lease.keys if lease else ("?",))
    expose(request, lease)
    try:
        response = call()
    except BaseException:
        give_back(lease)
        raise
    if isawaitable(response):
        return _awaited(response, lease, request)
    if not outlives(response, request, lease, partial(release, lease)):
        give_back(lease)
    return response


async def aguarded(
    call: Callable[[], Any], lock: Lock, request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """See guarded()."""
    lease = None
    try:
        keys = await lock.spec.akeys(request, args, kwargs)
        lease = lock.lease(keys)
        await arun(acquire(lease, lock.options.terms()))
    except SingleFlightError as error:
        if not lock.goes_on_without(error):
            return await lock.arefusal(request, error)
        lease = lock.unprotected(lease.keys if lease else ("?",))
    expose(request, lease)
    return await _awaited(call(), lease, request)


async def _awaited(response: Any, lease: Lease, request: Any) -> Any:
    try:
        if isawaitable(response):
            response = await response
    except BaseException as error:
        if was_cancelled(error):
            lapse(lease)
        else:
            await arun(release(lease))
        raise
    if not outlives(response, request, lease, partial(release, lease)):
        await arun(release(lease))
    return response
