"""Unique constraints as models declare them, and as ``unique=`` and ``constraint=`` name them.

One constraint is written as

- a field: ``"lessons.LessonSession.uuid"`` (``"lessons.LessonSession.pk"`` is the primary key);
- a tuple of fields: ``("lessons.LessonSession.user", "day")``;
- its name: ``"lessons.LessonSession.one_a_day"``, or ``"one_a_day"`` where no other model has it;

and several as a list of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import models

Model = type[models.Model]
Field: TypeAlias = "models.Field[Any, Any]"

_FORMS = (
    'write a field as "lessons.LessonSession.uuid", the fields of one constraint as a tuple like '
    '("lessons.LessonSession.user", "day"), a constraint by its name, and several as a list'
)


@dataclass(frozen=True)
class Constraint:
    """A unique constraint, or a primary key, on ``table``. ``name`` is "" where Django makes it up.

    ``fields`` is empty where it is made of expressions. ``deferred`` means that it is checked at
    COMMIT.
    """

    model: Model
    table: str
    fields: tuple[Field, ...] = field(compare=False)
    name: str = ""
    deferred: bool = False

    @property
    def columns(self) -> frozenset[str]:
        """The names of its columns."""
        return frozenset(str(each.column) for each in self.fields)

    @property
    def roots(self) -> frozenset[Field]:
        """What makes the primary keys of a model and of its parents one and the same."""
        return frozenset(root(each) for each in self.fields)

    def __str__(self) -> str:
        names = ",".join(each.name for each in self.fields)
        return f"{self.model._meta.label}.{self.name or names}"


def root(each: Field) -> Field:
    """Follow the links from a model to its parents."""
    while getattr(each.remote_field, "parent_link", False):
        each = each.target_field  # type: ignore[attr-defined]
    return each


def constraints_of(model: Model) -> Iterator[Constraint]:
    """Yield every unique constraint of ``model`` and of the tables of its parents."""
    for owner in _tables(model):
        options = owner._meta
        table = options.db_table
        yield Constraint(model, table, tuple(options.pk_fields))
        for each in options.local_concrete_fields:
            if each.unique and not each.primary_key:
                yield Constraint(model, table, (each,))
        for names in options.unique_together:
            yield Constraint(model, table, tuple(fields_of(owner, names)))
        for named in options.constraints:
            if isinstance(named, models.UniqueConstraint):
                deferred = named.deferrable is models.Deferrable.DEFERRED
                fields = tuple(fields_of(owner, named.fields))
                yield Constraint(model, table, fields, named.name, deferred)


def _tables(model: Model) -> list[Model]:
    return [each for each in (model, *model._meta.all_parents) if not each._meta.proxy]


def fields_of(model: Model, names: Iterable[str]) -> Iterator[Field]:
    """Yield the fields of these names. ``"pk"`` may stand for several."""
    for name in names:
        if name == "pk":
            yield from model._meta.pk_fields
        else:
            yield model._meta.get_field(name)  # type: ignore[misc]


class _Named(NamedTuple):
    """One constraint as it was written: ``model`` is "" for a bare name."""

    model: str
    names: tuple[str, ...]


# Those that guards were given, for ``manage.py check``.
declared: WeakSet[Unique] = WeakSet()


class Unique:
    """The constraints that ``spec`` names, in one of the forms above.

    Their form is checked now, their existence at first use: apps may not be loaded yet. With a
    ``model`` it goes without saying.
    """

    def __init__(self, spec: object, model: Model | None = None) -> None:
        self.spec = spec
        self._model = model
        self._named = [_parse(each) for each in (spec if isinstance(spec, list) else [spec])]
        if not self._named:
            raise ValueError(f"unique=[] names no constraint: {_FORMS}.")

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints of the models. Raises ImproperlyConfigured where there is none."""
        return tuple(each for named in self._named for each in self._find(named))

    def _find(self, named: _Named) -> list[Constraint]:
        model = self._labelled(named.model) if named.model else self._model
        if model is None:
            return self._anywhere(named.names)
        found = _matching(self._model or model, named.names)
        if not found:
            raise ImproperlyConfigured(_without(model, named.names))
        return found

    def _anywhere(self, names: tuple[str, ...]) -> list[Constraint]:
        """Find a constraint by its name alone, among the models that have it and their children."""
        found = [
            each
            for model in apps.get_models()
            for each in constraints_of(model)
            if (each.name,) == names
        ]
        tables = {each.table for each in found}
        if len(tables) != 1:
            how = "several models have" if tables else "no model has"
            raise ImproperlyConfigured(
                f"unique={self.spec!r}: {how} a unique constraint of that name; {_FORMS}."
            )
        return found[:1]

    def _labelled(self, label: str) -> Model:
        try:
            model = apps.get_model(label)
        except LookupError as error:
            raise ImproperlyConfigured(f"unique={self.spec!r}: {error}") from None
        if self._model is not None and not issubclass(self._model, model):
            raise ImproperlyConfigured(
                f"constraint={self.spec!r} is none of {self._model._meta.label}."
            )
        return model


def _parse(text: object) -> _Named:
    parts = text if isinstance(text, tuple) else (text,)
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise TypeError(f"{text!r} is no constraint: {_FORMS}.")
    owners, _, names = zip(*(part.rpartition(".") for part in parts), strict=True)
    if any(part.count(".") not in (0, 2) for part in parts):
        raise ValueError(f"{text!r} is no constraint: {_FORMS}.")
    if set(owners) - {"", owners[0]}:
        raise ValueError(f"{text!r} are fields of several models: {_FORMS}.")
    return _Named(owners[0], names)


def _matching(model: Model, names: tuple[str, ...]) -> list[Constraint]:
    known = list(constraints_of(model))
    by_name = [each for each in known if (each.name,) == names]
    if by_name:
        return by_name
    try:
        roots = {root(each) for each in fields_of(model, names)}
    except FieldDoesNotExist:
        return []
    return [each for each in known if each.roots == roots]


def _without(model: Model, names: tuple[str, ...]) -> str:
    known = ", ".join(sorted({str(each) for each in constraints_of(model)}))
    return (
        f"{model._meta.label} has no unique constraint over or called {', '.join(names)}: without "
        f"one the database lets duplicates in. Add unique=True or a UniqueConstraint, and migrate. "
        f"It has {known}."
    )
