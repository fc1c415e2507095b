"""``manage.py singleflight explain``: which key would this request get, and why?"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandError

from singleflight_django.checks.guarded import Guarded, find_guarded
from singleflight_django.management.singleflight.base import Subcommand
from singleflight_django.management.singleflight.effective import Line
from singleflight_django.management.singleflight.explanation import explain
from singleflight_django.management.singleflight.imagined import Imagined, imagine


class Explain(Subcommand):
    """Sends nothing, takes nothing: it computes the key."""

    name = "explain"
    help = (
        "Says which guards a view has, and which key a request would get and why: `explain POST "
        '/lessons/ --data \'{"uuid": "…"}\'`, or a view\'s dotted name for what its key needs.'
    )

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """See Subcommand.add_arguments()."""
        parser.add_argument("target", nargs="+", metavar="[METHOD] URL-OR-VIEW")
        parser.add_argument("--data", help="The body: JSON, or a urlencoded form.")
        parser.add_argument("--header", action="append", metavar="NAME:VALUE", dest="headers")
        parser.add_argument("--user", metavar="PK", help="Who is calling; default: nobody.")
        parser.add_argument("--session", metavar="KEY", help="The key of the caller's session.")

    def handle(
        self,
        *,
        target: list[str],
        data: str | None,
        headers: list[str] | None,
        user: str | None,
        session: str | None,
        **options: Any,
    ) -> None:
        """Explain."""
        if len(target) > 2:
            raise CommandError("Give a method and a URL, a URL, or the dotted name of a view.")
        where = target[-1]
        if "/" not in where:
            self._write(_of_name(where), None)
            return
        method = target[0].upper() if len(target) == 2 else "GET" if data is None else "POST"
        imagined = imagine(method, where, data=data, headers=headers, user=user, session=session)
        self._write(_of_request(imagined, where), imagined)

    def _write(self, found: Iterable[Guarded], imagined: Imagined | None) -> None:
        for each in found:
            self.stdout.write(self.style.SUCCESS(f"{each.name}  ({each.route.path})"))
            for line in explain(each, imagined):
                self.stdout.write(_aligned(line))


def _of_name(name: str) -> list[Guarded]:
    everything = find_guarded()
    found = [each for each in everything if f"{each.name}.".startswith(f"{name}.")]
    if found:
        return found
    known = sorted({each.name for each in everything})
    listed = "".join(f"\n  {each}" for each in known)
    raise CommandError(
        f"No view of the URLconf that is called {name!r} has a guard. Those that have:{listed}"
        if known
        else "No view of the URLconf has a guard."
    )


def _of_request(imagined: Imagined, where: str) -> list[Guarded]:
    found = [each for each in find_guarded() if each.route.view is imagined.view]
    method = imagined.request.method
    fitting = [each for each in found if each.answers is None or method in each.answers]
    if not found:
        raise CommandError(f"The view of {where!r} has no guard.")
    if not fitting:
        raise CommandError(f"The handler for {method} at {where!r} has no guard.")
    return fitting


def _aligned(line: Line) -> str:
    label, text = line
    return f"  {label:<16} {text}"
