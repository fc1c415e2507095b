"""What the settings say of the cache in use. No cache is made of them: none is connected to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.conf import settings
from django.utils.module_loading import import_string

from singleflight_django.checks.base import setting
from singleflight_django.stores.registry import REDIS_BACKENDS

_GOOD = "an alias of a Redis, Valkey or memcached server"


class Cache(NamedTuple):
    """One alias of CACHES."""

    alias: str
    backend: type
    location: object
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def is_a(self, *packages: str) -> bool:
        """Whether the backend, or what it is made from, comes from one of ``packages``."""
        return any(base.__module__.split(".")[0] in packages for base in self.backend.__mro__)

    @property
    def speaks_redis(self) -> bool:
        """Whether it is a Redis or Valkey cache."""
        names = (f"{base.__module__}.{base.__name__}" for base in self.backend.__mro__)
        return any(name.startswith(REDIS_BACKENDS) for name in names)

    @property
    def bypassed(self) -> bool:
        """Whether leases go straight to the server, unless that forbids scripts."""
        return bool(setting("SINGLEFLIGHT_STORE") == "redis")

    @property
    def passed_through(self) -> bool:
        """Whether leases certainly go through the cache's own methods."""
        by_backend = setting("SINGLEFLIGHT_STORE") is None
        return not self.bypassed and not (by_backend and self.speaks_redis)

    @property
    def servers(self) -> Sequence[object]:
        """Its locations, one by one."""
        if isinstance(self.location, str):
            return self.location.replace(";", ",").split(",")
        some = isinstance(self.location, list | tuple | set)
        return [*self.location] if some else [self.location]  # type: ignore[misc]

    def instead(self, other: str = _GOOD) -> str:
        """Return the cure: ``other`` in the place of this alias."""
        ours = self.alias == setting("SINGLEFLIGHT_CACHE")
        return f"Point {'SINGLEFLIGHT_CACHE' if ours else 'cache= of the guards'} at {other}."

    def straight(self, other: str) -> str:
        """Return the cure for what the cache's own methods do."""
        cure = self.instead(other)
        if self.speaks_redis:
            cure += (
                ' SINGLEFLIGHT_STORE = "redis" goes straight to the server, if scripts are allowed.'
            )
        return cure


def aliases_in_use(named: Iterable[str | None] = ()) -> list[str]:
    """Return the alias of the settings and those that guards name; none if leases are elsewhere."""
    if setting("SINGLEFLIGHT_STORE") not in (None, "redis", "cache"):
        return []
    aliases = [setting("SINGLEFLIGHT_CACHE"), *named]
    return [*dict.fromkeys(alias for alias in aliases if alias is not None)]


def described(alias: str) -> Cache | None:
    """Return what is known of the cache; None without one, or where its backend can't be imported."""
    if alias not in settings.CACHES:
        return None
    given = settings.CACHES[alias]
    try:
        backend = import_string(given.get("BACKEND", ""))
    except ImportError:
        return None
    location, options = given.get("LOCATION", ""), given.get("OPTIONS") or {}
    return Cache(alias, backend, location, options, given)
