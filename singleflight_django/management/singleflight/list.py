"""``manage.py singleflight list``: who holds what at this moment."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from itertools import islice
from threading import Event
from typing import Any

from django.core.management.base import CommandError

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.live import Live
from singleflight_django.management.singleflight.base import (
    Subcommand,
    add_store_arguments,
    store_of,
    told_by_store,
)
from singleflight_django.stores.base import Store
from singleflight_django.stores.listing import Holding, seconds_text

# So many lines are sorted and aligned with each other: a million leases are never in memory.
PAGE = 1000
HEADS = ("KEY", "KIND", "HOLDER", "AGE", "LEFT", "FOLLOWERS", "FENCE")
_CLEAR = "\x1b[H\x1b[2J"


class List(Subcommand):
    """A table, or JSON; once, or again and again."""

    name = "list"
    help = "Lists the live leases and flights: who holds them, for how long, and who follows."

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """See Subcommand.add_arguments()."""
        parser.add_argument("contains", nargs="?", default="", help="Only keys with this in them.")
        parser.add_argument(
            "--json",
            action="store_true",
            help='One JSON document: "holdings" with key, kind ("lease" or "flight"), holder, age, '
            "remaining (seconds), followers, fence, flight (its number, or 0). null: not known.",
        )
        parser.add_argument(
            "--watch",
            nargs="?",
            type=_interval,
            const=2.0,
            metavar="SECONDS",
            help="Draw it again every so many seconds (default: 2), until Ctrl-C.",
        )
        parser.add_argument(
            "--show-secrets",
            action="store_true",
            help="Show keys as they are, also what a header or the session says in them.",
        )
        add_store_arguments(parser)

    def handle(
        self,
        *,
        contains: str,
        json: bool,
        watch: float | None,
        show_secrets: bool,
        cache: str | None,
        database: bool,
        **options: Any,
    ) -> None:
        """List."""
        read = partial(_reader(store_of(cache, database), show_secrets), contains)
        if watch is not None:
            if json:
                raise CommandError("--json is one document, and --watch would write many.")
            self._watch(read, watch)
            return
        with told_by_store():
            if json:
                self._write_json(read())
            else:
                self._write_table(read())

    def _watch(self, read: Callable[[], Iterable[Holding]], seconds: float) -> None:
        never = Event()
        try:
            while True:
                if self.stdout.isatty():
                    self.stdout.write(_CLEAR, ending="")
                self.stdout.write(f"{datetime.now():%H:%M:%S}")
                try:
                    with told_by_store():
                        self._write_table(read())
                except CommandError as error:
                    if not isinstance(error.__cause__, StoreUnavailableError):
                        raise
                    # It may come back while we watch.
                    self.stdout.write(self.style.ERROR(str(error)))
                self.stdout.flush()
                never.wait(seconds)
        except KeyboardInterrupt:
            self.stdout.write("")

    def _write_json(self, holdings: Iterable[Holding]) -> None:
        self.stdout.write('{"holdings": [', ending="")
        between = "\n"
        for holding in holdings:
            self.stdout.write(between + json.dumps(as_dict(holding)), ending="")
            between = ",\n"
        self.stdout.write("\n]}")

    def _write_table(self, holdings: Iterable[Holding]) -> None:
        widths, number = [len(head) for head in HEADS], 0
        for page in _pages(holdings):
            rows = [row(holding) for holding in sorted(page, key=lambda each: each.key)]
            columns = zip(widths, *[map(len, each) for each in rows], strict=True)
            widths = [max(column) for column in columns]
            lines = [*([HEADS] if number == 0 else []), *rows]
            self.stdout.write("\n".join(_aligned(line, widths) for line in lines))
            number += len(rows)
        self.stdout.write(f"{number} held." if number else "Nothing is held.")


def _reader(store: Store, show_secrets: bool) -> Callable[[str], Iterator[Holding]]:
    """Return what yields the holdings whose key, as it is to be shown, contains a text."""
    if show_secrets:
        return store.holdings
    live = Live(store)
    return lambda contains: (row.holding._replace(key=row.shown) for row in live.rows(contains))


def as_dict(holding: Holding) -> dict[str, Any]:
    """Return what of a holding is shown: all but the token."""
    shown = holding._asdict()
    del shown["token"]
    return shown


def row(holding: Holding) -> tuple[str, ...]:
    """Return the cells of a line of the table."""
    followers, fence = holding.followers, holding.fence
    return (
        holding.key,
        holding.kind,
        holding.holder or "?",
        seconds_text(holding.age),
        seconds_text(holding.remaining),
        # A lease has none; of a flight, the store may not know how many.
        str(followers) if followers is not None else "-" if holding.kind == "lease" else "?",
        "?" if fence is None else str(fence),
    )


def _aligned(cells: Iterable[str], widths: Iterable[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()


def _pages(holdings: Iterable[Holding]) -> Iterator[list[Holding]]:
    iterator = iter(holdings)
    while page := list(islice(iterator, PAGE)):
        yield page


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise ValueError(text)
    return seconds
