"""Threads that leave no connection behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from django.db import connections

from tests.meeting import PATIENCE, together


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Let the calls start at once, each in a thread; return what they returned or raised."""
    return together(*(_closing(call) for call in calls))


def _closing(call: Callable[[], Any]) -> Callable[[], Any]:
    def closing() -> Any:
        try:
            return call()
        except Exception as error:
            return error
        finally:
            connections.close_all()

    return closing


class Aside:
    """Something that another thread does meanwhile, in a transaction of its own: step by step.

    ``step(call)`` runs it there and returns what it returned; ``start(call)`` doesn't wait for it.
    """

    def __enter__(self) -> Aside:
        self._pool = ThreadPoolExecutor(1)
        return self

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)

    def step(self, call: Callable[[], Any]) -> Any:
        return self.start(call).result(PATIENCE)

    def __exit__(self, *exc_info: object) -> None:
        self.step(connections.close_all)
        self._pool.shutdown()
