"""
A step's drafts in the cache make room for a new one: each gets the next number.

No cache renames several keys in one go. Two runs for one step meet like this, and lose a draft::

    first run               second run
    is there a draft 0? yes
    3 -> 4, 2 -> 3, 1 -> 2
    work                    is there a draft 0? yes
                            3 -> 4          (over the one that the first run has put there)
                            2 -> 3
    0 -> 1                  work
"""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from django.core.cache import cache
from django.http import HttpResponse, JsonResponse

from testproject.lessons.creating import work_seconds

# Drafts of each step; the one that has become number DRAFTS is there for an undo, and expires.
DRAFTS: Final = 4
KEEP: Final = 3600
UNDO: Final = 60


def draft_key(session_id: UUID, step: int, number: int) -> str:
    """Return under which key of the cache a step's draft is; number 0 is the newest."""
    return f"draft:{session_id}:{step}:{number}"


def cascade(session_id: UUID, step: int) -> HttpResponse:
    """Give each draft of a step the next number: 200, or 204 if there is room already."""
    keys = [draft_key(session_id, step, number) for number in range(DRAFTS + 1)]
    if cache.get(keys[0]) is None:
        return HttpResponse(status=204)
    for number in range(DRAFTS - 1, 0, -1):
        _rename(keys[number], keys[number + 1], UNDO if number == DRAFTS - 1 else KEEP)
    # The newest isn't put away as it is: a real one has it summed up by a service, say.
    time.sleep(work_seconds())
    _rename(keys[0], keys[1], KEEP)
    return JsonResponse({"session": session_id, "step": step})


def _rename(old: str, new: str, timeout: int) -> None:
    value = cache.get(old)
    if value is not None:
        cache.set(new, value, timeout)
        cache.delete(old)
