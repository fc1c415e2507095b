"""Who is calling: everything that can identify a caller, together.

Under ``scope="user"`` a principal is made of

- the user: model and primary key;
- ``request.auth`` of Ninja and REST framework;
- the session's key;
- the headers in CREDENTIALS, and what the server says about the client (SERVER_SAYS);
- where no user is authenticated, or where the user or ``request.auth`` has no lasting name: every
  header that is not HARMLESS, and so every cookie.

Too fine a principal only loses sharing; too coarse a one leaks. A site that tells an authenticated
caller's tenant by a header or cookie of its own names it: ``vary=("X-Tenant",)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import iscoroutine
from typing import Any, Final, Literal
from uuid import UUID

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.db.models import Model
from django.http import HttpRequest
from django.utils.functional import LazyObject, empty

from singleflight_django.bodies import is_drf, unwrap
from singleflight_django.requests import authenticated_user

Scope = Literal["user", "global"] | Callable[[Any], str]

CREDENTIALS: Final = (
    "Authorization",
    "Proxy-Authorization",
    "X-Api-Key",
    "Api-Key",
    "X-Auth-Token",
    "X-Access-Token",
)
SERVER_SAYS: Final = ("REMOTE_USER", "SSL_CLIENT_CERT", "SSL_CLIENT_S_DN", "SSL_CLIENT_M_SERIAL")

# Headers that say nothing about who is calling, in lower case. They differ between two tries of one
# caller, or come from the proxies in between. Accept and the like are a line of the identity.
HARMLESS: Final = frozenset(
    """
    accept accept-charset accept-encoding accept-language
    if-match if-modified-since if-none-match if-range if-unmodified-since prefer range
    connection content-encoding content-length content-md5 content-type date expect host keep-alive
    max-forwards priority te trailer transfer-encoding upgrade via
    cache-control device-memory dnt downlink dpr ect origin pragma purpose referer rtt save-data
    sec-gpc sec-purpose upgrade-insecure-requests user-agent viewport-width width x-moz x-purpose
    x-requested-with
    forwarded x-forwarded-for x-forwarded-host x-forwarded-port x-forwarded-prefix x-forwarded-proto
    x-forwarded-scheme x-forwarded-server x-forwarded-ssl x-original-forwarded-for x-real-ip
    x-scheme cf-connecting-ip cf-ray cf-visitor cdn-loop fly-request-id true-client-ip
    x-azure-ref x-client-ip x-cluster-client-ip x-varnish
    b3 baggage request-id sentry-trace traceparent tracestate uber-trace-id x-amzn-trace-id
    x-cloud-trace-context x-correlation-id x-envoy-attempt-count x-envoy-expected-rq-timeout-ms
    x-request-id x-request-start x-queue-start
    """.split()  # noqa: SIM905
)
HARMLESS_PREFIXES: Final = ("sec-ch-", "sec-fetch-", "x-b3-", "x-datadog-")

_NAMELESS: Final = "nameless"


def check_scope(scope: object) -> None:
    """Raise unless ``scope`` is "user", "global" or a plain function of the request."""
    if iscoroutinefunction(scope) or iscoroutinefunction(type(scope).__call__):
        raise TypeError(f"scope={scope!r} is async. Write a plain function.")
    if not callable(scope) and scope not in ("user", "global"):
        raise ValueError(
            f'scope must be "user", "global" or a callable (request) -> str, not {scope!r}.'
        )


def principal(request: Any, scope: Scope = "user") -> object:
    """Return who is calling, in JSON's types. It has secrets in clear: only for a digest."""
    if scope == "global":
        return "global"
    if scope == "user":
        return _caller(request)
    text: object = scope(request)
    if iscoroutine(text):
        text.close()
    if not isinstance(text, str):
        raise TypeError(f"scope={scope!r} returned {type(text).__name__}, not a str.")
    if not text:
        raise ValueError(f'scope={scope!r} returned "": every caller without it would be one.')
    return ["callable", text]


async def aprincipal(request: Any, scope: Scope = "user") -> object:
    """See principal()."""
    if callable(scope):
        return await sync_to_async(principal)(request, scope)
    if scope == "user":
        await _load_user(request)
    return principal(request, scope)


async def _load_user(request: Any) -> None:
    # Asking REST framework's request authenticates it, which its view has done.
    user = None if is_drf(request) else getattr(request, "user", None)
    if not isinstance(user, LazyObject) or user._wrapped is not empty:
        return
    load = vars(user).get("_setupfunc")
    if getattr(load, "__module__", "") == "django.contrib.auth.middleware":
        # One query, for the view's `await request.auser()` as well.
        request._cached_user = await request.auser()
    else:
        # Somebody else's: request.auser() needn't know of it.
        await sync_to_async(bool)(user)


def _caller(request: Any) -> list[object]:
    inner = unwrap(request)
    user, auth = authenticated_user(request), getattr(request, "auth", None)
    known: list[object] = [
        _name(user),
        _name(auth),
        getattr(getattr(request, "session", None), "session_key", None),
        [inner.headers.get(name) for name in CREDENTIALS],
        [str(inner.META[name]) for name in SERVER_SAYS if name in inner.META],
    ]
    if user is None or _NAMELESS in known:
        known.append(_telling_headers(inner))
    return known


def _telling_headers(request: HttpRequest) -> list[tuple[str, str]]:
    # The CSRF token is masked anew for each page.
    token = settings.CSRF_HEADER_NAME.removeprefix("HTTP_").replace("_", "-").lower()
    named = sorted((name.lower(), value) for name, value in request.headers.items())
    return [
        (name, value)
        for name, value in named
        if name not in HARMLESS and name != token and not name.startswith(HARMLESS_PREFIXES)
    ]


def _name(who: Any) -> object:
    """Return what names ``who`` in every process, or _NAMELESS."""
    try:
        return _lasting(who)
    except TypeError:
        return _NAMELESS


def _lasting(who: Any) -> object:
    if who is None or isinstance(who, bool | int | float | str):
        return [type(who).__name__, str(who)]
    if isinstance(who, bytes | bytearray):
        return ["bytes", bytes(who).hex()]
    if isinstance(who, UUID):
        return ["uuid", str(who)]
    if isinstance(who, Model) and who.pk is not None:
        return ["model", who._meta.label, str(who.pk)]
    if isinstance(who, Mapping):
        return ["map", sorted([str(name), _lasting(value)] for name, value in who.items())]
    if isinstance(who, list | tuple):
        return ["list", [_lasting(value) for value in who]]
    raise TypeError(type(who))
