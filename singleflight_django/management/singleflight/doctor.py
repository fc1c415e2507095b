"""``manage.py singleflight doctor``: connects, looks, tries, and names each risk with its cure."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from django.core.checks import ERROR, WARNING, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from singleflight_django.checks import TAG
from singleflight_django.conf import conf
from singleflight_django.management.singleflight.base import (
    Subcommand,
    add_store_arguments,
    store_of,
)
from singleflight_django.management.singleflight.smoke import smoke
from singleflight_django.stores.findings import Finding, Level


class Doctor(Subcommand):
    """Prints what it finds as it finds it."""

    name = "doctor"
    help = (
        "Examines the server that keeps the leases, and tries it out in several processes. Exit "
        "status 1 if there is an error (with --strict: or a warning)."
    )

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """See Subcommand.add_arguments()."""
        parser.add_argument(
            "--json",
            action="store_true",
            help='One JSON document: "ok", and "findings" with name, level, text and cure.',
        )
        parser.add_argument("--strict", action="store_true", help="Warnings count as errors.")
        add_store_arguments(parser)

    def handle(
        self, *, json: bool, strict: bool, cache: str | None, database: bool, **options: Any
    ) -> None:
        """Examine."""
        found = []
        for finding in examination(cache, database):
            found.append(finding)
            if not json:
                self._write(finding)
        levels = Counter(finding.level for finding in found)
        failed = bool(levels[Level.ERROR] or (strict and levels[Level.WARNING]))
        if json:
            self._write_json(found, ok=not failed)
        else:
            self.stdout.write(f"\n{_counted(levels)}")
        if failed:
            raise CommandError(_counted(levels))

    def _write(self, finding: Finding) -> None:
        style = {
            Level.OK: self.style.SUCCESS,
            Level.WARNING: self.style.WARNING,
            Level.ERROR: self.style.ERROR,
        }.get(finding.level, str)
        level = style(f"{finding.level:<8}")
        self.stdout.write(f"{level} {finding.name:<12} {finding.text}")
        if finding.cure:
            self.stdout.write(f"{'':<22}-> {finding.cure}")

    def _write_json(self, found: Iterable[Finding], *, ok: bool) -> None:
        findings = [finding._asdict() for finding in found]
        self.stdout.write(json.dumps({"ok": ok, "findings": findings}, indent=1))


def examination(cache: str | None = None, database: bool = False) -> Iterator[Finding]:
    """Yield what is found: in the settings, on the server, and by trying it out."""
    if conf.SINGLEFLIGHT_ENABLED is not True:
        text = f"SINGLEFLIGHT_ENABLED is {conf.SINGLEFLIGHT_ENABLED!r}: nothing is guarded."
        yield Finding("settings", Level.WARNING, text, "Set it to True, or leave it out.")
    yield from _checks()
    try:
        store = store_of(cache, database)
    except (ImproperlyConfigured, ImportError) as error:
        yield Finding("store", Level.ERROR, str(error), "Correct the settings.")
        return
    except Exception as error:
        # A cluster's client connects when it is made.
        text = f"The cache's client can't be made. {type(error).__name__}: {error}"
        yield Finding("reach", Level.ERROR, text, "Is the server running, and LOCATION right?")
        return
    alias, prefix = cache or conf.SINGLEFLIGHT_CACHE, conf.SINGLEFLIGHT_PREFIX
    text = f"{type(store).__name__}, cache {alias!r}, prefix {prefix!r}."
    yield Finding("store", Level.OK, text)
    usable = True
    for finding in store.examine(conf.SINGLEFLIGHT_TTL):
        usable = usable and finding.level is not Level.ERROR
        yield finding
    if usable:
        yield from smoke(store)
    else:
        yield Finding("smoke", Level.UNKNOWN, "Not tried: cure the errors above first.")


def _checks() -> Iterator[Finding]:
    """What ``manage.py check --tag singleflight --deploy`` says."""
    for message in run_checks(tags=[TAG], include_deployment_checks=True):
        if message.is_silenced():
            continue
        level = Level.INFO
        if message.level >= WARNING:
            level = Level.ERROR if message.level >= ERROR else Level.WARNING
        name = (message.id or "check").removeprefix("singleflight_django.")
        yield Finding(name, level, message.msg, message.hint or "")


def _counted(levels: Counter[Level]) -> str:
    errors, warnings = levels[Level.ERROR], levels[Level.WARNING]
    if not errors and not warnings:
        return "No errors, no warnings."
    plural = {1: ""}
    return (
        f"{errors} error{plural.get(errors, 's')}, {warnings} warning{plural.get(warnings, 's')}."
    )
