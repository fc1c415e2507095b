"""04x: what does a cache do to leases that go through its own ``add``, ``get`` and ``delete``?

Where scripts run on a Redis or Valkey server, none of this is asked: they bypass the cache's client.
"""

from __future__ import annotations

from django.core.cache.backends.locmem import LocMemCache
from django.core.checks import CheckMessage, Warning

from singleflight_django.checks.base import message, setting
from singleflight_django.checks.caches import Cache
from singleflight_django.stores.redis.defaults import gives_up

# Django's own default is 300: as many as a page of a site may set while a lease is held.
_ROOMY = 10_000


def check_nothing_is_culled(cache: Cache) -> list[CheckMessage]:
    """Does the cache throw entries away when it has many?"""
    # Of Django's culling caches the others are refused anyway; what Redis evicts is not in settings.
    if not issubclass(cache.backend, LocMemCache):
        return []
    given = cache.arguments.get("max_entries", cache.options.get("MAX_ENTRIES", 300))
    try:
        most = int(given)
    except (TypeError, ValueError):
        most = 300
    if most >= _ROOMY:
        return []
    text = (
        f"The cache {cache.alias!r} keeps {most} entries and throws others away, leases that are "
        "held among them."
    )
    hint = f"Set MAX_ENTRIES in its OPTIONS to {_ROOMY} or more. {cache.instead()}"
    return [message(Warning, "W040", text, hint)]


def check_whole_seconds(cache: Cache) -> list[CheckMessage]:
    """Does a lease live for as long as it is told to?"""
    ttl = setting("SINGLEFLIGHT_TTL")
    if not cache.passed_through or ttl is None or ttl == int(ttl):
        return []
    text = (
        f"SINGLEFLIGHT_TTL is {ttl}, and leases that go through the cache {cache.alias!r} live for "
        f"whole seconds: it is rounded up to {int(ttl) + 1}."
    )
    hint = "Write whole seconds. A Redis or Valkey server that runs scripts keeps to milliseconds."
    return [message(Warning, "W041", text, hint)]


def check_reads_see_writes(cache: Cache) -> list[CheckMessage]:
    """Are leases read from the server that they were written to?"""
    if not cache.passed_through or not cache.speaks_redis:
        return []
    by_sentinel = "Sentinel" in str(cache.options.get("CLIENT_CLASS", ""))
    if len(cache.servers) < 2 and not by_sentinel:
        return []
    text = (
        f"The cache {cache.alias!r} writes to its first server and reads from the others: a lease "
        "that a replica doesn't show yet can't be renewed or released, and a conflict looks like "
        "an outage."
    )
    return [message(Warning, "W042", text, cache.straight("an alias with one LOCATION"))]


def check_no_pickles(cache: Cache) -> list[CheckMessage]:
    """Does reading a lease or an outcome run what somebody has written there?"""
    if not cache.passed_through or not cache.speaks_redis or not _unpickles(cache):
        return []
    text = (
        f"The cache {cache.alias!r} unpickles what it reads, leases and outcomes too: whoever can "
        "write to its server can run code here."
    )
    hint = (
        'SINGLEFLIGHT_STORE = "redis" reads past the serializer, and its records are sealed. Else '
        "let only this site write to the server, or use a serializer for JSON."
    )
    return [message(Warning, "W043", text, hint)]


def _unpickles(cache: Cache) -> bool:
    # Both clients, and Django's own, pickle unless they are told otherwise.
    given = cache.options.get("SERIALIZER", cache.options.get("serializer"))
    return given is None or "pickle" in f"{given}{type(given)}".lower()


def check_a_hang_ends(cache: Cache) -> list[CheckMessage]:
    """Does a server that doesn't answer hold a request for ever?"""
    if not cache.passed_through or not (option := _timeout_missing(cache)):
        return []
    text = (
        f"The cache {cache.alias!r} has no {option}: a server that accepts a connection and does "
        "not answer holds every guarded request for ever."
    )
    return [message(Warning, "W044", text, f"Set {option} in its OPTIONS to a few seconds.")]


def _timeout_missing(cache: Cache) -> str:
    """Return the name of the option for the timeout that the client lacks, or ""."""
    options = cache.options
    if cache.is_a("django_redis", "django_valkey"):
        pool = options.get("CONNECTION_POOL_KWARGS") or {}
        given = pool.get("socket_timeout", 0) or options.get("SOCKET_TIMEOUT")
        forever = "socket_timeout" in pool and pool["socket_timeout"] is None
        driver = "redis" if cache.is_a("django_redis") else "valkey"
        return "SOCKET_TIMEOUT" if _waits(cache, driver, given, forever) else ""
    if cache.speaks_redis:
        given = options.get("socket_timeout")
        forever = "socket_timeout" in options and given is None
        return "socket_timeout" if _waits(cache, "redis", given, forever) else ""
    if "PyMemcacheCache" in [base.__name__ for base in cache.backend.__mro__]:
        return "" if options.get("timeout") else "timeout"
    return ""


def _waits(cache: Cache, driver: str, given: object, forever: bool) -> bool:
    if given or any("socket_timeout=" in str(server) for server in cache.servers):
        return False
    return forever or not gives_up(driver)
