"""Measure this library beside raw redis-py and its peers, in one run, on one server."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from testproject.benching.bench import Bench
from testproject.benching.peers import PEERS, Floor, Ours
from testproject.benching.plot import draw
from testproject.benching.report import tables
from testproject.racing.signals import terminate_cleanly


def _turns(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} isn't a whole number from 1 on")
    return int(text)


def _callers(text: str) -> int:
    if not text.isdecimal() or int(text) < 2 or int(text) % 2:
        raise ArgumentTypeError(f"{text!r} isn't an even number from 2 on: half in each process")
    return int(text)


class Command(BaseCommand):
    help = (
        "Measure a lock's cycle, a conflict, a guarded view and bursts of callers: this library, "
        "raw redis-py and whichever of its peers are installed (the extra `bench` has them), in "
        "turns, on a Valkey of our own or at REDIS_URL. Quiet machines give quiet figures."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--turns", type=_turns, default=40, help="of 50 calls each (40)")
        parser.add_argument(
            "--callers",
            type=_callers,
            action="append",
            help="callers of a burst; repeatable (50 and 200)",
        )
        parser.add_argument(
            "--peer",
            action="append",
            choices=[peer.name for peer in PEERS],
            metavar="NAME",
            help="only us, the floor and this one; repeatable",
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        parser.add_argument("--plot", metavar="FILE.png", help="draw the figures, too")

    def handle(self, *args: Any, **options: Any) -> None:
        terminate_cleanly()
        callers = tuple(options["callers"] or (50, 200))
        chosen = options["peer"]
        names = (Ours.name, Floor.name, *chosen) if chosen else [peer.name for peer in PEERS]
        bench = Bench(tuple(names), options["turns"], callers, self._say)
        try:
            told = bench.run()
        except KeyboardInterrupt:
            self._say("Interrupted; every process has been stopped.")
            sys.exit(130)
        self.stdout.write(json.dumps(told, indent=2) if options["json"] else f"\n{tables(told)}")
        if options["plot"]:
            draw(options["plot"], told["cycle"], bench.shown)
            self._say(f"Drawn: {options['plot']}")

    def _say(self, line: str) -> None:
        """Progress goes to stderr, so that stdout is the tables or the JSON alone."""
        print(line, file=sys.stderr, flush=True)
