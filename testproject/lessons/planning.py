"""
The service that plans a lesson, which takes as long as it likes.

``race`` runs one, so that it knows when a request is inside its view. Without one it is slept.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from http.client import HTTPConnection
from typing import Final
from urllib.parse import urlsplit

from django.conf import settings

from testproject.lessons.creating import work

TIMEOUT: Final = 20.0


def plan_lesson() -> None:
    """Ask the planner. Raise OSError if it is away."""
    host = urlsplit(getattr(settings, "PLANNER_URL", "")).netloc
    if not host:
        work()
        return
    with closing(HTTPConnection(host, timeout=TIMEOUT)) as connection:
        connection.request("GET", "/")
        connection.getresponse().read()


async def aplan_lesson() -> None:
    """See plan_lesson()."""
    await asyncio.to_thread(plan_lesson)
