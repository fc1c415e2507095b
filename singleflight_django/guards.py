"""What the decorator, the context manager and the mixin share: when to lock, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from inspect import isawaitable
from typing import Any

from django.http import HttpRequest

from singleflight_django import signals
from singleflight_django.conf import conf, seconds
from singleflight_django.exceptions import (
    LeaseConflictError,
    SingleFlightError,
    StoreUnavailableError,
)
from singleflight_django.keys import KeySpec
from singleflight_django.lease import Lease
from singleflight_django.locking import Terms
from singleflight_django.parts import qualify
from singleflight_django.responses import aproblem, problem, refusal, skip
from singleflight_django.stores.registry import get_store

Seconds = float | timedelta
OnConflict = Callable[[HttpRequest, LeaseConflictError], Any]

UNSAFE_METHODS = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every guard has, checked. None stands for the setting, read at use."""

    namespace: str | None = None
    ttl: Seconds | None = None
    renew: bool = True
    max_hold: Seconds | None = None
    observe: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        self._seconds("ttl", "max_hold")
        if self.namespace is not None and (
            not isinstance(self.namespace, str) or not self.namespace
        ):
            raise ValueError(f"namespace must be a non-empty str, not {self.namespace!r}.")

    def _seconds(self, *names: str, zero: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, seconds(value, name, zero=zero))


@dataclass(frozen=True, kw_only=True)
class LockOptions(Options):
    """The options of ``semaphore_lock``."""

    namespace: str = "semaphore_lock"
    on_conflict: str | OnConflict = "reject"
    wait: Seconds = 0
    limit: int = 1
    methods: tuple[str, ...] = UNSAFE_METHODS
    on_store_error: str = "reject"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wait is None:
            raise ValueError("wait must be a number of seconds or a timedelta, not None.")
        self._seconds("wait", zero=True)
        if type(self.limit) is not int or self.limit < 1:
            raise ValueError(f"limit must be a whole number of 1 or more, not {self.limit!r}.")
        object.__setattr__(self, "methods", checked_methods(self.methods))
        if not callable(self.on_conflict):
            check_choice("on_conflict", self.on_conflict, ("reject", "skip", "yield"))
        if self.on_store_error == "database":
            raise ValueError(
                'on_store_error="database" is not there yet: use "reject" or "proceed".'
            )
        check_choice("on_store_error", self.on_store_error, ("reject", "proceed"))

    def terms(self) -> Terms:
        """How the lease is asked for."""
        return Terms(as_float(self.wait), self.limit, conf.SINGLEFLIGHT_POLL_INTERVAL)


class Guard:
    """A namespace of keys and its options: makes leases, and tells what happens to them."""

    def __init__(self, options: Options, view: str = "") -> None:
        self.options = options
        self.view = view

    @property
    def namespace(self) -> str:
        """What keeps the keys apart from those of other guards."""
        return self.options.namespace or self.view

    def lease(self, keys: tuple[str, ...]) -> Lease:
        """Return a lease for ``keys`` that nobody has asked the store for yet."""
        options = self.options
        ttl = conf.SINGLEFLIGHT_TTL if options.ttl is None else as_float(options.ttl)
        longest = options.max_hold
        max_hold = conf.SINGLEFLIGHT_MAX_HOLD if longest is None else as_float(longest)
        return Lease(
            get_store(options.cache),
            self.qualified(keys),
            ttl,
            max_hold=max_hold if options.renew else 0.0,
            emit=self.tell,
        )

    def unprotected(self, keys: tuple[str, ...]) -> Lease:
        """Return a lease that no store knows of."""
        return Lease.unprotected(self.qualified(keys), self.tell)

    def qualified(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Put ``keys`` into the namespace."""
        return tuple(qualify(self.namespace, key) for key in keys)

    @property
    def observing(self) -> bool:
        """Whether nothing is to be refused or shared, only told."""
        return self.options.observe or conf.SINGLEFLIGHT_ENABLED == "observe"

    def tell(self, name: str, lease: Lease, **facts: Any) -> None:
        """Emit the event ``name`` about ``lease``."""
        if signals.heard(name, facts.get("reason", "")):
            if lease.acquired and len(lease.keys) == 1:
                facts["fence"] = lease.fences[lease.keys[0]]
            signals.emit(name, self.facts(lease.key, **facts))

    def facts(self, key: str, **facts: Any) -> signals.Facts:
        """What is known about an event, this guard included."""
        return signals.Facts(key, self.namespace, self.view, **facts)


class Lock(Guard):
    """A key and options of ``semaphore_lock``, and what it says when a lease can't be had."""

    options: LockOptions

    def __init__(self, key: Any, options: LockOptions, view: str = "") -> None:
        super().__init__(options, view)
        self.spec = KeySpec(key)

    def goes_on_without(self, error: SingleFlightError) -> bool:
        """Whether the work is to run although ``error`` says that the lease could not be had."""
        away = isinstance(error, StoreUnavailableError)
        reason = signals.STORE_AWAY if away else "observe"
        if self.observing or (away and self.options.on_store_error == "proceed"):
            event = "unprotected_run" if away else "lease_rejected"
            signals.emit(event, self.facts(error.key, reason=reason))
            return True
        if away:
            signals.emit("lease_rejected", self.facts(error.key, reason=reason))
        return False

    def refusal(self, request: HttpRequest, error: SingleFlightError) -> Any:
        """Return the response to ``error``; raise it where it is a fault of the code."""
        chosen = self._chosen_answer(request, error)
        return problem(request, error) if chosen is None else refusal(chosen)

    async def arefusal(self, request: HttpRequest, error: SingleFlightError) -> Any:
        """See refusal()."""
        chosen = self._chosen_answer(request, error)
        if isawaitable(chosen):
            chosen = await chosen
        return await aproblem(request, error) if chosen is None else refusal(chosen)

    def _chosen_answer(self, request: HttpRequest, error: SingleFlightError) -> Any:
        """Return what ``on_conflict`` answers to a conflict, or None."""
        if not isinstance(error, LeaseConflictError):
            return None
        on_conflict = self.options.on_conflict
        if callable(on_conflict):
            return on_conflict(request, error)
        return skip() if on_conflict == "skip" else None


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError, naming the choices, if ``value`` is none of them."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {known}, not {value!r}.")


def checked_methods(methods: object) -> tuple[str, ...]:
    """Return ``methods`` as a tuple; raise if it isn't a collection of upper-case HTTP methods."""
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise TypeError(f'methods must be a tuple like ("POST", "PUT"), not {methods!r}.')
    checked = tuple(methods)
    for method in checked:
        if not isinstance(method, str) or not method.isupper():
            raise ValueError(f'methods are written like ("POST", "PUT"); {method!r} is not one.')
    if not checked:
        raise ValueError("methods is empty: the guard would never be used.")
    return checked


def as_float(seconds: Seconds) -> float:
    """Return checked seconds as what they are since ``Options`` has checked them."""
    return seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
