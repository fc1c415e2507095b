"""What of an outcome others may have, through real middlewares, sessions, messages and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import messages
from django.contrib.auth import login, logout
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.middleware.csrf import get_token, rotate_token
from django.shortcuts import redirect
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.views.decorators.cache import cache_control
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.gzip import gzip_page
from django.views.decorators.vary import vary_on_cookie, vary_on_headers
from ninja.responses import Status
from rest_framework.response import Response

from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.principals import Scope
from singleflight_django.responses import problem, skip
from singleflight_django.sharing import (
    NEVER_SHARED,
    REASONS,
    is_failure,
    is_never_shared,
    may_be_kept,
    traces,
    why_not,
)

verdicts: list[str] = []
Views = dict[str, Callable[[HttpRequest], Any]]


def template(text: str) -> Any:
    return engines["django"].from_string(text)


def rendered(text: str) -> Callable[[HttpRequest], HttpResponse]:
    return lambda request: HttpResponse(template(text).render({}, request))


def change(request: HttpRequest) -> HttpResponse:
    request.session["cart"] = [1]
    return HttpResponse()


def flash(request: HttpRequest) -> HttpResponse:
    messages.success(request, "saved")
    return redirect("/")


def quiet_flash(request: HttpRequest) -> HttpResponse:
    messages.debug(request, "below the level that is recorded")
    return HttpResponse()


def cookie(request: HttpRequest) -> HttpResponse:
    response = HttpResponse()
    response.set_cookie("a", "1")
    return response


def log_in(request: HttpRequest) -> HttpResponse:
    login(request, User.objects.get_or_create(username="ann")[0])
    return HttpResponse()


def log_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return HttpResponse()


def rotate(request: HttpRequest) -> HttpResponse:
    rotate_token(request)
    return HttpResponse()


def nonce(request: Any) -> HttpResponse:
    return HttpResponse(f"<script nonce={request._csp_nonce}>")


def look(request: HttpRequest) -> HttpResponse:
    return HttpResponse(f"{request.session.get('cart')} {request.user.is_authenticated}")


SHAREABLE: Views = {
    "plain": lambda request: HttpResponse("x"),
    "redirect": lambda request: redirect("/"),
    "reads-the-session": look,
    "quiet-message": quiet_flash,
    "no-messages-to-show": rendered("{% for m in messages %}{{ m }}{% endfor %}"),
    "varies-on-accept": vary_on_headers("Accept", "accept-language")(lambda r: HttpResponse("x")),
    "varies-on-cookie": vary_on_cookie(lambda r: HttpResponse("x")),
    "too-short-to-compress": gzip_page(lambda r: HttpResponse("x")),
    "compressed-by-itself": lambda r: HttpResponse(b"", headers={"Content-Encoding": "gzip"}),
    "a-policy": lambda r: HttpResponse(headers={"Content-Security-Policy": "sandbox"}),
    "private": cache_control(private=True)(lambda r: HttpResponse("x")),
    "value": lambda request: {"a": 1},
    "status": lambda request: Status(201, None),
}
UNSHAREABLE: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
    "cookie": ("cookie", cookie),
    "cookie-header": ("cookie", lambda r: HttpResponse(headers={"Set-Cookie": "a=1"})),
    "session": ("session", change),
    "login": ("session", log_in),
    "logout": ("session", log_out),
    "flash": ("messages", flash),
    "token": ("csrf", rendered("{% csrf_token %}")),
    "token-in-code": ("csrf", lambda request: HttpResponse(get_token(request))),
    "token-in-a-value": ("csrf", lambda request: {"token": get_token(request)}),
    "rotated-token": ("csrf", rotate),
    "token-cookie": ("cookie", ensure_csrf_cookie(lambda r: HttpResponse("x"))),
    "nonce": ("nonce", nonce),
    "nonce-in-a-policy": (
        "nonce",
        lambda r: HttpResponse(headers={"Content-Security-Policy": "script-src 'nonce-abc'"}),
    ),
    "varies-on-a-header": ("vary", vary_on_headers("X-Tenant")(lambda r: HttpResponse("x"))),
    "varies-on-everything": ("vary", lambda r: HttpResponse(headers={"Vary": "Accept, *"})),
    "compressed": ("vary", gzip_page(lambda r: HttpResponse("x" * 500))),
    "stream": ("streaming", lambda r: StreamingHttpResponse(iter([b"x"]))),
    "file": ("streaming", lambda r: FileResponse(iter([b"x"]))),  # type: ignore[arg-type]
    "unrendered": ("not rendered", lambda r: TemplateResponse(r, template("x"))),
    "long": ("too large", lambda r: HttpResponse("x" * 5001)),
}
VIEWS: Views = {**SHAREABLE, **{name: view for name, (_, view) in UNSHAREABLE.items()}}


def judged(request: HttpRequest, name: str) -> HttpResponse:
    before = traces(request)
    result = VIEWS[name](request)
    verdicts.append(why_not(request, result, before=before, max_bytes=5000))
    return (
        result if hasattr(result, "status_code") and hasattr(result, "headers") else HttpResponse()
    )


async def judged_async(request: HttpRequest, name: str) -> HttpResponse:
    return judged(request, name)


urlpatterns = [path("async/<name>", judged_async), path("<name>", judged)]


def touching(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """A middleware that changes the session and leaves a message before every view."""

    def middleware(request: HttpRequest) -> HttpResponse:
        request.session["seen"] = "now"
        messages.info(request, "welcome")
        return get_response(request)

    return middleware


@pytest.fixture(autouse=True)
def _site(settings: Any) -> Iterator[None]:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "tests.test_sharing.nonces",
    ]
    verdicts.clear()
    yield
    assert set(verdicts) <= {"", *REASONS}


class LazyNonce:
    used = False

    def __bool__(self) -> bool:
        return self.used

    def __str__(self) -> str:
        self.used = True
        return "abc"


def nonces(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """As the middlewares for a Content-Security-Policy do, whatever the version of Django."""

    def middleware(request: Any) -> HttpResponse:
        request._csp_nonce = LazyNonce()
        return get_response(request)

    return middleware


@pytest.mark.urls(__name__)
@pytest.mark.django_db
class TestWhatFollowersMayHave:
    @pytest.mark.parametrize("name", SHAREABLE)
    def test_an_answer_for_everyone_of_the_identity(self, name: str) -> None:
        Client().get(f"/{name}")
        assert verdicts == [""]

    @pytest.mark.parametrize("name", UNSHAREABLE)
    def test_not_what_is_the_leaders_own(self, name: str) -> None:
        Client().get(f"/{name}", headers={"Accept-Encoding": "gzip"})
        assert verdicts == [UNSHAREABLE[name][0]]

    @pytest.mark.parametrize("name", ["plain", "reads-the-session"])
    def test_a_full_session_that_is_only_read(self, name: str) -> None:
        client = Client()
        client.get("/session")
        client.get(f"/{name}")
        assert verdicts == ["session", ""]

    def test_messages_that_were_shown(self) -> None:
        client = Client()
        client.get("/flash")
        client.get("/plain")
        client.get("/no-messages-to-show")
        client.get("/no-messages-to-show")
        assert verdicts == ["messages", "", "messages", ""]

    def test_what_a_middleware_did_before_does_not_count(self, settings: Any) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.touching"]
        for name in ("plain", "session", "flash", "no-messages-to-show"):
            Client().get(f"/{name}")
        assert verdicts == ["", "session", "messages", "messages"]

    async def test_in_async_views_nothing_is_loaded_for_it(self, settings: Any) -> None:
        settings.SESSION_ENGINE = "django.contrib.sessions.backends.db"
        for name in ("plain", "quiet-message", "cookie", "flash"):
            await AsyncClient().get(f"/async/{name}")
        assert verdicts == ["", "", "cookie", "messages"]


@pytest.mark.django_db
class TestSessionsThatCannotBeCompared:
    def test_are_taken_for_modified(self, rf: RequestFactory) -> None:
        from django.contrib.sessions.backends.signed_cookies import SessionStore

        request: Any = rf.get("/")
        request.session = SessionStore()
        request.session["when"] = object()
        assert why_not(request, HttpResponse(), before=traces(request)) == "session"

    def test_one_that_was_marked_by_hand_and_not_loaded_is_not_loaded(
        self, rf: RequestFactory, django_assert_num_queries: Any
    ) -> None:
        from django.contrib.sessions.backends.db import SessionStore

        request: Any = rf.get("/")
        request.session = SessionStore("a" * 32)
        request.session.modified = True
        with django_assert_num_queries(0):
            assert why_not(request, HttpResponse(), before=traces(request)) == ""

    def test_a_request_without_any_is_fine(self, rf: RequestFactory) -> None:
        assert why_not(rf.get("/"), HttpResponse()) == ""


def tenant(request: Any) -> str:
    return "a"


class TestScopes:
    @pytest.mark.parametrize("scope", ["global", tenant])
    def test_a_private_answer_never_leaves_its_user(self, rf: RequestFactory, scope: Scope) -> None:
        for value in ("private", "no-store", "max-age=5, Private", 'private="x"', "No-Store "):
            response = HttpResponse(headers={"Cache-Control": value})
            assert why_not(rf.get("/"), response, scope) == "private"
            assert why_not(rf.get("/"), response) == ""
            assert not may_be_kept(response)

    @pytest.mark.parametrize("scope", ["global", tenant])
    @pytest.mark.parametrize("name", ["Cookie", "Authorization"])
    def test_what_varies_on_the_caller_never_leaves_it(
        self, rf: RequestFactory, scope: Scope, name: str
    ) -> None:
        response = HttpResponse(headers={"Vary": name})
        assert why_not(rf.get("/"), response, scope) == "vary"
        assert why_not(rf.get("/"), response, scope, vary=[name]) == ""
        assert why_not(rf.get("/"), response) == ""

    def test_a_header_that_the_option_names_is_inside(self, rf: RequestFactory) -> None:
        response = HttpResponse(headers={"Vary": "X-Tenant"})
        assert why_not(rf.get("/"), response, vary=["x-tenant"]) == ""
        assert why_not(rf.get("/"), HttpResponse(headers={"Vary": "*"}), vary=["x"]) == "vary"


class TestStatuses:
    @pytest.mark.parametrize("status", [200, 201, 204, 301, 302, 304, 400, 404, 409, 410, 422])
    def test_an_answer_is_shared_and_kept(self, status: int) -> None:
        for result in (HttpResponse(status=status), Status(status, None), (status, None)):
            assert not is_failure(result)
            assert not is_never_shared(result)
            assert may_be_kept(result)

    @pytest.mark.parametrize("status", sorted(NEVER_SHARED))
    def test_what_is_about_one_caller_or_moment_is_never_shared(self, status: int) -> None:
        assert {401, 403, 408, 425, 429} == NEVER_SHARED
        for result in (HttpResponse(status=status), Status(status, None)):
            assert is_never_shared(result)
            assert not is_failure(result)

    @pytest.mark.parametrize("status", [500, 502, 503, 504])
    def test_a_5xx_is_a_failure(self, status: int) -> None:
        for result in (HttpResponse(status=status), (status, None)):
            assert is_failure(result)
            assert not is_never_shared(result)

    def test_our_own_refusals_are_never_shared(self, rf: RequestFactory) -> None:
        assert is_never_shared(skip())
        assert is_never_shared(problem(rf.get("/"), LeaseConflictError()))

    def test_an_exception_that_is_an_answer_is_shared_but_not_kept(self) -> None:
        assert not is_failure(Http404())
        assert not is_never_shared(Http404())
        assert is_never_shared(PermissionDenied())
        assert is_failure(ValueError())
        assert is_failure(SystemExit())
        response = Response(status=404)
        response.exception = True
        for result in (Http404(), response):
            assert not may_be_kept(result)

    def test_a_value_may_be_kept(self) -> None:
        assert may_be_kept({"a": 1})
        assert may_be_kept(None)
