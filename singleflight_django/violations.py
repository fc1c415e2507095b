"""Which unique constraint a database's error is about, told by codes and names, not by wording."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connections, models, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from singleflight_django.reading import DEADLOCK, RECORD_CHANGED, concrete, differing, find
from singleflight_django.stores.database.dialects import is_contention
from singleflight_django.uniques import Constraint, Field

_UNIQUE_VIOLATION: Final = "23505"
_DUPLICATE_ENTRY: Final = 1062
_SQLITE_NAMES: Final = (
    "SQLITE_CONSTRAINT_UNIQUE",
    "SQLITE_CONSTRAINT_PRIMARYKEY",
    "SQLITE_CONSTRAINT_ROWID",
)
_TRANSIENT_STATES: Final = ("40001", "40P01")  # serialization failure, deadlock
_SQLITE_BUSY: Final = 5

_LAST_QUOTED = re.compile(r".*'([^']+)'", re.DOTALL)
_TABLE_WRITTEN = re.compile(
    r"\s*(?:INSERT|REPLACE|UPDATE)(?:\s+(?:IGNORE|INTO))*\s+`?([^`\s(]+)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A write was refused: ``model`` has a row that is equal in ``fields`` already.

    ``constraint`` is its label, ``using`` the alias that was written to, ``error`` Django's.
    """

    model: type[models.Model]
    fields: tuple[str, ...]
    constraint: str
    using: str
    error: IntegrityError

    def existing(
        self, scope: models.Manager[Any] | models.QuerySet[Any] | None = None, **lookup: Any
    ) -> Any:
        """Return the row that won; None if there is none that equals ``lookup``, or none any more.

        Say in ``scope`` or in ``lookup`` whose it has to be: a client may send the id of a row that
        is another's. ``violation.existing(uuid=form["uuid"], user=request.user)``
        """
        if self._fields(self.fields) - self._fields(lookup):
            raise ValueError(f"existing() needs a value for each of {', '.join(self.fields)}.")
        rows = self.model._default_manager if scope is None else scope
        row = find(rows.all(), self.using, lookup)
        return None if row is None or differing(row, lookup) else row

    async def aexisting(
        self, scope: models.Manager[Any] | models.QuerySet[Any] | None = None, **lookup: Any
    ) -> Any:
        """See existing()."""
        return await sync_to_async(self.existing)(scope, **lookup)

    def _fields(self, names: Iterable[str]) -> set[Field]:
        return {each for name in names for each in concrete(self.model, name)}


def violation_of(
    error: IntegrityError, constraints: Iterable[Constraint], using: str | None = None
) -> Violation | None:
    """Return which of ``constraints`` the error is about; None if it is about anything else.

    ``using`` is the alias that was written to. Default: the router's for each constraint's model.
    Databases other than PostgreSQL, MySQL, MariaDB and SQLite aren't known.
    """
    for constraint in constraints:
        alias = using or router.db_for_write(constraint.model)
        connection = connections[alias]
        matches = _MATCHERS.get(connection.vendor)
        if matches and matches(error, constraint, connection):
            names = tuple(each.name for each in constraint.fields)
            return Violation(constraint.model, names, str(constraint), alias, error)
    return None


def is_transient(error: DatabaseError, using: str) -> bool:
    """Whether the same transaction may well succeed when it is run again.

    A lock wait that MySQL has given up (1205) isn't: the caller has waited long enough.
    """
    cause = error.__cause__
    vendor = connections[using].vendor
    if vendor == "postgresql":
        return _sqlstate(cause) in _TRANSIENT_STATES
    if vendor == "mysql":
        return error.args[:1] in ((DEADLOCK,), (RECORD_CHANGED,))
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF == _SQLITE_BUSY


def was_in_the_way(error: DatabaseError, using: Iterable[str]) -> bool:
    """Whether one of the databases gave up because of others: a lock wait that was too long, too."""
    vendors = {connections[alias].vendor for alias in using} & _MATCHERS.keys()
    return any(is_contention(vendor, error) for vendor in vendors)


def _on_postgresql(
    error: IntegrityError, constraint: Constraint, connection: BaseDatabaseWrapper
) -> bool:
    if _sqlstate(error.__cause__) != _UNIQUE_VIOLATION:
        return False
    facts = error.__cause__.diag  # type: ignore[union-attr]
    table = constraint.table.strip('"').rpartition('"."')[2]
    if facts.table_name != table:
        return False
    return _is_named(constraint, facts.constraint_name, table, connection)


def _sqlstate(cause: BaseException | None) -> str:
    # Of psycopg 3 and of psycopg2.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def _on_mysql(
    error: IntegrityError, constraint: Constraint, connection: BaseDatabaseWrapper
) -> bool:
    if error.args[:1] != (_DUPLICATE_ENTRY,):
        return False
    # The values before it may hold anything. MySQL writes table.key, MariaDB only the key, and
    # every table has a PRIMARY.
    quoted = _LAST_QUOTED.match(str(error.args[1]))
    table, _, name = quoted[1].rpartition(".") if quoted else ("", "", "")
    if (table or _table_written(error)).lower() != constraint.table.lower():
        return False
    return _is_named(constraint, name, constraint.table, connection)


def _table_written(error: IntegrityError) -> str:
    """Return the table of the failed statement, which Django's frame in the traceback still has."""
    trace, statement = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code in _EXECUTING:
            statement = str(trace.tb_frame.f_locals.get("sql", ""))
        trace = trace.tb_next
    written = _TABLE_WRITTEN.match(statement)
    return written[1] if written else ""


_EXECUTING: Final = (
    CursorWrapper._execute.__code__,  # type: ignore[attr-defined]
    CursorWrapper._executemany.__code__,  # type: ignore[attr-defined]
)


def _on_sqlite(
    error: IntegrityError, constraint: Constraint, connection: BaseDatabaseWrapper
) -> bool:
    if getattr(error.__cause__, "sqlite_errorname", "") not in _SQLITE_NAMES:
        return False
    # "UNIQUE constraint failed: table.column, table.column", or "…: index 'name'" of expressions.
    what = str(error.__cause__).partition(": ")[2]
    columns = {f"{constraint.table}.{column}" for column in constraint.columns}
    return what == f"index '{constraint.name}'" or set(what.split(", ")) == columns


_MATCHERS: Final[dict[str, Callable[[IntegrityError, Constraint, BaseDatabaseWrapper], bool]]] = {
    "postgresql": _on_postgresql,
    "mysql": _on_mysql,
    "sqlite": _on_sqlite,
}

# Of a table: the columns of each constraint and index, by its name.
_catalogue: dict[tuple[str, str, str], dict[str, frozenset[str]]] = {}


def _is_named(
    constraint: Constraint, name: str, table: str, connection: BaseDatabaseWrapper
) -> bool:
    """Whether ``name`` is the database's name of ``constraint``."""
    if constraint.name:
        return constraint.name == name
    key = (connection.alias, str(connection.settings_dict["NAME"]), table)
    # A migration may have added or renamed one since.
    if name not in _catalogue.get(key, {}):
        _catalogue[key] = _introspected(table, connection)
    return _catalogue[key].get(name) == constraint.columns


def _introspected(table: str, connection: BaseDatabaseWrapper) -> dict[str, frozenset[str]]:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, table)
    return {
        name: frozenset(each["columns"] or ()) for name, each in found.items() if each["unique"]
    }
