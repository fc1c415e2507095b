"""What a Redis store does where the access rules, or a proxy, forbid scripts: it is a cache, too.

For a while only: rules are corrected, and processes of which some use scripts and others don't keep
nobody apart. What may overlap until each has found out is told in ``failover``.
"""

from __future__ import annotations

from collections.abc import Iterator

from singleflight_django.stores.base import Store
from singleflight_django.stores.cache import CacheStore
from singleflight_django.stores.failover import FailoverStore
from singleflight_django.stores.findings import Finding
from singleflight_django.stores.listing import Holding
from singleflight_django.stores.outages import Breaker, Steps, ask, ask_async
from singleflight_django.stores.redis.store import ScriptsForbiddenError, store_on

# For how many seconds scripts are left alone once they were refused. Then one caller tries again.
REST = 30.0


class RedisOrCacheStore(FailoverStore):
    """Leases and flights by scripts; while they are refused, by ``cache.add`` on the same alias."""

    away = ScriptsForbiddenError

    def __init__(self, alias: str, prefix: str) -> None:
        breaker = Breaker(_gone(alias), _back(alias), lambda: REST)
        super().__init__(store_on(alias, prefix), CacheStore(alias), breaker)

    @property
    def compares_and_sets(self) -> bool:  # type: ignore[override]
        """See Store.compares_and_sets."""
        return self._present.compares_and_sets

    @property
    def fences(self) -> bool:  # type: ignore[override]
        """See Store.fences."""
        return self._present.fences

    @property
    def can_list(self) -> bool:  # type: ignore[override]
        """See Store.can_list."""
        return self._present.can_list

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        ask(self._forget(key))

    async def aforget(self, key: str) -> None:
        """See forget()."""
        await ask_async(self._forget(key))

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        """See Store.holdings()."""
        return self._present.holdings(contains)

    def evict(self, holding: Holding) -> bool:
        """See Store.evict()."""
        return Store.evict(self, holding)

    def examine(self, ttl: float) -> Iterator[Finding]:
        """See Store.examine(). It tells what the rules forbid."""
        return self._first.examine(ttl)

    @property
    def _present(self) -> Store:
        return self._second if self._breaker.away else self._first

    def _forget(self, key: str) -> Steps:
        if self._breaker.lets_through():
            try:
                yield self._first, "forget", (key,)
            except ScriptsForbiddenError as error:
                self._breaker.trip(error)
            else:
                self._breaker.mend()
                return
        yield self._second, "forget", (key,)


def _gone(alias: str) -> str:
    return (
        f"The server of the cache {alias!r} does not let us run scripts, so leases and flights are "
        "kept through cache.add: released in two steps, without fencing tokens, and waiters look "
        f"again by themselves. Scripts are tried again every {REST:g} s. Allow EVAL and EVALSHA, or "
        'choose this with SINGLEFLIGHT_STORE = "cache". What it said'
    )


def _back(alias: str) -> str:
    return (
        f"The server of the cache {alias!r} lets us run scripts again: leases and flights are kept "
        "by them."
    )
