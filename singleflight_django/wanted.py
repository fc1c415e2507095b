"""What is asked of ``create_or_existing()``: the row to be made, and the row that may be there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db import IntegrityError, OperationalError, models
from django.db.models.constants import LOOKUP_SEP

from singleflight_django.exceptions import DuplicateMismatchError
from singleflight_django.reading import RECORD_CHANGED, concrete, differing, find, parts
from singleflight_django.uniques import Constraint, Field, Unique, constraints_of, root
from singleflight_django.violations import Violation, violation_of
from singleflight_django.writing import sees_only_its_snapshot

if TYPE_CHECKING:
    from django.db.models.manager import BaseManager

_M = TypeVar("_M", bound=models.Model)
_R = TypeVar("_R", bound=models.Model)

_TOO_NEW = (
    "was committed after the snapshot of this REPEATABLE READ or SERIALIZABLE transaction: create "
    "before it begins, or run it again"
)


class Wanted(Generic[_M]):
    """The arguments of ``create_or_existing()``, checked."""

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
        self.values: dict[str, Any] = {**_plain(lookup), **(defaults or {})}
        self.constraints = self._constraints(constraint)
        self.same = self._same(same)

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

    def call_defaults(self) -> None:
        """Put what the callables among the defaults return in their places."""
        for name, value in self.values.items():
            if name not in self.lookup and callable(value):
                self.values[name] = value()

    def insert(self) -> _M:
        """Make the row: an INSERT in each of its tables, whatever its primary key."""
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

    def existing(self, error: IntegrityError) -> _M | None:
        """Return the row that refused the INSERT, or None if it is gone; raise if it isn't ours."""
        violation = violation_of(error, self.constraints, self.using)
        # A repetition violates all of the table's constraints, and is told of any one of them.
        if not violation and not violation_of(error, constraints_of(self.model), self.using):
            raise error
        row = self._look(self.rows, self.lookup, error)
        if row is None:
            if violation is None:
                raise error
            self._refuse_invisible(violation)
        elif violation is None and not self._repeats(row):
            raise error
        else:
            self._refuse_different(row, error)
        return row

    def _repeats(self, row: _M) -> bool:
        """Whether ``row`` is equal in the fields of a constraint that was asked for."""
        values = self._values_by_root()
        return any(
            each.roots
            and each.roots <= values.keys()
            and not differing(row, {field.name: values[field] for field in each.roots})
            for each in self.constraints
        )

    def _refuse_different(self, row: _M, error: IntegrityError) -> None:
        same = {name: self.values[known] for name, known in self.same.items()}
        if name := differing(row, _plain(self.lookup)) or differing(row, same):
            raise self._mismatch(f"differs in {name}") from error

    def _refuse_invisible(self, violation: Violation) -> None:
        """Raise if the row in the way is one that this caller doesn't see, now or later."""
        key = _roots(self.model, violation.fields)
        wanted = {each: value for each, value in self._values_by_root().items() if each in key}
        if key and key == wanted.keys() and self._anywhere(wanted, violation.error):
            raise self._mismatch("isn't among those that were looked for") from violation.error
        if sees_only_its_snapshot(self.using):
            raise self._mismatch(_TOO_NEW) from violation.error

    def _values_by_root(self) -> dict[Field, Any]:
        values = {**self.implied, **self.values}
        return {
            root(each): part
            for name in values
            for each, part in parts(self.model, name, values[name])
        }

    def _anywhere(self, wanted: dict[Field, Any], error: IntegrityError) -> bool:
        """Whether there is such a row, if only one of a parent's table."""
        owner = next(iter(wanted)).model
        everything: models.QuerySet[Any] = models.QuerySet(owner, using=self.using)
        lookup = {
            each.name: value if each.is_relation else getattr(value, "pk", value)
            for each, value in wanted.items()
        }
        return self._look(everything, lookup, error) is not None

    def _look(
        self, rows: models.QuerySet[_R], lookup: Mapping[str, Any], error: IntegrityError
    ) -> _R | None:
        try:
            return find(rows, self.using, lookup)
        except OperationalError as refused:
            if refused.args[:1] == (RECORD_CHANGED,):
                raise self._mismatch(_TOO_NEW) from error
            raise

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
