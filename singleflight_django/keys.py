"""What ``key=`` of the decorators may be, and how the keys of one request are made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import iscoroutine
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.urls.converters import UUIDConverter, get_converters

from singleflight_django.bodies import REPEATED
from singleflight_django.exceptions import KeyFieldError
from singleflight_django.parts import join, literal, part
from singleflight_django.redaction import Redaction
from singleflight_django.requests import Reader
from singleflight_django.templates import LONE_SOURCES, Field, Template, has_no_field, parse

_KINDS = {bool: "a boolean", float: "a float", list: "a list", dict: "an object"}

Convert = Callable[[object], str]
_is_usual_uuid = re.compile(UUIDConverter.regex).fullmatch


class KeySpec:
    """The key of a view: a template, a callable ``(request, *args, **kwargs)``, or a list of those.

    A callable returns a str or a tuple (one key) or a list of those. Several keys are taken all or
    none: they come sorted, and each once. Wrong use is a TypeError or ValueError that names the
    cure. Keys have no namespace yet; see parts.qualify().
    """

    def __init__(self, key: object) -> None:
        self._key = key
        self._static: tuple[str, ...] = ()
        if isinstance(key, str) and has_no_field(key):
            # What a `with` has, mostly: it needs to know no more than this.
            self._static = (literal(key),)
        elif not self.fields and not self.callables:
            self._static = tuple(sorted({template.render(()) for template in self.templates}))
        self.static = bool(self._static)

    @cached_property
    def _makers(self) -> list[_FromTemplate | _FromCallable]:
        key = self._key
        makers = [_maker(item) for item in key] if isinstance(key, list) else [_maker(key)]
        if not makers:
            raise ValueError("key=[] names no key. Name what two calls share.")
        return makers

    @cached_property
    def templates(self) -> list[Template]:
        """The templates among what the keys are made of."""
        return [maker.template for maker in self._makers if isinstance(maker, _FromTemplate)]

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """What the templates take from requests."""
        return tuple([field for template in self.templates for field in template.fields])

    @cached_property
    def callables(self) -> tuple[Callable[..., object], ...]:
        """The functions that make keys of requests."""
        return tuple([made.function for made in self._makers if isinstance(made, _FromCallable)])

    @cached_property
    def redaction(self) -> Redaction | None:
        """How the keys are shown in the log; None where they may be shown as they are."""
        return Redaction.of(self.templates)

    def keys(
        self, request: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[str, ...]:
        """Return the keys of one call of the view.

        Raise KeyFieldError for a field that doesn't name one thing, PermissionDenied (in DRF
        NotAuthenticated) for <user> without one, and what the view would have raised for a body
        that it can't read.
        """
        if self.static:
            return self._static
        reader = Reader(request, kwargs)
        made = [key for maker in self._makers for key in maker.make(reader, args)]
        return tuple(made if len(made) == 1 else sorted(set(made)))

    async def akeys(
        self, request: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[str, ...]:
        """See keys()."""
        # The lazy request.user and a callable may query the database.
        if self.callables or any(field.source == "user" for field in self.fields):
            return await sync_to_async(self.keys)(request, args, kwargs)
        return self.keys(request, args, kwargs)

    def static_keys(self) -> tuple[str, ...]:
        """Return the keys where there is no request; ValueError if they depend on one."""
        if not self.static:
            raise ValueError(
                "A key with <fields>, or a callable, needs a request. Outside a view write the "
                'value into the key: semaphore_lock(f"import:{pk}").'
            )
        return self._static


class _FromTemplate(NamedTuple):
    template: Template
    converts: tuple[Convert, ...]

    def make(self, reader: Reader, args: tuple[object, ...]) -> list[str]:
        values = [
            reader.lone(field) if field.source in LONE_SOURCES else _value(reader, field, convert)
            for field, convert in zip(self.template.fields, self.converts, strict=True)
        ]
        return [self.template.render(values)]


class _FromCallable(NamedTuple):
    function: Callable[..., object]

    def make(self, reader: Reader, args: tuple[object, ...]) -> list[str]:
        result = self.function(reader.request, *args, **reader.kwargs)
        try:
            items = result if isinstance(result, list) else [result]
            if not items:
                raise ValueError("an empty list names no key")
            return [_key(item) for item in items]
        except (TypeError, ValueError) as error:
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            raise type(error)(f"key={name} returned no usable key: {error}") from error


def _maker(key: object) -> _FromTemplate | _FromCallable:
    if isinstance(key, str):
        template = parse(key)
        return _FromTemplate(template, tuple([_convert(field, key) for field in template.fields]))
    if not callable(key):
        raise TypeError(
            f"key={key!r}: a key is a template, a callable, or a list of those (several keys). "
            "A tuple is one key where a callable returns it."
        )
    if iscoroutinefunction(key) or iscoroutinefunction(type(key).__call__):
        raise TypeError(f"key={key!r} is async. Write a plain function.")
    return _FromCallable(key)


def _key(item: object) -> str:
    if isinstance(item, tuple):
        return join(item)
    if isinstance(item, str):
        text = part(item)
        if text.isspace():
            raise ValueError("it is blank")
        return literal(text)
    if iscoroutine(item):
        item.close()
    raise TypeError(
        f"it is {type(item).__name__}, not a str or a tuple (one key) or a list of those (several)"
    )


def _value(reader: Reader, field: Field, convert: Convert) -> str:
    places = {_text(field, convert, place, value): place for place, value in reader.find(field)}
    if not places:
        raise KeyFieldError(f"<{field.text}> is missing.", field=field.text)
    if len(places) > 1:
        where = " and the ".join(dict.fromkeys(places.values()))
        raise KeyFieldError(
            f"<{field.text}> has different values in the {where}.", field=field.text
        )
    return next(iter(places))


def _text(field: Field, convert: Convert, place: str, value: object) -> str:
    reason = _unusable(place, value)
    if not reason:
        try:
            return convert(value)
        except ValueError:
            reason = f"is not a valid {field.converter or 'part of a key'}"
    raise KeyFieldError(f"<{field.text}> in the {place} {reason}.", field=field.text)


def _unusable(place: str, value: object) -> str:
    if value is REPEATED:
        return "is given more than once"
    if value is None:
        return "is null"
    if isinstance(value, str):
        return "" if value.strip() else "is empty"
    # The URL's arguments went through its converters; part() knows which of those have a text.
    if type(value) in _KINDS or (place != "URL" and not isinstance(value, int)):
        return f"is {_KINDS.get(type(value), 'something else')}, not text or a whole number"
    return ""


def _convert(field: Field, template: str) -> Convert:
    if field.converter is None:
        return part
    if field.converter == "uuid":
        return _uuid
    converters = get_converters()
    if field.converter not in converters:
        raise ValueError(
            f"Key template {template!r}: no converter {field.converter!r} is registered, only "
            f"{', '.join(sorted(converters))}. Call register_converter() before the module of "
            "this view is imported: beside the converter, or in AppConfig.ready()."
        )
    return _through(converters[field.converter])


def _uuid(value: object) -> str:
    # Whatever uuid.UUID takes. Django's converter knows one spelling only, which is str()'s.
    text = part(value)
    return text if _is_usual_uuid(text) else str(UUID(text))


def _through(converter: Any) -> Convert:
    matches = re.compile(converter.regex).fullmatch

    def convert(value: object) -> str:
        text = part(value if isinstance(value, (str, int)) else converter.to_url(value))
        if not matches(text):
            raise ValueError(text)
        return part(converter.to_url(converter.to_python(text)))

    return convert
