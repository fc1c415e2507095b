"""What an examination of a store finds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How bad a finding is. UNKNOWN: the server doesn't tell, or doesn't let us ask."""

    OK = "ok"
    INFO = "info"
    UNKNOWN = "unknown"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One thing that was looked at. ``name`` stays the same from version to version."""

    name: str
    level: Level
    text: str
    cure: str = ""
