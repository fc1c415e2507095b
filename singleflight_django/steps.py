"""The engine's steps do no I/O themselves: they ask for it, and a driver carries it out."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

# One call that may block: of an object, its method's name (in async code that of its a-twin), and the
# arguments. A plain tuple, for it is made for each request to the server.
Ask = tuple[Any, str, tuple[Any, ...]]

Steps = Generator[Ask, Any, Any]
