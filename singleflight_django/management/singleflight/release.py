"""``manage.py singleflight release``: ends a lease whose holder can't."""

from __future__ import annotations

from argparse import ArgumentParser
from difflib import get_close_matches
from itertools import islice
from typing import Any

from django.core.management.base import CommandError

from singleflight_django.live import Live, Row
from singleflight_django.management.singleflight.base import (
    Subcommand,
    add_store_arguments,
    store_of,
    told_by_store,
)
from singleflight_django.stores.base import Store
from singleflight_django.stores.listing import Holding, evicted, whose

# Among so many keys one is looked for that may have been meant.
LOOKED_AT = 20_000


class Release(Subcommand):
    """By the owner token, so that nobody is hit who came later than the answer to the question."""

    name = "release"
    help = (
        "Ends a lease: the next caller gets in, a follower of a flight takes it over. Its holder is "
        "not stopped, and hears of it at its next renewal or lease.check()."
    )

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """See Subcommand.add_arguments()."""
        parser.add_argument(
            "key", help="As `list` shows it, with or without --show-secrets; namespace included."
        )
        parser.add_argument("--yes", action="store_true", help="Don't ask.")
        parser.add_argument(
            "--holder",
            metavar="HOST:PID",
            help="Of a semaphore's holders, only this process: all the places that it has.",
        )
        add_store_arguments(parser)

    def handle(
        self,
        *,
        key: str,
        yes: bool,
        holder: str | None,
        cache: str | None,
        database: bool,
        **options: Any,
    ) -> None:
        """Release."""
        store = store_of(cache, database)
        with told_by_store():
            found = _held(Live(store), key, holder)
            for row in found:
                self.stdout.write(f"{row.shown} is held by {whose(row.holding)}.")
            if holder and len(found) > 1:
                self.stdout.write(f"These are all {len(found)} places of {holder}.")
            if not yes and not _confirmed(found, holder):
                raise CommandError("Nothing was released.")
            for row in found:
                self._release(store, row.holding)

    def _release(self, store: Store, holding: Holding) -> None:
        done = store.evict(holding)
        said = evicted(holding, done)
        self.stdout.write(self.style.SUCCESS(said) if done else said)


def _held(live: Live, key: str, holder: str | None) -> list[Row]:
    """Return who holds ``key``; CommandError, with what may have been meant, if nobody does."""
    by_token = {row.holding.token: row for row in _rows(live, key)}
    found = [row for row in by_token.values() if holder in (None, row.holding.holder)]
    if found:
        return found
    if by_token:
        holders = ", ".join(sorted(row.holding.holder or "?" for row in by_token.values()))
        raise CommandError(f"{key!r} is not held by {holder!r}, but by {holders}.")
    near = _near(live, key)
    hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    raise CommandError(f"Nobody holds {key!r}.{hint}")


def _rows(live: Live, key: str) -> list[Row]:
    """Return the rows of a key, as it is or as it is shown."""
    rows = [row for row in live.rows(key) if row.shown == key]
    if len({row.holding.key for row in rows}) > 1:
        raise CommandError(f"{key!r} is how several keys are shown: take it from --show-secrets.")
    return rows or list(live.rows_of(key))


def _near(live: Live, key: str) -> list[str]:
    # Most often it is the namespace that was left out.
    longer = sorted({row.shown for row in islice(live.rows(key), LOOKED_AT)})
    if longer:
        return longer[:3]
    known = {row.shown for row in islice(live.rows(), LOOKED_AT)}
    return get_close_matches(key, known, 3, 0.6)


def _confirmed(found: list[Row], holder: str | None) -> bool:
    what = "it" if len(found) == 1 else f"all {len(found)}"
    if len(found) > 1 and holder:
        what += f" places of {holder}"
    try:
        return input(f"Release {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise CommandError("Nobody is there to be asked: say --yes.") from None
