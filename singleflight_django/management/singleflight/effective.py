"""What a guard's options amount to, and on which side of the transaction its lease is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.db import connections

from singleflight_django.checks.guarded import Guarded
from singleflight_django.conf import SETTING_NAMES, conf
from singleflight_django.transactions import OptOut

Line = tuple[str, str]

# Settings that go by another name than the option they stand in for.
_SETTINGS = {"max_run": "SINGLEFLIGHT_MAX_HOLD"}
# They are on lines of their own.
_ELSEWHERE = ("methods", "namespace")
_SECONDS = ("ttl", "wait", "result_ttl", "max_hold", "max_run")


def options(guard: Any) -> Iterator[Line]:
    """Yield each option, and whether it was given, is the default, or comes from a setting."""
    for field in fields(guard.options):
        if field.name in _ELSEWHERE:
            continue
        value = getattr(guard.options, field.name)
        setting = _SETTINGS.get(field.name, f"SINGLEFLIGHT_{field.name.upper()}")
        if value is None and setting in SETTING_NAMES:
            yield field.name, f"{_shown(field.name, getattr(conf, setting))}  from {setting}"
        elif value is None and field.name == "on_store_error":
            yield field.name, "proceed for GET and HEAD, reject for the rest  by default"
        elif value is not None:
            origin = "by default" if value == field.default else "from the option"
            yield field.name, f"{_shown(field.name, value)}  {origin}"


def _shown(name: str, value: Any) -> str:
    if name in _SECONDS:
        return f"{value:g} s" if isinstance(value, int | float) else f"{value}"
    if callable(value):
        return f"{getattr(value, '__qualname__', value)}()"
    return str(value)


def placement(each: Guarded) -> str:
    """Say on which side of the request's transaction the lease is."""
    view: Any = each.route.view
    if iscoroutinefunction(view):
        return "async: Django opens none around the view"
    marker: Any = getattr(view, "_non_atomic_requests", ())
    # What the site itself has opted out of; the outermost guard opens the others within its lease.
    chosen = set(marker)
    asked = [
        alias
        for alias, given in connections.settings.items()
        if given["ATOMIC_REQUESTS"] and alias not in chosen
    ]
    if not asked:
        return "none around the view (ATOMIC_REQUESTS is off): the lease outlasts the view's own"
    names = ", ".join(asked)
    if isinstance(marker, OptOut) and not each.inside:
        return f"lease, BEGIN on {names}, view, COMMIT, release"
    guard: Any = each.guard
    if guard.variant == "flight" or guard.options.wait:
        return (
            f"BEGIN on {names} comes first, and it could wait: WaitInTransactionError on every call. "
            "Put @transaction.non_atomic_requests on the URL's callback, or use the mixin"
        )
    return f"BEGIN on {names} comes first: the lease is taken inside, and released at the COMMIT"
