"""Async calls that outlive the task that began them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from singleflight_django.steadiness import Steady, Wait, steadily


async def begun(call: Any) -> asyncio.Task[Any]:
    """A task that waits for ``call`` by now."""

    async def wait() -> Any:
        return await call

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# What is waited for


async def test_a_wait_gives_its_result_before_and_after() -> None:
    wait = Wait(asyncio.get_running_loop())
    task = await begun(wait)
    assert wait.end("first")
    assert await task == "first"
    assert not wait.end("second")
    wait.fail(ZeroDivisionError())
    assert await wait == wait.result == "first"


async def test_a_wait_that_fails_raises() -> None:
    wait = Wait(asyncio.get_running_loop())
    task = await begun(wait)
    wait.fail(ZeroDivisionError())
    assert not wait.end("too late")
    for waiting in (task, wait):
        with pytest.raises(ZeroDivisionError):
            await waiting


async def test_one_that_is_cancelled_takes_nothing_from_the_next() -> None:
    wait = Wait(asyncio.get_running_loop())
    await cancelled(await begun(wait))
    task = await begun(wait)
    wait.end("result")
    assert await task == "result"


async def test_what_ends_while_it_is_cancelled_has_ended() -> None:
    wait = Wait(asyncio.get_running_loop())
    task = await begun(wait)
    task.cancel()
    wait.end("result")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await wait == "result"


# Calls


async def test_an_interrupted_call_is_carried_on_where_it_was() -> None:
    first, second = (Wait(asyncio.get_running_loop()) for _ in range(2))
    tasks: list[Any] = []

    async def call() -> str:
        tasks.append(asyncio.current_task())
        words = await first
        tasks.append(asyncio.current_task())
        return str(words + await second)

    steady = Steady(call())
    one = await begun(steady)
    await cancelled(one)
    assert steady.suspended
    two = await begun(steady)
    first.end("a")
    await asyncio.sleep(0)
    await cancelled(two)
    three = await begun(steady)
    second.end("b")
    assert await three == "ab"
    assert tasks == [one, two]
    assert not steady.suspended


async def test_what_a_call_raises_of_itself_is_no_interruption() -> None:
    async def call() -> None:
        raise asyncio.CancelledError

    steady = Steady(call())
    with pytest.raises(asyncio.CancelledError):
        await steady
    assert not steady.suspended


async def test_a_call_that_minds_its_task_has_one_of_its_own() -> None:
    """A timeout, for one, cancels the task that it began in."""
    go_on = asyncio.Event()

    async def call() -> str:
        async with asyncio.timeout(0.05):
            go_on.set()
            await asyncio.Event().wait()
        return "never"

    steady = Steady(steadily(call()))
    lasting = asyncio.Event()
    survived = False

    async def began() -> None:
        nonlocal survived
        try:
            await steady
        except asyncio.CancelledError:
            # This task lives on, and the timeout isn't its own.
            await lasting.wait()
            survived = True

    task = asyncio.create_task(began())
    await go_on.wait()
    task.cancel()
    with pytest.raises(TimeoutError):
        await steady
    lasting.set()
    await task
    assert survived


async def test_a_call_in_its_own_task_gives_and_raises_what_it_does() -> None:
    async def give(word: str) -> str:
        if word == "raise":
            raise ZeroDivisionError
        return word

    assert await steadily(give("word")) == "word"
    with pytest.raises(ZeroDivisionError):
        await steadily(give("raise"))


async def test_a_call_in_its_own_task_ends_with_the_one_that_awaits_it() -> None:
    ended: list[str] = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("call")

    await cancelled(await begun(steadily(call())))
    await asyncio.sleep(0)
    assert ended == ["call"]
