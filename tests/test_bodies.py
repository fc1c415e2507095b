"""What a body says, and that the view afterwards finds everything as if nobody had looked."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from django.core.exceptions import BadRequest, RequestDataTooBig, TooManyFieldsSent
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, RawPostDataException
from django.http.multipartparser import MultiPartParserError
from django.test import RequestFactory
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from rest_framework import parsers
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.request import Request

from singleflight_django.bodies import read_body
from singleflight_django.exceptions import KeyFieldError
from singleflight_django.keys import KeySpec

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
BODIES = {
    "json": (JSON, b'{"n": 7, "title": "A"}'),
    "json of a kind": ("application/vnd.api+json; charset=utf-8", b'{"n": "7"}'),
    "json in utf-16": (JSON, '{"n": 7}'.encode("utf-16")),
    "json without a type": ("", b'{"n": 7}'),
    "json as text": ("text/plain", b'{"n": 7}'),
    "json as a form": (FORM, b'{"n": 7}'),
    "form": (FORM, b"n=7&title=A"),
    "multipart": (
        MULTIPART_CONTENT,
        encode_multipart(BOUNDARY, {"n": "7", "file": SimpleUploadedFile("a.txt", b"content")}),
    ),
}
METHODS = ["POST", "PUT", "PATCH", "DELETE", "GET"]


def requested(kind: str, body: bytes, method: str = "POST", path: str = "/") -> HttpRequest:
    return RequestFactory().generic(method, path, body, content_type=kind)


def wrapped(request: HttpRequest) -> Request:
    classes = [parsers.JSONParser, parsers.FormParser, parsers.MultiPartParser, ApiJSONParser]
    return Request(request, parsers=[parser() for parser in classes])


class ApiJSONParser(parsers.JSONParser):
    media_type = "application/vnd.api+json"


class TextParser(parsers.BaseParser):
    """Reads the stream itself, as FileUploadParser does."""

    media_type = "text/plain"

    def parse(self, stream: Any, *args: object) -> dict[str, str]:
        return {"n": stream.read().decode()}


def keys(key: str, request: Any, **kwargs: object) -> tuple[str, ...]:
    return KeySpec(key).keys(request, (), kwargs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "body"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("key", ["<body.n>", "<n>", "<int:n>"])
def test_a_field_is_found_in_every_kind_of_body(
    method: str, kind: str, body: bytes, key: str
) -> None:
    assert keys(key, requested(kind, body, method)) == ("7",)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["json", "json of a kind", "form", "multipart"])
def test_a_field_is_found_in_every_kind_of_body_that_drf_parses(method: str, name: str) -> None:
    request = wrapped(requested(*BODIES[name], method))
    assert keys("<body.n>", request) == ("7",)


def everything(request: Any) -> dict[str, object]:
    """What a view may do with a request's body, in several orders; an error is its name."""
    uses: dict[str, Callable[[], object]] = {
        "POST": lambda: dict(request.POST.lists()),
        "FILES": lambda: {name: file.read() for name, file in request.FILES.items()},
        "body": lambda: request.body,
        "stream": lambda: request.read(),
        "data": lambda: repr(request.data),
    }
    found = {}
    for name, use in uses.items():
        try:
            found[name] = use()
        except (RawPostDataException, AttributeError) as error:
            found[name] = type(error).__name__
    return found


class TestTheViewAfterwards:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(("kind", "body"), BODIES.values(), ids=BODIES)
    def test_finds_everything_as_it_would_have_been(
        self, method: str, kind: str, body: bytes
    ) -> None:
        untouched, touched = requested(kind, body, method), requested(kind, body, method)
        keys("<n>", touched)
        assert everything(touched) == everything(untouched)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("name", ["json", "json of a kind", "form", "multipart"])
    @pytest.mark.parametrize("inside", [True, False], ids=["below DRF", "above DRF"])
    def test_finds_drfs_data_as_it_would_have_been(
        self, method: str, name: str, inside: bool
    ) -> None:
        untouched, touched = (requested(*BODIES[name], method) for _ in range(2))
        used = wrapped(touched)
        keys("<n>", used if inside else touched)
        for attribute in ("data", "POST", "FILES"):
            ours, theirs = getattr(used, attribute), getattr(wrapped(untouched), attribute)
            assert repr(ours) == repr(theirs)
            untouched = requested(*BODIES[name], method)

    def test_may_read_the_raw_body_of_all_but_a_posted_multipart(self) -> None:
        for name, (kind, body) in BODIES.items():
            for method in METHODS:
                request = requested(kind, body, method)
                keys("<n>", request)
                if (name, method) != ("multipart", "POST"):
                    assert request.body == body

    @pytest.mark.parametrize("method", ["PUT", "PATCH"])
    def test_may_still_choose_its_upload_handlers(self, method: str) -> None:
        request = requested(*BODIES["multipart"], method)
        keys("<n>", request)
        request.upload_handlers = [MemoryFileUploadHandler(request)]
        post, files = request.parse_file_upload(request.META, BytesIO(request.body))
        assert post["n"] == "7"
        assert files["file"].read() == b"content"

    @pytest.mark.parametrize("key", ["<url.n>", "<query.n>", "<header.n>", "<method>", "all"])
    def test_has_the_stream_to_itself_when_no_field_needs_the_body(self, key: str) -> None:
        request = requested(*BODIES["multipart"], path="/?n=7")
        request.META["HTTP_N"] = "7"
        keys(key, request, n=7)
        assert request.read() == BODIES["multipart"][1]


class TestWhatAViewMayReadOtherwise:
    """A client must not be able to name one key and hand the view another one."""

    @pytest.mark.parametrize("kind", ["", "text/plain", FORM, "application/octet-stream"])
    def test_json_counts_whatever_its_type_says(self, kind: str) -> None:
        request = requested(kind, b'{"n": 7}', path="/?n=8")
        with pytest.raises(KeyFieldError, match="query string and the body"):
            keys("<n>", request)

    def test_a_form_that_is_json_too_has_one_value(self) -> None:
        request = requested(FORM, b'{"n":7,"x":"&n=8"}')
        with pytest.raises(KeyFieldError, match="different values in the body"):
            keys("<body.n>", request)

    @pytest.mark.parametrize("body", [b"", b" ", b"not json", b"\x89PNG\r\n", b"[" * 100_000])
    def test_a_body_that_says_nothing_is_no_fault_unless_it_is_to_be_json(
        self, body: bytes
    ) -> None:
        assert keys("<n>", requested("application/octet-stream", body), n=7) == ("7",)

    @pytest.mark.parametrize("body", [b"7", b'"n"', b"null", b"[]", b'["n"]', b'[{"n": 7}]'])
    def test_json_that_is_no_object_has_no_fields(self, body: bytes) -> None:
        for request in (requested(JSON, body), wrapped(requested(JSON, body))):
            with pytest.raises(KeyFieldError, match="is missing"):
                keys("<n>", request)

    def test_an_empty_json_body_has_no_fields(self) -> None:
        with pytest.raises(KeyFieldError, match="is missing"):
            keys("<n>", requested(JSON, b""))

    def test_a_file_is_no_value(self) -> None:
        body = encode_multipart(BOUNDARY, {"n": SimpleUploadedFile("a.txt", b"7")})
        with pytest.raises(KeyFieldError, match="is missing"):
            keys("<body.n>", requested(MULTIPART_CONTENT, body))
        with pytest.raises(KeyFieldError, match="is something else, not text"):
            keys("<body.n>", wrapped(requested(MULTIPART_CONTENT, body)))

    @pytest.mark.parametrize("name", ["form", "multipart"])
    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("drf", [True, False])
    def test_a_field_repeated_in_a_form_is_refused(self, name: str, method: str, drf: bool) -> None:
        body = b"n=7&n=7" if name == "form" else encode_multipart(BOUNDARY, {"n": ["7", "7"]})
        request = requested(BODIES[name][0], body, method)
        with pytest.raises(KeyFieldError, match="body is given more than once"):
            keys("<n>", wrapped(request) if drf else request)

    def test_a_name_repeated_in_json_is_refused_though_drf_takes_the_last(self) -> None:
        with pytest.raises(KeyFieldError, match="body is given more than once"):
            keys("<n>", wrapped(requested(JSON, b'{"n": 7, "n": 7}')))

    def test_many_repeated_names_are_counted_once(self) -> None:
        """Counting each name anew would take minutes for this body."""
        body = "{" + ",".join(f'"n{i}":1,"n{i}":2' for i in range(60_000)) + ',"n":7}'
        assert keys("<n>", requested(JSON, body.encode())) == ("7",)


class TestMalformed:
    """The view's own 400, not one of ours."""

    @pytest.mark.parametrize(
        "body",
        [b"{", b"{'n': 7}", b"\xff\xfe\xfd", b'{"n": 7}}', b"1" * 5000, b'{"n":' * 100_000],
        ids=["cut off", "quotes", "encoding", "trailing", "huge number", "too deep"],
    )
    def test_json(self, body: bytes) -> None:
        with pytest.raises(BadRequest, match="not valid JSON"):
            keys("<n>", requested(JSON, body), n=7)

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_multipart(self, method: str) -> None:
        request = requested("multipart/form-data", b"n=7", method)
        with pytest.raises(MultiPartParserError):
            keys("<n>", request)

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("name", ["form", "multipart"])
    def test_too_many_fields(self, method: str, name: str, settings: Any) -> None:
        settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 2
        kind = BODIES[name][0]
        fields = {str(i): "x" for i in range(9)}
        body = b"&".join(b"x=1" for _ in fields)
        body = body if name == "form" else encode_multipart(BOUNDARY, fields)
        with pytest.raises(TooManyFieldsSent):
            keys("<n>", requested(kind, body, method))

    @pytest.mark.parametrize(("kind", "body"), [(JSON, b"{"), ("multipart/form-data", b"n=7")])
    def test_drf_has_its_own_error(self, kind: str, body: bytes) -> None:
        with pytest.raises(ParseError):
            keys("<n>", wrapped(requested(kind, body)))

    def test_drf_has_its_own_error_for_a_type_that_it_cannot_parse(self) -> None:
        with pytest.raises(UnsupportedMediaType):
            keys("<n>", wrapped(requested("text/csv", b"n,7")))


class TestTooLarge:
    @pytest.fixture(autouse=True)
    def _limit(self, settings: Any) -> None:
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            (JSON, json.dumps({"n": "7" * 2000}).encode()),
            (FORM, b"n=" + b"7" * 2000),
            (MULTIPART_CONTENT, encode_multipart(BOUNDARY, {"n": "7" * 2000})),
        ],
    )
    @pytest.mark.parametrize("key", ["<n>", "<body.n>"])
    @pytest.mark.parametrize("drf", [True, False])
    def test_the_key_needs_it(
        self, method: str, kind: str, body: bytes, key: str, drf: bool
    ) -> None:
        request = requested(kind, body, method)
        with pytest.raises(KeyFieldError, match="too large") as refused:
            keys(key, wrapped(request) if drf else request, n=7)
        assert refused.value.too_large
        assert refused.value.field in ("n", "body.n")

    @pytest.mark.parametrize("drf", [True, False])
    def test_a_posted_file_may_be_larger(self, drf: bool) -> None:
        """It goes to the upload handlers, not into memory."""
        large = SimpleUploadedFile("a.bin", b"x" * 100_000)
        request = requested(
            MULTIPART_CONTENT, encode_multipart(BOUNDARY, {"n": "7", "file": large})
        )
        used = wrapped(request) if drf else request
        assert keys("<n>", used) == ("7",)
        assert used.FILES["file"].size == 100_000

    def test_a_body_of_another_kind_is_left_alone_unless_the_field_must_be_in_it(self) -> None:
        request = requested("application/octet-stream", b"x" * 2000)
        assert keys("<n>", request, n=7) == ("7",)
        assert request.read() == b"x" * 2000
        with pytest.raises(KeyFieldError, match="too large"):
            keys("<body.n>", requested("application/octet-stream", b"x" * 2000))

    def test_other_fields_do_not_ask(self) -> None:
        assert keys("<url.n>", requested(JSON, b"x" * 2000), n=7) == ("7",)


class TestReadBefore:
    def test_a_consumed_stream_is_a_fault_of_the_code_that_names_the_cure(self) -> None:
        for name, method in [("json", "POST"), ("form", "PUT"), ("multipart", "PUT")]:
            request = requested(*BODIES[name], method)
            request.read(1)
            with pytest.raises(RawPostDataException, match=r"<url\.name>"):
                keys("<n>", request)

    @pytest.mark.parametrize("name", ["form", "multipart"])
    def test_a_form_that_a_middleware_has_parsed_is_found(self, name: str) -> None:
        request = requested(*BODIES[name])
        assert request.POST["n"] == "7"
        assert keys("<n>", request) == ("7",)
        drf = requested(*BODIES[name])
        assert drf.POST["n"] == "7"
        assert keys("<n>", wrapped(drf)) == ("7",)

    def test_what_drf_has_parsed_from_the_stream_is_found(self) -> None:
        request = Request(requested("text/plain", b"7"), parsers=[TextParser()])
        assert request.data == {"n": "7"}
        assert keys("<n>", request) == ("7",)

    def test_a_body_is_read_once_for_all_fields(self) -> None:
        request = requested(JSON, b'{"n": 7, "m": 8}')
        assert keys("<body.n>:<body.m>:<n>", request) == ("7:8:7",)

    def test_a_request_that_was_made_by_hand_has_its_post(self) -> None:
        """Ninja's test client makes such."""
        request = HttpRequest()
        request.method, request._body, request.POST = "POST", b"", {"n": "7"}  # type: ignore[attr-defined,assignment]
        assert next(iter(read_body(request))) == {"n": "7"}


def test_the_limit_is_djangos_own(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
    with pytest.raises(RequestDataTooBig):
        list(read_body(requested(JSON, b'{"n": 7, "m": 8}')))
