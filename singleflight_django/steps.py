"""The engine's steps do no I/O themselves: they ask for it, and a driver carries it out."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """One call that may block: of ``on``'s method ``verb``, or in async code of its a-twin."""

    on: Any
    verb: str
    args: tuple[Any, ...] = ()


Steps = Generator[Ask, Any, Any]
