"""The row that is in a writer's way: read as it is now, and compared as Python compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from django.core.exceptions import FieldDoesNotExist, ObjectDoesNotExist
from django.db import OperationalError, connections, models, transaction

from singleflight_django.uniques import Field, fields_of

# Of MySQL and MariaDB. The former is what a locking read of a row is refused with that the snapshot
# doesn't show, where innodb_snapshot_isolation is on: by default since MariaDB 11.6.
RECORD_CHANGED: Final = 1020
DEADLOCK: Final = 1213

_M = TypeVar("_M", bound=models.Model)


def find(rows: models.QuerySet[_M], using: str, lookup: Mapping[str, Any]) -> _M | None:
    """Return the row of ``rows`` that ``lookup`` finds on the alias ``using``, or None.

    In REPEATABLE READ MySQL shows other transactions' rows only to a read that locks them.
    """
    connection = connections[using]
    rows = rows.using(using)
    mode: AbstractContextManager[None] = nullcontext()
    if connection.vendor == "mysql" and connection.in_atomic_block:
        rows, mode = rows.select_for_update(), connection.execute_wrapper(_share)
    with mode:
        try:
            return rows.get(**lookup)
        except ObjectDoesNotExist:
            return None
        except OperationalError as error:
            if connection.in_atomic_block and error.args[:1] in ((RECORD_CHANGED,), (DEADLOCK,)):
                # The server has rolled back all of it, and what comes now must not be committed.
                transaction.set_rollback(True, using=using)
            raise


# Whose INSERT was refused has a shared lock on the row. Two of them that both ask for more than
# that would deadlock.
def _share(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
    shared = f"{sql.removesuffix(' FOR UPDATE')} LOCK IN SHARE MODE"
    return execute(shared if sql.endswith(" FOR UPDATE") else sql, params, many, context)


def differing(row: models.Model, values: Mapping[str, Any]) -> str:
    """Return the name of the first of ``values`` that ``row`` does not have, or "".

    What the database holds equal (a case-insensitive collation does) need not be the same.
    Lookups such as ``day__gte`` and expressions can't be compared here.
    """
    for name, value in values.items():
        for each, wanted in parts(type(row), name, value):
            if not hasattr(wanted, "resolve_expression") and not _has(row, each, wanted):
                return name
    return ""


def parts(model: type[models.Model], name: str, value: Any) -> Iterator[tuple[Field, Any]]:
    """Yield the fields that ``name`` stands for, each with its part of ``value``."""
    fields = concrete(model, name)
    yield from zip(fields, value if len(fields) > 1 else [value], strict=True) if fields else ()


def concrete(model: type[models.Model], name: str) -> list[Field]:
    """Return the fields with columns that ``name`` stands for: none, one, or a composite key's."""
    try:
        fields = list(fields_of(model, [name]))
    except FieldDoesNotExist:
        return []
    return [each for each in fields if getattr(each, "column", None)]


def _has(row: models.Model, each: Field, wanted: Any) -> bool:
    if isinstance(wanted, models.Model):
        wanted = getattr(wanted, each.target_field.attname)  # type: ignore[attr-defined]
    return bool(_stored(each, getattr(row, each.attname)) == _stored(each, wanted))


def _stored(each: Field, value: Any) -> Any:
    return each.get_prep_value(each.to_python(value))
