"""Show what concurrent duplicates do on real servers, and what each protection makes of them."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from testproject.racing.forms import FORMS, Form
from testproject.racing.race import Race
from testproject.racing.report import as_json, table
from testproject.racing.signals import terminate_cleanly

READ_NEXT = """\
Read next, in README.md:
  "What it is not"   before you rely on it
  "The lock"         the reject and cascade forms above, with every option
  "Coalescing"       the coalesce and answer forms, and what they do not promise
  "The constraint"   why the lock does not replace it, and the cure without a lock
  "Operations"       leases in the database, always or while Redis is away
The views of this race are in testproject/lessons/views/."""

KILLERS = [form.name for form in FORMS if form.kills_redis]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} isn't a whole number from 1 on")
    return int(text)


def _chosen(names: list[str] | None, kill_redis: bool) -> list[Form]:
    if kill_redis and os.environ.get("REDIS_URL"):
        raise CommandError(
            "--kill-redis kills the server that race has started itself; the one that REDIS_URL "
            "names isn't ours, and others may use it. Unset REDIS_URL."
        )
    chosen = [
        form
        for form in FORMS
        if (form.name in names if names else kill_redis or not form.kills_redis)
    ]
    if kill_redis != any(form.kills_redis for form in chosen):
        raise CommandError(f"--kill-redis and its forms go together: {', '.join(KILLERS)}.")
    return chosen


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
        parser.add_argument(
            "--kill-redis",
            action="store_true",
            help=f"also kill our Redis while a request is in its view: {', '.join(KILLERS)}",
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def handle(self, *args: Any, **options: Any) -> None:
        terminate_cleanly()
        forms = _chosen(options["forms"], options["kill_redis"])
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
