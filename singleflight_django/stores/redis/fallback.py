"""What a Redis store does where the access rules, or a proxy, forbid scripts: it is a cache, too."""

from __future__ import annotations

import logging
import threading
from functools import wraps
from typing import Any

from singleflight_django.stores.base import Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis.store import Link, RedisStore, ScriptsForbiddenError

logger = logging.getLogger("singleflight_django")

# All that makes a store what it is: its steps, their a-twins, and its capabilities.
_STORE = tuple(name for name in vars(Store) if not name.startswith("_"))


def _either(step: str) -> Any:
    """Return a step that begins something: by scripts, or on the cache if they are refused."""
    by_scripts = getattr(RedisStore, step)

    @wraps(by_scripts)
    def either(self: RedisOrCacheStore, *args: Any, **kwargs: Any) -> Any:
        try:
            return by_scripts(self, *args, **kwargs)
        except ScriptsForbiddenError as error:
            return getattr(self.fall_back(error), step)(*args, **kwargs)

    return either


def _aeither(step: str) -> Any:
    """See _either()."""
    by_scripts = getattr(RedisStore, step)

    @wraps(by_scripts)
    async def either(self: RedisOrCacheStore, *args: Any, **kwargs: Any) -> Any:
        try:
            return await by_scripts(self, *args, **kwargs)
        except ScriptsForbiddenError as error:
            return await getattr(self.fall_back(error), step)(*args, **kwargs)

    return either


class RedisOrCacheStore(RedisStore):
    """Leases and flights by scripts; from the first refusal on, by ``cache.add`` on the same alias.

    Only a step that begins something falls back: what was begun by scripts can't be ended without.
    """

    acquire, aacquire = _either("acquire"), _aeither("aacquire")
    join, ajoin = _either("join"), _aeither("ajoin")
    forget, aforget = _either("forget"), _aeither("aforget")

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(Link(alias), prefix)
        self._alias = alias
        self._instead: CacheStore | None = None
        self._falling = threading.Lock()

    def fall_back(self, error: ScriptsForbiddenError) -> CacheStore:
        """Be a ``CacheStore`` from now on, and say so once."""
        with self._falling:
            if self._instead is None:
                self._instead = instead = CacheStore(self._alias)
                # Found before the methods of the class: nothing is left that asks for a script.
                vars(self).update({name: getattr(instead, name) for name in _STORE})
                _warn(self._alias, error)
            return self._instead


def _warn(alias: str, error: ScriptsForbiddenError) -> None:
    logger.warning(
        "The server of the cache %r does not let us run scripts, so leases and flights are kept "
        "through cache.add: released in two steps, without fencing tokens, and waiters look again "
        "by themselves. Allow EVAL and EVALSHA, or choose this with "
        'SINGLEFLIGHT_STORE = "cache". (%s)',
        alias,
        error,
    )
