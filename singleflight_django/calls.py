"""The key of a call: a text, a tuple, or a template whose fields are arguments of the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from singleflight_django.parts import join, literal, part
from singleflight_django.templates import parse


def key_text(key: object) -> str:
    """Return the text of a key: literal text, or a tuple of parts."""
    if isinstance(key, tuple):
        return join(key)
    if not isinstance(key, str) or not key:
        raise TypeError(f"A key is a non-empty str or a tuple, not {key!r}.")
    return literal(key)


def arguments_key(key: object, function: Callable[..., Any]) -> Callable[..., str]:
    """Return what makes the key of one call of ``function`` from its arguments.

    Raises TypeError or ValueError for a field that is no parameter of it.
    """
    if callable(key):
        return lambda *args, **kwargs: key_text(key(*args, **kwargs))
    if not isinstance(key, str):
        raise TypeError(f"key is a template or a callable, not {key!r}.")
    signature, template = inspect.signature(function), parse(key)
    for field in template.fields:
        if field.text not in signature.parameters:
            known = ", ".join(f"<{name}>" for name in signature.parameters)
            raise ValueError(f"<{field.text}> is no argument of the function; there are {known}.")
    if not template.fields:
        raise ValueError(f"{key!r} has no <fields>: every call would share one result.")

    def key_of(*args: Any, **kwargs: Any) -> str:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return template.render([part(call.arguments[field.text]) for field in template.fields])

    return key_of
