"""Where key fields come from in real requests: Django's, DRF's and Ninja's."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import include, path
from django.views import View
from ninja import NinjaAPI, Schema
from ninja.security import APIKeyHeader
from ninja.testing import TestClient
from rest_framework.authentication import BaseAuthentication, BasicAuthentication
from rest_framework.decorators import api_view
from rest_framework.exceptions import NotAuthenticated
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.views import APIView

from singleflight_django.exceptions import KeyFieldError
from singleflight_django.keys import KeySpec
from singleflight_django.requests import MAX_HEADER_LENGTH

ID = "12345678-1234-5678-1234-56781234abcd"
JSON = "application/json"


def keys(key: object, request: Any, **kwargs: object) -> tuple[str, ...]:
    return KeySpec(key).keys(request, (), kwargs)


def shown(key: str, request: Any, kwargs: dict[str, Any]) -> dict[str, object]:
    try:
        return {"keys": KeySpec(key).keys(request, (), kwargs)}
    except KeyFieldError as error:
        return {"refused": error.field}


def django_view(request: HttpRequest, key: str, **kwargs: object) -> HttpResponse:
    return JsonResponse(shown(key, request, {"key": key, **kwargs}))


async def async_view(request: HttpRequest, **kwargs: object) -> HttpResponse:
    return JsonResponse({"keys": await KeySpec("<uuid>:<user?>").akeys(request, (), kwargs)})


class ClassView(View):
    def post(self, request: HttpRequest, **kwargs: object) -> HttpResponse:
        return JsonResponse(shown("<uuid>:<method>", request, kwargs))


class DRFView(APIView):
    def post(self, request: Request, **kwargs: object) -> Response:
        found = shown("<uuid>:<path>", request, kwargs)
        return Response({**found, "data": request.data})


class DRFUserView(APIView):
    authentication_classes = [BasicAuthentication]  # noqa: RUF012

    def get(self, request: Request) -> Response:
        return Response(shown("<user>", request, {}))


@api_view(["POST"])
def drf_function(request: Request, **kwargs: object) -> Response:
    return Response(shown("<uuid>", request, kwargs))


class Lesson(Schema):
    uuid: UUID
    title: str = ""


class ByKey(APIKeyHeader):
    param_name = "X-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> object:
        return {"user": User(pk=7, username="seven"), "text": "client"}.get(key or "")


ninja = NinjaAPI(urls_namespace="singleflight-requests")


@ninja.post("/body")
def ninja_body(request: HttpRequest, payload: Lesson, title: str = "") -> dict[str, object]:
    found = shown("<uuid>", request, {"payload": payload, "title": title})
    return {**found, "title": payload.title}


@ninja.post("/lessons/{int:number}/{uuid}")
def ninja_path(request: HttpRequest, number: int, uuid: UUID) -> dict[str, object]:
    return shown("<number>:<uuid>:<url.uuid>", request, {"number": number, "uuid": uuid})


@ninja.get("/user", auth=ByKey())
def ninja_user(request: HttpRequest) -> dict[str, object]:
    return shown("<user>", request, {})


router = [path("<int:pk>/", django_view, {"key": "<course>:<pk>"})]
urlpatterns = [
    path("django/<uuid:uuid>/", django_view, {"key": "<uuid>"}),
    path("query/", django_view, {"key": "<uuid>"}),
    path("session/", django_view, {"key": "<session>"}),
    path("user/", django_view, {"key": "<user>"}),
    path("courses/<slug:course>/", include(router)),
    path("async/<uuid:uuid>/", async_view),
    path("class/<uuid:uuid>/", ClassView.as_view()),
    path("drf/<str:uuid>/", DRFView.as_view()),
    path("drf/", DRFView.as_view()),
    path("drf-function/", drf_function),
    path("drf-user/", DRFUserView.as_view()),
    path("ninja/", ninja.urls),
]
pytestmark = pytest.mark.urls(__name__)


class TestThroughTheUrlconf:
    @pytest.mark.parametrize(
        ("url", "body", "found"),
        [
            (f"/django/{ID}/", None, {"keys": [ID]}),
            (f"/django/{ID}/?uuid={ID.upper()}", None, {"keys": [ID]}),
            (f"/django/{ID}/", {"uuid": ID.replace("-", "")}, {"keys": [ID]}),
            (f"/django/{ID}/?uuid={ID[::-1]}", None, {"refused": "uuid"}),
            (f"/query/?uuid={ID}", None, {"keys": [ID]}),
            ("/query/", {"uuid": ID}, {"keys": [ID]}),
            ("/query/", {"id": ID}, {"refused": "uuid"}),
            ("/courses/django/7/", None, {"keys": ["django:7"]}),
            (f"/class/{ID}/", None, {"keys": [f"{ID}:POST"]}),
        ],
    )
    def test_djangos_own_views(
        self, client: Client, url: str, body: object, found: dict[str, object]
    ) -> None:
        response = client.post(url, body, content_type=JSON) if body else client.post(url)
        assert response.json() == found

    def test_a_form_from_the_test_client(self, client: Client) -> None:
        assert client.post("/query/", {"uuid": ID}).json() == {"keys": [ID]}

    @pytest.mark.parametrize("body", ["{", '{"uuid": '])
    def test_malformed_json_is_djangos_400(self, client: Client, body: str) -> None:
        assert client.post("/query/", body, content_type=JSON).status_code == 400

    async def test_an_async_view(self, async_client: AsyncClient) -> None:
        response = await async_client.post(f"/async/{ID}/", {"uuid": ID}, content_type=JSON)
        assert response.json() == {"keys": [f"{ID}:*"]}

    @pytest.mark.parametrize(
        ("url", "body", "found"),
        [
            (f"/drf/{ID.upper()}/", {}, {"keys": [f"{ID}:%2Fdrf%2F{ID.upper()}%2F"]}),
            (f"/drf/?uuid={ID}", {"title": "A"}, {"keys": [f"{ID}:%2Fdrf%2F"]}),
            ("/drf/", {"uuid": ID.upper()}, {"keys": [f"{ID}:%2Fdrf%2F"]}),
            ("/drf/", {"uuid": [ID]}, {"refused": "uuid"}),
            (f"/drf/{ID}/", {"uuid": ID[::-1]}, {"refused": "uuid"}),
        ],
    )
    def test_drf(
        self, client: Client, url: str, body: dict[str, object], found: dict[str, object]
    ) -> None:
        response = client.post(url, body, content_type=JSON)
        assert response.json() == {**found, "data": body}

    def test_drf_answers_a_body_that_it_cannot_read_itself(self, client: Client) -> None:
        assert client.post("/drf/", "{", content_type=JSON).status_code == 400
        assert client.post("/drf-function/", "a,b", content_type="text/csv").status_code == 415
        assert client.post("/drf-function/", {"uuid": ID}).json() == {"keys": [ID]}

    @pytest.mark.parametrize(
        ("url", "body", "found"),
        [
            ("/ninja/body", {"uuid": ID.upper(), "title": "A"}, {"keys": [ID], "title": "A"}),
            (f"/ninja/body?uuid={ID}", {"uuid": ID}, {"keys": [ID], "title": ""}),
            (f"/ninja/body?uuid={ID[::-1]}", {"uuid": ID}, {"refused": "uuid", "title": ""}),
            (f"/ninja/lessons/007/{ID.upper()}", {}, {"keys": [f"7:{ID}:{ID}"]}),
            (f"/ninja/lessons/7/{ID}?number=7", {"uuid": ID}, {"keys": [f"7:{ID}:{ID}"]}),
        ],
    )
    def test_ninja(self, client: Client, url: str, body: object, found: dict[str, object]) -> None:
        assert client.post(url, body, content_type=JSON).json() == found

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
    def test_ninja_reads_json_whatever_its_type_says(self, client: Client, kind: str) -> None:
        body = f'{{"uuid": "{ID}"}}'
        other = f"/ninja/body?uuid={ID[::-1]}"
        assert client.post("/ninja/body", body, content_type=kind).json()["keys"] == [ID]
        assert client.post(other, body, content_type=kind).json()["refused"] == "uuid"

    def test_ninjas_own_test_client(self) -> None:
        tester = TestClient(ninja)
        assert tester.post("/body", json={"uuid": ID}).json()["keys"] == [ID]
        assert tester.get("/user", headers={"X-Key": "user"}).json() == {"keys": ["7"]}


class TestUser:
    def test_is_the_pk_of_the_authenticated_user(self, rf: RequestFactory) -> None:
        request = rf.get("/")
        request.user = User(pk=7)
        assert keys("<user>", request) == keys("<user?>", request) == ("7",)

    def test_nobody_is_refused(self, rf: RequestFactory) -> None:
        """With and without AuthenticationMiddleware."""
        with pytest.raises(PermissionDenied):
            keys("<user>", rf.get("/"))
        request = rf.get("/")
        request.user = AnonymousUser()
        with pytest.raises(PermissionDenied):
            keys(["lesson", "<user>"], request)

    def test_a_caller_without_a_user_has_a_part_that_no_pk_can_be(self, rf: RequestFactory) -> None:
        anonymous, named = rf.get("/"), rf.get("/")
        anonymous.user = AnonymousUser()
        assert keys("u:<user?>", anonymous) == keys("u:<user?>", rf.get("/")) == ("u:*",)
        for pk in ("*", "%2A", "anonymous", "None", "0"):
            named.user = User(username=pk)
            named.user.pk = pk
            assert keys("u:<user?>", named) != ("u:*",)

    def test_a_user_without_a_pk_is_a_fault_of_the_code(self, rf: RequestFactory) -> None:
        request = rf.get("/")
        request.user = User()
        with pytest.raises(TypeError, match="can't be NoneType"):
            keys("<user>", request)

    def test_drf_says_not_authenticated(self) -> None:
        request = Request(APIRequestFactory().get("/"))
        with pytest.raises(NotAuthenticated):
            keys("<user>", request)
        assert keys("<user?>", request) == ("*",)

    def test_drf_has_authenticated_the_user_itself(self) -> None:
        plain = APIRequestFactory().get("/")
        force_authenticate(plain, User(pk=7))
        assert keys("<user>", Request(plain)) == ("7",)

    def test_drf_answers_401_where_its_authenticator_can(self, client: Client) -> None:
        assert client.get("/drf-user/").status_code == 401

    def test_ninja_leaves_its_user_in_auth(self, client: Client) -> None:
        found = client.get("/ninja/user", headers={"X-Key": "user"})
        assert found.json() == {"keys": ["7"]}

    def test_what_is_no_user_in_auth_does_not_count(self, client: Client) -> None:
        assert client.get("/ninja/user", headers={"X-Key": "text"}).status_code == 403

        class WithToken(BaseAuthentication):
            def authenticate(self, request: Request) -> tuple[object, object]:
                return AnonymousUser(), Group(pk=7)

        request = Request(APIRequestFactory().get("/"), authenticators=[WithToken()])
        with pytest.raises(NotAuthenticated):
            keys("<user>", request)

    @pytest.mark.django_db
    def test_a_user_who_is_logged_in(self, client: Client) -> None:
        user = User.objects.create_user("teacher")
        assert client.get("/user/").status_code == 403
        client.force_login(user)
        assert client.get("/user/").json() == {"keys": [str(user.pk)]}

    @pytest.mark.django_db(transaction=True)
    async def test_a_user_who_is_logged_in_async(self, async_client: AsyncClient) -> None:
        user = await User.objects.acreate_user("teacher")
        await async_client.aforce_login(user)
        response = await async_client.get(f"/async/{ID}/")
        assert response.json() == {"keys": [f"{ID}:{user.pk}"]}


class TestSession:
    @pytest.mark.django_db
    def test_is_the_sessions_key(self, client: Client) -> None:
        assert client.get("/session/").json() == {"refused": "session"}
        client.force_login(User.objects.create_user("teacher"))
        response = client.get("/session/")
        assert response.json() == {"keys": [client.session.session_key]}
        assert not response.has_header("Vary")

    def test_none_is_refused_and_none_is_made(self, rf: RequestFactory) -> None:
        request = rf.get("/")
        with pytest.raises(KeyFieldError, match="no session"):
            keys("<session>", request)
        request.session = SessionStore()
        with pytest.raises(KeyFieldError, match="no session"):
            keys("<session>", request)
        assert not request.session.modified


def test_the_method_and_the_path_are_parts(rf: RequestFactory) -> None:
    request = rf.patch("/lessons/é 1/?q=1")
    assert keys("<method>:<path>", request) == ("PATCH:%2Flessons%2F%C3%A9%201%2F",)
    drf = Request(rf.patch("/lessons/"))
    assert keys("<method>:<path>", drf) == ("PATCH:%2Flessons%2F",)


class TestHeader:
    @pytest.mark.parametrize(
        ("value", "part"),
        [
            ("k", "k"),
            ('"k"', "k"),
            (" k ", "k"),
            (' "k" ', "k"),
            ('" k "', "%20k%20"),
            ('"k', "%22k"),
            ('k"', "k%22"),
            ('"a", "b"', "%22a%22%2C%20%22b%22"),
            ("a, b", "a%2C%20b"),
            ('"a\\"', "%22a%5C%22"),
            ("caf\xe9", "caf%C3%A9"),
            ("\x80\xff", "%C2%80%C3%BF"),
            ("k" * 256, "k" * 256),
            ("k" * MAX_HEADER_LENGTH, "k" * MAX_HEADER_LENGTH),
        ],
    )
    def test_a_quoted_value_and_a_bare_one_are_one_key(
        self, rf: RequestFactory, value: str, part: str
    ) -> None:
        request = rf.post("/", headers={"Idempotency-Key": value})
        for spelling in ("Idempotency-Key", "idempotency-key", "IDEMPOTENCY_KEY"):
            assert keys(f"<header.{spelling}>", request) == (part,)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("", "is empty"),
            ("   ", "is empty"),
            ('""', "is empty"),
            ('"  "', "is empty"),
            ("k" * (MAX_HEADER_LENGTH + 1), "is longer than 1024 characters"),
            ("k" * 10_000, "is longer than 1024 characters"),
            ("a\x00b", "has control characters"),
            ("a\nb", "has control characters"),
            ("a\x7f", "has control characters"),
        ],
    )
    def test_a_value_that_makes_no_key_is_refused(
        self, rf: RequestFactory, value: str, reason: str
    ) -> None:
        request = rf.post("/", headers={"Idempotency-Key": value})
        with pytest.raises(KeyFieldError, match=reason) as refused:
            keys("<header.Idempotency-Key>", request)
        assert refused.value.field == "header.Idempotency-Key"

    def test_a_header_goes_through_the_converter(self, rf: RequestFactory) -> None:
        request = rf.post("/", headers={"X-Lesson": f'"{ID.upper()}"'})
        assert keys("<uuid:header.X-Lesson>", request) == (ID,)
        with pytest.raises(KeyFieldError, match="not a valid int"):
            keys("<int:header.X-Lesson>", request)

    def test_drf_and_django_have_the_same_headers(self, rf: RequestFactory) -> None:
        request = Request(rf.post("/", headers={"X-Key": "k"}), parsers=[JSONParser()])
        assert keys("<header.X-Key>", request) == ("k",)
