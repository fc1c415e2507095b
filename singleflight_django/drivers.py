"""Carry out the engine's steps: once blocking, once on an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from singleflight_django.lease import LeaseStore
from singleflight_django.locking import Ask, Steps

_background: set[asyncio.Task[None]] = set()


def run(steps: Steps, store: LeaseStore) -> None:
    """Carry ``steps`` out on ``store``, blocking."""
    try:
        ask = next(steps)
        while True:
            try:
                answer = getattr(store, ask.verb)(*ask.args)
            except BaseException as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(answer)
    except StopIteration:
        return


async def arun(steps: Steps, store: LeaseStore) -> None:
    """See run(). Cancelled, it leaves nothing half done: the rest is carried out in the background."""
    try:
        await _carry_out(steps, next(steps), store)
    except StopIteration:
        return


async def _carry_out(steps: Steps, ask: Ask, store: LeaseStore) -> None:
    while True:
        call = asyncio.ensure_future(getattr(store, "a" + ask.verb)(*ask.args))
        try:
            answer = await (call if ask.verb == "wait_free" else asyncio.shield(call))
        except asyncio.CancelledError:
            _finish_later(steps, ask, call, store)
            raise
        except BaseException as error:
            following = _step(steps.throw, error)
        else:
            following = _step(steps.send, answer)
        if following is None:
            return
        ask = following


def _step(advance: Any, value: Any) -> Ask | None:
    try:
        following: Ask = advance(value)
    except StopIteration:
        return None
    return following


def _finish_later(steps: Steps, ask: Ask, call: asyncio.Future[Any], store: LeaseStore) -> None:
    task = asyncio.ensure_future(_finish(steps, ask, call, store))
    _background.add(task)
    task.add_done_callback(_background.discard)


async def _finish(steps: Steps, ask: Ask, call: asyncio.Future[Any], store: LeaseStore) -> None:
    """Undo an interrupted acquire once its answer is there; carry anything else through."""
    error: BaseException = asyncio.CancelledError()
    try:
        answer = await call
    except BaseException as failure:
        error = failure
        undo = True
    else:
        undo = ask.verb in ("acquire", "wait_free")
    try:
        following = _step(steps.throw, error) if undo else _step(steps.send, answer)
        if following is not None:
            await _carry_out(steps, following, store)
    except BaseException:  # noqa: S110
        # Whoever asked for it is gone, and has been told by its own CancelledError.
        pass
