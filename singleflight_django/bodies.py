"""What a request's body says, read so that the view afterwards finds everything untouched."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any, Final

from django.core.exceptions import BadRequest
from django.http import HttpRequest, QueryDict, RawPostDataException
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict

MISSING: Final = object()
REPEATED: Final = object()

_MULTIPART: Final = "multipart/form-data"
_URLENCODED: Final = "application/x-www-form-urlencoded"


def is_drf(request: Any) -> bool:
    """Tell whether this is Django REST framework's Request, which wraps Django's own."""
    module = sys.modules.get("rest_framework.request")
    return module is not None and isinstance(request, module.Request)


def unwrap(request: Any) -> HttpRequest:
    """Return Django's own request."""
    # Nearly always, and told at once.
    if isinstance(request, HttpRequest):
        return request
    inner: HttpRequest = request._request if is_drf(request) else request
    return inner


def read_body(request: Any) -> Iterator[object]:
    """Yield what the body says, in each of the ways in which the view may read it.

    A malformed body raises what the view would have raised: Django and DRF answer 400 or 415. All
    but multipart is also read as JSON whatever its type says, because many views do that (Ninja's
    all do): a client must not be able to name one key in the URL and hand the view another one.
    """
    inner, drf = unwrap(request), is_drf(request)
    multipart = inner.content_type == _MULTIPART
    # DRF parses multipart from the stream, and anything else from what is read here.
    raw = b"" if multipart else _raw(inner, drf=drf)
    if drf:
        yield request.data
    elif multipart or inner.content_type in (_URLENCODED, None):
        yield _form(inner, multipart=multipart)
    yield _json(raw, strict=_is_json(inner) and not drf)


def _raw(request: HttpRequest, *, drf: bool) -> bytes:
    try:
        return request.body
    except RawPostDataException as error:
        if drf:
            return b""
        raise RawPostDataException(
            "The key needs the body, but something has read it as a stream before. Take the field "
            "from elsewhere (<url.name>, <query.name>, <header.Name>), or read request.body there."
        ) from error


def _form(request: HttpRequest, *, multipart: bool) -> QueryDict:
    # Django fills POST for the method POST only, a middleware perhaps for others. To ask for it
    # then would end the view's choice of upload handlers.
    if request.method == "POST" or getattr(request, "_post", None):
        return request.POST
    if not multipart:
        return QueryDict(request.body, encoding=request.encoding)
    stream = BytesIO(_raw(request, drf=False))
    parser = MultiPartParser(request.META, stream, [], request.encoding)
    return parser.parse()[0]


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        found.update((name, REPEATED) for name, count in counts.items() if count > 1)
    return found


# As json.loads() does it, which would make a new decoder for each request.
_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def _json(raw: bytes, *, strict: bool) -> object:
    if not raw or raw.isspace():
        return MISSING
    try:
        return _decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        if strict:
            raise BadRequest("The request's body is not valid JSON.") from error
        return MISSING


def _is_json(request: HttpRequest) -> bool:
    kind = request.content_type or ""
    return kind == "application/json" or kind.endswith("+json")


def is_form_or_json(request: HttpRequest) -> bool:
    """Tell whether the body's type says that it has fields."""
    return request.content_type in (_MULTIPART, _URLENCODED) or _is_json(request)


def look_up(reading: object, path: tuple[str, ...]) -> object:
    """Return a field's value, MISSING or REPEATED. In a form the path is one name, with dots."""
    if reading is MISSING:
        return MISSING
    if isinstance(reading, MultiValueDict):
        values = reading.getlist(".".join(path))
        return MISSING if not values else values[0] if len(values) == 1 else REPEATED
    for name in path:
        if reading is REPEATED:
            return REPEATED
        if not isinstance(reading, Mapping) or name not in reading:
            return MISSING
        reading = reading[name]
    return reading
