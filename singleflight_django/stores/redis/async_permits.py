"""How many connections of one event loop are busy at once: the asyncio twin of ``permits``."""

from __future__ import annotations

import asyncio
from collections import deque

from singleflight_django.steadiness import Wait
from singleflight_django.stores.redis.permits import MOST


class AsyncPermits:
    """``MOST`` permits for the tasks of one loop, first come, first served."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._free = MOST
        self._queue: deque[Wait] = deque()

    async def take(self) -> None:
        """Wait for a permit; TimeoutError after ``patience`` seconds."""
        if self.take_at_once():
            return
        loop = asyncio.get_running_loop()
        turn = Wait(loop)
        self._queue.append(turn)
        alarm = loop.call_later(self._patience, turn.end, False)
        try:
            if not await turn:
                raise TimeoutError(f"{MOST} calls have been under way for {self._patience} s.")
        except BaseException:
            # It may have come at the same moment.
            if not turn.end(False) and turn.result:
                self.give()
            raise
        finally:
            alarm.cancel()

    def take_at_once(self) -> bool:
        """Whether there was a permit."""
        if self._free:
            self._free -= 1
            return True
        return False

    def give(self) -> None:
        """Give one back: to whoever has waited longest."""
        while self._queue:
            if self._queue.popleft().end(True):
                return
        self._free += 1
