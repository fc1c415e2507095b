"""Show what concurrent duplicates do on real servers, and what each protection makes of them."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from testproject.racing.forms import FORMS
from testproject.racing.race import Race
from testproject.racing.report import as_json, table
from testproject.racing.signals import terminate_cleanly

READ_NEXT = """\
Read next, in README.md:
  "What it is not"   before you rely on it
  "The lock"         the reject and cascade forms above, with every option
  "Coalescing"       the coalesce and answer forms, and what they do not promise
  "The constraint"   why the lock does not replace it
The views of this race are in testproject/lessons/views/."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} isn't a whole number from 1 on")
    return int(text)


class Command(BaseCommand):
    help = (
        "Fire identical requests at the same view, unguarded and protected in every way, on real "
        "servers with several worker processes: a create, a slow model's answer, a cascade in the "
        "cache. Exit status 0 only if each unguarded form raced and every protected form held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        names = [form.name for form in FORMS]
        parser.add_argument("-n", "--requests", type=_positive, default=20, help="at once (20)")
        parser.add_argument("--rounds", type=_positive, default=1, help="for each form (1)")
        parser.add_argument("--workers", type=_positive, default=3, help="processes (3)")
        parser.add_argument(
            "--form", action="append", choices=names, dest="forms", help="only this; repeatable"
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def handle(self, *args: Any, **options: Any) -> None:
        terminate_cleanly()
        forms = [form for form in FORMS if not options["forms"] or form.name in options["forms"]]
        facts = {name: options[name] for name in ("requests", "rounds", "workers")}
        try:
            with Race(forms, **facts, say=self._say) as race:
                results = race.run()
        except KeyboardInterrupt:
            self._say("Interrupted; every server has been stopped.")
            sys.exit(130)
        if options["json"]:
            self.stdout.write(as_json(results, **facts))
        else:
            self.stdout.write(f"\n{table(results)}\n\n{READ_NEXT}")
        if not all(result.held for result in results.values()):
            sys.exit(1)

    def _say(self, line: str) -> None:
        """Progress goes to stderr, so that stdout is the table or the JSON alone."""
        print(line, file=sys.stderr, flush=True)
