"""Key templates: literal text and ``<fields>``, parsed once, rendered so that keys never collide.

A field is ``<name>``, ``<source.name>``, or either after a converter: ``<uuid:body.id>``. The
sources that have names are ``url``, ``body``, ``query`` and ``header``; ``<user>``, ``<user?>``,
``<session>``, ``<method>`` and ``<path>`` stand alone. A field without a converter whose last
segment is ``uuid`` means ``<uuid:...>``; ``<str:uuid>`` opts out.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Final, NamedTuple, NoReturn

from singleflight_django.parts import escape, literal

NAMED_SOURCES: Final = ("url", "body", "query", "header")
LONE_SOURCES: Final = ("user", "session", "method", "path")

_FIELD = re.compile(r"<([^<>]*)>")
# A character of a part's text, as parts.escape() leaves it, or the mark of an anonymous caller.
_VALUE: Final = "[A-Za-z0-9_.~%*-]"
_HEADER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_part_has_no = re.compile(r"[^A-Za-z0-9_.~%-]").search
# Escapes consist of %, 0-9 and A-F: any other character can tell two neighbouring values apart.
_no_escape_has = re.compile(r"[^%0-9A-F]").search


class Field(NamedTuple):
    """One field of a template.

    ``text`` is what stands between the angle brackets. ``source`` is "" for a bare name, which is
    looked for in the URL, the body and the query string. ``path`` holds the segments of the name.
    """

    text: str
    source: str
    path: tuple[str, ...]
    converter: str | None = None
    optional: bool = False


class Template(NamedTuple):
    """A parsed template; see parse(). ``fields`` are in the order in which they were written."""

    text: str
    fields: tuple[Field, ...]
    pattern: str
    guards: tuple[str, ...]

    def expression(self, sources: Container[str]) -> str:
        """Return the regular expression of render()'s keys, with a group per field of ``sources``."""
        # What % is literal is followed by two hexadecimal digits, so "%s" is a field's place.
        first, *rest = (re.escape(piece.replace("%%", "%")) for piece in self.pattern.split("%s"))
        found = [first]
        for field, guard, after in zip(self.fields, self.guards, rest, strict=True):
            value = rf"(?:(?!{re.escape(guard)}){_VALUE})+" if guard else rf"{_VALUE}+"
            found += [f"({value})" if field.source in sources else value, after]
        return "".join(found)

    @property
    def head(self) -> str:
        """The literal text before the first field, as it stands in a key."""
        return self.pattern.partition("%s")[0].replace("%%", "%")

    def render(self, values: Sequence[str]) -> str:
        """Return the key for one text per field. Different values never give the same key."""
        if len(values) != len(self.fields):
            raise ValueError(f"{self.text!r} needs {len(self.fields)} values, not {len(values)}.")
        return self.pattern % tuple(map(_fill, values, self.guards))


def has_no_field(text: str) -> bool:
    """Whether ``text`` is a key as it stands."""
    return "<" not in text and ">" not in text and not text.isspace() and bool(text)


def parse(text: str) -> Template:
    """Return the template that ``text`` describes; ValueError tells what to write instead."""
    if not isinstance(text, str):
        raise TypeError(f"A key template is a str, not {type(text).__name__}.")
    if not text.strip():
        raise ValueError('A key template is empty. Name what two calls share: "lesson:<uuid>".')
    if has_no_field(text):
        return Template(text, (), literal(text).replace("%", "%%"), ())
    pieces = _FIELD.split(text)
    literals, fields = pieces[::2], tuple(_field(inner, text) for inner in pieces[1::2])
    if any("<" in piece or ">" in piece for piece in literals):
        _refuse(text, "its < and > don't pair up; they are for <fields> only")
    first, *rest = map(literal, literals)
    between, last = [_separator(piece) for piece in rest[:-1]], rest[-1:]
    pattern = "%s".join(piece.replace("%", "%%") for piece in (first, *between, *last))
    return Template(text, fields, pattern, (*map(_guard, between), ""))


def _refuse(template: str, problem: str) -> NoReturn:
    raise ValueError(f"Key template {template!r}: {problem}.")


def _field(inner: str, template: str) -> Field:
    converter, colon, name = inner.rpartition(":")
    if not name:
        _refuse(template, f"<{inner}> is empty; write <name>")
    if colon and (not converter or ":" in converter or converter != converter.strip()):
        _refuse(template, f"<{inner}> isn't <converter:name>")
    source, dot, rest = name.partition(".")
    if source.removesuffix("?") in LONE_SOURCES:
        return _lone_field(inner, source, bool(colon or dot), template)
    if "?" in name:
        _refuse(template, f"<{inner}>: only <user?> may be absent")
    if not dot and source in NAMED_SOURCES:
        _refuse(
            template,
            f"<{name}> names a source, not what to take from it: write <{name}.name>, or "
            f"<query.{name}> for a field that is called {name}",
        )
    if dot and source not in NAMED_SOURCES:
        known = ", ".join(f"<{known}.name>" for known in NAMED_SOURCES)
        _refuse(template, f"<{inner}>: {source!r} is not a source; there are {known}")
    path = tuple(rest.split(".")) if dot else (name,)
    _check_path(source if dot else "", path, inner, template)
    implied = "uuid" if path[-1] == "uuid" else None
    return Field(inner, source if dot else "", path, converter or implied)


def _lone_field(inner: str, source: str, adorned: bool, template: str) -> Field:
    name = source.removesuffix("?")
    if adorned:
        _refuse(
            template,
            f"<{inner}>: <{name}> has one form and takes neither a converter nor a path; "
            f"<url.{name}> is the URL's argument of that name",
        )
    if name != source and name != "user":
        _refuse(template, f"<{inner}>: only <user?> may be absent")
    return Field(inner, name, (), optional=name != source)


def _check_path(source: str, path: tuple[str, ...], inner: str, template: str) -> None:
    if source == "header":
        fits = _HEADER_NAME.fullmatch(".".join(path)) is not None
    elif source == "url":
        fits = len(path) == 1 and path[0].isidentifier()
    else:
        fits = all(segment.replace("-", "_").isidentifier() for segment in path)
    if not fits:
        _refuse(template, f"<{inner}> is not a name that can be looked up; use a callable as key")


def _separator(between: str) -> str:
    return between if _no_escape_has(between) else f"!{between}"


def _guard(separator: str) -> str:
    """Return the character that the value before this text must not contain, or "".

    ``<a>-<b>`` would give one key for ("x-y", "z") and ("x", "y-z"); with "-" escaped in the first
    value it can't. A character that no value contains anyway makes that needless.
    """
    found = None if _part_has_no(separator) else _no_escape_has(separator)
    return found[0] if found else ""


def _fill(value: str, guard: str) -> str:
    text = escape(value)
    return text.replace(guard, f"%{ord(guard):02X}") if guard else text
