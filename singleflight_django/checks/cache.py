"""01x: can the cache keep leases? Only its settings are looked at: no cache is made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from django.conf import settings
from django.core import mail
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import import_string

from singleflight_django.checks.base import message, setting

_OWN_ALIAS = "Point SINGLEFLIGHT_CACHE at an alias of a Redis, Valkey or memcached server"

# What each of these does when two callers add the same key at once.
_NO_EXCLUSION: dict[type, tuple[str, str]] = {
    DummyCache: ("E012", "gives a lease to everyone who asks"),
    FileBasedCache: ("E013", "looks first and writes later, so that several callers get one lease"),
    DatabaseCache: ("E014", "gives one lease to several callers when the last one has expired"),
}


class _Cache(NamedTuple):
    alias: str
    backend: type
    location: object
    options: Mapping[str, Any]

    def is_a(self, *packages: str) -> bool:
        """Whether the backend, or what it is made from, comes from one of ``packages``."""
        return any(base.__module__.split(".")[0] in packages for base in self.backend.__mro__)


def _alias() -> str | None:
    """Return the alias in use, or None where leases don't live in one that we know."""
    store = setting("SINGLEFLIGHT_STORE")
    alias: str | None = setting("SINGLEFLIGHT_CACHE")
    return alias if store in (None, "redis", "cache") else None


def _cache() -> _Cache | None:
    """Return what the settings say of the cache in use, without making a cache of it."""
    alias = _alias()
    if alias is None or alias not in settings.CACHES:
        return None
    given = settings.CACHES[alias]
    try:
        backend = import_string(given.get("BACKEND", ""))
    except ImportError:
        return None
    return _Cache(alias, backend, given.get("LOCATION", ""), given.get("OPTIONS") or {})


def _through_the_cache() -> _Cache | None:
    """Return the cache where leases may go through its own methods, not straight to the server."""
    return None if setting("SINGLEFLIGHT_STORE") == "redis" else _cache()


def check_alias() -> list[CheckMessage]:
    """Does the alias exist?"""
    alias = _alias()
    if alias is None or alias in settings.CACHES:
        return []
    nearest = get_close_matches(alias, settings.CACHES, 1)
    return [
        message(
            Error,
            "E010",
            f"SINGLEFLIGHT_CACHE is {alias!r}, and CACHES has no such alias.",
            f"Did you mean {nearest[0]!r}?" if nearest else f"{_OWN_ALIAS}, and add it to CACHES.",
        )
    ]


def check_backend() -> list[CheckMessage]:
    """Can the alias's backend be imported?"""
    alias = _alias()
    if alias is None or alias not in settings.CACHES or _cache() is not None:
        return []
    path = settings.CACHES[alias].get("BACKEND")
    text = f"The backend of the cache {alias!r} can't be imported: {path!r}."
    return [message(Error, "E011", text, "Correct BACKEND, or install the package it is in.")]


def check_exclusion() -> list[CheckMessage]:
    """Does the backend give a lease to one caller only?"""
    if (cache := _cache()) is None:
        return []
    return [
        message(
            Error,
            number,
            f"The cache {cache.alias!r} can't keep leases: its {kind.__name__} {fault}.",
            f"{_OWN_ALIAS}. Where nothing needs guarding, set SINGLEFLIGHT_ENABLED = False.",
        )
        for kind, (number, fault) in _NO_EXCLUSION.items()
        if issubclass(cache.backend, kind)
    ]


def check_shared() -> list[CheckMessage]:
    """Do all processes see the same leases?"""
    # The test runner turns DEBUG off, and a test run is one process: it makes the outbox.
    developing = settings.DEBUG or hasattr(mail, "outbox")
    return _private(Warning, "W015") if developing else _private(Error, "E016")


def check_shared_when_deployed() -> list[CheckMessage]:
    """Will all processes see the same leases, if this is what is deployed?"""
    # Without DEBUG, check_shared() has said so already.
    return _private(Error, "E016") if settings.DEBUG else []


def _private(kind: type[Error] | type[Warning], number: str) -> list[CheckMessage]:
    cache = _cache()
    if cache is None or not issubclass(cache.backend, LocMemCache):
        return []
    text = (
        f"The cache {cache.alias!r} lives in the memory of one process: other processes don't see "
        "its leases, and nothing is guarded between them."
    )
    return [message(kind, number, text, f"{_OWN_ALIAS}.")]


def check_outages_show() -> list[CheckMessage]:
    """Does the cache say so when its server is away?"""
    cache = _through_the_cache()
    if cache is None or not (option := _ignoring(cache)):
        return []
    text = (
        f"The cache {cache.alias!r} has {option}: while its server is away, a lease that goes "
        "through it looks lost or held by someone else."
    )
    return [message(Warning, "W017", text, _straight(cache, f"an alias without {option}"))]


def _ignoring(cache: _Cache) -> str:
    """Return the name of the option that hides outages, or ""."""
    for package, name in (("django_redis", "DJANGO_REDIS"), ("django_valkey", "DJANGO_VALKEY")):
        site_wide = f"{name}_IGNORE_EXCEPTIONS"
        if cache.is_a(package):
            if "IGNORE_EXCEPTIONS" in cache.options:
                return "IGNORE_EXCEPTIONS" if cache.options["IGNORE_EXCEPTIONS"] else ""
            return site_wide if getattr(settings, site_wide, False) else ""
    return "ignore_exc" if cache.options.get("ignore_exc") else ""


def check_ttl_is_kept() -> list[CheckMessage]:
    """Does the cache's client keep to the ttl that it is given?"""
    cache = _through_the_cache()
    if cache is None or not _herds(cache.options.get("CLIENT_CLASS")):
        return []
    text = (
        f"The cache {cache.alias!r} uses HerdClient, which lets every lease live for "
        "CACHE_HERD_TIMEOUT seconds longer than its ttl."
    )
    return [message(Warning, "W018", text, _straight(cache, "an alias with the DefaultClient"))]


def _herds(client: object) -> bool:
    try:
        kind = import_string(client) if isinstance(client, str) else client
    except ImportError:
        return False
    return any(base.__name__ == "HerdClient" for base in getattr(kind, "__mro__", ()))


def check_one_server_decides() -> list[CheckMessage]:
    """Is there only one server that gives leases?"""
    cache = _through_the_cache()
    if (
        cache is None
        or not cache.is_a("django_redis", "django_valkey")
        or cache.options.get("REPLICA_READ_ONLY", True)
        or len(_servers(cache.location)) < 2
    ):
        return []
    text = (
        f"The cache {cache.alias!r} writes to another server when the first doesn't answer "
        "(REPLICA_READ_ONLY is False): two servers then give the same lease to two callers, and "
        "django-redis 7 lets it live a thousand times longer there."
    )
    return [message(Warning, "W019", text, _straight(cache, "an alias with one LOCATION"))]


def _servers(location: object) -> Collection[object]:
    if isinstance(location, str):
        return location.split(",")
    return location if isinstance(location, list | tuple | set) else [location]


def _straight(cache: _Cache, instead: str) -> str:
    """Return the cure for what the cache's own methods do."""
    cure = f"Point SINGLEFLIGHT_CACHE at {instead}."
    if cache.is_a("django_redis", "django_valkey"):
        cure += ' SINGLEFLIGHT_STORE = "redis" goes straight to the server, if scripts are allowed.'
    return cure
