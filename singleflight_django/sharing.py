"""What of a leader's outcome others may have, and for how long.

Never shared, so that followers take part again: 401, 403, 408, 425, 429 and our own refusals.
A failure: 5xx.
Not shareable:

- it sets a cookie;
- the session was modified (to read it is fine);
- a flash message was added or shown;
- a CSRF token or a CSP nonce was used;
- it varies on a header outside the identity, or on ``*``;
- it is streamed;
- it is longer than ``max_bytes``;
- it is ``private`` or ``no-store``, and the scope is not "user".

Not kept for later callers: ``private``, ``no-store``, and what was made of an exception.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from django.http.response import HttpResponseBase

from singleflight_django.bodies import unwrap
from singleflight_django.identity import headers_inside
from singleflight_django.principals import Scope
from singleflight_django.raised import is_from_exception, status_of_raised
from singleflight_django.responses import is_refusal
from singleflight_django.values import status_of

# They are about one caller or one moment.
NEVER_SHARED: Final = frozenset({401, 403, 408, 425, 429})

REASONS: Final = (
    "streaming",
    "not rendered",
    "cookie",
    "session",
    "messages",
    "csrf",
    "nonce",
    "vary",
    "private",
    "too large",
)


class Traces(NamedTuple):
    """What a request had done to its session and messages, before the view or after."""

    session: object = None
    messages: tuple[bool, int, bool] = (False, 0, False)


def traces(request: Any) -> Traces:
    """Return the traces so far. The guard looks before the view, since a middleware leaves some."""
    inner = unwrap(request)
    return Traces(_session(inner), _messages(inner))


def is_failure(result: Any) -> bool:
    """Whether the leader has failed: ``result`` is what its view returned or the exception."""
    return _status(result) >= 500


def is_never_shared(result: Any) -> bool:
    """Whether each caller has to get its own answer, because this one was about the leader."""
    return is_refusal(result) or _status(result) in NEVER_SHARED


def may_be_kept(result: Any) -> bool:
    """Whether a later caller may have ``result``, which followers may, within ``result_ttl``."""
    if isinstance(result, BaseException) or is_from_exception(result):
        return False
    return not _is_private(result)


def why_not(
    request: Any,
    result: Any,
    scope: Scope = "user",
    *,
    vary: Iterable[str] = (),
    before: Traces | None = None,
    max_bytes: int | None = None,
) -> str:
    """Return why followers may not have ``result``, one of REASONS; "" if they may.

    ``result`` is a rendered response or a handler's value; ``before`` the traces before the view.
    """
    inner = unwrap(request)
    return _why_not_traces(inner, before or Traces()) or (
        _why_not_response(result, scope, vary, max_bytes)
        if isinstance(result, HttpResponseBase)
        else ""
    )


def _status(result: Any) -> int:
    return status_of_raised(result) if isinstance(result, BaseException) else status_of(result)


def _why_not_response(
    response: Any, scope: Scope, vary: Iterable[str], max_bytes: int | None
) -> str:
    if response.streaming:
        return "streaming"
    if getattr(response, "is_rendered", True) is False:
        return "not rendered"
    if response.cookies or response.has_header("Set-Cookie"):
        return "cookie"
    if any("'nonce-" in value.lower() for value in _policies(response)):
        return "nonce"
    if not _varies_on(response) <= headers_inside(scope, vary):
        return "vary"
    if scope != "user" and _is_private(response):
        return "private"
    if max_bytes is not None and len(response.content) > max_bytes:
        return "too large"
    return ""


def _why_not_traces(request: Any, before: Traces) -> str:
    session = _session(request)
    if session is not None and session != before.session:
        return "session"
    added, queued, shown = _messages(request)
    was_added, were_queued, was_shown = before.messages
    if (added and not was_added) or queued > were_queued or (shown and not was_shown):
        return "messages"
    # Django sets it for every use of the token, whether or not the client has the cookie.
    if request.META.get("CSRF_COOKIE_NEEDS_UPDATE"):
        return "csrf"
    # Of Django's own middleware, and of django-csp: true once the nonce was asked for.
    if getattr(request, "_csp_nonce", None):
        return "nonce"
    return ""


def _session(request: Any) -> object:
    """Return None for an unmodified session, else what it is now."""
    session: Any = getattr(request, "session", None)
    if not getattr(session, "modified", False):
        return None
    try:
        # By value: the view may modify again what a middleware has modified before it.
        data = getattr(session, "_session_cache", None)  # never loaded for this
        return session.session_key, session.serializer().dumps(data)
    except (AttributeError, TypeError, ValueError):
        return object()


def _messages(request: Any) -> tuple[bool, int, bool]:
    """Return whether a message was added, how many are still to show, and whether any was shown."""
    storage = getattr(request, "_messages", None)
    shown = getattr(storage, "used", False) and bool(getattr(storage, "_loaded_data", None))
    queued = len(getattr(storage, "_queued_messages", ()))
    return bool(getattr(storage, "added_new", False)), queued, shown


def _policies(response: Any) -> list[str]:
    names = ("Content-Security-Policy", "Content-Security-Policy-Report-Only")
    return [response.headers.get(name, "") for name in names]


def _varies_on(response: Any) -> set[str]:
    names = _listed(response.headers.get("Vary", ""))
    # Not compressed, it is for everybody.
    if not response.has_header("Content-Encoding"):
        names.discard("accept-encoding")
    return names


def _is_private(result: Any) -> bool:
    if not isinstance(result, HttpResponseBase):
        return False
    directives = _listed(result.headers.get("Cache-Control", ""))
    return any(name.partition("=")[0].strip() in ("private", "no-store") for name in directives)


def _listed(header: str) -> set[str]:
    return {name for item in header.split(",") if (name := item.strip().lower())}
