"""Which store a cache alias gets, by its backend or by ``SINGLEFLIGHT_STORE``."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from singleflight_django.conf import conf
from singleflight_django.stores.base import Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.failover import FailoverStore

logger = logging.getLogger("singleflight_django")


class _Entry(NamedTuple):
    cache_settings: Any
    store: Store


_stores: dict[tuple[str, str, str | None], _Entry] = {}


def get_store(alias: str | None = None) -> Store:
    """Return the store of the cache ``alias`` (default: ``SINGLEFLIGHT_CACHE``).

    There is one for each alias, prefix and kind, for as long as the alias's settings stay the same.
    """
    alias = alias or conf.SINGLEFLIGHT_CACHE
    which = (alias, conf.SINGLEFLIGHT_PREFIX, conf.SINGLEFLIGHT_STORE)
    present = conf.CACHES.get(alias)
    entry = _stores.get(which)
    if entry is None or entry.cache_settings is not present:
        if entry is not None:
            _stores.pop(which, None)
        # Whatever was made at the same time: all callers have to meet in one store.
        entry = _stores.setdefault(which, _Entry(present, _make(*which)))
    return entry.store


def _make(alias: str, prefix: str, kind: str | None) -> Store:
    kind = kind or ("redis" if speaks_redis(caches[alias]) else "cache")
    if kind == "redis":
        # Imported here: a site on memcached needs neither redis-py nor its import time.
        from singleflight_django.stores.redis.fallback import RedisOrCacheStore

        return RedisOrCacheStore(alias, prefix)
    if kind == "cache":
        _warn_of_one_process(alias)
        return CacheStore(alias)
    if kind == "database":
        return _database(prefix)
    store: Store = import_string(kind)(alias, prefix)
    return store


_backed: dict[int, tuple[Store, Store]] = {}


def backed_by_database(store: Store) -> Store:
    """Return ``store`` with the database behind it, for while it is away; one for each store."""
    first, both = _backed.get(id(store), (None, store))
    if first is store or conf.SINGLEFLIGHT_STORE == "database":
        return both
    both = FailoverStore(store, _database(conf.SINGLEFLIGHT_PREFIX))
    # A store that is no longer asked for is no longer needed.
    present = {id(entry.store) for entry in _stores.values()}
    for other in [other for other in list(_backed) if other not in present]:
        _backed.pop(other, None)
    return _backed.setdefault(id(store), (store, both))[1]


def _database(prefix: str) -> Store:
    if not apps.is_installed("singleflight_django"):
        raise ImproperlyConfigured(
            'Leases in the database need their tables: add "singleflight_django" to '
            "INSTALLED_APPS and run manage.py migrate."
        )
    # Imported here: a model can't be imported where its app is not installed.
    from singleflight_django.stores.database.store import DatabaseStore

    return DatabaseStore(prefix)


def speaks_redis(cache: Any) -> bool:
    """Whether ``cache`` is a Redis or Valkey cache: django-redis, django-valkey or Django's own."""
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(cache).__mro__]
    return any(name.startswith(REDIS_BACKENDS) for name in names)


REDIS_BACKENDS = (
    "django_redis.cache.",
    "django_valkey.",
    "django.core.cache.backends.redis.",
)


def _warn_of_one_process(alias: str) -> None:
    if isinstance(caches[alias], LocMemCache) and not settings.DEBUG:
        logger.error(
            "The cache %r lives in one process: other processes don't see its leases. "
            "Point SINGLEFLIGHT_CACHE at Redis, Valkey or memcached.",
            alias,
        )
