"""03x: does the key of a guarded view name what two calls share, and nothing else?"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from django.core.checks import CheckMessage, Error, Warning

from singleflight_django.checks.base import message
from singleflight_django.checks.guarded import Guarded
from singleflight_django.flights import FlightGuard
from singleflight_django.templates import Field

_BODYLESS = ("GET", "HEAD", "DELETE")
_WITH_BODY = ("POST", "PUT", "PATCH")

# Written without what separates words.
_PER_REQUEST_HEADERS = frozenset(
    [
        "date",
        "requestid",
        "xrequestid",
        "correlationid",
        "xcorrelationid",
        "xrequeststart",
        "xamznrequestid",
        "xamzntraceid",
        "xcloudtracecontext",
        "xb3traceid",
        "xb3spanid",
        "traceparent",
        "tracestate",
        "cfray",
        "flyrequestid",
        "xvercelid",
    ]
)
_PER_REQUEST_FIELDS = frozenset(
    ["timestamp", "ts", "nonce", "requestid", "correlationid", "traceid", "now", "sentat"]
)


def check_url_fields(each: Guarded) -> Iterator[CheckMessage]:
    """Does the route have what ``<url.…>`` names?"""
    known = each.route.kwargs
    for field in _fields(each, "url"):
        name = field.path[-1]
        if known is None or name in known:
            continue
        text = (
            f"{each.name}: the key has <{field.text}>, and the route {each.route.path!r} has no "
            f"{name!r}: every guarded request is answered 400."
        )
        near = get_close_matches(name, known, 1)
        hint = f"Did you mean <url.{near[0]}>?" if near else _what_there_is(known)
        yield message(Error, "E030", text, hint)


def _what_there_is(known: frozenset[str]) -> str:
    if not known:
        return "Name what comes in the body, the query string or a header instead."
    return f"The route has {', '.join(f'<url.{name}>' for name in sorted(known))}."


def check_body_fields(each: Guarded) -> Iterator[CheckMessage]:
    """Do the guarded methods have a body, where the key takes something from it?"""
    fields = [f"<{field.text}>" for field in _fields(each, "body")]
    methods = [name for name in _BODYLESS if name in (each.methods or ())]
    if not fields or not methods:
        return
    text = (
        f"{each.name}: the key has {', '.join(fields)}, and {', '.join(methods)} requests, which "
        "are guarded too, have no body: they are answered 400."
    )
    hint = (
        "Leave those methods out of methods= (lock_methods or flight_methods of a mixin, whose key "
        "may also be a dict by the name of the handler), or take the key from the URL or the query."
    )
    yield message(Warning, "W031", text, hint)


def check_coarse_keys(each: Guarded) -> Iterator[CheckMessage]:
    """Is there anything in the key that tells one call from another?"""
    spec = each.guard.spec
    fields = [field for field in spec.fields if field.source != "method"]
    if fields or not (spec.static or spec.fields) or getattr(each.guard.options, "limit", 1) > 1:
        return
    hint = (
        "Name in it what two calls share, such as <user> or <url.pk>. If one for the whole site is "
        'meant, a callable says so: key=lambda request, **kwargs: "import".'
    )
    if not isinstance(each.guard, FlightGuard):
        text = f"{each.name}: the key has no field, so that all callers of the site share one lock."
        yield message(Warning, "W032", text, hint)
    # A flight's path, query and caller are in its identity, but not its body.
    elif each.methods and each.methods.intersection(_WITH_BODY):
        text = (
            f"{each.name}: the key has no field, so that requests with different bodies are one "
            "flight: while the first is under way, the others are answered 409."
        )
        yield message(Warning, "W032", text, hint)


def check_fine_keys(each: Guarded) -> Iterator[CheckMessage]:
    """Is there something in the key that no two calls share?"""
    fields = [f"<{field.text}>" for field in each.guard.spec.fields if _differs(field, each)]
    vary = getattr(each.guard.options, "vary", ())
    headers = [f"vary={name!r}" for name in vary if _plain(name) in _PER_REQUEST_HEADERS]
    if not fields and not headers:
        return
    text = (
        f"{each.name}: {', '.join(fields + headers)} is another one in each request, so that no two "
        "of them ever meet."
    )
    hint = "Name only what a repeated call has in common with the first, such as its uuid."
    yield message(Warning, "W033", text, hint)


def _differs(field: Field, each: Guarded) -> bool:
    if field.source == "header":
        return _plain(field.path[0]) in _PER_REQUEST_HEADERS
    if field.source not in ("", "body", "query"):
        return False
    # What is in the route has been chosen by who made the link.
    in_route = not field.source and field.path[-1] in (each.route.kwargs or ())
    return not in_route and _plain(field.path[-1]) in _PER_REQUEST_FIELDS


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def _fields(each: Guarded, source: str) -> list[Field]:
    return [field for field in each.guard.spec.fields if field.source == source]
