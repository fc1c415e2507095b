"""Carry a step of the store out: blocking, or from an event loop in a thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core import mail
from django.db import router

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.models import Lease
from singleflight_django.stores.base import Grant, Led
from singleflight_django.stores.database.connections import in_test_case
from singleflight_django.stores.database.purging import purge_some
from singleflight_django.stores.database.sessions import Session, carry_out

_T = TypeVar("_T")

# After one in so many leases that were taken, some rows that are out of date are removed.
PURGE_EVERY = 200

# Whether this thread is one that Django doesn't know: it must leave no connection open.
_foreign: ContextVar[bool] = ContextVar("singleflight_foreign_thread", default=False)


class Runner:
    """``using``: the database's alias; None: the one that the router names for the model."""

    def __init__(self, using: str | None) -> None:
        self._using = using

    def run(
        self, step: Callable[[Session], _T], key: str = "", *, opens: bool = False
    ) -> tuple[_T, bool]:
        """Return what ``step`` does, and whether it may have been done before: see carry_out()."""
        alias, apart = self.alias, _foreign.get()
        answer = carry_out(alias, step, key=key, opens=opens, apart=apart)
        if isinstance(answer[0], Grant | Led) and random.randrange(PURGE_EVERY) == 0:  # noqa: S311
            with suppress(StoreUnavailableError):
                carry_out(alias, purge_some, opens=False, apart=apart)
        return answer

    async def in_thread(self, call: Callable[..., _T], *args: Any) -> _T:
        """Carry out a blocking call of the store. Inside a TestCase, in the thread of the test."""
        if await self._in_test_case():
            return await sync_to_async(call)(*args)
        return await asyncio.to_thread(_in_foreign_thread, call, *args)

    async def _in_test_case(self) -> bool:
        # Only a test run has the outbox: nobody else pays for the question.
        return hasattr(mail, "outbox") and await sync_to_async(in_test_case)(self.alias)

    @property
    def alias(self) -> str:
        """The database's alias."""
        return self._using or router.db_for_write(Lease)


def _in_foreign_thread(call: Callable[..., _T], *args: Any) -> _T:
    _foreign.set(True)
    return call(*args)
