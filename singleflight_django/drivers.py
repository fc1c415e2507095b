"""Carry out the engine's steps: once blocking, once on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from singleflight_django.steadiness import Steady, steadily
from singleflight_django.steps import Ask, Steps

# What the store may have carried out although nobody read its answer: never torn in the middle.
# An interrupted one of these is finished in the background, and undone if it took something.
TAKES = frozenset({"acquire", "join"})
WHOLE = TAKES | {"release", "publish"}

# How long a loop that ends waits for what is being finished, in seconds.
LAST_WORK = 5.0
# What is being finished on each loop, and what makes the loop wait for it before it ends.
_background: WeakKeyDictionary[
    asyncio.AbstractEventLoop, tuple[set[asyncio.Task[None]], AsyncGenerator[None, None]]
] = WeakKeyDictionary()


def run(steps: Steps) -> Any:
    """Carry ``steps`` out, blocking. Return or raise what they do."""
    try:
        on, verb, args = next(steps)
        while True:
            try:
                answer = getattr(on, verb)(*args)
            except BaseException as error:
                on, verb, args = steps.throw(error)
            else:
                on, verb, args = steps.send(answer)
    except StopIteration as stop:
        return stop.value


async def arun(steps: Steps) -> Any:
    """See run(). Cancelled, it leaves nothing half done."""
    return await _carry_out(steps, *_advance(next, steps))


async def _carry_out(steps: Steps, ask: Ask | None, result: Any) -> Any:
    while ask is not None:
        on, verb, args = ask
        call = getattr(on, "a" + verb)(*args)
        whole: Steady | None = None
        if verb in WHOLE:
            # A task of its own costs a fifth of the whole: most stores do without (measured).
            whole = Steady(call if getattr(on, "steady", False) else steadily(call))
        try:
            answer = await (call if whole is None else whole)
        except GeneratorExit:
            # Nobody runs this task any more: what the steps hold, the keeper gives back.
            steps.close()
            raise
        except BaseException as error:
            if whole is not None and whole.suspended:
                in_background(_finish(steps, verb, whole))
                raise
            ask, result = _advance(steps.throw, error)
        else:
            ask, result = _advance(steps.send, answer)
    return result


async def _finish(steps: Steps, verb: str, call: Steady) -> None:
    """Carry an interrupted call on; undo it if it took something, else carry the steps through."""
    try:
        try:
            answer = await call
        except BaseException as error:
            following = _advance(steps.throw, error)
        else:
            if verb in TAKES:
                following = _advance(steps.throw, asyncio.CancelledError())
            else:
                following = _advance(steps.send, answer)
        await _carry_out(steps, *following)
    except BaseException:  # noqa: S110 - whoever asked is gone, and was told by its CancelledError
        pass


def _advance(advance: Callable[[Any], Any], value: Any) -> tuple[Ask | None, Any]:
    """Return the next ask, or None and the result."""
    try:
        return advance(value), None
    except StopIteration as stop:
        return None, stop.value


def in_background(rest: Coroutine[Any, Any, None]) -> None:
    """Carry ``rest`` out while the caller goes on. A loop that ends waits for it a little."""
    loop = asyncio.get_running_loop()
    if loop not in _background:
        running: set[asyncio.Task[None]] = set()
        _background[loop] = running, _before_the_loop_ends(running)
        # Up to its yield it runs at once; the loop takes note of it, and closes it when it ends.
        with suppress(StopIteration):
            _background[loop][1].__anext__().send(None)
    running, _ = _background[loop]
    task = loop.create_task(rest)
    running.add(task)
    task.add_done_callback(running.discard)


async def _before_the_loop_ends(running: set[asyncio.Task[None]]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        while running:
            _, late = await asyncio.wait(running, timeout=LAST_WORK)
            for task in late:
                task.cancel()
        # The generator knows its loop: kept here, it would keep the loop.
        _background.pop(asyncio.get_running_loop(), None)
