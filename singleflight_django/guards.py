"""What every guard has, of locks and of flights: its options, its leases, its voice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings

from singleflight_django import signals
from singleflight_django.conf import conf, seconds
from singleflight_django.keys import KeySpec
from singleflight_django.lease import Lease
from singleflight_django.parts import qualify
from singleflight_django.stores.base import Store
from singleflight_django.stores.registry import backed_by_database, get_store

Seconds = float | timedelta

ON_STORE_ERROR = ("reject", "proceed", "database")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every guard has, checked. None stands for the setting, read at use."""

    namespace: str | None = None
    ttl: Seconds | None = None
    renew: bool = True
    max_hold: Seconds | None = None
    observe: bool = False
    cache: str | None = None
    on_store_error: str | None = None

    def __post_init__(self) -> None:
        self._seconds("ttl", "max_hold")
        if self.namespace is not None and (
            not isinstance(self.namespace, str) or not self.namespace
        ):
            raise ValueError(f"namespace must be a non-empty str, not {self.namespace!r}.")
        for name in ("renew", "observe"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if self.cache is not None:
            check_choice("cache", self.cache, tuple(settings.CACHES))

    def _seconds(self, *names: str, zero: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, seconds(value, name, zero=zero))


class Guard:
    """A namespace of keys and its options: makes leases, and tells what happens to them."""

    # What events call it.
    variant = ""
    # What the keys are made of, where there is a template to tell.
    spec: KeySpec | None = None

    def __init__(self, options: Options, view: str = "") -> None:
        self.options = options
        self.view = view
        # What keeps the keys apart from those of other guards.
        self.namespace = options.namespace or view

    @property
    def methods(self) -> tuple[str, ...]:
        """The HTTP methods that are guarded."""
        methods: tuple[str, ...] = getattr(self.options, "methods", ())
        return methods

    @property
    def store(self) -> Store:
        """Where the leases and outcomes are."""
        store = get_store(self.options.cache)
        return backed_by_database(store) if self.options.on_store_error == "database" else store

    def lease(self, keys: tuple[str, ...]) -> Lease:
        """Return a lease for ``keys`` that nobody has asked the store for yet."""
        options = self.options
        ttl = conf.SINGLEFLIGHT_TTL if options.ttl is None else as_float(options.ttl)
        longest = options.max_hold
        max_hold = conf.SINGLEFLIGHT_MAX_HOLD if longest is None else as_float(longest)
        return Lease(
            self.store,
            self.qualified(keys),
            ttl,
            max_hold=max_hold if options.renew else 0.0,
            emit=self.tell,
        )

    def unprotected(self, keys: tuple[str, ...] = ("?",)) -> Lease:
        """Return a lease that no store knows of, and of which there is nothing to tell."""
        return Lease.unprotected(self.qualified(keys), lambda *args, **facts: None)

    def qualified(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Put ``keys`` into the namespace."""
        namespace = self.namespace
        return tuple([qualify(namespace, key) for key in keys])

    @property
    def observing(self) -> bool:
        """Whether nothing is to be refused or shared, only told."""
        return self.options.observe or conf.SINGLEFLIGHT_ENABLED == "observe"

    def tell(self, name: str, lease: Lease, **facts: Any) -> None:
        """Emit the event ``name`` about ``lease``."""
        if signals.heard(name, facts.get("reason", "")):
            if name == "lease_rejected" and self.observing:
                facts["reason"] = signals.OBSERVED
            if lease.acquired and len(lease.keys) == 1:
                facts["fence"] = lease.fences[lease.keys[0]]
            signals.emit(name, self.facts(lease.key, **facts))

    def facts(self, key: str, **facts: Any) -> signals.Facts:
        """What is known about an event, this guard included."""
        redaction = self.spec.redaction if self.spec else None
        shown = redaction.shown(self.namespace, key) if redaction else key
        return signals.Facts(
            key, self.namespace, self.view, variant=self.variant, shown=shown, **facts
        )


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
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
