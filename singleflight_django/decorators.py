"""``semaphore_lock``, for views and for ``with``, and ``single_flight``, for views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from singleflight_django.coalescing import ALL_METHODS, Coalescer, ViewOptions
from singleflight_django.constraints import OnDuplicate
from singleflight_django.entering import lock_view
from singleflight_django.flight_views import flight_view
from singleflight_django.guards import Seconds
from singleflight_django.locks import UNSAFE_METHODS, Lock, OnConflict, lock_options
from singleflight_django.placement import refuse_misplaced, view_name, with_resolved_signature
from singleflight_django.principals import Scope
from singleflight_django.sections import Section

_View = TypeVar("_View", bound=Callable[..., Any])


class semaphore_lock(Section):  # noqa: N801 - reads as a function, like Django's own decorators
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
    ``unique``: unique constraints, as ``"lessons.LessonSession.uuid"``, a tuple of fields
    ``("lessons.LessonSession.user", "day")``, a constraint's name, or a list of these. Their
    violation in the view is a duplicate, too: what a sync view wrote is rolled back (in an async
    one earlier writes stay), and the answer is 409, or 204 if ``on_conflict="skip"``. A deadlock or
    a serialization failure there is a 503.
    ``on_duplicate``: that answer: "reject", "skip", or a callable ``(request, violation)`` that
    returns it; ``violation.existing(uuid=...)`` is the row that won.
    ``renew``, ``max_hold``: whether the lease is renewed while the work goes on, and for how many
    seconds at most (SINGLEFLIGHT_MAX_HOLD).
    ``observe``: refuse nothing, only tell what would have been refused.
    ``cache``: the alias of the cache that keeps the leases (SINGLEFLIGHT_CACHE).
    ``on_store_error``: ``"reject"`` answers 503 when the store is away, ``"proceed"`` runs
    unprotected and says so, ``"database"`` goes to the database meanwhile.

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
        unique: Any = None,
        on_duplicate: Literal["reject", "skip"] | OnDuplicate | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        observe: bool = False,
        cache: str | None = None,
        on_store_error: Literal["reject", "proceed", "database"] = "reject",
    ) -> None:
        options = lock_options(
            ttl=ttl,
            namespace=namespace,
            on_conflict=on_conflict,
            wait=wait,
            limit=limit,
            methods=methods,
            unique=unique,
            on_duplicate=on_duplicate,
            renew=renew,
            max_hold=max_hold,
            observe=observe,
            cache=cache,
            on_store_error=on_store_error,
        )
        super().__init__(Lock(key, options))

    def __call__(self, view: _View) -> _View:
        """Guard ``view``."""
        refuse_misplaced(view)
        options = self._lock.options
        if options.on_conflict == "yield":
            raise ValueError('on_conflict="yield" is for `with`: a view uses "reject" or "skip".')
        guarded = lock_view(view, Lock(self._lock.spec, options, view_name(view)))
        return with_resolved_signature(guarded, view)


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
    on_store_error: Literal["reject", "proceed", "database"] | None = None,
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
    and HEAD), "reject" answers 503 (default for the rest), "database" goes to the database.

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
    spec = Coalescer(key, options).spec

    def decorate(view: _View) -> _View:
        refuse_misplaced(view)
        guarded = flight_view(view, Coalescer(spec, options, view_name(view)))
        return with_resolved_signature(guarded, view)

    return decorate
