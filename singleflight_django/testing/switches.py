"""Switch the library off, keep the keys of tests apart, and play the other caller."""

from __future__ import annotations

import asyncio
import os
from contextvars import Context
from typing import Any
from unittest import TestCase, TestResult
from uuid import uuid4

from django.conf import settings
from django.core.cache import caches, close_caches
from django.test.utils import TestContextDecorator, override_settings

from singleflight_django.calls import key_text
from singleflight_django.conf import conf
from singleflight_django.drivers import arun, run
from singleflight_django.guards import Guard, Options, Seconds
from singleflight_django.keys import KeySpec
from singleflight_django.lease import Lease
from singleflight_django.locking import Terms, acquire, release
from singleflight_django.steps import Steps
from singleflight_django.stores import registry


def disabled() -> override_settings:
    """Switch all guards off: a context manager, and a decorator of tests and test classes.

    It sets ``SINGLEFLIGHT_ENABLED`` to False, and puts back what was there before.
    """
    return override_settings(SINGLEFLIGHT_ENABLED=False)


class isolated_keys(TestContextDecorator):  # noqa: N801 - reads as a function
    """Give a test keys of its own: what other tests, or runs, have left behind isn't seen.

    A context manager, and a decorator of tests and test classes. See also ``IsolatedKeysMixin``
    and, for pytest, the fixture ``singleflight_isolated``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._overrides: list[override_settings] = []

    def enable(self) -> str:
        """Begin, and return the prefix."""
        override = override_settings(**isolating_settings())
        override.enable()
        self._overrides.append(override)
        return conf.SINGLEFLIGHT_PREFIX

    def disable(self) -> None:
        """End, and close the connections that were opened."""
        override = self._overrides.pop()
        forget_stores(override.options["SINGLEFLIGHT_PREFIX"])
        override.disable()


class IsolatedKeysMixin(TestCase):
    """For test classes, Django's or unittest's: keys of its own for each test, with its setUp().

    ``class LessonTests(IsolatedKeysMixin, TransactionTestCase)``.
    """

    def run(self, result: TestResult | None = None) -> TestResult | None:
        """Run the test."""
        with isolated_keys():
            return super().run(result)

    def debug(self) -> None:
        """Run the test without collecting its result."""
        with isolated_keys():
            super().debug()


def isolating_settings() -> dict[str, Any]:
    """Return settings under which all keys are new."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "test")
    prefix = f"{conf.SINGLEFLIGHT_PREFIX[:18]}.{worker[:10]}.{uuid4().hex[:8]}"
    alias = conf.SINGLEFLIGHT_CACHE
    new: dict[str, Any] = {"SINGLEFLIGHT_PREFIX": prefix}
    if alias in settings.CACHES and _ignores_the_prefix(alias):
        entry = {**settings.CACHES[alias], "KEY_PREFIX": prefix}
        new["CACHES"] = {**settings.CACHES, alias: entry}
    return new


def forget_stores(prefix: str) -> None:
    """Let go of the stores of ``prefix``, and so of their connections."""
    for which in [which for which in registry._stores if which[1] == prefix]:
        registry._stores.pop(which, None)


def _ignores_the_prefix(alias: str) -> bool:
    """Whether leases are entries of the cache ``alias`` as any other."""
    kind = conf.SINGLEFLIGHT_STORE
    return kind == "cache" or (kind is None and not registry.speaks_redis(caches[alias]))


class held(TestContextDecorator):  # noqa: N801 - reads as a function
    """Someone else holds ``key``: the test of a conflict in one line.

    ``with held(f"lesson:{uuid}"):`` (or ``async with``; also a decorator) yields the lease.
    ``key`` is what the template gives for the request, or a tuple of its parts; ``namespace``,
    ``cache`` and ``limit`` are those of the guard that is to meet it: all its places are taken.
    The lease is renewed, and given back at the end.

    Raises LeaseConflictError if the key is held already.
    """

    def __init__(
        self,
        key: str | tuple[object, ...],
        *,
        namespace: str = "semaphore_lock",
        limit: int = 1,
        ttl: Seconds | None = None,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self._keys = (key_text(key),) if isinstance(key, tuple) else KeySpec(key).static_keys()
        self._guard = Guard(Options(namespace=namespace, ttl=ttl, cache=cache))
        self._terms = Terms(limit=limit)
        # Each holder has a context of its own: in the test's, a view's lock would be a nested one.
        self._holders: list[list[tuple[Context, Lease]]] = []

    def enable(self) -> Lease:
        """Take the key."""
        holders = self._begin()
        try:
            for context, lease in holders:
                context.run(run, acquire(lease, self._terms))
        except BaseException:
            self.disable()
            raise
        return holders[0][1]

    def disable(self) -> None:
        """Give the key back."""
        for context, lease in self._holders.pop():
            context.run(run, release(lease))
            context.run(close_caches)

    async def __aenter__(self) -> Lease:
        holders = self._begin()
        try:
            for context, lease in holders:
                await _within(context, acquire(lease, self._terms))
        except BaseException:
            await self.__aexit__()
            raise
        return holders[0][1]

    async def __aexit__(self, *error: object) -> None:
        for context, lease in self._holders.pop():
            await _within(context, release(lease))
            context.run(close_caches)

    def _begin(self) -> list[tuple[Context, Lease]]:
        contexts = [Context() for _ in range(self._terms.limit)]
        holders = [(context, context.run(self._guard.lease, self._keys)) for context in contexts]
        self._holders.append(holders)
        return holders


async def _within(context: Context, steps: Steps) -> None:
    await asyncio.get_running_loop().create_task(arun(steps), context=context)
