"""What the client is told, through the real handlers of Django, REST framework and Ninja."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import Any
from wsgiref.handlers import SimpleHandler
from wsgiref.util import setup_testing_defaults

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.asyncio import async_unsafe
from ninja import NinjaAPI
from rest_framework.views import APIView

from singleflight_django import exceptions
from singleflight_django.exceptions import (
    ContentionError,
    DuplicateMismatchError,
    FingerprintMismatchError,
    FlightTimeoutError,
    KeyFieldError,
    LeaderFailedError,
    LeaseConflictError,
    LeaseLostError,
    NestedFlightError,
    SingleFlightError,
    StoreUnavailableError,
    UnshareableResultError,
    WaitInTransactionError,
)
from singleflight_django.responses import (
    ANSWERED,
    STATUS,
    aproblem,
    is_refusal,
    problem,
    refusal,
    skip,
)

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"

TOO_LARGE = KeyFieldError(field="body.uuid", too_large=True)
ANSWERS: list[tuple[SingleFlightError, int, str, bool]] = [
    (LeaseConflictError(), 429, "conflict", True),
    (FingerprintMismatchError(), 409, "fingerprint-mismatch", False),
    (DuplicateMismatchError(), 409, "duplicate-mismatch", False),
    (UnshareableResultError(), 409, "in-flight", True),
    (FlightTimeoutError(), 504, "timeout", True),
    (LeaderFailedError(), 503, "leader-failed", True),
    (StoreUnavailableError(), 503, "store-unavailable", True),
    (ContentionError(), 503, "contention", True),
    (KeyFieldError(field="body.uuid"), 400, "key-field", False),
    (TOO_LARGE, 413, "body-too-large", False),
]
FAULTS_OF_THE_CODE = [NestedFlightError, WaitInTransactionError, LeaseLostError]
BY_SLUG: dict[str, SingleFlightError] = {slug: error for error, _, slug, _ in ANSWERS}
each_answer = pytest.mark.parametrize(("error", "status", "slug", "retry"), ANSWERS)


def refuse(request: HttpRequest, slug: str) -> HttpResponse:
    return problem(request, BY_SLUG[slug])


async def arefuse(request: HttpRequest, slug: str) -> HttpResponse:
    return await aproblem(request, BY_SLUG[slug])


def skipped(request: HttpRequest) -> HttpResponse:
    return skip()


def not_ours(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=429)


class Api(APIView):
    def get(self, request: Any, slug: str) -> HttpResponse:
        return problem(request, BY_SLUG[slug])

    def post(self, request: Any, slug: str) -> HttpResponse:
        return skip()


ninja = NinjaAPI(urls_namespace="responses", docs_url=None, openapi_url=None)


@ninja.get("/{slug}")
def ninja_refuse(request: HttpRequest, slug: str) -> HttpResponse:
    return problem(request, BY_SLUG[slug])


@ninja.post("/{slug}")
async def ninja_skip(request: HttpRequest, slug: str) -> HttpResponse:
    return skip()


urlpatterns = [
    path("skipped", skipped),
    path("not-ours", not_ours),
    path("django/<slug>", refuse),
    path("async/<slug>", arefuse),
    path("drf/<slug>", Api.as_view()),
    path("ninja/", ninja.urls),
]
pytestmark = pytest.mark.urls(__name__)

Refuse = Callable[[SingleFlightError, str], HttpResponse]


@pytest.fixture
def answer(rf: RequestFactory) -> Refuse:
    """problem() for a request with that Accept header."""
    return lambda error, accept="*/*": problem(rf.get("/", headers={"accept": accept}), error)


def templates(text: str, *context_processors: str) -> list[dict[str, Any]]:
    """TEMPLATES of a site whose own problem.html is ``text``."""
    loader = ("django.template.loaders.locmem.Loader", {"singleflight_django/problem.html": text})
    return [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {"loaders": [loader], "context_processors": list(context_processors)},
        }
    ]


class TestTheMapping:
    @each_answer
    def test_each_error_has_its_status_and_type(
        self,
        answer: Callable[..., HttpResponse],
        error: SingleFlightError,
        status: int,
        slug: str,
        retry: bool,
    ) -> None:
        response = answer(error)

        body = json.loads(response.content)
        assert status == response.status_code == body["status"]
        assert body["type"] == f"urn:singleflight-django:{slug}"
        assert set(body) - {"field"} == {"type", "title", "status", "detail"}
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Vary"] == "Accept"
        assert response.headers.get("Retry-After") == ("1" if retry else None)

    @pytest.mark.parametrize("fault", FAULTS_OF_THE_CODE)
    def test_a_fault_of_the_code_propagates(
        self, answer: Callable[..., HttpResponse], fault: type[SingleFlightError]
    ) -> None:
        error = fault("nested")

        with pytest.raises(fault) as caught:
            answer(error)

        assert caught.value is error
        assert not isinstance(error, ANSWERED)

    async def test_a_fault_of_the_code_propagates_async(self, rf: RequestFactory) -> None:
        with pytest.raises(NestedFlightError):
            await aproblem(rf.get("/"), NestedFlightError("nested"))

    def test_every_error_is_either_answered_or_a_fault_of_the_code(self) -> None:
        every = {
            error
            for error in vars(exceptions).values()
            if isinstance(error, type) and issubclass(error, SingleFlightError)
        }

        assert every - {SingleFlightError} == {*STATUS, *FAULTS_OF_THE_CODE}

    def test_a_subclass_is_answered_as_its_base(self, answer: Callable[..., HttpResponse]) -> None:
        class OurConflictError(LeaseConflictError):
            pass

        assert answer(OurConflictError()).status_code == 429

    @pytest.mark.parametrize("accept", ["*/*", BROWSER])
    def test_neither_key_nor_message_goes_out(
        self, answer: Callable[..., HttpResponse], accept: str
    ) -> None:
        for kind in ANSWERED:
            response = answer(kind("secret message", key="secret:key"), accept)

            assert b"secret" not in response.content

    @pytest.mark.parametrize("error", [KeyFieldError(field="header.Idempotency-Key"), TOO_LARGE])
    def test_a_bad_field_is_named(
        self, answer: Callable[..., HttpResponse], error: KeyFieldError
    ) -> None:
        body = json.loads(answer(error).content)

        assert body["field"] == error.field
        assert error.field in body["detail"]


class TestNegotiation:
    @pytest.mark.parametrize(
        "accept",
        [BROWSER, "text/html", "text/*", "text/html, application/json", "*/*;q=0.1, text/html"],
    )
    def test_a_browser_gets_a_page(self, answer: Callable[..., HttpResponse], accept: str) -> None:
        response = answer(LeaseConflictError(), accept)

        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"<h1>Already in progress</h1>" in response.content
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "1"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Vary"] == "Accept"

    @pytest.mark.parametrize(
        "accept",
        [
            "",
            "*/*",
            "application/json",
            "application/problem+json, text/html",
            "application/json, text/plain, */*",
            "text/html;q=0.5, application/json",
            "image/png",
            "text/html;q=0",
            ";;;,/,",
            "text/html;" + "q" * 11_000,
        ],
    )
    def test_everyone_else_gets_json(
        self, answer: Callable[..., HttpResponse], accept: str
    ) -> None:
        response = answer(LeaseConflictError(), accept)

        assert response.headers["Content-Type"] == "application/problem+json"

    def test_the_pages_values_are_escaped(self, answer: Callable[..., HttpResponse]) -> None:
        response = answer(KeyFieldError(field="<script>"), BROWSER)

        assert b"<script>" not in response.content
        assert b"&lt;script&gt;" in response.content

    def test_a_site_can_have_its_own_page(
        self, answer: Callable[..., HttpResponse], settings: Any
    ) -> None:
        settings.TEMPLATES = templates(
            "{{ status }} {{ title }} at {{ request.path }}",
            "django.template.context_processors.request",
        )

        assert answer(LeaseConflictError(), BROWSER).content == b"429 Already in progress at /"

    def test_without_templates_a_browser_gets_json(
        self, answer: Callable[..., HttpResponse], settings: Any
    ) -> None:
        settings.TEMPLATES = []

        response = answer(LeaseConflictError(), BROWSER)

        assert response.headers["Content-Type"] == "application/problem+json"


@async_unsafe
def counts(request: HttpRequest) -> dict[str, Any]:
    """A context processor that may not run in an event loop, as one that queries the database."""
    return {"count": 7}


class TestAsync:
    async def test_a_sites_own_page_may_query_the_database(
        self, rf: RequestFactory, settings: Any
    ) -> None:
        settings.TEMPLATES = templates("{{ count }} waiting", f"{__name__}.counts")
        request = rf.get("/", headers={"accept": BROWSER})

        response = await aproblem(request, LeaseConflictError())

        assert response.content == b"7 waiting"
        with pytest.raises(SynchronousOnlyOperation):
            problem(request, LeaseConflictError())

    async def test_json_is_the_same_as_beneath_sync(self, rf: RequestFactory) -> None:
        request = rf.get("/")

        response = await aproblem(request, LeaseConflictError())

        assert response.content == problem(request, LeaseConflictError()).content


class TestHead:
    @pytest.mark.parametrize("accept", ["*/*", BROWSER])
    def test_no_body(self, rf: RequestFactory, accept: str) -> None:
        response = problem(rf.head("/", headers={"accept": accept}), LeaseConflictError())

        assert response.content == b""
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "1"


class TestSkip:
    def test_no_body_and_no_content_type(self) -> None:
        response = skip()

        assert response.status_code == 204
        assert response.content == b""
        assert "Content-Type" not in response.headers
        assert response.headers["Cache-Control"] == "no-store"

    def test_on_the_wire(self) -> None:
        """Proxies and fetch() trip over a 204 that has a body."""
        environ: dict[str, Any] = {"PATH_INFO": "/skipped"}
        setup_testing_defaults(environ)
        out = io.BytesIO()
        handler = SimpleHandler(io.BytesIO(), out, io.StringIO(), environ)
        handler.origin_server = True

        handler.run(WSGIHandler())

        head, _, body = out.getvalue().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 204 No Content\r\n")
        assert b"content-type" not in head.lower()
        assert body == b""


class TestFrameworks:
    """The same answer as return value of a handler of each framework."""

    @pytest.mark.parametrize("framework", ["django", "async", "drf", "ninja"])
    @each_answer
    def test_problem(
        self,
        client: Client,
        framework: str,
        error: SingleFlightError,
        status: int,
        slug: str,
        retry: bool,
    ) -> None:
        response = client.get(f"/{framework}/{slug}")

        assert status == response.status_code
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers.get("Retry-After") == ("1" if retry else None)
        assert "Accept" in response.headers["Vary"]
        assert response.json()["type"] == f"urn:singleflight-django:{slug}"

    @pytest.mark.parametrize("framework", ["django", "async", "drf", "ninja"])
    def test_page(self, client: Client, framework: str) -> None:
        response = client.get(f"/{framework}/conflict", headers={"accept": BROWSER})

        assert response.status_code == 429
        assert b"<h1>Already in progress</h1>" in response.content

    @pytest.mark.parametrize("framework", ["django", "async", "drf", "ninja"])
    async def test_problem_async(self, async_client: AsyncClient, framework: str) -> None:
        response = await async_client.get(f"/{framework}/conflict")

        assert response.status_code == 429
        assert response.json()["status"] == 429

    @pytest.mark.parametrize("framework", ["drf", "ninja"])
    def test_skip(self, client: Client, framework: str) -> None:
        response = client.post(f"/{framework}/conflict")

        assert response.status_code == 204
        assert response.content == b""
        assert "Content-Type" not in response.headers


class TestLog:
    """A refusal is the library at work, not a fault: Django doesn't log it as a warning."""

    @pytest.fixture(autouse=True)
    def level(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "django.request")

    @pytest.mark.parametrize("framework", ["django", "async", "drf", "ninja"])
    @each_answer
    def test_no_record(
        self,
        client: Client,
        caplog: pytest.LogCaptureFixture,
        framework: str,
        error: SingleFlightError,
        status: int,
        slug: str,
        retry: bool,
    ) -> None:
        client.get(f"/{framework}/{slug}")

        assert [r for r in caplog.records if r.name == "django.request"] == []

    async def test_no_record_async(
        self, async_client: AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        await async_client.get("/async/conflict")

        assert [r for r in caplog.records if r.name == "django.request"] == []

    def test_other_answers_are_logged_as_ever(
        self, client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        client.get("/not-ours")

        [record] = [r for r in caplog.records if r.name == "django.request"]
        assert record.levelname == "WARNING"


class TestRefusal:
    def test_ours_are_marked_and_others_are_not(self, rf: RequestFactory) -> None:
        assert is_refusal(problem(rf.get("/"), LeaseConflictError()))
        assert is_refusal(skip())
        assert not is_refusal(HttpResponse(status=429))
        assert not is_refusal({"singleflight_refusal": True})

    def test_a_response_of_the_users_can_be_marked(self) -> None:
        response = HttpResponse("busy", status=423)

        assert refusal(response) is response
        assert is_refusal(response)
