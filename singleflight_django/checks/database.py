"""02x: does the database stand behind what guards rely on?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, models, router
from django.db.backends.base.base import BaseDatabaseWrapper

from singleflight_django.checks.base import message, setting
from singleflight_django.checks.guarded import find_guarded, guards_in_use
from singleflight_django.uniques import Constraint, Unique, declared

logger = logging.getLogger("singleflight_django")


class _Relied(NamedTuple):
    """A constraint that a guard relies on, and how the model declares it where that has a name."""

    unique: Unique
    constraint: Constraint
    declaration: models.UniqueConstraint | None
    # The database that the model is written to.
    alias: str
    connection: BaseDatabaseWrapper


def check_constraints_exist() -> list[CheckMessage]:
    """Does each ``unique=`` of the guards that are loaded name a constraint of a model?"""
    messages = []
    for unique in _in_order():
        try:
            _ = unique.constraints
        except ImproperlyConfigured as error:
            hint = "Without the constraint nothing keeps duplicates out when a lease is lost."
            messages.append(message(Error, "E020", str(error), hint))
    return messages


def check_constraints_are_made() -> list[CheckMessage]:
    """Can the database that is in use make the constraint? Django leaves out what it can't."""
    messages = []
    for each in _relied_on():
        for kind in _never_made(each.declaration, each.connection.features):
            text = (
                f"unique={each.unique.spec!r}: {each.constraint} is {kind}, which "
                f"{each.connection.vendor} doesn't have: Django has not made it on "
                f"{each.alias!r}, and nothing keeps duplicates out."
            )
            hint = "Declare a constraint that this database has, without the condition or the rest."
            messages.append(message(Error, "E021", text, hint))
    return messages


def check_nulls_collide() -> list[CheckMessage]:
    """Does the constraint keep out what it lets in twice: rows with NULL in one of its columns?"""
    messages = []
    for each in _relied_on():
        nullable = [field.name for field in each.constraint.fields if field.null]
        if nullable and getattr(each.declaration, "nulls_distinct", None) is not False:
            text = (
                f"unique={each.unique.spec!r}: {', '.join(nullable)} may be NULL, and rows with "
                "NULL there are no duplicates of each other."
            )
            hint = "Set null=False; on PostgreSQL UniqueConstraint(nulls_distinct=False) will do."
            messages.append(message(Warning, "W022", text, hint))
    return messages


def check_tables(databases: list[str]) -> list[CheckMessage]:
    """Are the constraints and our own tables really there? This connects to ``databases``."""
    messages = []
    for alias in databases:
        try:
            tables = {*connections[alias].introspection.table_names()}
        except DatabaseError:
            # That it is away is not for a check to tell.
            continue
        # In one that has never been migrated nothing is there yet.
        if "django_migrations" in tables:
            messages += [*_missing_constraints(alias, tables), *_missing_tables(alias, tables)]
    return messages


def _missing_constraints(alias: str, tables: set[str]) -> Iterator[CheckMessage]:
    for each in _relied_on():
        constraint, connection = each.constraint, each.connection
        if each.alias != alias or constraint.table not in tables:
            continue
        with connection.cursor() as cursor:
            found = connection.introspection.get_constraints(cursor, constraint.table)
        made = {
            name: {*(one["columns"] or ())}
            for name, one in found.items()
            if one["unique"] or one["primary_key"]
        }
        if constraint.name in made or constraint.columns in made.values():
            continue
        text = (
            f"unique={each.unique.spec!r}: the table {constraint.table} on {alias!r} has no such "
            "constraint, and nothing keeps duplicates out."
        )
        hint = "Run manage.py makemigrations and migrate. Other databases may not have its kind."
        yield message(Warning, "W023", text, hint)


def _missing_tables(alias: str, tables: set[str]) -> Iterator[CheckMessage]:
    if not _keeps_leases():
        return
    for model in apps.get_app_config("singleflight_django").get_models():
        table = model._meta.db_table
        if router.db_for_write(model) == alias and table not in tables:
            text = f"Leases may be kept in the database {alias!r}, and it has no table {table}."
            hint = f"Run manage.py migrate --database {alias} singleflight_django."
            yield message(Warning, "W024", text, hint)


def _keeps_leases() -> bool:
    """Whether the database store is in use, be it only while another is away."""
    return setting("SINGLEFLIGHT_STORE") == "database" or any(
        guard.options.on_store_error == "database" for guard in guards_in_use(find_guarded())
    )


def _never_made(declaration: models.UniqueConstraint | None, features: Any) -> Iterator[str]:
    """Yield what the database lacks for it. Of expressions MySQL only tells when connected."""
    if declaration is not None:
        if declaration.condition is not None and not features.supports_partial_indexes:
            yield "conditional"
        if declaration.deferrable and not features.supports_deferrable_unique_constraints:
            yield "deferrable"
        if getattr(declaration, "include", ()) and not features.supports_covering_indexes:
            yield "covering"


def _relied_on() -> Iterator[_Relied]:
    for unique in _in_order():
        try:
            constraints = unique.constraints
        except ImproperlyConfigured:
            # E020 tells.
            continue
        for constraint in constraints:
            try:
                alias = router.db_for_write(constraint.model)
                connection = connections[alias]
            except Exception:
                logger.debug("The checks don't know where %s is.", constraint, exc_info=True)
                continue
            yield _Relied(unique, constraint, _declaration(constraint), alias, connection)


def _declaration(constraint: Constraint) -> models.UniqueConstraint | None:
    for owner in (constraint.model, *constraint.model._meta.all_parents):
        for each in owner._meta.constraints:
            if constraint.name and each.name == constraint.name:
                return each if isinstance(each, models.UniqueConstraint) else None
    return None


def _in_order() -> list[Unique]:
    return sorted(declared, key=lambda each: str(each.spec))
