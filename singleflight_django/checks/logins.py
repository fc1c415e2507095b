"""03x: may the answer to one caller be given to all others?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Warning
from django.utils.module_loading import import_string

from singleflight_django.checks.base import message
from singleflight_django.checks.guarded import Guarded

# Flights of different users stay apart with one of these in the key or in ``vary``.
_WHOSE = ("user", "session")
_CREDENTIALS = ("authorization", "cookie")

_MIXINS = (
    "LoginRequiredMixin",
    "PermissionRequiredMixin",
    "UserPassesTestMixin",
    "AccessMixin",
)


def check_shared_with_strangers(each: Guarded) -> Iterator[CheckMessage]:
    """Does a view that asks who is calling share its answers with everybody?"""
    options = each.guard.options
    if getattr(options, "scope", "user") != "global" or options.authorize or _apart(each):
        return
    if not (asks := _what_asks(each)):
        return
    text = (
        f'{each.name}: scope="global" gives one caller\'s answer to all others who come meanwhile, '
        f"and the view asks who they are ({asks})."
    )
    hint = (
        'Leave scope at "user". Where the answer is the same for all who may have it, say so with '
        "authorize=, a callable that is asked for each of them."
    )
    yield message(Warning, "W034", text, hint)


def _apart(each: Guarded) -> bool:
    fields = each.guard.spec.fields
    headers = [*each.guard.options.vary, *(f.path[0] for f in fields if f.source == "header")]
    return any(field.source in _WHOSE for field in fields) or any(
        name.lower() in _CREDENTIALS for name in headers
    )


def _what_asks(each: Guarded) -> str:
    """Return the name of what lets in only callers that it knows, or ""."""
    view = each.route.view
    # A mark of login_required and its like.
    if any(hasattr(one, "redirect_field_name") for one in (view, each.function)):
        return "login_required, or another test of the user"
    bases = [base.__name__ for base in each.cls.__mro__] if each.cls else []
    if mixins := [name for name in _MIXINS if name in bases]:
        return mixins[0]
    if permissions := _permissions(each):
        return permissions
    if getattr(each.operation, "auth_callbacks", None):
        return "auth of Ninja"
    everywhere = getattr(view, "login_required", True) and _middleware(tuple(settings.MIDDLEWARE))
    return "LoginRequiredMiddleware" if everywhere else ""


def _permissions(each: Guarded) -> str:
    """Return the name of a permission class of REST framework that not everybody has, or ""."""
    told: Any = getattr(each.route.view, "initkwargs", None) or {}
    classes = told.get("permission_classes", getattr(each.cls, "permission_classes", ()))
    for one in classes:
        name = getattr(one, "__name__", type(one).__name__)
        reads = each.methods is not None and each.methods <= {"GET", "HEAD"}
        if name != "AllowAny" and not (reads and name.endswith("ReadOnly")):
            return f"permission class {name}"
    return ""


@lru_cache(maxsize=8)
def _middleware(paths: tuple[str, ...]) -> bool:
    for path in paths:
        kind = import_string(path)
        if "LoginRequiredMiddleware" in [base.__name__ for base in getattr(kind, "__mro__", ())]:
            return True
    return False
