"""What a request says for key fields: its URL, query string, headers, user, session and body."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db.models import Model

from singleflight_django.bodies import (
    MISSING,
    is_drf,
    is_form_or_json,
    look_up,
    read_body,
    unwrap,
)
from singleflight_django.exceptions import KeyFieldError
from singleflight_django.parts import ANONYMOUS, part
from singleflight_django.templates import Field

MAX_HEADER_LENGTH: Final = 1024

_control = re.compile(r"[\x00-\x1f\x7f]").search
_quoted = re.compile(r'"([^"\\]*)"').fullmatch


class Reader:
    """Looks up the fields of one request. The body is read once, and only when a field needs it."""

    def __init__(self, request: Any, kwargs: Mapping[str, object]) -> None:
        self.request = request
        self.kwargs = kwargs

    def find(self, field: Field) -> list[tuple[str, object]]:
        """Return (place, value) wherever the field is; a value may be REPEATED."""
        source, found = field.source, []
        if source in ("", "url"):
            found.append(("URL", self._url(field.path[-1])))
        if source in ("", "query"):
            found.append(("query string", look_up(self.request.GET, field.path)))
        if source in ("", "body"):
            found += [("body", look_up(body, field.path)) for body in self._readings(field)]
        if source == "header":
            found.append(("header", _header(self.request, field)))
        return [(place, value) for place, value in found if value is not MISSING]

    def lone(self, field: Field) -> str:
        """Return the text of a field that isn't looked up by name: <user>, <method>, ..."""
        if field.source == "user":
            user = authenticated_user(self.request)
            if user is None:
                return _anonymous(self.request, field)
            return part(user.pk)
        if field.source == "session":
            return _session_key(self.request, field)
        return part(self.request.method if field.source == "method" else self.request.path)

    def _url(self, name: str) -> object:
        match = getattr(self.request, "resolver_match", None)
        if match is not None and name not in match.kwargs:
            return MISSING
        # The call's own: a view may be called by another one, and Ninja has parsed its text.
        return self.kwargs.get(name, match.kwargs[name] if match is not None else MISSING)

    def _readings(self, field: Field) -> tuple[object, ...]:
        try:
            return self._body
        except RequestDataTooBig as error:
            if not field.source and not is_form_or_json(unwrap(self.request)):
                return ()
            raise KeyFieldError(
                f"The body is too large to look for <{field.text}> in it.",
                field=field.text,
                too_large=True,
            ) from error

    @cached_property
    def _body(self) -> tuple[object, ...]:
        return tuple(read_body(self.request))


def _header(request: Any, field: Field) -> object:
    value = request.headers.get(field.path[0])
    if value is None:
        return MISSING
    if len(value) > MAX_HEADER_LENGTH:
        reason = f"is longer than {MAX_HEADER_LENGTH} characters"
    elif _control(value):
        reason = "has control characters"
    else:
        # The draft standard of Idempotency-Key quotes its value, most clients don't.
        quoted = _quoted(value.strip())
        return quoted[1] if quoted else value.strip()
    raise KeyFieldError(f"<{field.text}> {reason}.", field=field.text)


def authenticated_user(request: Any) -> Any:
    """Return the user who is calling, or None. Ninja leaves its own in ``request.auth``."""
    user = getattr(request, "user", None)
    if getattr(user, "is_authenticated", False):
        return user
    auth = getattr(request, "auth", None)
    # Not DRF's token or whatever else Ninja's authenticators return.
    is_user = isinstance(auth, Model) and getattr(auth, "is_authenticated", False)
    return auth if is_user else None


def _anonymous(request: Any, field: Field) -> str:
    if field.optional:
        return ANONYMOUS
    if is_drf(request):
        raise sys.modules["rest_framework.exceptions"].NotAuthenticated
    raise PermissionDenied("The key of this view needs an authenticated user.")


def _session_key(request: Any, field: Field) -> str:
    # Not loaded to see whether it still exists: that would be a query, and Vary: Cookie.
    key = getattr(getattr(request, "session", None), "session_key", None)
    if not key:
        raise KeyFieldError(f"<{field.text}>: the request has no session.", field=field.text)
    return part(key)
