"""``manage.py singleflight explain``: the key that it names is the one that the request then has."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI, Schema
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient
from rest_framework.viewsets import ViewSet

from singleflight_django import (
    SemaphoreLockMixin,
    SingleFlightMixin,
    semaphore_lock,
    single_flight,
)

ID = "2f1e4fc0-81fd-41da-9138-6dd7d3d4c7aa"
HERE = __name__

# The keys that the views really had.
seen: list[str] = []


def note(request: Any) -> HttpResponse:
    seen.append(getattr(request, "_request", request).lease.key)
    return HttpResponse("done")


@semaphore_lock(key="lesson:<uuid>")
def lock(request: HttpRequest) -> HttpResponse:
    return note(request)


@csrf_exempt
@semaphore_lock(key="import:<int:pk>:<query.q>:<method>", wait=3, ttl=7)
def dotted(request: HttpRequest, pk: int) -> HttpResponse:
    return note(request)


@semaphore_lock(key="pay:<header.Idempotency-Key>:<user?>")
def pay(request: HttpRequest) -> HttpResponse:
    return note(request)


@semaphore_lock(key="mine:<user>")
def mine(request: HttpRequest) -> HttpResponse:
    return note(request)


@semaphore_lock(key=["b:<uuid>", "a:<uuid>"])
def several(request: HttpRequest) -> HttpResponse:
    return note(request)


def computed_key(request: HttpRequest) -> tuple[str, str]:
    return ("computed", request.GET["q"])


@semaphore_lock(key=computed_key)
def computed(request: HttpRequest) -> HttpResponse:
    return note(request)


@single_flight(key="answer:<uuid>", vary=("X-Tenant",), result_ttl=0)
def flight(request: HttpRequest) -> HttpResponse:
    return note(request)


@single_flight(key="answer:<uuid>", scope="global")
async def aflight(request: HttpRequest) -> HttpResponse:
    return note(request)


def answered(request: HttpRequest, conflict: Exception) -> HttpResponse:
    return HttpResponse(status=409)


class Handlers(View):
    @method_decorator(semaphore_lock(key="handler:<url.pk>"))
    def put(self, request: HttpRequest, pk: int) -> HttpResponse:
        return note(request)

    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse()


class Waiting(View):
    @method_decorator(semaphore_lock(key="waiting", wait=5, on_conflict=answered))
    def put(self, request: HttpRequest) -> HttpResponse:
        return note(request)


class Mixed(SemaphoreLockMixin, View):
    lock_key = "mixed:<uuid>"
    lock_limit = 2

    def post(self, request: HttpRequest) -> HttpResponse:
        return note(request)


class Computed(SingleFlightMixin, View):
    suffix = "class"

    def get_flight_key(self, request: HttpRequest) -> tuple[str, str]:
        return ("own", f"{self.suffix}-{request.GET['q']}")

    def get(self, request: HttpRequest) -> HttpResponse:
        return note(request)


class Lessons(SemaphoreLockMixin, ViewSet):
    authentication_classes = (SessionAuthentication,)
    lock_key = {"create": "lesson:<uuid>:<user>", "finish": "finish:<url.pk>"}  # noqa: RUF012

    def create(self, request: Request) -> Response:
        note(request)
        return Response()

    @action(detail=True, methods=["post"])
    def finish(self, request: Request, pk: str) -> Response:
        note(request)
        return Response()

    @action(detail=False, methods=["post"])
    @semaphore_lock(key="decorated:<uuid>")
    def decorated(self, request: Request) -> Response:
        note(request)
        return Response()


@api_view(["POST"])
@semaphore_lock(key="api:<uuid>:<user?>")
def api(request: Request) -> Response:
    note(request)
    return Response()


@transaction.non_atomic_requests
@single_flight(key="free:<uuid>")
def free(request: HttpRequest) -> HttpResponse:
    return note(request)


class Lesson(Schema):
    uuid: str


ninja = NinjaAPI(urls_namespace=f"{HERE}-api")


@ninja.post("/lessons/{pk}/")
@semaphore_lock(key="ninja:<url.pk>:<uuid:body.uuid>")
def create_lesson(request: HttpRequest, pk: int, lesson: Lesson) -> dict[str, str]:
    note(request)
    return {}


def bare(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


router = SimpleRouter()
router.register("lessons", Lessons, basename="lessons")
urlpatterns = [
    path("lock/", lock),
    path("dotted/<int:pk>/", dotted),
    path("pay/", pay),
    path("mine/", mine),
    path("several/", several),
    path("computed/", computed),
    path("flight/", flight),
    path("aflight/", aflight),
    path("handlers/<int:pk>/", Handlers.as_view()),
    path("waiting/", Waiting.as_view()),
    path("mixed/", Mixed.as_view(lock_ttl=4)),
    path("own/", Computed.as_view(suffix="told")),
    path("api/", api),
    path("free/", free),
    path("ninja/", ninja.urls),
    path("bare/", bare),
    path("drf/", include(router.urls)),
]


@pytest.fixture(autouse=True)
def _here(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    seen.clear()


def explain(*arguments: str) -> str:
    out = StringIO()
    call_command("singleflight", "explain", *arguments, stdout=out, no_color=True)
    return out.getvalue()


def said(text: str, label: str) -> list[str]:
    return re.findall(rf"^  {re.escape(label)} +(.*)$", text, re.M)


FORM = {"uuid": ID}
JSON = json.dumps(FORM)


@pytest.mark.django_db(transaction=True)
class TestTheKeyIsTheOneThatTheRequestHas:
    @pytest.mark.parametrize(
        ("method", "url", "data", "headers"),
        [
            ("POST", "/lock/", JSON, {}),
            ("POST", "/lock/", JSON.replace("2f1e4fc0-81fd", "2F1E4FC081FD"), {}),
            ("POST", "/dotted/7/?q=a%20b", None, {}),
            ("DELETE", "/dotted/7/?q=ü", None, {}),
            ("POST", "/pay/", None, {"Idempotency-Key": '"s3cret-1"'}),
            ("POST", "/several/", JSON, {}),
            ("POST", "/computed/?q=x", None, {}),
            ("POST", "/flight/", JSON, {"X-Tenant": "a", "Accept": "text/html"}),
            ("GET", f"/flight/?uuid={ID}", None, {"Accept-Language": "de"}),
            ("POST", "/aflight/", JSON, {}),
            ("PUT", "/handlers/7/", None, {}),
            ("POST", "/mixed/", JSON, {}),
            ("GET", "/own/?q=y", None, {}),
            ("POST", "/api/", JSON, {}),
            ("POST", "/drf/lessons/5/finish/", None, {}),
            ("POST", "/drf/lessons/decorated/", JSON, {}),
            ("POST", "/ninja/lessons/7/", JSON, {}),
        ],
    )
    def test_of_an_anonymous_caller(
        self, method: str, url: str, data: str | None, headers: dict[str, str]
    ) -> None:
        kind = "application/json" if data else "application/x-www-form-urlencoded"
        Client().generic(method, url, data or "", kind, headers=headers)
        arguments = [f"--header={name}: {value}" for name, value in headers.items()]
        arguments += [f"--data={data}"] if data else []
        text = explain(method, f"http://testserver{url}", *arguments)
        (real,) = seen
        keys = said(text, "key")
        if "s3cret-1" in real:
            assert "s3cret" not in text
            assert re.fullmatch(r"semaphore_lock:pay:<[0-9a-f]{8}>:\*", keys[0])
            (field,) = said(text, "<header.Idempotency-Key>")
            assert field == f"{keys[0].split(':')[2]}  from the header Idempotency-Key"
        else:
            assert ",".join(keys) == real

    @pytest.mark.parametrize("url", ["/mine/", "/pay/", "/drf/lessons/", "/flight/"])
    def test_of_a_user(self, url: str) -> None:
        user = User.objects.create_user("ada")
        client = APIClient()
        client.force_login(user)
        session = client.session.session_key
        client.post(url, JSON, content_type="application/json", headers={"Idempotency-Key": "k"})
        text = explain(
            "POST", f"http://testserver{url}", "--data", JSON, "--user", str(user.pk),
            "--session", session, "--header", "Idempotency-Key:k",
        )  # fmt: skip
        (real,) = seen
        (key,) = said(text, "key")
        assert key == (
            f"semaphore_lock:pay:{key.split(':')[2]}:{user.pk}" if url == "/pay/" else real
        )

    def test_a_form_is_read_as_one(self) -> None:
        Client().post("/lock/", FORM)
        text = explain("POST", "/lock/", "--data", f"uuid={ID}")
        assert said(text, "key") == seen == [f"semaphore_lock:lesson:{ID}"]
        assert said(text, "<uuid>") == [f"{ID}  from the body"]


class TestWhy:
    def test_each_field_says_where_it_is_from(self) -> None:
        text = explain("POST", "/dotted/7/?q=x")
        assert said(text, "template") == ["import:<int:pk>:<query.q>:<method>"]
        assert said(text, "<int:pk>") == ["7  from the URL"]
        assert said(text, "<query.q>") == ["x  from the query string"]
        assert said(text, "<method>") == ["POST  from the method"]

    def test_each_option_says_whether_it_was_given(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_MAX_HOLD = 99
        text = explain("POST", "/dotted/7/?q=x")
        assert said(text, "ttl") == ["7 s  from the option"]
        assert said(text, "wait") == ["3 s  from the option"]
        assert said(text, "limit") == ["1  by default"]
        assert said(text, "max_hold") == ["99 s  from SINGLEFLIGHT_MAX_HOLD"]
        assert said(explain("POST", "/mixed/"), "ttl") == ["4 s  from the option"]
        flight_text = explain("POST", "/flight/")
        assert said(flight_text, "on_store_error") == [
            "proceed for GET and HEAD, reject for the rest  by default"
        ]
        assert said(flight_text, "max_run") == ["99 s  from SINGLEFLIGHT_MAX_HOLD"]

    def test_an_option_that_is_a_function_is_named(self) -> None:
        text = explain("PUT", "/waiting/")
        assert said(text, "on_conflict") == ["answered()  from the option"]
        assert said(text, "key") == ["semaphore_lock:waiting"]

    def test_the_identity_of_a_flight_is_told_in_words(self) -> None:
        text = explain(
            "POST", "/flight/?b=1", "--data", JSON, "--header=X-Tenant: a", "--header=Accept: */*"
        )
        (identity,) = said(text, "identity")
        assert "/flight/; the caller; query b=1; header Accept; header x-tenant" in identity
        assert "everybody" in said(explain("POST", "/aflight/", "--data", JSON), "identity")[0]

    def test_a_callable_is_named(self) -> None:
        text = explain("POST", "/computed/?q=x")
        assert said(text, "template") == [f"whatever {HERE}.computed_key() returns"]
        assert said(explain("POST", "/computed/"), "key")[0].startswith(
            "none: MultiValueDictKeyError"
        )

    @pytest.mark.parametrize(
        ("arguments", "label", "says"),
        [
            (["POST", "/lock/"], "<uuid>", "is missing. It is answered 400."),
            (["POST", "/lock/", "--data", '{"uuid": "x"}'], "<uuid>", "not a valid uuid"),
            (
                ["POST", f"/lock/?uuid={ID}", "--data", JSON.replace("2", "3")],
                "key",
                "different values",
            ),
            (
                ["POST", "/lock/", "--data", "{", "--header", "Content-Type: application/json"],
                "<uuid>",
                "none: ",
            ),
            (["POST", "/mine/"], "<user>", "give --user PK"),
            (["POST", "/drf/lessons/", "--data", JSON], "<user>", "give --user PK"),
        ],
    )
    def test_a_request_without_a_key_says_what_it_is_answered(
        self, arguments: list[str], label: str, says: str
    ) -> None:
        text = explain(*arguments)
        assert says in said(text, label)[0]
        assert said(text, "key")[0].startswith("none: ")

    def test_a_method_that_is_not_guarded_passes(self) -> None:
        text = explain("/lock/")
        assert said(text, "methods") == ["POST, PUT, PATCH, DELETE: GET passes unguarded"]
        assert said(text, "key") == []

    @pytest.mark.parametrize("name", [f"{HERE}.pay", f"{HERE}.Lessons", f"{HERE}.create_lesson"])
    def test_a_dotted_name_says_what_is_needed(self, name: str) -> None:
        text = explain(name)
        assert text.startswith(name)
        assert "needed: from" in text
        assert "  key " not in text

    def test_all_handlers_of_a_class_are_explained(self) -> None:
        text = explain(f"{HERE}.Lessons")
        heads = re.findall(rf"^{HERE}\.Lessons\.(\w+) ", text, re.M)
        assert sorted(heads) == ["create", "decorated", "finish"]


class TestTheTransaction:
    @pytest.fixture
    def _atomic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from django.db import connections

        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    def test_without_atomic_requests_there_is_none(self) -> None:
        assert "ATOMIC_REQUESTS is off" in said(explain("POST", "/lock/"), "transaction")[0]

    @pytest.mark.usefixtures("_atomic")
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["POST", "/lock/"], "lease, BEGIN on default, view, COMMIT, release"),
            (["POST", "/mixed/"], "lease, BEGIN on default, view, COMMIT, release"),
            (["PUT", "/handlers/7/"], "BEGIN on default comes first: the lease is taken inside"),
            (["POST", "/api/"], "BEGIN on default comes first: the lease is taken inside"),
            (["PUT", "/waiting/"], "BEGIN on default comes first, and it could wait"),
            (["POST", "/free/"], "none around the view"),
            (["POST", "/aflight/"], "async"),
        ],
    )
    def test_with_it_the_lease_is_inside_or_outside(self, arguments: list[str], says: str) -> None:
        assert said(explain(*arguments), "transaction")[0].startswith(says)


class TestWhatCanNotBeExplained:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["/nowhere/"], "No URL pattern matches '/nowhere/'"),
            (["/bare/"], "has no guard"),
            (["POST", "/handlers/7/"], "The handler for POST"),
            ([f"{HERE}.bare"], f"Those that have:\n  {HERE}"),
            (["GET", "POST", "/lock/"], "Give a method and a URL"),
            (["/lock/", "--header", "nonsense"], "NAME:VALUE"),
        ],
    )
    def test_it_says_why(self, arguments: list[str], says: str) -> None:
        with pytest.raises(CommandError, match=re.escape(says)):
            explain(*arguments)

    @pytest.mark.django_db
    @pytest.mark.parametrize("pk", ["0", "ada"])
    def test_nobody_has_that_key(self, pk: str) -> None:
        with pytest.raises(CommandError, match="No user has"):
            explain("/lock/", "--user", pk)

    def test_a_site_without_guards(self, settings: Any) -> None:
        settings.ROOT_URLCONF = "tests.urls"
        with pytest.raises(CommandError, match="No view of the URLconf has a guard"):
            explain("some.view")

    def test_a_site_without_users(self) -> None:
        apps = [app for app in settings.INSTALLED_APPS if "auth" not in app and "admin" not in app]
        with override_settings(INSTALLED_APPS=apps):
            assert said(explain("POST", "/lock/", "--data", JSON), "key")
            with pytest.raises(CommandError, match=r"needs django\.contrib\.auth"):
                explain("/lock/", "--user", "1")
