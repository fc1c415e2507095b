"""A request that was never sent: what the options of ``explain`` say of it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from django.apps import apps
from django.conf import settings
from django.core.management.base import CommandError
from django.http import HttpRequest
from django.test import RequestFactory
from django.urls import Resolver404, resolve


class Imagined(NamedTuple):
    """A request, and the view that its URL resolves to."""

    request: HttpRequest
    view: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]


def imagine(
    method: str,
    url: str,
    *,
    data: str | None = None,
    headers: list[str] | None = None,
    user: str | None = None,
    session: str | None = None,
) -> Imagined:
    """Return the request; CommandError if it can't be one of this site."""
    parts = urlsplit(url)
    try:
        match = resolve(parts.path)
    except Resolver404:
        raise CommandError(f"No URL pattern matches {parts.path!r}.") from None
    given = dict(_header(text) for text in headers or [])
    body, kind = _body(data)
    request = RequestFactory(SERVER_NAME=parts.hostname or _host()).generic(
        method,
        f"{parts.path}?{parts.query}" if parts.query else parts.path,
        body,
        given.pop("Content-Type", kind),
        secure=parts.scheme == "https",
        headers=given,
    )
    request.resolver_match = match
    request.user = _user(user)
    if session is not None:
        store = import_module(settings.SESSION_ENGINE).SessionStore
        request.session = store(session)
    if user is not None:
        # Where REST framework looks first.
        request._force_auth_user = request.user  # type: ignore[attr-defined]
    return Imagined(request, match.func, match.args, match.kwargs)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise CommandError(f"--header is written NAME:VALUE; {text!r} is not.")
    name = name.strip()
    return "Content-Type" if name.lower() == "content-type" else name, value.strip()


def _body(data: str | None) -> tuple[bytes, str]:
    if data is None:
        return b"", "application/x-www-form-urlencoded"
    try:
        json.loads(data)
    except ValueError:
        return data.encode(), "application/x-www-form-urlencoded"
    return data.encode(), "application/json"


def _host() -> str:
    """Return a host that ALLOWED_HOSTS takes."""
    named = [host.lstrip(".") for host in settings.ALLOWED_HOSTS if host != "*"]
    return named[0] if named else "localhost"


def _user(pk: str | None) -> Any:
    if not apps.is_installed("django.contrib.auth"):
        if pk is not None:
            raise CommandError("--user needs django.contrib.auth.")
        return None
    # Imported here: their models can't be imported where their app is not installed.
    from django.contrib.auth import get_user_model
    from django.contrib.auth.models import AnonymousUser

    if pk is None:
        return AnonymousUser()
    model = get_user_model()
    try:
        return model._default_manager.get(pk=pk)
    except (model.DoesNotExist, ValueError, TypeError) as error:
        raise CommandError(f"No user has the primary key {pk!r}.") from error
