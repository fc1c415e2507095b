"""``unique=`` and ``on_duplicate=``: a view's violation of a declared constraint is an answer.

Two callers that the lease did not keep apart (it had lapsed, the store was away)::

    A: INSERT                     COMMIT   201
    B:          INSERT (waits for A)       refused: rollback, 409

What B wrote before is rolled back with it: a sync view runs in a transaction on the alias that the
constraint's model is written to, in a savepoint where one is open. An async view has none; what it
wrote before stays, so it had better begin with ``acreate_or_existing()``.

The database may also end such a meeting by a deadlock or a serialization failure, of which nobody
can say who was first. All is rolled back then, and the answer is 503 with Retry-After, and a warning.

Who repeats a whole row violates all of its table's unique constraints, and is told of any one of
them: declare them all, unless a repetition differs in the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import IntegrityError, OperationalError, router
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from singleflight_django.exceptions import ContentionError, DuplicateError
from singleflight_django.responses import aproblem, problem, refusal, skip
from singleflight_django.transactions import can_roll_back, roll_back
from singleflight_django.uniques import Unique, declared
from singleflight_django.violations import Violation, violation_of, was_in_the_way
from singleflight_django.writing import Committed, writing

logger = logging.getLogger("singleflight_django")

OnDuplicate = Callable[[HttpRequest, Violation], Any]
Tell = Callable[[Violation], None]


class Duplicates:
    """Constraints whose violation is expected, and what is answered then.

    ``unique``: constraints, see ``uniques``. ``on_duplicate``: "reject" (409), "skip" (204), or a
    callable ``(request, violation)`` that returns the response.
    """

    def __init__(self, unique: object, on_duplicate: str | OnDuplicate = "reject") -> None:
        self.unique = Unique(unique)
        self.on_duplicate = on_duplicate
        declared.add(self.unique)

    def observe(self, call: Callable[[], Any], tell: Tell) -> Any:
        """Call a view; of a duplicate only tell."""
        try:
            return call()
        except IntegrityError as error:
            self._tell_of(error, tell)
            raise

    async def aobserve(self, call: Callable[[], Any], tell: Tell) -> Any:
        """See observe()."""
        try:
            response = call()
            return await response if isawaitable(response) else response
        except IntegrityError as error:
            await sync_to_async(self._tell_of)(error, tell)
            raise

    def _tell_of(self, error: IntegrityError, tell: Tell) -> None:
        violation = violation_of(error, self.unique.constraints)
        if violation is not None:
            tell(violation)

    def catch(self, call: Callable[[], Any], request: HttpRequest, tell: Tell) -> Any:
        """Call a view, or return the answer to a duplicate, of which ``tell`` is told first."""
        constraints, aliases, committed = self.unique.constraints, self._aliases(), Committed()
        try:
            with writing(aliases, constraints, committed):
                return call()
        except IntegrityError as error:
            violation = None if committed else violation_of(error, constraints)
            if violation is None:
                raise
        except OperationalError as error:
            # The view has done more than what could be done again here: that is for its caller.
            if committed or not was_in_the_way(error, aliases) or not can_roll_back():
                raise
            try:
                # First, as the site's own page may query the database.
                return problem(request, _contention(error))
            finally:
                roll_back()
        tell(violation)
        return self._answer(request, violation)

    async def acatch(self, call: Callable[[], Any], request: HttpRequest, tell: Tell) -> Any:
        """See catch(). ``call`` may return the response or an awaitable of it."""
        constraints = self.unique.constraints
        try:
            response = call()
            return await response if isawaitable(response) else response
        except IntegrityError as error:
            violation = await sync_to_async(violation_of)(error, constraints)
            if violation is None:
                raise
        except OperationalError as error:
            if not was_in_the_way(error, self._aliases()):
                raise
            return await aproblem(request, _contention(error))
        tell(violation)
        return await self._aanswer(request, violation)

    def _aliases(self) -> list[str]:
        return sorted({router.db_for_write(each.model) for each in self.unique.constraints})

    def _answer(self, request: HttpRequest, violation: Violation) -> Any:
        if callable(self.on_duplicate):
            return _as_refusal(self.on_duplicate(request, violation))
        return skip() if self.on_duplicate == "skip" else problem(request, _error(violation))

    async def _aanswer(self, request: HttpRequest, violation: Violation) -> Any:
        if not callable(self.on_duplicate):
            if self.on_duplicate == "skip":
                return skip()
            return await aproblem(request, _error(violation))
        ask = self.on_duplicate
        # It is likely to ask the database.
        chosen = (ask if iscoroutinefunction(ask) else sync_to_async(ask))(request, violation)
        chosen = await chosen
        return _as_refusal(await chosen if isawaitable(chosen) else chosen)


def _contention(error: OperationalError) -> ContentionError:
    logger.warning("The database gave a view's writes up for another's: 503.", exc_info=error)
    return ContentionError(str(error))


def _error(violation: Violation) -> DuplicateError:
    return DuplicateError(f"{violation.constraint} exists already.")


def _as_refusal(response: Any) -> Any:
    """Mark a no as ours. A response that is the existing row is as good as the first one."""
    if isinstance(response, HttpResponseBase) and response.status_code >= 400:
        return refusal(response)
    return response


def answered(call: Callable[[], Any], request: HttpRequest) -> Any:
    """Call a view, and answer what ``create_or_existing()`` raises in it."""
    try:
        return call()
    except DuplicateError as error:
        return problem(request, error)


async def aanswered(call: Callable[[], Any], request: HttpRequest) -> Any:
    """See answered()."""
    try:
        response = call()
        return await response if isawaitable(response) else response
    except DuplicateError as error:
        return await aproblem(request, error)
