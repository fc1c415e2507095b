"""Ctrl-C and SIGTERM, at moments when they can do no harm."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def terminate_cleanly() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does: through every ``finally``."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # A shell's nohup asks to be left alone.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """
    Hold the signals that would stop the program until the block is over.

    A child whose start is interrupted between its birth and the moment its parent has noted it
    would outlive the parent; a clean-up that is interrupted leaves what it hasn't come to yet.
    Handlers, unlike a signal mask, aren't inherited by the children.
    """
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    heard = [number for number in STOPPING if handlers[number] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, handlers[number])
        if held:
            signal.raise_signal(held[0])
