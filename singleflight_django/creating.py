"""``create_or_existing()``: an INSERT that, where the row exists already, gives that row.

Two callers, in autocommit or in transactions of their own::

    A: INSERT            COMMIT
    B:          INSERT (waits for A)   refused: SELECT, from the savepoint on
    C: INSERT            ROLLBACK
    D:          INSERT (waits for C)   created
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asgiref.sync import sync_to_async
from django.db import IntegrityError, OperationalError, connections, models

from singleflight_django.violations import is_transient
from singleflight_django.wanted import Wanted
from singleflight_django.writing import Committed, writing

if TYPE_CHECKING:
    from django.db.models.manager import BaseManager

_M = TypeVar("_M", bound=models.Model)

# How often the INSERT is tried. Another time is needed where the winner is gone before it could be
# read, and where the database picks this transaction as the victim of a deadlock.
ATTEMPTS: Final = 4
# Longest pause before the second attempt after a deadlock or the like, in seconds; it doubles then.
_PAUSE: Final = 0.02


def create_or_existing(
    rows: BaseManager[_M] | models.QuerySet[_M],
    /,
    *,
    constraint: object = None,
    defaults: Mapping[str, Any] | None = None,
    same: Iterable[str] = (),
    **lookup: Any,
) -> tuple[_M, bool]:
    """Create a row, or return the one that exists: ``(object, created)``.

    ::

        lesson, created = create_or_existing(
            Lesson.objects.filter(user=user), uuid=uuid, defaults={"user": user, "course": course}
        )

    ``rows``: a manager or queryset: the scope in which the existing row has to be.
    ``constraint``: which unique constraint tells that it exists, as for ``unique=``, or a field, a
    tuple of fields or a name without the model. Default: every one whose fields ``lookup`` has.
    ``defaults``: more values for the new row; callables are called once.
    ``same``: fields in which the existing row has to have the values that the new one would have.
    ``lookup``: what finds the existing row, and its plain values make the new one. None equals
    nothing in SQL: with a None in the constraint's fields a new row is made each time.

    It never updates. The INSERT has a savepoint, or a transaction of its own where none is open;
    only there is it repeated after a deadlock or serialization failure (ATTEMPTS times in all).
    ``pre_save`` is sent for each attempt, ``post_save`` only for a row that was created.

    Raises DuplicateMismatchError if a row exists that isn't the one asked for: outside of ``rows``,
    different in ``same``, equal to the database's collation only, or committed after the snapshot
    of a REPEATABLE READ or SERIALIZABLE transaction; IntegrityError for any other constraint, and
    where the row that is in the way was gone at each attempt; ValueError where no constraint fits.
    """
    return _create(Wanted(rows, constraint, defaults, same, lookup))


async def acreate_or_existing(
    rows: BaseManager[_M] | models.QuerySet[_M],
    /,
    *,
    constraint: object = None,
    defaults: Mapping[str, Any] | None = None,
    same: Iterable[str] = (),
    **lookup: Any,
) -> tuple[_M, bool]:
    """See create_or_existing()."""
    wanted = Wanted(rows, constraint, defaults, same, lookup)
    return await sync_to_async(_create)(wanted)


def _create(wanted: Wanted[_M]) -> tuple[_M, bool]:
    connection = connections[wanted.using]
    ours = connection.get_autocommit() and not connection.in_atomic_block
    wanted.call_defaults()
    for attempt in itertools.count(1):
        committed = Committed()
        try:
            with writing([wanted.using], wanted.constraints, committed):
                return wanted.insert(), True
        except (IntegrityError, OperationalError) as error:
            # What the site's own on_commit hooks raise isn't about this row: it is there.
            if committed:
                raise
            row = None
            if isinstance(error, IntegrityError):
                row = wanted.existing(error)
            elif not ours or not is_transient(error, wanted.using):
                raise
            else:
                time.sleep(random.uniform(0, _PAUSE * 2**attempt))  # noqa: S311
            if row is None and attempt == ATTEMPTS:
                raise
        if row is not None:
            return row, False
    raise AssertionError  # pragma: no cover
