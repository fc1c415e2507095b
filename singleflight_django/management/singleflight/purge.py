"""``manage.py singleflight purge``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from singleflight_django.management.singleflight.base import Subcommand
from singleflight_django.stores.database.purging import purge


class Purge(Subcommand):
    """Removes rows that say nothing any more."""

    name = "purge"
    help = "Removes what is out of date from the tables of the database store."

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """See Subcommand.add_arguments()."""
        parser.add_argument(
            "--database",
            choices=tuple(connections),
            help=f"Whose tables; the router says it otherwise (mostly {DEFAULT_DB_ALIAS!r}).",
        )

    def handle(self, *, database: str | None, verbosity: int, **options: Any) -> None:
        """Remove what is out of date."""
        removed = purge(database)
        if verbosity > 0:
            self.stdout.write(f"{removed} row{'' if removed == 1 else 's'} removed.")
