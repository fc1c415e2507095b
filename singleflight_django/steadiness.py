"""Async calls that another task can carry on, where the one that began them was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")


class Wait:
    """What one task at a time waits for. It may go away, and another come in its place.

    The tasks wait for futures of their own: one that is cancelled takes only its own with it.
    """

    __slots__ = ("_ended", "_error", "_loop", "_waiter", "result")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self.result: Any = None
        self._error: BaseException | None = None

    def end(self, result: Any) -> bool:
        """Let whoever waits have ``result``. Return False if it had ended before: then nothing changes."""
        if self._ended:
            return False
        self._ended, self.result = True, result
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    def fail(self, error: BaseException) -> None:
        """Let whoever waits have ``error`` raised. See end()."""
        if not self._ended:
            self._error = error
            self.end(None)

    def __await__(self) -> Generator[Any, None, Any]:
        while not self._ended:
            self._waiter = waiter = self._loop.create_future()
            # As Future.__await__() does, save that it looks at nothing when it goes on.
            waiter._asyncio_future_blocking = True
            yield waiter
        if self._error is not None:
            raise self._error
        return self.result


class Steady:
    """Carries a call out in the caller's task, for as long as that isn't interrupted.

    What is raised into it leaves the call where it is: await this again, in any task, to carry it on.
    Only for calls all of whose waits are Waits: see steadily().
    """

    __slots__ = ("_call",)

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call

    @property
    def suspended(self) -> bool:
        """Whether the call was interrupted."""
        return self._call.cr_suspended  # type: ignore[attr-defined,no-any-return]

    def __await__(self) -> Generator[Any, None, Any]:
        send = self._call.send
        while True:
            try:
                waited = send(None)
            except StopIteration as stop:
                return stop.value
            yield waited


async def steadily(call: Coroutine[Any, Any, _T]) -> _T:
    """Carry out a call of any kind, in a task of its own: who awaits this can be taken over from."""
    loop = asyncio.get_running_loop()
    wait, task = Wait(loop), loop.create_task(call)
    task.add_done_callback(wait.end)
    try:
        await wait
    except BaseException:
        # Its loop may have been closed long ago.
        with suppress(RuntimeError):
            task.cancel()
        raise
    return task.result()
