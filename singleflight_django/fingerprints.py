"""What must be equal under one identity: the body, however a client may write the same thing.

- A form, multipart or not: the fields, the names in any order, the values of one name in theirs,
  without the CSRF token; of each file its names, its type and a hash of its content.
- JSON: the members of an object in any order, 1.0 and 1.00 and 1 one number. A name that an object
  has twice keeps its values in their order.
- Anything else: the bytes, and the type they are said to have.

A multipart POST is parsed through the request's own upload handlers. A view that chooses its own
does so before the guard: in a decorator that stands above it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from io import BytesIO
from operator import itemgetter
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, RawPostDataException
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict

from singleflight_django.bodies import is_drf, is_form_or_json, unwrap
from singleflight_django.digests import digest
from singleflight_django.identity import sorted_pairs
from singleflight_django.parts import part

CSRF_FIELD: Final = "csrfmiddlewaretoken"

_MULTIPART: Final = "multipart/form-data"
_URLENCODED: Final = "application/x-www-form-urlencoded"


def fingerprint(request: Any) -> str | None:
    """Return the digest of what the body says; None if it can't be read here: don't share.

    That is so for a body over ``DATA_UPLOAD_MAX_MEMORY_SIZE`` (files in a form don't count) and for
    one that was read as a stream before. A malformed form raises what the view would have raised.
    """
    inner = unwrap(request)
    if inner.content_type == _MULTIPART:
        content = _multipart(request)
    else:
        try:
            content = _in_memory(inner, inner.body)
        except (RequestDataTooBig, RawPostDataException):
            content = None
    return None if content is None else digest("fingerprint", content)


async def afingerprint(request: Any) -> str | None:
    """See fingerprint()."""
    if unwrap(request).content_type == _MULTIPART:
        # Files may be large, and upload handlers do what they like.
        return await sync_to_async(fingerprint)(request)
    return fingerprint(request)


def _in_memory(request: HttpRequest, raw: bytes) -> list[object]:
    if not raw:
        return []
    if request.content_type == _URLENCODED:
        return ["form", _without_csrf(sorted_pairs(raw.decode("latin-1"))), []]
    if is_form_or_json(request):
        try:
            return ["json", _parse(raw.decode(json.detect_encoding(raw), "surrogatepass"))]
        except (ValueError, RecursionError):
            pass  # malformed: that is for the view to say
    return ["raw", request.content_type, _hash([raw])]


def _multipart(request: Any) -> list[object] | None:
    inner = unwrap(request)
    if is_drf(request) or inner.method == "POST" or getattr(inner, "_post", None):
        form, files = request.POST, request.FILES
    else:
        # Django parses the method POST only, a middleware perhaps others.
        try:
            body = BytesIO(inner.body)
        except (RequestDataTooBig, RawPostDataException):
            return None
        parser = MultiPartParser(inner.META, body, [_Hasher(inner)], inner.encoding)
        form, files = parser.parse()
    if not form and not files and not _has_no_parts(inner):
        return None  # read as a stream before, perhaps: then any two would be equal
    try:
        pairs = [(name, str(value)) for name, values in _sorted(form) for value in values]
        return ["form", _without_csrf(pairs), list(_files(files))]
    except (AttributeError, OSError, ValueError):
        return None  # an upload handler or a parser put something else in its place


def _has_no_parts(request: HttpRequest) -> bool:
    """Whether the body is so short that it has but the last boundary."""
    boundary = (request.content_params or {}).get("boundary", "")
    length = str(request.META.get("CONTENT_LENGTH"))
    return length.isdecimal() and int(length) <= len(f"--{boundary}--\r\n")


def _sorted(form: MultiValueDict[str, Any]) -> list[tuple[str, list[Any]]]:
    return sorted(form.lists(), key=itemgetter(0))


def _without_csrf(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[0] != CSRF_FIELD]


def _files(files: MultiValueDict[str, Any]) -> Iterator[list[str]]:
    for name, uploads in _sorted(files):
        for file in uploads:
            if isinstance(file, _Hashed):
                content = file.content
            else:
                content = _hash(file.chunks())
                file.seek(0)
            yield [name, str(file.name), str(file.content_type), content]


def _hash(chunks: Iterable[bytes]) -> str:
    state = blake2b(digest_size=20)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


class _Hashed:
    def __init__(self, name: str | None, content_type: str | None, content: str) -> None:
        self.name, self.content_type, self.content = name, content_type, content


class _Hasher(FileUploadHandler):
    """Keeps the hash of an upload, and nothing else."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        self.state = blake2b(digest_size=20)

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.state.update(raw_data)

    def file_complete(self, file_size: int) -> Any:
        return _Hashed(self.file_name, self.content_type, self.state.hexdigest())


# Real objects become {"o": …} and numbers {"n": …}, so that neither can imitate the other.
def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {"o": sorted(pairs, key=itemgetter(0))}


def _number(text: str) -> dict[str, str]:
    try:
        return {"n": part(Decimal(text))}
    except (InvalidOperation, ValueError):
        return {"n": text}


_parse = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_int=_number, parse_constant=_number
).decode
