"""Which requests are one flight: identities differ exactly when they must."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils import timezone, translation
from django.utils.functional import SimpleLazyObject
from ninja import NinjaAPI
from ninja.security import APIKeyHeader
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.response import Response

from singleflight_django.identity import aidentity, checked_vary, headers_inside, identity
from singleflight_django.principals import check_scope

ANN, BEN = User(pk=1, username="ann"), User(pk=2, username="ben")


def request(
    user: Any = None,
    session: str | None = None,
    auth: Any = None,
    where: str = "/lessons/7/",
    method: str = "GET",
    **headers: str,
) -> Any:
    """A request as the middlewares leave it. ``X_Api_Key="k"`` is the header X-Api-Key."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    made = RequestFactory().generic(method, where, headers=named)
    made.user = user or AnonymousUser()
    made.session = SimpleNamespace(session_key=session)  # type: ignore[assignment]
    if auth is not None:
        made.auth = auth  # type: ignore[attr-defined]
    return made


def described(*args: Any, **kwargs: Any) -> Any:
    return pytest.param(*args[1:], id=args[0], **kwargs)


Pair = tuple[dict[str, Any], dict[str, Any]]

APART = [
    described("two users", {"user": ANN}, {"user": BEN}),
    described("a user and nobody", {"user": ANN}, {}),
    described(
        "two sessions of a user", {"user": ANN, "session": "a"}, {"user": ANN, "session": "b"}
    ),
    described("two anonymous sessions", {"session": "a"}, {"session": "b"}),
    described("a JWT in a cookie", {"Cookie": "jwt=ann"}, {"Cookie": "jwt=ben"}),
    described("a cookie or none", {"Cookie": "cart=1"}, {}),
    described("an API key", {"X_Api_Key": "ann"}, {"X_Api_Key": "ben"}),
    described("an API key or none", {"X_Api_Key": "ann"}, {}),
    described(
        "API keys in one session",
        {"user": ANN, "session": "a", "X_Api_Key": "1"},
        {"user": ANN, "session": "a", "X_Api_Key": "2"},
    ),
    described("bearer tokens", {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}),
    described(
        "bearer tokens in one session",
        {"user": ANN, "session": "a", "Authorization": "Bearer a"},
        {"user": ANN, "session": "a", "Authorization": "Bearer b"},
    ),
    described("an unknown header", {"X_Tenant": "a"}, {"X_Tenant": "b"}),
    described("a proxy's user", {"X_Forwarded_User": "a"}, {"X_Forwarded_User": "b"}),
    described("Ninja's user", {"auth": ANN}, {"auth": BEN}),
    described(
        "Ninja's user beside another", {"user": ANN, "auth": ANN}, {"user": ANN, "auth": BEN}
    ),
    described("Ninja's key", {"auth": "a"}, {"auth": "b"}),
    described("Ninja's key in bytes", {"auth": b"1"}, {"auth": "1"}),
    described("Ninja's number", {"auth": 1}, {"auth": True}),
    described("Ninja's UUID", {"auth": UUID(int=1)}, {"auth": UUID(int=2)}),
    described("Ninja's claims", {"auth": {"sub": ["a"]}}, {"auth": {"sub": ["b"]}}),
    described(
        "an API key where Ninja's answer has no lasting name",
        {"user": ANN, "auth": object(), "X_Account": "a"},
        {"user": ANN, "auth": object(), "X_Account": "b"},
    ),
    described(
        "a cookie where the user has no lasting name",
        {"user": User(username="unsaved"), "Cookie": "a=1"},
        {"user": User(username="unsaved"), "Cookie": "a=2"},
    ),
    described("methods", {"user": ANN}, {"user": ANN, "method": "POST"}),
    described("GET and HEAD", {"user": ANN}, {"user": ANN, "method": "HEAD"}),
    described("paths", {"where": "/lessons/7/"}, {"where": "/lessons/8/"}),
    described("a trailing slash", {"where": "/lessons/7/"}, {"where": "/lessons/7"}),
    described("hosts", {"Host": "a.example"}, {"Host": "b.example"}),
    described("queries", {"where": "/?a=1"}, {"where": "/?a=2"}),
    described("a query or none", {"where": "/?dry_run=1"}, {"where": "/"}),
    described("the order of one name", {"where": "/?a=1&a=2"}, {"where": "/?a=2&a=1"}),
    described("where a name ends", {"where": "/?a=1&b=2"}, {"where": "/?a=1%26b=2"}),
    described("bytes that are not UTF-8", {"where": "/?a=%ff"}, {"where": "/?a=%fe"}),
    described("Accept", {"Accept": "text/html"}, {"Accept": "application/json"}),
    described("languages", {"Accept_Language": "de"}, {"Accept_Language": "fr"}),
    described("a cached page's revalidation", {"user": ANN, "If_None_Match": '"1"'}, {"user": ANN}),
    described("a precondition", {"user": ANN, "If_Match": '"1"'}, {"user": ANN, "If_Match": '"2"'}),
    described("a range", {"user": ANN, "Range": "bytes=0-9"}, {"user": ANN}),
    described("a part of a page", {"user": ANN, "HX_Request": "true"}, {"user": ANN}),
]

TOGETHER = [
    described("one user", {"user": ANN, "session": "a"}, {"user": ANN, "session": "a"}),
    described("nobody twice", {}, {}),
    described("one cookie", {"Cookie": "jwt=ann"}, {"Cookie": "jwt=ann"}),
    described(
        "a user's other cookies", {"user": ANN, "Cookie": "ad=1"}, {"user": ANN, "Cookie": "ad=2"}
    ),
    described("browsers", {"User_Agent": "a"}, {"User_Agent": "b"}),
    described("proxies", {"X_Forwarded_For": "1.1.1.1"}, {"X_Forwarded_For": "2.2.2.2"}),
    described("traces", {"Traceparent": "a", "X_B3_TraceId": "a"}, {"Traceparent": "b"}),
    described("request ids", {"X_Request_ID": "a"}, {"X_Request_ID": "b"}),
    described("masks of a CSRF token", {"X_CSRFToken": "a"}, {"X_CSRFToken": "b"}),
    described("a warm pre-fetch", {"Sec_Purpose": "prefetch", "Sec_Fetch_Mode": "cors"}, {}),
    described("the referring page", {"Referer": "a"}, {"Referer": "b"}),
    described("the order of names", {"where": "/?b=2&a=1"}, {"where": "/?a=1&b=2"}),
    described("two spellings of a query", {"where": "/?a=%41+b"}, {"where": "/?a=A%20b"}),
    described("a host's case", {"Host": "A.example"}, {"Host": "a.example"}),
    described(
        "Ninja's claims in any order", {"auth": {"a": 1, "b": 2}}, {"auth": {"b": 2, "a": 1}}
    ),
]


class TestWhatIsOneFlight:
    @pytest.mark.parametrize(("one", "other"), APART)
    def test_requests_that_differ_there_are_separate_flights(self, one: Any, other: Any) -> None:
        assert identity(request(**one)) != identity(request(**other))

    @pytest.mark.parametrize(("one", "other"), TOGETHER)
    def test_requests_that_differ_there_only_are_one_flight(self, one: Any, other: Any) -> None:
        assert identity(request(**one)) == identity(request(**other))

    @pytest.mark.parametrize(("one", "other"), [*APART, *TOGETHER])
    async def test_the_async_twin_says_the_same(self, one: Any, other: Any) -> None:
        for given in (one, other):
            if "auth" not in given or type(given["auth"]) is not object:
                assert await aidentity(request(**given)) == identity(request(**given))

    def test_the_scheme_counts(self) -> None:
        secure = RequestFactory().get("/", secure=True)
        assert identity(secure) != identity(RequestFactory().get("/"))

    def test_the_script_name_counts(self) -> None:
        one, other = RequestFactory().get("/x"), RequestFactory(SCRIPT_NAME="/app").get("/x")
        assert identity(one) != identity(other)

    def test_what_the_server_says_about_the_client_counts(self) -> None:
        one, other = request(user=ANN), request(user=ANN)
        one.META["REMOTE_USER"] = "ann"
        assert identity(one) != identity(other)

    def test_the_active_language_and_time_zone_count(self) -> None:
        """A cookie or a profile may have chosen them."""
        base = identity(request(user=ANN))
        with translation.override("de"):
            assert identity(request(user=ANN)) != base
        with timezone.override("Asia/Tokyo"):
            assert identity(request(user=ANN)) != base
        assert identity(request(user=ANN)) == base

    def test_a_request_without_session_and_user_has_an_identity(self) -> None:
        assert identity(RequestFactory().get("/")) == identity(RequestFactory().get("/"))

    @override_settings(ALLOWED_HOSTS=["good.example"])
    def test_a_host_that_is_not_allowed_is_refused_as_django_does(self) -> None:
        with pytest.raises(DisallowedHost):
            identity(request(Host="evil.example"))


class TestScope:
    def test_global_asks_nobody_who_is_calling(self) -> None:
        one = request(user=ANN, session="a", Authorization="Bearer a", Cookie="a=1", X_Tenant="a")
        assert identity(one, "global") == identity(request(user=BEN), "global")

    async def test_the_async_twin_asks_nobody_either(self) -> None:
        assert await aidentity(request(user=ANN), "global") == identity(request(), "global")

    def test_global_still_tells_apart_what_was_asked(self) -> None:
        assert identity(request(where="/a"), "global") != identity(request(where="/b"), "global")

    def test_the_scopes_never_meet(self) -> None:
        scopes: list[Any] = ["user", "global", lambda request: "global"]
        assert len({identity(request(), scope) for scope in scopes}) == 3

    async def test_a_callable_says_who_is_one(self) -> None:
        def tenant(request: Any) -> str:
            return str(request.headers["X-Tenant"])

        a, b = request(user=ANN, X_Tenant="a"), request(user=BEN, X_Tenant="a")
        assert identity(a, tenant) == identity(b, tenant) == await aidentity(b, tenant)
        assert identity(a, tenant) != identity(request(user=ANN, X_Tenant="b"), tenant)

    def test_a_callable_has_to_return_a_text(self) -> None:
        async def late(request: Any) -> str:
            return "a"

        wrong: list[tuple[Any, type[Exception]]] = [
            (lambda request: None, TypeError),
            (lambda request: 7, TypeError),
            (lambda request: "", ValueError),
            (late, TypeError),
        ]
        for scope, error in wrong:
            with pytest.raises(error, match="scope="):
                identity(request(), scope)

    def test_another_scope_is_refused_when_it_is_written(self) -> None:
        class Late:
            async def __call__(self, request: Any) -> str:
                return "a"

        for good in ("user", "global", str):
            check_scope(good)
        for bad, error in [("session", ValueError), (None, ValueError), (Late(), TypeError)]:
            with pytest.raises(error, match="scope"):
                check_scope(bad)


class TestVary:
    def test_a_named_header_tells_a_users_requests_apart(self) -> None:
        a, b = request(user=ANN, X_Tenant="a"), request(user=ANN, X_Tenant="b")
        assert identity(a) == identity(b)
        assert identity(a, vary=("X-Tenant",)) != identity(b, vary=("x-tenant",))

    def test_a_missing_header_is_not_an_empty_one(self) -> None:
        empty, missing = request(user=ANN, X_Tenant=""), request(user=ANN)
        assert identity(empty, vary=["X-Tenant"]) != identity(missing, vary=["X-Tenant"])

    def test_case_and_order_of_the_names_do_not_matter(self) -> None:
        assert checked_vary(["X-B", "x-a", "X-A"]) == ("x-a", "x-b")
        r = request(user=ANN, X_A="1", X_B="2")
        assert identity(r, vary=("X-A", "x-b")) == identity(r, vary=("X-B", "X-A"))

    @pytest.mark.parametrize("wrong", ["X-Tenant", None, 7])
    def test_what_is_no_collection_of_names_is_a_type_error(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="vary must be a tuple"):
            checked_vary(wrong)

    @pytest.mark.parametrize("wrong", ["", "*", "X Tenant", 7])
    def test_what_is_no_name_is_a_value_error(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match="names of headers"):
            checked_vary([wrong])

    def test_cookies_are_inside_a_users_identity_only(self) -> None:
        assert {"cookie", "authorization", "accept"} <= headers_inside("user")
        assert "cookie" not in headers_inside("global")
        assert {"cookie", "authorization"}.isdisjoint(headers_inside(lambda request: "a"))
        assert "x-tenant" in headers_inside("global", ["X-Tenant"])


class TestSecrecy:
    def test_the_identity_is_a_digest_and_shows_nothing(self) -> None:
        text = identity(request(user=ANN, session="secret", Authorization="secret"))
        assert re.fullmatch("[0-9a-f]{40}", text)

    def test_it_is_the_same_in_every_process(self) -> None:
        with override_settings(SECRET_KEY="fixed", LANGUAGE_CODE="en-us"):
            assert identity(request(user=ANN)) == "6b300daae5dc999084f8761d3ac3de7c8006d445"

    def test_nobody_without_the_secret_key_can_test_a_guess(self) -> None:
        texts = set()
        for key in ("a", "b", b"c", "long" * 50):
            with override_settings(SECRET_KEY=key):
                texts.add(identity(request(user=ANN)))
        assert len(texts) == 4


class KeyAuthentication(BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[User, str] | None:
        key = request.headers.get("X-Key")
        return (ANN, key) if key else None


@api_view(["GET", "POST"])
@authentication_classes([KeyAuthentication])
def drf_view(request: Any) -> Response:
    return Response({"identity": identity(request)})


def django_view(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"identity": identity(request), "user": request.user.pk})


async def async_view(request: HttpRequest) -> HttpResponse:
    made = await aidentity(request)
    user = await request.auser()
    return JsonResponse({"identity": made, "user": user.pk, "again": request.user.pk})


class CountingBackend(ModelBackend):
    loaded: ClassVar[list[Any]] = []

    def get_user(self, user_id: Any) -> Any:
        self.loaded.append(user_id)
        return super().get_user(user_id)

    async def aget_user(self, user_id: Any) -> Any:
        self.loaded.append(user_id)
        return await super().aget_user(user_id)


def own_user(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """A site's own middleware: the caller is named by a JWT in a cookie."""

    def find(request: HttpRequest) -> Any:
        return User.objects.get(username=request.COOKIES["jwt"])

    def middleware(request: HttpRequest) -> HttpResponse:
        if "jwt" in request.COOKIES:
            request.user = SimpleLazyObject(lambda: find(request))  # type: ignore[assignment]
        return get_response(request)

    return middleware


api = NinjaAPI(urls_namespace="identity")


class HeaderKey(APIKeyHeader):
    param_name = "X-Ninja"

    def authenticate(self, request: HttpRequest, key: str | None) -> Any:
        return {"account": key} if key else None


@api.get("/key", auth=HeaderKey())
def ninja_view(request: HttpRequest) -> Any:
    return {"identity": identity(request)}


@api.get("/akey", auth=HeaderKey())
async def ninja_async_view(request: HttpRequest) -> Any:
    return {"identity": await aidentity(request)}


urlpatterns = [
    path("django/", django_view),
    path("async/", async_view),
    path("drf/", drf_view),
    path("ninja/", api.urls),
]


@pytest.mark.urls(__name__)
@pytest.mark.django_db
class TestThroughTheFrameworks:
    def test_each_login_is_a_flight_of_its_own(self) -> None:
        ann, ben = (User.objects.create(username=name) for name in ("ann", "ben"))
        seen = set()
        for user in (ann, ben, ann, None):
            client = Client()
            if user:
                client.force_login(user)
            first, second = (client.get("/django/").json()["identity"] for _ in range(2))
            assert first == second
            seen.add(first)
        assert len(seen) == 4

    def test_rest_frameworks_own_authentication_counts(self) -> None:
        one, same, other = (
            Client().get("/drf/", headers={"X-Key": key}).json()["identity"] for key in "aab"
        )
        assert one == same != other

    @pytest.mark.parametrize("where", ["/ninja/key", "/ninja/akey"])
    def test_ninjas_own_authentication_counts(self, where: str) -> None:
        one, same, other = (
            Client().get(where, headers={"X-Ninja": key}).json()["identity"] for key in "aab"
        )
        assert one == same != other


@pytest.mark.urls(__name__)
@pytest.mark.django_db(transaction=True)
class TestUsersInAsyncViews:
    async def test_the_user_is_loaded_once_for_the_identity_and_the_view(
        self, settings: Any
    ) -> None:
        settings.AUTHENTICATION_BACKENDS = [f"{__name__}.CountingBackend"]
        CountingBackend.loaded.clear()
        client, user = AsyncClient(), await User.objects.acreate(username="ann")
        await client.aforce_login(user)
        answer = (await client.get("/async/")).json()
        assert answer["user"] == answer["again"] == user.pk
        assert CountingBackend.loaded == [user.pk]

    async def test_a_user_that_a_middleware_loads_is_the_one_who_counts(
        self, settings: Any
    ) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.own_user"]
        for name in ("ann", "ben"):
            await User.objects.acreate(username=name)
        client = AsyncClient()
        await client.aforce_login(await User.objects.aget(username="ann"))
        seen = set()
        for name in ("ann", "ben"):
            client.cookies["jwt"] = name
            seen.add((await client.get("/async/")).json()["identity"])
        assert len(seen) == 2
