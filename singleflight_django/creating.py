"""``create_or_existing()``: an INSERT that, where the row exists already, gives that row."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connections,
    models,
    transaction,
)
from django.db.models.constants import LOOKUP_SEP

from singleflight_django.exceptions import DuplicateMismatchError
from singleflight_django.reading import concrete, differing, find
from singleflight_django.uniques import Constraint, Field, Unique, constraints_of, root
from singleflight_django.violations import Violation, is_transient, violation_of
from singleflight_django.writing import sees_only_its_snapshot, writing

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
    return _Creation(rows, constraint, defaults, same, lookup).run()


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
    return await sync_to_async(_Creation(rows, constraint, defaults, same, lookup).run)()


class _Creation(Generic[_M]):
    def __init__(
        self,
        rows: BaseManager[_M] | models.QuerySet[_M],
        constraint: object,
        defaults: Mapping[str, Any] | None,
        same: Iterable[str],
        lookup: dict[str, Any],
    ) -> None:
        self.given, self.lookup = rows, lookup
        self.rows: models.QuerySet[_M] = rows.all()
        self.rows._for_write = True  # type: ignore[attr-defined]
        self.model, self.using = self.rows.model, self.rows.db
        self.implied = _implied(rows)
        self.values = {**_plain(lookup), **(defaults or {})}
        self.constraints = self._constraints(constraint)
        self.same = self._same(same)
        self.ours = self.committed = False

    def _constraints(self, constraint: object) -> tuple[Constraint, ...]:
        if constraint is not None:
            return Unique(constraint, self.model).constraints
        roots = _roots(self.model, {**self.implied, **_plain(self.lookup)})
        found = [each for each in constraints_of(self.model) if each.roots and each.roots <= roots]
        if not found:
            raise ValueError(
                f"No unique constraint of {self.model._meta.label} has all of its fields in the "
                "lookup, so nothing would tell that the row exists: add them, or say constraint=."
            )
        return tuple(found)

    def _same(self, same: Iterable[str]) -> dict[str, str]:
        """Return under which of the values' names the names in ``same`` are."""
        if isinstance(same, str):
            raise TypeError(f'same is a tuple of names, like ("{same}",).')
        names = {tuple(concrete(self.model, name)): name for name in self.values}
        found = {name: names.get(tuple(concrete(self.model, name)), "") for name in same}
        for name, known in found.items():
            if not known:
                raise ValueError(
                    f"same names {name!r}, for which neither lookup nor defaults says."
                )
        return found

    def run(self) -> tuple[_M, bool]:
        connection = connections[self.using]
        self.ours = connection.get_autocommit() and not connection.in_atomic_block
        for name, value in self.values.items():
            if name not in self.lookup and callable(value):
                self.values[name] = value()
        for attempt in itertools.count(1):
            try:
                return self._insert(), True
            except (IntegrityError, OperationalError) as error:
                row = self._in_the_way(error, attempt)
                if row is None and attempt == ATTEMPTS:
                    raise
            if row is not None:
                return row, False
        raise AssertionError  # pragma: no cover

    def _insert(self) -> _M:
        with writing([self.using], self.constraints):
            transaction.on_commit(self._commit, self.using)
            return self._create()

    def _commit(self) -> None:
        self.committed = True

    def _create(self) -> _M:
        values = {**self.implied, **self.values}
        if _roots(self.model, values) & _keys_of_parents(self.model):
            # create() inserts the child, but updates a parent that has this key already.
            row = self.model(**values)
            row.save(force_insert=(models.Model,), using=self.using)
            return row
        rows: Any = self.given
        pinned = rows.using if isinstance(rows, models.QuerySet) else rows.db_manager
        created: _M = pinned(self.using).create(**self.values)
        return created

    def _in_the_way(self, error: DatabaseError, attempt: int) -> _M | None:
        """Return the row that exists; None if the INSERT is worth another attempt."""
        # What the site's own on_commit hooks raise isn't about this row: it is there.
        violation = None
        if isinstance(error, IntegrityError) and not self.committed:
            violation = violation_of(error, self.constraints, self.using)
        if violation:
            return self._existing(violation)
        if self.committed or not self.ours or not is_transient(error, self.using):
            raise error
        time.sleep(random.uniform(0, _PAUSE * 2**attempt))  # noqa: S311
        return None

    def _existing(self, violation: Violation) -> _M | None:
        row = find(self.rows, self.using, self.lookup)
        if row is None:
            self._refuse_invisible(violation)
            return None
        same = {name: self.values[known] for name, known in self.same.items()}
        if name := differing(row, _plain(self.lookup)) or differing(row, same):
            raise self._mismatch(f"differs in {name}") from violation.error
        return row

    def _refuse_invisible(self, violation: Violation) -> None:
        """Raise if the row in the way is one that this caller doesn't see, now or later."""
        key = _roots(self.model, violation.fields)
        values = {**self.implied, **self.values}
        wanted = {name: values[name] for name in values if _roots(self.model, [name]) & key}
        everything: models.QuerySet[_M] = models.QuerySet(self.model, using=self.using)
        if key <= _roots(self.model, wanted) and find(everything, self.using, wanted):
            raise self._mismatch("isn't among those that were looked for") from violation.error
        if sees_only_its_snapshot(self.using):
            raise self._mismatch(
                "was committed after the snapshot of this REPEATABLE READ or SERIALIZABLE "
                "transaction: create before it begins, or run it again"
            ) from violation.error

    def _mismatch(self, what: str) -> DuplicateMismatchError:
        return DuplicateMismatchError(f"A {self.model._meta.label} exists, and {what}.")


def _implied(rows: Any) -> dict[str, Any]:
    """Return what a manager such as ``user.lessons`` adds to each row that it makes."""
    if hasattr(rows, "instance") and hasattr(rows, "field"):
        return {rows.field.name: rows.instance}
    return {}


def _plain(lookup: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lookup.items() if LOOKUP_SEP not in name}


def _roots(model: type[models.Model], names: Iterable[str]) -> set[Field]:
    return {root(each) for name in names for each in concrete(model, name)}


def _keys_of_parents(model: type[models.Model]) -> set[Field]:
    return {root(each) for parent in model._meta.all_parents for each in parent._meta.pk_fields}
