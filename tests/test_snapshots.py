"""Frozen responses and values come back equal, and nothing hostile comes back at all."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from typing import Any

import pytest
from django.http import (
    Http404,
    HttpResponse,
    HttpResponseNotModified,
    HttpResponseRedirect,
    JsonResponse,
)
from django.test import override_settings
from ninja.responses import Status

from singleflight_django.exceptions import UnshareableResultError
from singleflight_django.outcomes import freeze_result, replay
from singleflight_django.raised import freeze_raised, thaw_raised
from singleflight_django.records import FORMAT, RAISED, RESPONSE, UNREADABLE, VALUE, seal, unseal
from singleflight_django.serializers import codec
from singleflight_django.snapshots import CARRIED, freeze, thaw
from singleflight_django.values import freeze_value, status_of, thaw_value, touched


def copied(response: HttpResponse, **kwargs: Any) -> HttpResponse:
    copy = thaw(freeze(response, **kwargs))
    assert copy is not None
    return copy


class TestResponses:
    @pytest.mark.parametrize(
        "response",
        [
            HttpResponse("é", status=201, reason="Made"),
            HttpResponse(bytes(range(256)), content_type="application/octet-stream"),
            HttpResponse("é".encode("latin-1"), content_type="text/plain; charset=latin-1"),
            HttpResponse("", headers={"Content-Type": ""}),
            HttpResponse(headers={"Location": "/lessons/7/", "ETag": '"7"', "X-Total-Count": "3"}),
            HttpResponse(b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
            JsonResponse({"a": [1, None]}, status=422),
            HttpResponseRedirect("/next/?a=1"),
            HttpResponse(headers={"Content-Disposition": 'attachment; filename="a.txt"'}),
            HttpResponse(headers={"Content-Security-Policy": "sandbox"}),
            HttpResponse("x", status=599),
        ],
    )
    def test_a_copy_is_equal(self, response: HttpResponse) -> None:
        copy = copied(response)
        assert copy.status_code == response.status_code
        assert copy.reason_phrase == response.reason_phrase
        assert copy.content == response.content
        assert dict(copy.headers) == dict(response.headers)
        assert copy.charset == response.charset

    def test_each_copy_is_another_object(self) -> None:
        record = freeze(HttpResponse("a"))
        one, other = thaw(record), thaw(record)
        assert one is not None
        assert other is not None
        one["X-Request-ID"] = "1"
        assert "X-Request-ID" not in other

    @pytest.mark.parametrize(
        "name",
        [
            "Set-Cookie",
            "Date",
            "Server",
            "Connection",
            "Transfer-Encoding",
            "Content-Length",
            "X-Request-ID",
            "X-RateLimit-Remaining",
            "RateLimit",
            "WWW-Authenticate",
            "Clear-Site-Data",
            "Server-Timing",
            "Age",
            "X-Unknown",
        ],
    )
    def test_what_belongs_to_one_request_stays_behind(self, name: str) -> None:
        assert name.lower() not in CARRIED
        assert not copied(HttpResponse(headers={name: "1"})).has_header(name)

    def test_a_cookie_stays_behind(self) -> None:
        response = HttpResponse()
        response.set_cookie("session", "secret")
        record = freeze(response)
        assert b"secret" not in record
        assert not copied(response).cookies

    def test_no_content_and_not_modified_have_no_body_and_no_type(self) -> None:
        for response in (HttpResponse("x", status=204), HttpResponseNotModified()):
            assert copied(response).content == b""
        assert "Content-Type" not in copied(HttpResponseNotModified()).headers

    def test_head_has_no_body_but_its_length(self) -> None:
        copy = copied(HttpResponse("12345"), method="HEAD")
        assert copy.content == b""
        assert copy["Content-Length"] == "5"
        assert "Content-Length" not in copied(HttpResponse(), method="HEAD").headers

    def test_a_redirect_can_be_followed_by_djangos_test_client(self) -> None:
        assert copied(HttpResponseRedirect("/next/")).url == "/next/"  # type: ignore[attr-defined]
        assert not hasattr(copied(HttpResponse(headers={"Location": "/x/"}, status=201)), "url")

    def test_what_a_decorator_left_for_a_middleware_is_kept(self) -> None:
        response = HttpResponse()
        response.xframe_options_exempt = True  # type: ignore[attr-defined]
        assert copied(response).xframe_options_exempt is True  # type: ignore[attr-defined]
        assert not hasattr(copied(HttpResponse()), "xframe_options_exempt")

    def test_too_long_is_not_shareable(self) -> None:
        assert freeze(HttpResponse("x" * 100), max_bytes=1000)
        with pytest.raises(UnshareableResultError, match="over max_bytes=1000"):
            freeze(HttpResponse("x" * 1000), max_bytes=1000)


class Trap:
    """Opened as a pickle it leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


GOOD = freeze(HttpResponse("x" * 50))
THAWS: list[Any] = [
    thaw,
    thaw_value,
    thaw_raised,
    replay,
    codec("json").decode,
    codec("pickle").decode,
]


class TestHostileRecords:
    @pytest.mark.parametrize("open_", THAWS)
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"SF1",
            b"random bytes of some length that mean nothing at all",
            os.urandom(200),
            FORMAT + RESPONSE + os.urandom(200),
            FORMAT + RESPONSE + bytes(200),
            b"SF0" + GOOD[3:],
            GOOD[:3] + b"V" + GOOD[4:],
            GOOD[:-1],
            GOOD + b"x",
            GOOD[:10],
            GOOD[:22],
            GOOD.decode("latin-1"),
            None,
            7,
            memoryview(GOOD),
            {"status": 200},
            seal(b"Z", {}, b""),
        ],
    )
    def test_no_outcome_one_line_and_no_exception(
        self, open_: Any, data: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        result = open_(data)
        assert result is None or result is UNREADABLE
        assert not result
        [line] = caplog.records
        assert line.levelno == logging.WARNING
        assert line.name == "singleflight_django"

    def test_every_truncation_and_every_flipped_bit_is_noticed(self) -> None:
        for place in range(len(GOOD)):
            assert thaw(GOOD[:place]) is None
            flipped = bytearray(GOOD)
            flipped[place] ^= 1
            assert thaw(bytes(flipped)) is None

    @pytest.mark.parametrize("open_", THAWS)
    def test_a_pickle_is_not_opened(self, open_: Any, tmp_path: Any) -> None:
        path = tmp_path / "trapped"
        pickled = pickle.dumps(Trap(str(path)))
        with override_settings(SECRET_KEY="the attacker's"):
            records = [pickled, *(seal(kind, {}, pickled) for kind in (b"P", b"R", b"J"))]
        for record in records:
            open_(record)
        assert not path.exists()

    def test_another_sites_record_is_none(self) -> None:
        with override_settings(SECRET_KEY="another"):
            foreign = freeze(HttpResponse("<script>"))
        assert thaw(foreign) is None

    def test_a_record_from_before_the_key_was_changed_is_read(self) -> None:
        with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["old"]):
            with override_settings(SECRET_KEY="old"):
                record = freeze(HttpResponse("a"))
            assert thaw(record) is not None

    @pytest.mark.parametrize("open_", [thaw, replay])
    @pytest.mark.parametrize(
        "head",
        [
            {},
            {"status": "x", "reason": "", "headers": [], "flags": []},
            {"status": 7, "reason": "", "headers": [], "flags": []},
            {"status": 200, "reason": "", "headers": [["A", "a\nb"]], "flags": []},
            {"status": 200, "reason": "", "headers": [1], "flags": []},
            {"status": 200, "reason": "", "headers": [], "flags": [], "new": 1},
        ],
    )
    def test_a_head_that_another_version_wrote_is_none(self, open_: Any, head: Any) -> None:
        assert not open_(seal(RESPONSE, head, b""))

    @pytest.mark.parametrize("open_", [thaw_raised, replay])
    def test_an_unknown_kind_of_exception_is_none(self, open_: Any) -> None:
        assert not open_(seal(RAISED, {"kind": "SystemExit", "texts": []}, b""))

    def test_a_record_that_is_not_opened_yet_shows_what_it_is(self) -> None:
        record = unseal(GOOD, RESPONSE + VALUE)
        assert record is not None
        assert record.kind == RESPONSE
        assert record.body == b"x" * 50
        assert repr(UNREADABLE) == "UNREADABLE"


VALUES: list[Any] = [None, False, 0, "", [], {}, {"a": [1, 2.5, None, {"b": "é\ud800"}]}, "text"]


class TestValues:
    @pytest.mark.parametrize("value", VALUES)
    def test_a_value_comes_back_equal(self, value: Any) -> None:
        assert thaw_value(freeze_value(value)) == value

    @pytest.mark.parametrize("value", VALUES)
    def test_a_status_and_a_value_come_back_in_their_form(self, value: Any) -> None:
        assert thaw_value(freeze_value((201, value))) == (201, value)
        copy = thaw_value(freeze_value(Status(202, value)))
        assert isinstance(copy, Status)
        assert (copy.status_code, copy.value) == (202, value)

    @pytest.mark.parametrize(
        "value", [object(), {1: "a"}, {"a": (1, 2)}, (1, 2, 3), float("nan"), {1, 2}, b"x"]
    )
    def test_what_json_would_change_is_not_shareable(self, value: Any) -> None:
        for result in (value, (200, value), Status(200, value)):
            with pytest.raises(UnshareableResultError):
                freeze_value(result)

    def test_too_long_is_not_shareable(self) -> None:
        with pytest.raises(UnshareableResultError):
            freeze_value("x" * 1000, max_bytes=1000)

    def test_without_ninja_its_status_is_no_outcome(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record = freeze_value(Status(200, 1))
        monkeypatch.delitem(sys.modules, "ninja.responses")
        assert thaw_value(record) is UNREADABLE
        assert thaw_value(freeze_value((200, 1))) == (200, 1)

    def test_the_status_of_a_result_is_known(self) -> None:
        results = [HttpResponse(status=404), Status(201, None), (204, None), {"a": 1}, (1, 2, 3)]
        assert [status_of(result) for result in results] == [404, 201, 204, 200, 200]

    def test_headers_on_the_response_that_ninja_hands_out_are_noticed(self) -> None:
        plain, named, cookie = HttpResponse(), HttpResponse(), HttpResponse()
        named["X-A"] = "1"
        cookie.set_cookie("a", "1")
        assert not touched({"response": plain, "lesson": 7})
        assert touched({"response": named})
        assert touched({"response": cookie})


class TestReplay:
    @pytest.mark.parametrize("value", [None, {"a": 1}, (201, {"a": 1})])
    def test_a_value_is_returned(self, value: Any) -> None:
        assert replay(freeze_result(value)) == value

    def test_a_response_is_returned(self) -> None:
        copy = replay(freeze_result(JsonResponse({"a": 1}), method="POST", max_bytes=1000))
        assert json.loads(copy.content) == {"a": 1}

    def test_an_exception_is_raised(self) -> None:
        with pytest.raises(Http404, match="no such lesson"):
            replay(freeze_raised(Http404("no such lesson")))
