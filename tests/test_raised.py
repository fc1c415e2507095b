"""Exceptions that are answers: followers get what the leader's client got, with one report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.translation import gettext_lazy
from ninja import NinjaAPI, Router
from ninja.errors import HttpError
from ninja.errors import ValidationError as NinjaValidationError
from rest_framework import exceptions as drf
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler
from rest_framework.viewsets import ViewSet

from singleflight_django.outcomes import freeze_result, replay
from singleflight_django.raised import (
    answer,
    freeze_raised,
    is_from_exception,
    status_of_raised,
    thaw_raised,
)


class MappedError(Exception):
    """An exception that the site's own handlers make an answer of."""


class UnknownError(Exception):
    pass


reports: list[Exception] = []
published: dict[str, bytes | None] = {}


def shared(view: Callable[..., Any]) -> Any:
    """A guard in its barest form: who asks with ?follow gets what was published before."""

    def request_of(args: Any) -> Any:
        return next(arg for arg in args if hasattr(arg, "META"))

    def publish(request: Any, error: Exception) -> Any:
        published[request.path] = None
        try:
            response = answer(request, error)
        except Exception as unanswered:
            published[request.path] = freeze_raised(unanswered)
            raise
        if not hasattr(response, "add_post_render_callback"):
            published[request.path] = freeze_result(response)
        else:
            response.add_post_render_callback(
                lambda rendered: published.update({request.path: freeze_result(rendered)})
            )
        return response

    @wraps(view)
    def inner(*args: Any, **kwargs: Any) -> Any:
        request = request_of(args)
        if "follow" in request.GET:
            return replay(published[request.path])
        try:
            return view(*args, **kwargs)
        except Exception as error:
            return publish(request, error)

    @wraps(view)
    async def ainner(*args: Any, **kwargs: Any) -> Any:
        request = request_of(args)
        if "follow" in request.GET:
            return replay(published[request.path])
        try:
            return await view(*args, **kwargs)
        except Exception as error:
            return publish(request, error)

    return ainner if iscoroutinefunction(view) else inner


ERRORS: dict[str, Callable[[], Exception]] = {
    "not-found": lambda: Http404("no such lesson"),
    "lazy": lambda: Http404(gettext_lazy("no such lesson")),
    "denied": lambda: PermissionDenied("not yours"),
    "bad": lambda: BadRequest("what?"),
    "multipart": lambda: MultiPartParserError("what?"),
    "suspicious": lambda: SuspiciousOperation("caught"),
    "mapped": lambda: MappedError("mapped"),
    "unknown": lambda: UnknownError("unknown"),
    "drf-nested": lambda: drf.ValidationError({"lessons": [{"uuid": ["taken", "ünique"]}]}),
    "drf-list": lambda: drf.ValidationError(["a", "b"]),
    "drf-conflict": lambda: drf.APIException("conflict", code="c"),
    "drf-not-found": lambda: drf.NotFound(),
    "ninja-error": lambda: HttpError(418, "teapot"),
    "ninja-validation": lambda: NinjaValidationError([{"loc": ["body"], "msg": "no"}]),
}


@shared
def function_view(request: HttpRequest, name: str) -> HttpResponse:
    raise ERRORS[name]()


@shared
async def async_view(request: HttpRequest, name: str) -> HttpResponse:
    raise ERRORS[name]()


def reporting_handler(error: Exception, context: Any) -> Response | None:
    reports.append(error)
    if isinstance(error, MappedError):
        return Response({"mapped": str(error)}, status=409)
    return exception_handler(error, context)


class ReportingView(APIView):
    def get_exception_handler(self) -> Any:
        return reporting_handler

    @shared
    def get(self, request: Request, name: str) -> Response:
        raise ERRORS[name]()


class Lessons(ViewSet):
    def get_exception_handler(self) -> Any:
        return reporting_handler

    @action(detail=False)
    @shared
    def extra(self, request: Request, name: str) -> Response:
        raise ERRORS[name]()


@api_view()
@shared
def drf_function(request: Request, name: str) -> Response:
    raise ERRORS[name]()


api, second = NinjaAPI(urls_namespace="raised"), NinjaAPI(urls_namespace="second")
router = Router()


@api.exception_handler(MappedError)
def on_mapped(request: HttpRequest, error: Any) -> HttpResponse:
    reports.append(error)
    return api.create_response(request, {"mapped": str(error)}, status=409)


@second.exception_handler(MappedError)
def on_mapped_second(request: HttpRequest, error: Any) -> HttpResponse:
    return second.create_response(request, {"second": str(error)}, status=410)


@router.get("/sync/{name}")
@shared
def ninja_view(request: HttpRequest, name: str) -> Any:
    raise ERRORS[name]()


@router.post("/sync/{name}")
def ninja_other_operation(request: HttpRequest, name: str) -> Any:
    return None


@router.get("/async/{name}")
@shared
async def ninja_async_view(request: HttpRequest, name: str) -> Any:
    raise ERRORS[name]()


api.add_router("", router)
second.add_router("", router)

urlpatterns = [
    path("function/<name>", function_view),
    path("async/<name>", async_view),
    path("drf/<name>", ReportingView.as_view()),
    path("drf-action/<name>", Lessons.as_view({"get": "extra"})),
    path("drf-function/<name>", drf_function),
    path("ninja/", api.urls),
    path("second/", second.urls),
]


def handler404(request: HttpRequest, exception: Exception) -> HttpResponse:
    return HttpResponse(f"sorry: {exception.args}", status=404)


def middleware(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    def run(request: HttpRequest) -> HttpResponse:
        return get_response(request)

    def process_exception(request: HttpRequest, error: Exception) -> HttpResponse | None:
        return HttpResponse("by the middleware", status=400) if type(error) is BadRequest else None

    run.process_exception = process_exception  # type: ignore[attr-defined]
    return run


DJANGOS = {
    "not-found": 404,
    "lazy": 404,
    "denied": 403,
    "bad": 400,
    "multipart": 400,
    "suspicious": 400,
}
DRFS = {
    "not-found": 404,
    "denied": 403,
    "suspicious": 400,
    "drf-nested": 400,
    "drf-list": 400,
    "drf-conflict": 500,
    "drf-not-found": 404,
}
NINJAS = {"not-found": 404, "suspicious": 400, "ninja-error": 418, "ninja-validation": 422}
CASES = [
    *(
        (f"/{place}/{name}", status)
        for place in ("function", "async")
        for name, status in DJANGOS.items()
    ),
    *(
        (f"/{place}/{name}", status)
        for place in ("drf", "drf-action", "drf-function")
        for name, status in DRFS.items()
    ),
    *(
        (f"/{place}/{name}", status)
        for place in ("ninja/sync", "ninja/async", "second/sync")
        for name, status in NINJAS.items()
    ),
    ("/drf/mapped", 409),
    ("/drf-action/mapped", 409),
    ("/ninja/sync/mapped", 409),
    ("/ninja/async/mapped", 409),
    ("/second/sync/mapped", 410),
    ("/second/async/mapped", 410),
]


def shown(response: Any) -> tuple[Any, ...]:
    return response.status_code, response.content, response.headers.get("Content-Type")


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    reports.clear()
    published.clear()


@pytest.mark.urls(__name__)
class TestFollowersGetWhatTheLeadersClientGot:
    @pytest.mark.parametrize(("where", "status"), CASES)
    def test_sync(self, where: str, status: int) -> None:
        led = Client().get(where)
        assert led.status_code == status
        for _ in range(2):
            assert shown(Client().get(f"{where}?follow")) == shown(led)

    @pytest.mark.parametrize(
        ("where", "status"),
        [case for case in CASES if case[0].startswith(("/async", "/ninja/async"))],
    )
    async def test_async(self, where: str, status: int) -> None:
        led = await AsyncClient().get(where)
        assert led.status_code == status
        assert shown(await AsyncClient().get(f"{where}?follow")) == shown(led)

    def test_a_middlewares_answer_too(self) -> None:
        with override_settings(MIDDLEWARE=[f"{__name__}.middleware"]):
            led = Client().get("/function/bad")
            assert led.content == b"by the middleware"
            assert shown(Client().get("/function/bad?follow")) == shown(led)

    @override_settings(DEBUG=True)
    def test_with_the_page_for_debugging(self) -> None:
        for name in ("not-found", "bad", "suspicious"):
            assert Client().get(f"/function/{name}").status_code in (400, 404)
            assert Client().get(f"/function/{name}?follow").status_code in (400, 404)


@pytest.mark.urls(__name__)
class TestOneReport:
    @pytest.mark.parametrize("where", ["/drf/mapped", "/drf/drf-nested", "/ninja/sync/mapped"])
    def test_the_frameworks_handler_is_asked_once(self, where: str) -> None:
        for query in ("", "?follow", "?follow"):
            Client().get(where + query)
        assert len(reports) == 1

    def test_also_of_an_exception_that_it_has_no_answer_for(self) -> None:
        led = Client(raise_request_exception=False).get("/drf/unknown")
        assert led.status_code == 500
        assert [type(error) for error in reports] == [UnknownError]

    def test_only_the_leader_reports_a_security_incident(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        for query in ("", "?follow", "?follow"):
            Client().get(f"/function/suspicious{query}")
        assert len([line for line in caplog.records if line.levelno >= logging.ERROR]) == 1

    def test_an_outer_decorators_own_exception_is_still_handled(self) -> None:
        """Only the exception that the handler has seen isn't shown to it again."""
        view = ReportingView()
        request = view.initialize_request(RequestFactory().get("/"))
        view.request, view.headers = request, {}
        error = UnknownError("x")
        with pytest.raises(UnknownError):
            answer(request, error)
        with pytest.raises(UnknownError):
            view.handle_exception(error)
        assert view.handle_exception(MappedError("y")).status_code == 409
        assert len(reports) == 2


@pytest.mark.urls(__name__)
class TestFailures:
    @pytest.mark.parametrize(
        "where",
        [
            "/function/unknown",
            "/function/mapped",
            "/async/unknown",
            "/drf/unknown",
            "/drf-function/mapped",
            "/ninja/sync/unknown",
            "/ninja/async/unknown",
        ],
    )
    def test_what_nobody_maps_is_a_failure(self, where: str) -> None:
        assert Client(raise_request_exception=False).get(where).status_code == 500
        assert published[where] is None

    def test_nothing_but_exceptions_that_django_answers_has_a_record(self) -> None:
        for error in (UnknownError(), KeyboardInterrupt(), SystemExit(), ValueError("x")):
            assert freeze_raised(error) is None
            assert status_of_raised(error) == 500

    def test_the_exception_goes_on_where_there_is_no_framework(self) -> None:
        error = Http404("x")
        for request in (RequestFactory().get("/"), Request(RequestFactory().get("/"))):
            with pytest.raises(Http404) as caught:
                answer(request, error)
            assert caught.value is error


class TestRecords:
    @pytest.mark.parametrize("name", DJANGOS)
    def test_an_exception_like_it_is_raised(self, name: str) -> None:
        error = ERRORS[name]()
        copy = thaw_raised(freeze_raised(error))
        assert copy is not None
        assert status_of_raised(copy) == status_of_raised(error) == DJANGOS[name]
        assert isinstance(copy, SuspiciousOperation) == (name == "suspicious")
        assert str(copy) == str(error)

    def test_only_texts_are_kept_and_not_too_much_of_them(self) -> None:
        copy = thaw_raised(freeze_raised(Http404({"tried": []}, "x" * 5000)))
        assert copy is not None
        assert copy.args == ("x" * 1000,)

    def test_a_response_of_an_exception_can_be_told(self) -> None:
        assert not is_from_exception(HttpResponse(status=404))
        assert not is_from_exception({"a": 1})
        response = Response()
        response.exception = True
        assert is_from_exception(response)
