"""The smoke test of the doctor: real processes, the real store, keys that nobody else uses.

Alone: one process gets in. Same key: of several at once one does, and the others are told so.
Different keys: all do. Given back: then it is free again. A crash: the lease of a process that was
killed ends by itself. Flight: one leads, and all get its outcome.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from singleflight_django.exceptions import SingleFlightError
from singleflight_django.owners import new_token
from singleflight_django.stores.base import (
    Busy,
    Grant,
    Joining,
    Kept,
    Landing,
    Led,
    Publishing,
    Status,
    Store,
)
from singleflight_django.stores.findings import Finding, Level
from singleflight_django.testing.processes import in_processes

PROCESSES = 4
PATIENCE = 20.0
# Life of the lease whose holder is killed, in seconds; a cache rounds up to whole ones.
BRIEF = 1.0
_PAYLOAD = b"the leader's"


def smoke(store: Store) -> Iterator[Finding]:
    """Yield what each scenario shows; after the first one that failed there are no others."""
    if not hasattr(os, "fork"):
        yield Finding("smoke", Level.UNKNOWN, "Not tried: this system can't fork processes.")
        return
    key = f"singleflight-doctor:{secrets.token_hex(6)}"
    for name, scenario in (
        ("alone", _alone),
        ("same key", _same_key),
        ("different keys", _different_keys),
        ("crash", _crash),
        ("flight", _flight),
    ):
        try:
            wrong = scenario(store, f"{key}:{name.replace(' ', '-')}")
        except Exception as error:
            wrong = f"it could not be tried: {type(error).__name__}: {error}"
        if wrong:
            yield Finding("smoke", Level.ERROR, f"{name.capitalize()}: {wrong}", _CURE)
            return
    text = (
        f"{PROCESSES} processes: one in for one key, all for different keys, nobody left waiting."
    )
    yield Finding("smoke", Level.OK, text)


_CURE = "See the findings above; with SINGLEFLIGHT_CACHE on one Redis or Valkey server this holds."


class Meeting:
    """Lets each process have its number, and go on when all are where it is."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("fork")
        self._barrier = context.Barrier(n, timeout=PATIENCE)

    def wait(self) -> int:
        """Return when all are here: each gets another number."""
        return int(self._barrier.wait())


def _try(store: Store, keys: list[str]) -> list[bool]:
    """Let a process try each of ``keys``, all at once, and keep what it got until all have tried."""
    meeting = Meeting(len(keys))

    def caller() -> bool:
        key, token = keys[meeting.wait()], new_token()
        got = error = None
        try:
            got = store.acquire(key, token, PATIENCE, 1, 0.0)
        except SingleFlightError as failure:
            error = failure
        meeting.wait()
        if error is not None:
            raise error
        held = isinstance(got, Grant)
        if held:
            store.release(key, token)
        return held

    return _values(in_processes(len(keys), caller, PATIENCE * 2))


def _values(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def _alone(store: Store, key: str) -> str:
    if _try(store, [key]) != [True]:
        return "nobody held the key, and it was refused."
    return _given_back(store, key)


def _same_key(store: Store, key: str) -> str:
    inside = sum(_try(store, [key] * PROCESSES))
    if inside == 0:
        return f"of {PROCESSES} processes at once none got in."
    if inside > 1:
        return (
            f"of {PROCESSES} processes at once {inside} got in: the store doesn't exclude them from "
            "each other. They each have their own memory, or it is not atomic, or not one server."
        )
    return _given_back(store, key)


def _different_keys(store: Store, key: str) -> str:
    inside = sum(_try(store, [f"{key}:{n}" for n in range(PROCESSES)]))
    if inside < PROCESSES:
        return f"with {PROCESSES} keys only {inside} of {PROCESSES} processes got in."
    return ""


def _given_back(store: Store, key: str) -> str:
    token = new_token()
    if not isinstance(store.acquire(key, token, PATIENCE, 1, 0.0), Grant):
        return "it was given back, and is still held."
    store.release(key, token)
    return ""


def _crash(store: Store, key: str) -> str:
    def caller() -> None:
        store.acquire(key, new_token(), BRIEF, 1, 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    in_processes(1, caller, PATIENCE)
    deadline, token = time.monotonic() + BRIEF * 5, new_token()
    while not isinstance(store.acquire(key, token, BRIEF, 1, 0.0), Grant):
        if time.monotonic() > deadline:
            return f"its holder was killed, and {BRIEF * 5:g} s later its lease has not ended."
        store.rest(BRIEF / 20)
    store.release(key, token)
    return ""


def _flight(store: Store, key: str) -> str:
    meeting = Meeting(PROCESSES)

    def caller() -> tuple[bool, bytes]:
        joining = Joining(new_token(), PATIENCE, PATIENCE)
        meeting.wait()
        return _fly(store, key, joining, meeting.wait)

    told = _values(in_processes(PROCESSES, caller, PATIENCE * 2))
    store.forget(key)
    leaders = sum(led for led, _ in told)
    if leaders != 1:
        return f"of {PROCESSES} processes at once {leaders} led."
    if {payload for _, payload in told} != {_PAYLOAD}:
        return "not all followers got the leader's outcome."
    return ""


def _fly(
    store: Store, key: str, joining: Joining, joined: Callable[[], object]
) -> tuple[bool, bytes]:
    """Lead, or follow to the end; return which, and the outcome."""
    answer = store.join(key, joining)
    joined()
    if isinstance(answer, Led):
        done = Publishing(joining.token, answer.flight, Status.DONE, _PAYLOAD, keep=PATIENCE)
        store.publish(key, done)
        return True, _PAYLOAD
    deadline = time.monotonic() + PATIENCE
    while isinstance(answer, Busy) and time.monotonic() < deadline:
        landed = store.wait_landing(key, answer.flight, "0", store.longest_block or 0.1)
        answer = landed or store.join(key, joining._replace(flight=answer.flight))
    return False, answer.payload if isinstance(answer, Landing | Kept) else b""
