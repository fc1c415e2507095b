"""``semaphore_lock``'s options, and what it says when a lease can't be had."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from inspect import isawaitable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from singleflight_django import signals
from singleflight_django.conf import conf
from singleflight_django.constraints import Duplicates, OnDuplicate, aanswered, answered
from singleflight_django.exceptions import (
    LeaseConflictError,
    SingleFlightError,
    StoreUnavailableError,
)
from singleflight_django.guards import (
    ON_STORE_ERROR,
    Guard,
    Options,
    Seconds,
    as_float,
    check_choice,
    checked_methods,
)
from singleflight_django.keys import KeySpec
from singleflight_django.lease import Lease
from singleflight_django.locking import Terms
from singleflight_django.responses import aproblem, problem, refusal, skip
from singleflight_django.signals import OBSERVED
from singleflight_django.violations import Violation

OnConflict = Callable[[HttpRequest, LeaseConflictError], Any]

UNSAFE_METHODS = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, kw_only=True)
class LockOptions(Options):
    """The options of ``semaphore_lock``."""

    namespace: str = "semaphore_lock"
    on_conflict: str | OnConflict = "reject"
    wait: Seconds = 0
    limit: int = 1
    methods: tuple[str, ...] = UNSAFE_METHODS
    on_store_error: str = "reject"
    unique: Any = None
    on_duplicate: str | OnDuplicate | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.namespace:
            raise ValueError(f"namespace must be a non-empty str, not {self.namespace!r}.")
        if self.wait is None:
            raise ValueError("wait must be a number of seconds or a timedelta, not None.")
        self._seconds("wait", zero=True)
        if type(self.limit) is not int or self.limit < 1:
            raise ValueError(f"limit must be a whole number of 1 or more, not {self.limit!r}.")
        object.__setattr__(self, "methods", checked_methods(self.methods))
        if not callable(self.on_conflict):
            check_choice("on_conflict", self.on_conflict, ("reject", "skip", "yield"))
        check_choice("on_store_error", self.on_store_error, ON_STORE_ERROR)
        if self.on_duplicate is not None:
            if self.unique is None:
                raise ValueError("on_duplicate answers what unique= catches: say which constraint.")
            if not callable(self.on_duplicate):
                check_choice("on_duplicate", self.on_duplicate, ("reject", "skip"))
        # What is wrong with it shows here, not at a request.
        _ = self.duplicates

    @cached_property
    def duplicates(self) -> Duplicates | None:
        """What catches the violations of ``unique``, if that says any."""
        if self.unique is None:
            return None
        as_conflicts = "skip" if self.on_conflict == "skip" else "reject"
        return Duplicates(self.unique, self.on_duplicate or as_conflicts)

    def terms(self) -> Terms:
        """How the lease is asked for."""
        if not self.wait:
            return self._at_once
        return Terms(as_float(self.wait), self.limit, conf.SINGLEFLIGHT_POLL_INTERVAL)

    @cached_property
    def _at_once(self) -> Terms:
        return Terms(0.0, self.limit)


def lock_options(**given: Any) -> LockOptions:
    """Return checked options. A `with` is executed often: the same ones again for the same values."""
    # Whether there is such a cache depends on the settings.
    if given.get("cache") is None:
        try:
            return _remembered_options(**given)
        except TypeError:
            # Something can't be hashed. What else is wrong the check itself says.
            pass
    return LockOptions(**given)


_remembered_options = lru_cache(maxsize=256, typed=True)(LockOptions)


class Lock(Guard):
    """A key and options of ``semaphore_lock``, and what it says when a lease can't be had.

    ``answer``, if there is one, answers a conflict in the place of the option ``on_conflict``.
    """

    options: LockOptions
    variant = "lock"
    spec: KeySpec

    def __init__(
        self,
        key: Any,
        options: LockOptions,
        view: str = "",
        answer: OnConflict | None = None,
    ) -> None:
        super().__init__(options, view)
        self.spec = key if isinstance(key, KeySpec) else KeySpec(key)
        self._answer = answer

    def goes_on_without(self, error: Exception) -> bool:
        """Whether the work is to run although ``error`` says that the lease could not be had."""
        away = isinstance(error, StoreUnavailableError)
        goes_on = self.observing or (away and self.options.on_store_error == "proceed")
        # Of a conflict acquire() has told already.
        if (away or goes_on) and not isinstance(error, LeaseConflictError):
            event = "unprotected_run" if away and goes_on else "lease_rejected"
            reason = signals.STORE_AWAY if away else f"{OBSERVED}: {type(error).__name__}"
            signals.emit(event, self.facts(getattr(error, "key", ""), reason=reason))
        return goes_on

    def refusal(self, request: HttpRequest, error: SingleFlightError) -> Any:
        """Return the response to ``error``; raise it where it is a fault of the code."""
        answer = self._answer_to(error)
        chosen = answer(request, error) if answer else None
        if isawaitable(chosen):
            chosen = async_to_sync(_awaited)(chosen)
        return problem(request, error) if chosen is None else marked(chosen)

    async def arefusal(self, request: HttpRequest, error: SingleFlightError) -> Any:
        """See refusal()."""
        answer = self._answer_to(error)
        if answer and answer is not _skip and not iscoroutinefunction(answer):
            # It may query the database.
            answer = sync_to_async(answer)
        chosen = answer(request, error) if answer else None
        if isawaitable(chosen):
            chosen = await chosen
        return await aproblem(request, error) if chosen is None else marked(chosen)

    def catching(self, call: Callable[[], Any], request: HttpRequest, lease: Lease) -> Any:
        """Call a view, and answer the duplicates that ``unique`` declares."""
        duplicates = self.options.duplicates
        if duplicates is not None:
            tell = partial(self._tell_of_duplicate, lease)
            call = (
                partial(duplicates.observe, call, tell)
                if self.observing
                else partial(duplicates.catch, call, request, tell)
            )
        return answered(call, request)

    async def acatching(self, call: Callable[[], Any], request: HttpRequest, lease: Lease) -> Any:
        """See catching()."""
        duplicates = self.options.duplicates
        if duplicates is not None:
            tell = partial(self._tell_of_duplicate, lease)
            call = (
                partial(duplicates.aobserve, call, tell)
                if self.observing
                else partial(duplicates.acatch, call, request, tell)
            )
        return await aanswered(call, request)

    def _tell_of_duplicate(self, lease: Lease, violation: Violation) -> None:
        reason = violation.constraint
        self.tell(
            "duplicate_caught", lease, reason=f"{OBSERVED}: {reason}" if self.observing else reason
        )

    def _answer_to(self, error: SingleFlightError) -> Callable[..., Any] | None:
        """Return what makes the response to a conflict, if that is to be another than 429."""
        if not isinstance(error, LeaseConflictError):
            return None
        chosen = self._answer or self.options.on_conflict
        if callable(chosen):
            return chosen
        return _skip if chosen == "skip" else None


def marked(chosen: Any) -> Any:
    """Return what a user's callable answers, marked as a refusal if it is a response."""
    # A Ninja handler may answer with a value.
    return refusal(chosen) if isinstance(chosen, HttpResponseBase) else chosen


def _skip(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
    return skip()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
