"""What the subcommands share."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Store
from singleflight_django.stores.registry import backed_by_database, get_store


class Subcommand:
    """One subcommand; ``command`` has the streams to write to."""

    name: ClassVar[str]
    help: ClassVar[str]

    def __init__(self, command: BaseCommand) -> None:
        self.stdout, self.stderr, self.style = command.stdout, command.stderr, command.style

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add its arguments."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it."""
        raise NotImplementedError


def add_store_arguments(parser: ArgumentParser) -> None:
    """Add what says which store is meant."""
    parser.add_argument(
        "--cache",
        choices=tuple(settings.CACHES),
        metavar="ALIAS",
        help="The cache that keeps the leases; default: SINGLEFLIGHT_CACHE.",
    )
    parser.add_argument(
        "--database",
        action="store_true",
        help='Also the database behind it, for guards with on_store_error="database".',
    )


def store_of(cache: str | None, database: bool) -> Store:
    """Return the store that add_store_arguments() says."""
    store = get_store(cache)
    return backed_by_database(store) if database else store


@contextmanager
def told_by_store() -> Iterator[None]:
    """A store that is away, or that can't list, is no traceback."""
    try:
        yield
    except StoreUnavailableError as error:
        raise CommandError(f"{error} Ask manage.py singleflight doctor.") from error
    except NotImplementedError as error:
        raise CommandError(str(error)) from error
