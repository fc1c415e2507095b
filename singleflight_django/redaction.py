"""What of a key may be logged: a part from a header or the session is shown as a short digest.

``pay:3f0c-…`` of the template ``"pay:<header.Idempotency-Key>"`` is shown as ``pay:<9b1c04de>``:
the lines of one key can still be told from those of another. What a callable made of a request
can't be told from what it left out, and is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from singleflight_django.digests import digest
from singleflight_django.parts import MAX_BYTES, escape
from singleflight_django.templates import Template

SECRET_SOURCES: Final = ("header", "session")

_DIGITS: Final = 8
_is_digest = re.compile(r"[0-9a-f]{40}").fullmatch


class Redaction:
    """How the keys of ``templates`` are shown, some of which have a field of SECRET_SOURCES."""

    def __init__(self, templates: Iterable[Template]) -> None:
        # Where two of them match, the one with the secrets counts.
        ordered = sorted(templates, key=lambda template: not _has_secrets(template))
        self._matches = [re.compile(each.expression(SECRET_SOURCES)).fullmatch for each in ordered]
        self._heads = sorted((template.head for template in ordered), key=len, reverse=True)
        self._secret_heads = sorted({each.head for each in ordered if _has_secrets(each)}, key=len)

    @classmethod
    def of(cls, templates: Iterable[Template]) -> Redaction | None:
        """Return how keys of these templates are shown; None where they have nothing to hide."""
        templates = tuple(templates)
        return cls(templates) if any(map(_has_secrets, templates)) else None

    def shown(self, namespace: str, text: str) -> str:
        """Return what may be logged of a key of ``namespace``, or of several, joined by commas."""
        prefix = f"{escape(namespace)}:"
        pieces = re.split(f"(?:^|,){re.escape(prefix)}", text)
        if pieces[0]:
            # No key of this namespace: a store has been asked for something else.
            return self._hidden(text)
        return ",".join(f"{prefix}{self._shown(prefix, piece)}" for piece in pieces[1:])

    def _shown(self, prefix: str, key: str) -> str:
        # "#" comes before the identity of a flight, and before the digest of a key that was cut.
        body, mark, tail = key.partition("#")
        if len(prefix) + len(key) == MAX_BYTES and _is_digest(tail):
            return f"{self._shown_of_cut(body)}{mark}{tail}"
        return f"{self._shown_whole(body)}{mark}{tail}"

    def _shown_whole(self, body: str) -> str:
        for match in self._matches:
            found = match(body)
            if found:
                return _without_groups(found)
        return self._hidden(body)

    def _shown_of_cut(self, body: str) -> str:
        """Return what is left of one whose end is missing: any template may seem to explain it."""
        for head in self._secret_heads:
            if body.startswith(head):
                return f"{head}{_short(body)}"
            if head.startswith(body):
                return body
        return self._shown_whole(body)

    def _hidden(self, body: str) -> str:
        """Return what is left of a key that no template explains, as one that was cut."""
        head = next((head for head in self._heads if head and body.startswith(head)), "")
        return f"{head}{_short(body)}"


def _has_secrets(template: Template) -> bool:
    return any(field.source in SECRET_SOURCES for field in template.fields)


def _without_groups(found: re.Match[str]) -> str:
    pieces, end = [], 0
    for number in range(1, len(found.groups()) + 1):
        pieces += [found.string[end : found.start(number)], _short(found[number])]
        end = found.end(number)
    return "".join(pieces) + found.string[end:]


def _short(text: str) -> str:
    # Keyed with the SECRET_KEY: a guess can't be tested against it.
    return f"<{digest('shown', text)[:_DIGITS]}>"
