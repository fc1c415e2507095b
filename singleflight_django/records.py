"""What lies in the store for an outcome: a few plain fields and bytes, sealed.

    "SF1"  kind (1 byte)  seal (16 bytes)  length of the head (4 bytes)  head (JSON)  body (bytes)

The seal is keyed with the site's SECRET_KEY: who can write to the store, but doesn't know the key,
can neither have a response of his own served nor a pickle of his own opened. Whatever can't be read
(cut short, from another format or site) counts as no outcome, with a line in the log.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from django.conf import settings

from singleflight_django.digests import MARK_BYTES, is_marked, mark
from singleflight_django.exceptions import UnshareableResultError
from singleflight_django.signals import logger

# Another format is another number: processes of the old and the new version then run side by side.
FORMAT: Final = b"SF1"

RESPONSE: Final = b"R"
VALUE: Final = b"V"
RAISED: Final = b"E"
JSON: Final = b"J"
PICKLE: Final = b"P"
MODEL: Final = b"M"

_PURPOSE: Final = "record"
_LENGTH_BYTES: Final = 4


# The last record that was opened: all followers of a flight in a process are given the same bytes.
_opened: tuple[object, tuple[Any, ...], Record] | None = None


class _Unreadable:
    def __repr__(self) -> str:
        return "UNREADABLE"

    def __bool__(self) -> bool:
        return False


# What a value's thaw() returns for a record that it can't read: None is a value.
UNREADABLE: Final = _Unreadable()


class Record(NamedTuple):
    """An opened record. ``head`` is a JSON object."""

    kind: bytes
    head: dict[str, Any]
    body: bytes


def seal(kind: bytes, head: dict[str, Any], body: bytes, max_bytes: int | None = None) -> bytes:
    """Return the record. Raise UnshareableResultError if it is longer than ``max_bytes``."""
    text = json.dumps(head, separators=(",", ":")).encode()
    content = len(text).to_bytes(_LENGTH_BYTES) + text + body
    if max_bytes is not None and len(content) > max_bytes:
        raise UnshareableResultError(f"It has {len(content)} bytes, over max_bytes={max_bytes}.")
    return FORMAT + kind + mark(_PURPOSE, FORMAT, kind, content) + content


def unseal(data: object, kinds: bytes) -> Record | None:
    """Return the record that ``data`` is; None, and a log line, if it is none of ``kinds``."""
    global _opened
    opened, keys = _opened, (kinds, settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    if opened is not None and opened[0] is data and opened[1] == keys:
        return opened[2]
    try:
        record = _unseal(data, kinds)
    except ValueError as error:
        ignore(str(error))
        return None
    _opened = data, keys, record
    return record


def ignore(reason: str) -> None:
    """Log that an outcome counts as none."""
    logger.warning("An outcome in the store can't be read and counts as none: %s", reason)


def _unseal(data: object, kinds: bytes) -> Record:
    if not isinstance(data, bytes):
        raise ValueError(f"it is {type(data).__name__}, not bytes")
    start = len(FORMAT) + 1
    kind, given, content = data[start - 1 : start], data[start:][:MARK_BYTES], data[start:]
    content = content[MARK_BYTES:]
    if not data.startswith(FORMAT):
        raise ValueError("it is in another format")
    if not is_marked(given, _PURPOSE, FORMAT, kind, content):
        raise ValueError("its seal is broken, or another site's (SECRET_KEY)")
    if kind not in kinds:
        raise ValueError(f"it is of kind {kind!r}, not of {kinds!r}")
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES])
    return Record(kind, json.loads(content[_LENGTH_BYTES:end]), content[end:])
