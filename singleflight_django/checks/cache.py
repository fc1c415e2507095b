"""01x: can the cache keep leases? Only its settings are looked at: no cache is made of them."""

from __future__ import annotations

from difflib import get_close_matches

from django.conf import settings
from django.core import mail
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import import_string

from singleflight_django.checks.base import message
from singleflight_django.checks.caches import Cache, described

# What each of these does when two callers add the same key at once.
_NO_EXCLUSION: dict[type, tuple[str, str]] = {
    DummyCache: ("E012", "gives a lease to everyone who asks"),
    FileBasedCache: ("E013", "looks first and writes later, so that several callers get one lease"),
    DatabaseCache: ("E014", "gives one lease to several callers when the last one has expired"),
}


def check_alias(alias: str) -> list[CheckMessage]:
    """Does the alias exist?"""
    if alias in settings.CACHES:
        return []
    nearest = get_close_matches(alias, settings.CACHES, 1)
    cure = "Point SINGLEFLIGHT_CACHE at an alias of CACHES, or add this one."
    hint = f"Did you mean {nearest[0]!r}?" if nearest else cure
    text = f"SINGLEFLIGHT_CACHE is {alias!r}, and CACHES has no such alias."
    return [message(Error, "E010", text, hint)]


def check_backend(alias: str) -> list[CheckMessage]:
    """Can the alias's backend be imported?"""
    if alias not in settings.CACHES or described(alias) is not None:
        return []
    path = settings.CACHES[alias].get("BACKEND")
    text = f"The backend of the cache {alias!r} can't be imported: {path!r}."
    return [message(Error, "E011", text, "Correct BACKEND, or install the package it is in.")]


def check_exclusion(cache: Cache) -> list[CheckMessage]:
    """Does the backend give a lease to one caller only?"""
    return [
        message(
            Error,
            number,
            f"The cache {cache.alias!r} can't keep leases: its {kind.__name__} {fault}.",
            f"{cache.instead()} Where nothing needs guarding, set SINGLEFLIGHT_ENABLED = False.",
        )
        for kind, (number, fault) in _NO_EXCLUSION.items()
        if issubclass(cache.backend, kind)
    ]


def check_shared(cache: Cache) -> list[CheckMessage]:
    """Do all processes see the same leases?"""
    # The test runner turns DEBUG off, and a test run is one process: it makes the outbox.
    developing = settings.DEBUG or hasattr(mail, "outbox")
    return _private(cache, Warning, "W015") if developing else _private(cache, Error, "E016")


def check_shared_when_deployed(cache: Cache) -> list[CheckMessage]:
    """Will all processes see the same leases, if this is what is deployed?"""
    # Without DEBUG, check_shared() has said so already.
    return _private(cache, Error, "E016") if settings.DEBUG else []


def _private(cache: Cache, kind: type[Error] | type[Warning], number: str) -> list[CheckMessage]:
    if not issubclass(cache.backend, LocMemCache):
        return []
    text = (
        f"The cache {cache.alias!r} lives in the memory of one process: other processes don't see "
        "its leases, and nothing is guarded between them."
    )
    return [message(kind, number, text, cache.instead())]


def check_outages_show(cache: Cache) -> list[CheckMessage]:
    """Does the cache say so when its server is away?"""
    if cache.bypassed or not (option := _ignoring(cache)):
        return []
    text = (
        f"The cache {cache.alias!r} has {option}: while its server is away, a lease that goes "
        "through it looks lost, and one that is given back stays."
    )
    return [message(Warning, "W017", text, cache.straight(f"an alias without {option}"))]


def _ignoring(cache: Cache) -> str:
    """Return the name of the option that hides outages, or ""."""
    for package, name in (("django_redis", "DJANGO_REDIS"), ("django_valkey", "DJANGO_VALKEY")):
        site_wide = f"{name}_IGNORE_EXCEPTIONS"
        if cache.is_a(package):
            if "IGNORE_EXCEPTIONS" in cache.options:
                return "IGNORE_EXCEPTIONS" if cache.options["IGNORE_EXCEPTIONS"] else ""
            return site_wide if getattr(settings, site_wide, False) else ""
    return "ignore_exc" if cache.options.get("ignore_exc") else ""


def check_ttl_is_kept(cache: Cache) -> list[CheckMessage]:
    """Does the cache's client keep to the ttl that it is given?"""
    if cache.bypassed or not _herds(cache.options.get("CLIENT_CLASS")):
        return []
    text = (
        f"The cache {cache.alias!r} uses HerdClient, which lets every lease live for "
        "CACHE_HERD_TIMEOUT seconds longer than its ttl."
    )
    return [message(Warning, "W018", text, cache.straight("an alias with the DefaultClient"))]


def _herds(client: object) -> bool:
    try:
        kind = import_string(client) if isinstance(client, str) else client
    except ImportError:
        return False
    return any(base.__name__ == "HerdClient" for base in getattr(kind, "__mro__", ()))


def check_one_server_decides(cache: Cache) -> list[CheckMessage]:
    """Is there only one server that gives leases?"""
    if (
        cache.bypassed
        or not cache.is_a("django_redis", "django_valkey")
        or cache.options.get("REPLICA_READ_ONLY", True)
        or len(cache.servers) < 2
    ):
        return []
    text = (
        f"The cache {cache.alias!r} writes to another server when the first doesn't answer "
        "(REPLICA_READ_ONLY is False): two servers then give the same lease to two callers, and "
        "django-redis 7 lets it live a thousand times longer there."
    )
    return [message(Warning, "W019", text, cache.straight("an alias with one LOCATION"))]
