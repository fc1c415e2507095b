"""Why a request gets its key: what each field of the template is, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied

from singleflight_django.checks.guarded import Guarded
from singleflight_django.exceptions import KeyFieldError
from singleflight_django.identity import NEGOTIATED
from singleflight_django.keys import KeySpec
from singleflight_django.management.singleflight.effective import Line, options, placement
from singleflight_django.management.singleflight.imagined import Imagined
from singleflight_django.mixins import ARMOURIES
from singleflight_django.redaction import SECRET_SOURCES, Redaction
from singleflight_django.requests import Reader
from singleflight_django.templates import LONE_SOURCES, Field

VARIANTS = {"lock": "semaphore_lock", "flight": "single_flight"}
_WHERE = {
    "": "the URL, the body or the query string",
    "url": "the URL",
    "body": "the body",
    "query": "the query string",
    "header": "a header",
    "user": "the authenticated user",
    "session": "the session",
    "method": "the method",
    "path": "the path",
}


def explain(each: Guarded, imagined: Imagined | None) -> Iterator[Line]:
    """Yield what there is to say of one guard, for a request if there is one."""
    guard: Any = each.guard
    request: Any = None
    if imagined is not None:
        guard, request = _as_called(each, imagined)
    yield "variant", VARIANTS.get(guard.variant, guard.variant)
    yield "methods", _methods(guard, imagined)
    yield "namespace", guard.namespace or "the handler's qualified name"
    yield from _keys(guard.spec)
    if imagined is not None and imagined.request.method in guard.methods:
        for field in guard.spec.fields:
            yield f"<{field.text}>", _value(field, request, imagined)
        yield from _key(guard, request, imagined)
    else:
        for field in guard.spec.fields:
            yield f"<{field.text}>", f"needed: from {_source(field)}"
    yield from options(guard)
    yield "transaction", placement(each)


def _as_called(each: Guarded, imagined: Imagined) -> tuple[Any, Any]:
    """Return the guard and the request as they are when the handler is called."""
    if each.cls is None or not hasattr(each.route.view, "singleflight_armed"):
        return each.guard, _framework_request(each, imagined, None)
    view = _instance(each, imagined)
    request = _framework_request(each, imagined, view)
    view.request = request
    if each.guard.view:
        return each.guard, request
    handler = each.name.rpartition(".")[2]
    made = ARMOURIES[each.guard.variant].guard_of(view, handler)
    return made or each.guard, request


def _instance(each: Guarded, imagined: Imagined) -> Any:
    callback: Any = each.route.view
    given = getattr(callback, "initkwargs", None) or getattr(callback, "view_initkwargs", {})
    view: Any = each.cls(**given) if each.cls else None
    if actions := getattr(callback, "actions", None):
        view.action_map = actions
        view.action = actions.get((imagined.request.method or "").lower())
    view.setup(imagined.request, *imagined.args, **imagined.kwargs)
    return view


def _framework_request(each: Guarded, imagined: Imagined, view: Any) -> Any:
    """REST framework's own request, for what is guarded beneath it."""
    if each.cls is None or not hasattr(each.cls, "initialize_request"):
        return imagined.request
    if view is None and each.function is each.route.view:
        # It stands above the framework.
        return imagined.request
    view = view or _instance(each, imagined)
    return view.initialize_request(imagined.request, *imagined.args, **imagined.kwargs)


def _methods(guard: Any, imagined: Imagined | None) -> str:
    methods = ", ".join(guard.methods)
    if imagined is None or imagined.request.method in guard.methods:
        return methods
    return f"{methods}: {imagined.request.method} passes unguarded"


def _keys(spec: KeySpec) -> Iterator[Line]:
    for template in spec.templates:
        yield "template", template.text
    for function in spec.callables:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        yield "template", f"whatever {getattr(function, '__module__', '?')}.{name}() returns"


def _value(field: Field, request: Any, imagined: Imagined) -> str:
    """Return the text of one field and where it is from, or why it has none."""
    try:
        (text,) = KeySpec(f"<{field.text}>").keys(request, imagined.args, imagined.kwargs)
        reader = Reader(request, imagined.kwargs)
        said = field.source in ("header", *LONE_SOURCES)
        places = [] if said else [f"the {place}" for place, _ in reader.find(field)]
    except Exception as error:
        return f"none: {_refusal(error)}"
    if field.source in SECRET_SOURCES:
        text = _digest(field, text)
    return f"{text}  from {' and '.join(dict.fromkeys(places)) or _source(field)}"


def _source(field: Field) -> str:
    return f"the header {field.path[0]}" if field.source == "header" else _WHERE[field.source]


def _digest(field: Field, text: str) -> str:
    redaction = Redaction.of(KeySpec(f"<{field.text}>").templates)
    return redaction.shown("shown", f"shown:{text}").removeprefix("shown:") if redaction else text


def _refusal(error: Exception) -> str:
    """Return what a request is answered that has no key."""
    if isinstance(error, KeyFieldError):
        return f"{error} It is answered {413 if error.too_large else 400}."
    if isinstance(error, PermissionDenied) or type(error).__name__ == "NotAuthenticated":
        return "nobody is authenticated (give --user PK). It is answered 401 or 403."
    if isinstance(error, BadRequest) or type(error).__name__ == "ParseError":
        return f"the body can't be read: {error} It is answered 400."
    return f"{type(error).__name__}: {error}"


def _key(guard: Any, request: Any, imagined: Imagined) -> Iterator[Line]:
    redaction = guard.spec.redaction

    def shown(key: str) -> str:
        return redaction.shown(guard.namespace, key) if redaction else key

    try:
        if guard.variant == "lock":
            for key in guard.qualified(guard.spec.keys(request, imagined.args, imagined.kwargs)):
                yield "key", shown(key)
            return
        flight = guard.flight_of(request, imagined.args, imagined.kwargs)
    except Exception as error:
        yield "key", f"none: {_refusal(error)}"
        return
    yield "identity", _identity(guard, imagined)
    yield (
        "key",
        shown(flight.key) if flight else "none: its body can't be compared, so it runs alone",
    )


def _identity(guard: Any, imagined: Imagined) -> str:
    """What the digest behind ``#`` in a flight's key is made of."""
    request, scope = imagined.request, guard.options.scope
    caller = "the caller" if scope == "user" else "everybody" if scope == "global" else "scope()"
    headers = [
        name for name in (*NEGOTIATED, *guard.options.vary) if name.lower() in _lower(request)
    ]
    parts = [f"{request.method} {request.scheme}://{request.get_host()}{request.path}", caller]
    parts += [f"query {request.META['QUERY_STRING']}"] if request.META["QUERY_STRING"] else []
    parts += [f"header {name}" for name in headers]
    return "; ".join(parts)


def _lower(request: Any) -> set[str]:
    return {name.lower() for name in request.headers}
