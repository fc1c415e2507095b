"""Digests that nobody can test a guess against: they are keyed with the site's SECRET_KEY.

What goes in may be a session key, a token or a password; what comes out lies in the store, where
others may read it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

from django.conf import settings
from django.utils.encoding import force_bytes

MARK_BYTES: Final = 16

_TEXT_BYTES: Final = 20


def digest(purpose: str, parts: object) -> str:
    """Return the digest of ``parts`` (JSON's types only): equal for equal ones, in every process.

    ``purpose`` keeps the digests of different things apart.
    """
    text = json.dumps(parts, separators=(",", ":")).encode()
    return _blake2b(settings.SECRET_KEY, purpose, text, _TEXT_BYTES).hex()


def mark(purpose: str, *data: bytes) -> bytes:
    """Return the mark that tells ``data`` as this site's own."""
    return _mark(settings.SECRET_KEY, purpose, data)


def is_marked(given: bytes, purpose: str, *data: bytes) -> bool:
    """Whether ``given`` is the mark of ``data``, under the site's key or one of its former keys."""
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return any(compare_digest(given, _mark(key, purpose, data)) for key in keys)


def _mark(secret: Any, purpose: str, data: tuple[bytes, ...]) -> bytes:
    return _blake2b(secret, purpose, b"".join(data), MARK_BYTES)


def _blake2b(secret: Any, purpose: str, data: bytes, size: int) -> bytes:
    key = _key(force_bytes(secret))
    return blake2b(data, digest_size=size, key=key, person=purpose.encode()).digest()


# SECRET_KEY may be longer than the 64 bytes that blake2b takes.
@lru_cache(maxsize=8)
def _key(secret: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=b"singleflight").digest()
