"""``manage.py singleflight``: one subcommand for each module of ``management/singleflight``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from singleflight_django.management.singleflight.base import Subcommand
from singleflight_django.management.singleflight.doctor import Doctor
from singleflight_django.management.singleflight.explain import Explain
from singleflight_django.management.singleflight.list import List
from singleflight_django.management.singleflight.purge import Purge
from singleflight_django.management.singleflight.release import Release

SUBCOMMANDS: tuple[type[Subcommand], ...] = (Doctor, List, Release, Explain, Purge)


class Command(BaseCommand):
    """Hands on to a subcommand."""

    help = "Looks after the leases and flights of singleflight_django."
    # What the checks find is for the doctor to say, too: it must not be kept from its work by it.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the subcommands."""
        parsers = parser.add_subparsers(dest="subcommand", required=True)
        for kind in SUBCOMMANDS:
            text = kind.help
            kind.add_arguments(parsers.add_parser(kind.name, help=text, description=text))

    def handle(self, *args: Any, subcommand: str, **options: Any) -> None:
        """Carry out the subcommand."""
        kinds = {kind.name: kind for kind in SUBCOMMANDS}
        kinds[subcommand](self).handle(**options)
