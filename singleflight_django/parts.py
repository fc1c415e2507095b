"""The text of keys: parts are made stable and escaped, so that different parts never collide.

A key is printable ASCII. A part is percent-encoded to letters, digits and ``_.~-``; literal text
keeps ``:/@,;=+&|`` as well. Three characters are left to this library, so that no part and no
literal text can imitate them: ``*`` (a caller without a user), ``!`` (the end of a value that what
follows could be mistaken for), ``#`` (before the digest of a long key).
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from typing import Final
from urllib.parse import quote_from_bytes
from uuid import UUID

MAX_BYTES: Final = 200

_DIGEST_BYTES: Final = 20
_LITERAL_ALSO: Final = ":/@,;=+&|"
_LONGEST_PLAIN_DECIMAL: Final = 100
_safe = re.compile(r"[A-Za-z0-9_.~-]+").fullmatch
_safe_literal = re.compile(rf"[A-Za-z0-9_.~{_LITERAL_ALSO}-]+").fullmatch


class _Mark(str):
    """Text that is left as it is by escape(), and that escape() makes of nothing else."""

    __slots__ = ()


ANONYMOUS: Final[str] = _Mark("*")


def part(value: object) -> str:
    """Return the text of one part of a key: the same in every process, equal for equal values.

    Raise TypeError for a value that has no such text, ValueError for "" and for a Decimal that is
    not a finite number.
    """
    text = value if type(value) is str else _stable(value)
    if not text:
        raise ValueError("A part of a key is empty: every caller without it would share one key.")
    return text


def escape(text: str) -> str:
    """Return a part's text as it stands in a key: letters, digits, ``_.~-`` and %XX."""
    if _safe(text) or isinstance(text, _Mark):
        return text
    if not text:
        raise ValueError("A part of a key is empty: every caller without it would share one key.")
    return quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe="")


def literal(text: str) -> str:
    """Return literal text as it stands in a key. Keeps ``:/@,;=+&|`` besides what parts keep."""
    if _safe_literal(text) or not text:
        return text
    return quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe=_LITERAL_ALSO)


def join(parts: tuple[object, ...]) -> str:
    """Return the key of a tuple of parts. ``("import", 7)`` is ``"import:7"``."""
    if not parts:
        raise ValueError("A key is an empty tuple. Name what two calls share.")
    return ":".join([escape(part(value)) for value in parts])


def qualify(namespace: str, key: str) -> str:
    """Return ``<namespace>:<key>`` in at most 200 bytes, for a key that is escaped already.

    A longer one keeps a readable head and ends in a blake2b digest of the whole.
    """
    text = f"{escape(namespace)}:{key}"
    if len(text) <= MAX_BYTES:
        return text
    digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{text[: MAX_BYTES - len(digest) - 1]}#{digest}"


def _stable(value: object) -> str:
    if isinstance(value, Enum):
        return part(value.value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, UUID):
        return UUID.__str__(value)
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, datetime):
        aware = value.utcoffset() is not None
        return (value.astimezone(UTC) if aware else value).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(
        f"A part of a key can't be {type(value).__name__}: it has no text that is the same in "
        "every process and language. Give a str, an int, a UUID, a Decimal, a date, a datetime or "
        'an Enum; of a model instance the pk, of a list ",".join(...), of a translation its id.'
    )


def _decimal(value: Decimal) -> str:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"A part of a key can't be Decimal({str(value)!r}): it is not a number.")
    coefficient = "".join(map(str, digits)).lstrip("0")
    kept = coefficient.rstrip("0")
    exponent += len(coefficient) - len(kept)
    if not kept:
        return "0"
    # normalize() would round to the context's precision, and str() depends on the context, too.
    if abs(exponent) > _LONGEST_PLAIN_DECIMAL:
        return f"{'-' if sign else ''}{kept}E{exponent}"
    return format(Decimal((sign, tuple(map(int, kept)), exponent)), "f")
