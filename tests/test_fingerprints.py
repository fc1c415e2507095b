"""What must be equal under one identity: honest retries are, other content isn't."""

from __future__ import annotations

import tracemalloc
from io import BytesIO
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler, TemporaryFileUploadHandler
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.multipartparser import MultiPartParserError
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.test.client import encode_multipart
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view
from rest_framework.exceptions import ParseError
from rest_framework.parsers import FileUploadParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from singleflight_django.fingerprints import afingerprint, fingerprint

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
TEXT = "text/plain"


def request(body: bytes | str, kind: str, method: str = "POST", **headers: str) -> Any:
    data = body.encode() if isinstance(body, str) else body
    return RequestFactory().generic(method, "/", data, content_type=kind, headers=headers)


def multipart(fields: dict[str, Any], boundary: str = "b", method: str = "POST") -> Any:
    body = encode_multipart(boundary, fields)
    return request(body, f"multipart/form-data; boundary={boundary}", method)


def upload(content: bytes, name: str = "a.txt", kind: str = TEXT) -> SimpleUploadedFile:
    return SimpleUploadedFile(name, content, kind)


def form(**fields: Any) -> Any:
    return lambda boundary="b", method="POST": multipart(fields, boundary, method)


class TestHonestRetries:
    @pytest.mark.parametrize(
        ("one", "other", "kind"),
        [
            ('{"a":1,"b":2}', '{ "b": 2,\n "a": 1 }', JSON),
            ("[1.0]", "[1.00]", JSON),
            ("[1.0]", "[1]", JSON),
            ("[100]", "[1e2]", JSON),
            ("[0]", "[-0.0]", JSON),
            ('["é"]', '["\\u00e9"]', JSON),
            ('["é"]', '["é"]'.encode("utf-16"), JSON),
            ('{"a":{"c":1,"d":[{"e":1,"f":2}]}}', '{"a":{"d":[{"f":2,"e":1}],"c":1}}', JSON),
            ('{"a":1}', '{"a": 1}', "application/merge-patch+json"),
            ("a=1&b=2", "b=2&a=1", FORM),
            ("a=%41", "a=A", FORM),
            ("a=1&csrfmiddlewaretoken=x", "csrfmiddlewaretoken=y&a=1", FORM),
            ("same", "same", TEXT),
        ],
    )
    def test_the_same_content_written_differently(self, one: Any, other: Any, kind: str) -> None:
        assert fingerprint(request(one, kind)) == fingerprint(request(other, kind)) is not None

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_another_boundary_csrf_token_and_order_of_a_form(self, method: str) -> None:
        one = {"a": "1", "csrfmiddlewaretoken": "x", "f": upload(b"abc")}
        other = {"csrfmiddlewaretoken": "y", "f": upload(b"abc"), "a": "1"}
        assert fingerprint(multipart(one, "b1", method)) == fingerprint(
            multipart(other, "b2", method)
        )

    def test_a_form_is_the_same_whichever_way_it_is_sent(self) -> None:
        forms = (multipart({"a": "é"}), multipart({"a": "é"}, method="PUT"))
        assert fingerprint(forms[0]) == fingerprint(forms[1])

    def test_headers_do_not_count(self) -> None:
        one = request("x", TEXT, **{"Authorization": "Bearer a", "User-Agent": "a"})
        assert fingerprint(one) == fingerprint(request("x", TEXT))

    def test_no_body_is_no_body_whatever_its_type(self) -> None:
        texts = {fingerprint(request("", kind, "GET")) for kind in (JSON, FORM, TEXT, "")}
        assert len(texts) == 1


class TestOtherContent:
    @pytest.mark.parametrize(
        ("one", "other", "kind"),
        [
            ("[1]", "[2]", JSON),
            ("[1]", '["1"]', JSON),
            ("[1]", "[true]", JSON),
            ("[1,2]", "[2,1]", JSON),
            ("[null]", "[]", JSON),
            ("[0.1]", "[0.1000000000000000055511151231257827]", JSON),
            ("[12345678901234567890]", "[12345678901234567891]", JSON),
            ("[1e400]", "[1e401]", JSON),
            ("[NaN]", '["NaN"]', JSON),
            ("[1]", '[{"n":"1"}]', JSON),
            ('{"a":1}', '{"o":[["a",1]]}', JSON),
            ('{"a":1,"a":2}', '{"a":2,"a":1}', JSON),
            ('{"a":1,"a":2}', '{"a":2}', JSON),
            ('["\\ud800"]', '["\\ud801"]', JSON),
            ("{broken", "{broken ", JSON),
            ("[" * 5000, "[" * 5001, JSON),
            ("a=1&a=2", "a=2&a=1", FORM),
            ("a=%ff", "a=%fe", FORM),
            ("a=", "b=", FORM),
            ('{"a":1}', '{"a": 1}', TEXT),
        ],
    )
    def test_is_another_fingerprint(self, one: str, other: str, kind: str) -> None:
        assert fingerprint(request(one, kind)) != fingerprint(request(other, kind))

    def test_the_same_bytes_as_another_type_are_other_content(self) -> None:
        kinds = (JSON, TEXT, "application/xml", FORM)
        assert len({fingerprint(request("[]", kind)) for kind in kinds}) == 4

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize(
        "changed",
        [
            {"f": upload(b"abd")},
            {"f": upload(b"abc", name="b.txt")},
            {"f": upload(b"abc", kind="text/html")},
            {"g": upload(b"abc")},
            {"f": [upload(b"abc"), upload(b"abc")]},
            {"f": "abc"},
            {"f": upload(b"abc"), "a": "1"},
        ],
    )
    def test_a_changed_file_or_field_is_seen(self, changed: Any, method: str) -> None:
        base = fingerprint(multipart({"f": upload(b"abc")}, method=method))
        for value in changed.values():
            for file in value if isinstance(value, list) else [value]:
                getattr(file, "seek", lambda place: None)(0)
        assert base != fingerprint(multipart(changed, method=method)) is not None

    def test_nobody_without_the_secret_key_can_test_a_guess(self) -> None:
        base = fingerprint(request("password=1234", FORM))
        with override_settings(SECRET_KEY="another"):
            assert fingerprint(request("password=1234", FORM)) != base


class Spool(FileUploadHandler):
    """A handler that puts something of its own in the place of a file."""

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        return None

    def file_complete(self, file_size: int) -> Any:
        return {"stored": "elsewhere"}


class TestNotShared:
    @pytest.mark.parametrize("kind", [JSON, FORM, TEXT])
    @override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10)
    def test_a_body_that_is_too_large_to_read(self, kind: str) -> None:
        made = request("x" * 11, kind)
        assert fingerprint(made) is None
        assert made.read() == b"x" * 11, "the view can still read it as a stream"

    @override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10)
    def test_a_form_that_django_does_not_parse_and_that_is_too_large(self) -> None:
        assert fingerprint(multipart({"f": upload(b"abc")}, method="PUT")) is None

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_what_was_read_as_a_stream_before(self, method: str) -> None:
        for made in (multipart({"a": "1"}, method=method), request("x", TEXT, method)):
            made.read()
            assert fingerprint(made) is None

    def test_an_upload_that_its_handler_put_elsewhere(self) -> None:
        made = multipart({"f": upload(b"abc")})
        made.upload_handlers = [Spool(made)]
        assert fingerprint(made) is None


class TestLargeUploads:
    def test_files_may_be_large_and_are_hashed_in_pieces(self) -> None:
        content = b"x" * 12_000_000
        made = multipart({"f": upload(content)})
        made.upload_handlers = [TemporaryFileUploadHandler(made)]
        made.FILES  # noqa: B018 - parsed before, so that only the hash is measured
        tracemalloc.start()
        text = fingerprint(made)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert text is not None
        assert peak < 2_000_000
        assert made.FILES["f"].read(5) == b"xxxxx", "the view reads it from the start"
        made.close()

    def test_they_are_not_measured_by_the_limit_for_the_rest(self) -> None:
        with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100):
            assert fingerprint(multipart({"f": upload(b"x" * 1000)})) is not None


def broken() -> Any:
    return request(b"--b\r\nno", "multipart/form-data; boundary=")


def plain_view(request: HttpRequest) -> HttpResponse:
    made = fingerprint(request)
    files = {name: file.read().decode() for name, file in request.FILES.items()}
    return JsonResponse({"fingerprint": made, "post": request.POST.dict(), "files": files})


@csrf_exempt
async def async_view(request: HttpRequest) -> HttpResponse:
    made = await afingerprint(request)
    files = {name: file.read().decode() for name, file in request.FILES.items()}
    return JsonResponse({"fingerprint": made, "post": request.POST.dict(), "files": files})


@api_view(["POST", "PUT"])
def drf_view(request: Request) -> Response:
    made = fingerprint(request)
    return Response({"fingerprint": made, "data": sorted(request.data)})


urlpatterns = [path("plain/", plain_view), path("async/", async_view), path("drf/", drf_view)]


@pytest.mark.urls(__name__)
class TestThroughTheFrameworks:
    def test_the_view_finds_everything_untouched(self) -> None:
        answer = Client().post("/plain/", {"a": "1", "f": upload(b"abc")}).json()
        assert answer["fingerprint"]
        assert answer["post"] == {"a": "1"}
        assert answer["files"] == {"f": "abc"}

    async def test_the_async_twin_says_the_same(self) -> None:
        for data, kind in [({"a": "1"}, JSON), ("x", TEXT)]:
            one = (await AsyncClient().post("/async/", data, content_type=kind)).json()
            other = fingerprint(RequestFactory().post("/", data, content_type=kind))
            assert one["fingerprint"] == other
        data = {"a": "1", "f": upload(b"abc")}
        answer = (await AsyncClient().post("/async/", data)).json()
        data["f"].seek(0)  # type: ignore[attr-defined]
        assert answer["fingerprint"] == fingerprint(multipart(data))
        assert answer["files"] == {"f": "abc"}

    @pytest.mark.parametrize("method", ["post", "put"])
    def test_rest_framework_has_the_same_fingerprints(self, method: str) -> None:
        bodies: list[tuple[Any, str]] = [
            ('{"a":1}', JSON),
            ("a=1", FORM),
            (
                encode_multipart("b", {"a": "1", "f": upload(b"abc")}),
                "multipart/form-data; boundary=b",
            ),
        ]
        for body, kind in bodies:
            answer = getattr(Client(), method)("/drf/", body, content_type=kind).json()
            assert answer["fingerprint"] == fingerprint(request(body, kind))
            assert "a" in answer["data"]

    def test_a_malformed_form_is_the_views_own_error(self) -> None:
        with pytest.raises(MultiPartParserError):
            fingerprint(broken())
        with pytest.raises(ParseError):
            fingerprint(Request(broken(), parsers=[MultiPartParser()]))
        bad = Client().post("/plain/", b"--b", content_type="multipart/form-data; boundary=")
        assert bad.status_code == 400

    def test_a_parser_of_another_kind_is_not_shared(self) -> None:
        made = request(b"abc", "multipart/form-data; boundary=b", "PUT")
        wrapped = Request(made, parsers=[FileUploadParser()])
        wrapped.parser_context["kwargs"] = {"filename": "a.txt"}
        assert fingerprint(wrapped) is None
        assert wrapped.data["file"].read() == b"abc"

    def test_upload_handlers_can_be_chosen_above_the_guard(self) -> None:
        made = multipart({"f": upload(b"abc")})
        made.upload_handlers.insert(0, TemporaryFileUploadHandler(made))
        assert fingerprint(made)
        assert made.FILES["f"].temporary_file_path()
        made.close()

    def test_the_body_of_a_put_stays_for_the_view(self) -> None:
        made = multipart({"f": upload(b"abc")}, method="PUT")
        assert fingerprint(made)
        assert b"abc" in made.body
        made.upload_handlers = [Spool(made)]
        assert BytesIO(made.body).read() == made.read()
