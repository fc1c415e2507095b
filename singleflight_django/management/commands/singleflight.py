"""``manage.py singleflight purge``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections

from singleflight_django.stores.database.purging import purge


class Command(BaseCommand):
    """Each subcommand has a parser in add_arguments(), and a method named ``do_…``."""

    help = "Looks after the leases of singleflight_django."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the subcommands."""
        subcommands = parser.add_subparsers(dest="subcommand", required=True)
        purging = subcommands.add_parser(
            "purge", help="Removes what is out of date from the tables of the database store."
        )
        purging.add_argument(
            "--database",
            choices=tuple(connections),
            help=f"Whose tables; the router says it otherwise (mostly {DEFAULT_DB_ALIAS!r}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Carry out the subcommand."""
        getattr(self, f"do_{options['subcommand']}")(**options)

    def do_purge(self, *, database: str | None, verbosity: int, **options: Any) -> None:
        """Remove what is out of date."""
        removed = purge(database)
        if verbosity > 0:
            self.stdout.write(f"{removed} row{'' if removed == 1 else 's'} removed.")
