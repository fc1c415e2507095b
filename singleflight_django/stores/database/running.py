"""Carry a call of the store out: blocking, or from an event loop in a thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.core import mail
from django.db import router

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.models import Lease
from singleflight_django.stores.base import Grant, Led
from singleflight_django.stores.database.connections import in_test_case
from singleflight_django.stores.database.purging import purge_some
from singleflight_django.stores.database.sessions import Session, carry_out

# After one in so many leases that were taken, some rows that are out of date are removed.
PURGE_EVERY = 200


class Call(NamedTuple):
    """One step, and the key that it is about.

    ``opens``: it comes early in a request, and may open the connection that the view will use.
    """

    step: Callable[[Session], Any]
    key: str = ""
    opens: bool = False


class Runner:
    """``using``: the database's alias; None: the one that the router names for the model."""

    def __init__(self, using: str | None) -> None:
        self._using = using

    def run(self, call: Call) -> tuple[Any, bool]:
        """Return what the step does, and whether it may have been done before."""
        return self._run(call, apart=False)

    async def arun(self, call: Call) -> tuple[Any, bool]:
        """See run(). A thread that Django doesn't know must leave no connection open."""
        if await self._in_test_case():
            return await sync_to_async(self.run)(call)
        return await asyncio.to_thread(self._run, call, apart=True)

    async def _in_test_case(self) -> bool:
        # Only the thread of the test knows, and only a test run has the outbox: no others pay for it.
        return hasattr(mail, "outbox") and await sync_to_async(in_test_case)(self._alias())

    def _run(self, call: Call, *, apart: bool) -> tuple[Any, bool]:
        alias = self._alias()
        answer = carry_out(alias, call.step, key=call.key, opens=call.opens, apart=apart)
        if isinstance(answer[0], Grant | Led) and random.randrange(PURGE_EVERY) == 0:  # noqa: S311
            with suppress(StoreUnavailableError):
                carry_out(alias, purge_some, opens=False, apart=apart)
        return answer

    def _alias(self) -> str:
        return self._using or router.db_for_write(Lease)
