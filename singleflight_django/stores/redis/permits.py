"""How many connections of one process, or of one event loop, are busy at once."""

from __future__ import annotations

from collections import deque
from threading import Lock

# So many exchange a command for its reply at once, and so many more wait for news on the server.
MOST = 64


class Permits:
    """``MOST`` permits for threads, first come, first served.

    Nothing is locked while there are enough: adding to and taking from an end of a deque is atomic.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._free = deque(range(MOST))
        # A locked lock for each thread that waits: whoever unlocks it has left it a permit.
        self._queue: deque[Lock] = deque()

    def take(self) -> None:
        """Wait for a permit; TimeoutError after ``patience`` seconds."""
        try:
            self._free.pop()
        except IndexError:
            self._wait()

    def take_at_once(self) -> bool:
        """Whether there was a permit."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def give(self) -> None:
        """Give one back: to whoever has waited longest."""
        self._free.append(0)
        if self._queue:
            self._hand_out()

    def _wait(self) -> None:
        turn = Lock()
        turn.acquire()
        self._queue.append(turn)
        # One that was given back before we stood in the queue would wait for us in vain.
        self._hand_out()
        try:
            served = turn.acquire(timeout=self._patience)
        except BaseException:
            if not self._leave(turn):
                self.give()
            raise
        if not served and self._leave(turn):
            raise TimeoutError(f"{MOST} calls have been under way for {self._patience} s.")

    def _hand_out(self) -> None:
        """Give what is free to those who wait. Several threads may do so at once."""
        while self._queue and self.take_at_once():
            try:
                turn = self._queue.popleft()
            except IndexError:
                self._free.append(0)
            else:
                turn.release()

    def _leave(self, turn: Lock) -> bool:
        """Leave the queue; False if there was a permit at the same moment."""
        try:
            self._queue.remove(turn)
        except ValueError:
            return False
        return True
