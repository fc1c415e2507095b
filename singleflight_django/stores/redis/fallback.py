"""What a Redis store does where the access rules, or a proxy, forbid scripts: it is a cache, too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from singleflight_django.stores.base import Claim, Conflict, Grant
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.redis.store import Link, RedisStore, ScriptsForbiddenError

logger = logging.getLogger("singleflight_django")


class RedisOrCacheStore(RedisStore):
    """Leases by scripts; from the first refusal of a script on, by ``cache.add`` on the same alias.

    Flights have no such second way: there a refusal says that the store is away.
    """

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(Link(alias), prefix)
        self._alias = alias
        self._instead: CacheStore | None = None
        self._falling = threading.Lock()

    def acquire(self, *args: Any, **kwargs: Any) -> Grant | Conflict:
        """See Store.acquire()."""
        if self._instead is None:
            try:
                return super().acquire(*args, **kwargs)
            except ScriptsForbiddenError as error:
                self._fall_back(error)
                return self.acquire(*args, **kwargs)
        return self._instead.acquire(*args, **kwargs)

    async def aacquire(self, *args: Any, **kwargs: Any) -> Grant | Conflict:
        """See acquire()."""
        if self._instead is None:
            try:
                return await super().aacquire(*args, **kwargs)
            except ScriptsForbiddenError as error:
                self._fall_back(error)
                return await self.aacquire(*args, **kwargs)
        return await self._instead.aacquire(*args, **kwargs)

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        """See Store.renew()."""
        return super().renew(claims) if self._instead is None else self._instead.renew(claims)

    async def arenew(self, claims: Sequence[Claim]) -> list[bool]:
        """See renew()."""
        if self._instead is None:
            return await super().arenew(claims)
        return await self._instead.arenew(claims)

    def release(self, key: str, token: str) -> bool:
        """See Store.release()."""
        if self._instead is None:
            return super().release(key, token)
        return self._instead.release(key, token)

    async def arelease(self, key: str, token: str) -> bool:
        """See release()."""
        if self._instead is None:
            return await super().arelease(key, token)
        return await self._instead.arelease(key, token)

    def wait_free(self, key: str, seconds: float) -> bool:
        """See Store.wait_free()."""
        if self._instead is None:
            return super().wait_free(key, seconds)
        return self._instead.wait_free(key, seconds)

    async def await_free(self, key: str, seconds: float) -> bool:
        """See wait_free()."""
        if self._instead is None:
            return await super().await_free(key, seconds)
        return await self._instead.await_free(key, seconds)

    def _fall_back(self, error: ScriptsForbiddenError) -> None:
        with self._falling:
            if self._instead is not None:
                return
            self.longest_block, self.fences, self.compares_and_sets = 0.0, False, False
            self._instead = CacheStore(self._alias)
        logger.warning(
            "The server of the cache %r does not let us run scripts, so leases are kept through "
            "cache.add: released in two steps, without fencing tokens, and waiters look again by "
            'themselves. Allow EVAL and EVALSHA, or choose this with SINGLEFLIGHT_STORE = "cache". '
            "(%s)",
            self._alias,
            error,
        )
