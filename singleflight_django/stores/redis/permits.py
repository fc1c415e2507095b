"""How many connections of one process, or of one event loop, are busy at once."""

from __future__ import annotations

import time
from collections import deque

from singleflight_django.waiting import clock

# So many exchange a command for its reply at once, and so many more wait for news on the server.
MOST = 64
# How often a thread that finds no permit looks again, in seconds. It takes as long as an exchange.
PAUSE = 0.001


class Permits:
    """``MOST`` permits for threads. They cost next to nothing while there are enough."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # Adding and taking away at an end are atomic.
        self._free = deque(range(MOST))

    def take(self) -> None:
        """Wait for a permit; TimeoutError after ``patience`` seconds."""
        if self.take_at_once():
            return
        deadline = clock() + self._patience
        while not self.take_at_once():
            if clock() > deadline:
                raise TimeoutError(f"{MOST} calls have been under way for {self._patience} s.")
            time.sleep(PAUSE)

    def take_at_once(self) -> bool:
        """Whether there was a permit."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def give(self) -> None:
        """Give one back."""
        self._free.append(0)
