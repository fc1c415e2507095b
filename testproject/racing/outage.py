"""
Redis dies in mid-run, while a request is inside the view::

    first half      lease in Redis, view ..................... INSERT   201
                    the others: 429
    Redis                               killed
    second half                              lease in the database, view    INSERT   409
                                             the others: 429

The first one's lease was lost with Redis, and the database knows nothing of it: two callers are in
the view at once, and the constraint decides. A sync view with ``unique=`` has a transaction around
it; there SQLite, which has one writer, keeps the second out until the first one's COMMIT: 204.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from django.core.management import CommandError

from testproject.racing.client import Answer, Call, fired
from testproject.racing.planner import Planner
from testproject.racing.redis import Redis

# Seconds for the first request to come into its view, and for a second one, which need not come.
FIRST: Final = 15.0
SECOND: Final = 1.5


@dataclass
class Outage:
    """From fire(), which kills Redis, to the end of the ``with``, where it is started again."""

    redis: Redis
    planner: Planner
    say: Callable[[str], None]

    def __enter__(self) -> Outage:
        return self

    def fire(self, port: int, calls: Sequence[Call]) -> list[Answer]:
        """Send half of ``calls``, kill Redis, send the others; return all answers."""
        half = (len(calls) + 1) // 2
        with self.planner.held(), fired(port, calls[:half]) as first:
            if not self.planner.is_asked(FIRST):
                raise CommandError("No request came into its view, so Redis wasn't killed.")
            self.redis.kill()
            self.say("Redis killed in mid-run: a request is in the view")
            with fired(port, calls[half:]) as second:
                if self.planner.is_asked(SECOND):
                    self.say("a second request is in the view, with a lease in the database")
                self.planner.let_go()
                return [*first(), *second()]

    def __exit__(self, kind: object, *error: object) -> None:
        # Nobody needs it after Ctrl-C.
        if kind is None:
            self.redis.start_again()
            self.say("Redis started again, empty")
