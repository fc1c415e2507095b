"""Who is measured: this library, raw redis-py as the floor, and what people use in its place.

A peer that isn't installed is left out, and so is what a peer doesn't offer.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import pickle
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar

import redis
from django.conf import settings
from django.core.cache import cache
from django.http import HttpResponse

TTL = 10
# Twice what a caller of a burst waits for the work of all the others.
WAIT = 60
RESULT_TTL = 30

Work = Callable[[], str]


class Peer:
    """One way to hold a lock on a key, or to share one execution for it."""

    name: ClassVar[str]
    locks: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url)

    def lock(self, key: str, ttl: int = TTL) -> AbstractContextManager[Any]:
        """Return what holds ``key`` during a `with`, for ``ttl`` seconds at most."""
        raise NotImplementedError

    def attempt(self, key: str) -> bool:
        """Try once to get ``key``, which is held by someone else."""
        raise NotImplementedError

    def share(self, key: str, work: Work) -> str:
        """Return what ``work`` returned to the one caller of many that ran it."""
        value = self.redis.get(f"value:{key}")
        if value is None:
            with self.lock(key):
                value = self.redis.get(f"value:{key}")
                if value is None:
                    value = work().encode()
                    self.redis.set(f"value:{key}", value, ex=RESULT_TTL)
        return value.decode()

    def guard(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Return a view that is entered by one request at a time for its Idempotency-Key."""

        @functools.wraps(view)
        def guarded(request: Any) -> Any:
            with self.lock(f"{request.path}:{request.headers['Idempotency-Key']}"):
                return view(request)

        return guarded


class Ours(Peer):
    name = "singleflight_django"

    def __init__(self, url: str) -> None:
        from singleflight_django import SingleFlight, semaphore_lock

        super().__init__(url)
        self.semaphore_lock = semaphore_lock
        self.flights = SingleFlight("bench", ttl=TTL, wait=WAIT, result_ttl=RESULT_TTL)

    @contextmanager
    def lock(self, key: str, ttl: int = TTL) -> Iterator[None]:
        # In a context of its own: the same one can't take it twice, and is told so.
        context, section = contextvars.copy_context(), self.semaphore_lock(key, ttl=ttl)
        context.run(section.__enter__)
        try:
            yield
        finally:
            context.run(section.__exit__, None, None, None)

    def cycle(self, key: str) -> None:
        with self.semaphore_lock(key, ttl=TTL):
            pass

    def attempt(self, key: str) -> bool:
        with self.semaphore_lock(key, ttl=TTL, on_conflict="yield") as lease:
            return lease.acquired

    def share(self, key: str, work: Work) -> str:
        value: str = self.flights.run(key, work)
        return value

    def guard(self, view: Callable[..., Any]) -> Callable[..., Any]:
        return self.semaphore_lock(key="<path>:<header.Idempotency-Key>", ttl=TTL)(view)


class Store(Peer):
    """The two steps alone, without what the public names add to them."""

    name = "singleflight_django, its store"
    shares = False

    def __init__(self, url: str) -> None:
        from singleflight_django.stores.base import Grant
        from singleflight_django.stores.registry import get_store

        super().__init__(url)
        self.store, self.grant = get_store(), Grant

    @contextmanager
    def lock(self, key: str, ttl: int = TTL) -> Iterator[None]:
        token = uuid.uuid4().hex
        self.store.acquire(key, token, ttl, 1, 0)
        yield
        self.store.release(key, token)

    def cycle(self, key: str) -> None:
        token = uuid.uuid4().hex
        self.store.acquire(key, token, TTL, 1, 0)
        self.store.release(key, token)

    def attempt(self, key: str) -> bool:
        return isinstance(self.store.acquire(key, uuid.uuid4().hex, TTL, 1, 0), self.grant)


class Floor(Peer):
    """SET NX PX and a compare-and-delete: what no lock through redis-py can do without."""

    name = "raw redis-py (the floor)"
    shares = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.delete = self.redis.script_load(
            "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end "
            "return 0"
        )

    @contextmanager
    def lock(self, key: str, ttl: int = TTL) -> Iterator[None]:
        token = uuid.uuid4().hex
        self.redis.set(key, token, nx=True, px=ttl * 1000)
        try:
            yield
        finally:
            self.redis.evalsha(self.delete, 1, key, token)

    def cycle(self, key: str) -> None:
        token = uuid.uuid4().hex
        if self.redis.set(key, token, nx=True, px=TTL * 1000):
            self.redis.evalsha(self.delete, 1, key, token)

    def attempt(self, key: str) -> bool:
        return bool(self.redis.set(key, "another", nx=True, px=TTL * 1000))


class Naive(Peer):
    """What is written by hand: add and delete, and a look every half a second."""

    name = "cache.add by hand"
    pause = 0.5

    @contextmanager
    def lock(self, key: str, ttl: int = TTL) -> Iterator[None]:
        if cache.add(key, "1", ttl):
            try:
                yield
            finally:
                cache.delete(key)

    def attempt(self, key: str) -> bool:
        return bool(cache.add(key, "1", TTL))

    def share(self, key: str, work: Work) -> str:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            if (value := cache.get(f"value:{key}")) is not None:
                return str(value)
            if cache.add(key, "1", TTL):
                try:
                    value = work()
                    cache.set(f"value:{key}", value, RESULT_TTL)
                    return value
                finally:
                    cache.delete(key)
            time.sleep(self.pause)
        raise TimeoutError


class NaiveQuick(Naive):
    name = "cache.add, a look every 100 ms"
    locks = False
    pause = 0.1


class RedisPyLock(Peer):
    name = "redis-py Lock"

    def lock(self, key: str, ttl: int = TTL) -> AbstractContextManager[Any]:
        return self.redis.lock(key, timeout=ttl)

    def attempt(self, key: str) -> bool:
        return bool(self.redis.lock(key, timeout=TTL).acquire(blocking=False))


class CacheLock(Peer):
    name = "django-redis cache.lock"
    shares = False

    def lock(self, key: str, ttl: int = TTL) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = cache.lock(key, timeout=ttl)  # type: ignore[attr-defined]
        return held

    def attempt(self, key: str) -> bool:
        return bool(cache.lock(key, timeout=TTL).acquire(blocking=False))  # type: ignore[attr-defined]


class PythonRedisLock(Peer):
    name = "python-redis-lock"

    def __init__(self, url: str) -> None:
        import redis_lock

        super().__init__(url)
        self.library = redis_lock
        logging.getLogger("redis_lock").setLevel(logging.ERROR)

    def lock(self, key: str, ttl: int = TTL) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = self.library.Lock(self.redis, key, expire=ttl)
        return held

    def attempt(self, key: str) -> bool:
        return bool(self.library.Lock(self.redis, key, expire=TTL).acquire(blocking=False))


class Dogpile(Peer):
    name = "dogpile.cache"
    locks = False

    def __init__(self, url: str) -> None:
        from dogpile.cache import make_region

        super().__init__(url)
        arguments = {
            "url": url,
            "distributed_lock": True,
            "thread_local_lock": False,
            "lock_timeout": TTL,
            "redis_expiration_time": 2 * RESULT_TTL,
        }
        self.region = make_region().configure(
            "dogpile.cache.redis", expiration_time=RESULT_TTL, arguments=arguments
        )

    def share(self, key: str, work: Work) -> str:
        value: str = self.region.get_or_create(key, work)
        return value


class Cacheops(Peer):
    """Offers its lock for querysets; this is what they do with it."""

    name = "django-cacheops lock=True"
    locks = False

    def __init__(self, url: str) -> None:
        settings.CACHEOPS_REDIS = url
        from cacheops.getset import getting
        from cacheops.redis import redis_client

        super().__init__(url)
        self.getting, self.client = getting, redis_client

    def share(self, key: str, work: Work) -> str:
        with self.getting(key, [], "", lock=True) as data:
            if data is not None:
                kept: str = pickle.loads(data)  # noqa: S301 - what this very program has put there
                return kept
            value = work()
            self.client.setex(key, RESULT_TTL, pickle.dumps(value))
            return value


class DrfIdempotency(Peer):
    """Keeps the first answer for a minute, whatever it is."""

    name = "drf-idempotency"
    locks = shares = False

    def __init__(self, url: str) -> None:
        settings.IDEMPOTENCY = {
            "BACKEND": "drf_idempotency.backends.redis.RedisBackend",
            "BACKEND_OPTIONS": {"url": url},
            "TTL_SECONDS": 60,
        }
        from drf_idempotency.decorators import idempotent

        super().__init__(url)
        self.guard = idempotent()


PEERS: tuple[type[Peer], ...] = (
    Ours,
    Store,
    Floor,
    RedisPyLock,
    CacheLock,
    PythonRedisLock,
    Naive,
    NaiveQuick,
    Dogpile,
    Cacheops,
    DrfIdempotency,
)


def installed(url: str, names: Collection[str]) -> list[Peer]:
    """Return those of ``names`` that are here, on the server at ``url``."""
    found = []
    for peer in PEERS:
        if peer.name not in names:
            continue
        with suppress(ImportError):
            found.append(peer(url))
    return found


def plain(request: Any) -> HttpResponse:
    """The view that is guarded."""
    return HttpResponse(b'{"ok": true}', content_type="application/json")
