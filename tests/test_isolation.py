"""Nobody sees what is not theirs: callers of one view with one key, through Django's handlers.

In each row two callers are under way at once, or one after the other while answers are kept. The
view answers with what it knows of its caller; whoever gets another caller's answer, sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib import messages
from django.contrib.auth.backends import BaseBackend
from django.contrib.auth.models import User
from django.contrib.sessions.backends.cache import SessionStore
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.shortcuts import redirect
from django.test import Client
from django.urls import path
from django.utils import translation
from django.utils.cache import patch_vary_headers
from ninja import NinjaAPI
from ninja.security import APIKeyHeader, HttpBearer
from rest_framework.authentication import BaseAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

from singleflight_django import SingleFlightMixin, single_flight
from tests.flying import acall, afly, call, fly, seen, statuses
from tests.meeting import Room, codes, urls

Headers = dict[str, str]
kept = single_flight(key="lesson:<pk>", result_ttl=60)


@pytest.fixture(autouse=True)
def _sessions_in_the_cache(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
    settings.AUTHENTICATION_BACKENDS = [f"{__name__}.Backend"]


class Backend(BaseBackend):
    """It knows every user, and needs no database."""

    def get_user(self, user_id: int) -> User:
        return User(pk=user_id, username=f"user {user_id}")


def session_of(pk: int | None, **data: Any) -> Headers:
    """The cookie of a new session, of a user that is logged in, or of nobody."""
    session = SessionStore()
    session.update(data)
    if pk is not None:
        user = User(pk=pk)
        session.update(
            {
                "_auth_user_id": str(pk),
                "_auth_user_backend": f"{__name__}.Backend",
                "_auth_user_hash": user.get_session_auth_hash(),
            }
        )
    session.save()
    return {"Cookie": f"sessionid={session.session_key}"}


def with_cookie(headers: Headers, cookie: str) -> Headers:
    return {**headers, "Cookie": f"{headers['Cookie']}; {cookie}" if headers else cookie}


def who(request: HttpRequest) -> str:
    """All that a view may learn of its caller."""
    session = request.session.get("of", "")
    return "|".join(
        [
            str(request.user.pk),
            str(session),
            request.headers.get("Authorization", ""),
            request.headers.get("X-Api-Key", ""),
            request.COOKIES.get("jwt", ""),
            str(translation.get_language()),
            request.headers.get("Accept", ""),
        ]
    )


Pair = Callable[[], tuple[Headers, Headers]]
DIFFERENT: dict[str, Pair] = {
    "two users": lambda: (session_of(1), session_of(2)),
    "a user and nobody": lambda: (session_of(1), {}),
    "two anonymous sessions": lambda: (session_of(None, of="a"), session_of(None, of="b")),
    "a session and none": lambda: (session_of(None, of="a"), {}),
    "two sessions of a user": lambda: (session_of(1, of="a"), session_of(1, of="b")),
    "a jwt in a cookie": lambda: ({"Cookie": "jwt=a"}, {"Cookie": "jwt=b"}),
    "a jwt and none": lambda: ({"Cookie": "jwt=a"}, {}),
    "api keys": lambda: ({"X-Api-Key": "a"}, {"X-Api-Key": "b"}),
    "bearer tokens": lambda: ({"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}),
    "bearer tokens in one session": lambda: tuple(  # type: ignore[return-value]
        {**cookie, "Authorization": f"Bearer {token}"}
        for cookie in [session_of(1)]
        for token in "ab"
    ),
    "a token in a session and none": lambda: tuple(  # type: ignore[return-value]
        {**cookie, **more}
        for cookie in [session_of(1)]
        for more in ({"Authorization": "Bearer a"}, {})
    ),
    "languages": lambda: ({"Accept-Language": "de"}, {"Accept-Language": "fr"}),
    "formats": lambda: ({"Accept": "text/html"}, {"Accept": "application/json"}),
}
SAME: dict[str, Pair] = {
    "nobody": lambda: ({}, {}),
    "one session": lambda: (lambda cookie: (cookie, dict(cookie)))(session_of(1)),
    "one key": lambda: ({"X-Api-Key": "a"}, {"X-Api-Key": "a"}),
    "another trace": lambda: ({"traceparent": "00-a"}, {"traceparent": "00-b"}),
    "another browser": lambda: ({"User-Agent": "a"}, {"User-Agent": "b"}),
}
each_different = pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
each_same = pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
each_colour = pytest.mark.parametrize("colour", ["sync", "async"])


def view_of(room: Room, colour: str, answer: Callable[[HttpRequest], Any], guard: Any) -> Any:
    def view(request: HttpRequest, pk: str) -> Any:
        room.stay()
        return answer(request)

    async def aview(request: HttpRequest, pk: str) -> Any:
        await room.astay()
        return await sync_to_async(answer)(request)

    return guard(view if colour == "sync" else aview)


def tells(request: HttpRequest) -> HttpResponse:
    return HttpResponse(who(request))


@pytest.fixture(autouse=True)
def _languages(settings: Any) -> Iterator[None]:
    settings.USE_I18N = True
    settings.LANGUAGES = [("en", "English"), ("de", "German"), ("fr", "French")]
    middleware = list(settings.MIDDLEWARE)
    middleware.insert(1, "django.middleware.locale.LocaleMiddleware")
    settings.MIDDLEWARE = middleware
    yield
    translation.deactivate()


class TestCallers:
    @each_different
    @each_colour
    async def test_different_callers_each_get_their_own(
        self, pair: Pair, colour: str, settings: Any
    ) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(view_of(room, colour, tells, kept))
        one, other = await asyncio.to_thread(pair)
        first = await acall("get", headers=one)()
        second = await acall("get", headers=other)()
        again = await acall("get", headers=one)()
        assert first.content != second.content
        assert again.content == first.content
        assert room.visits == 2

    @each_different
    def test_at_once(self, pair: Pair, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, "sync", tells, kept))
        one, other = pair()
        sends = [call("get", headers=one), call("get", headers=other), call("get", headers=one)]
        first, second, third = fly(room, *sends, waiting=1)
        assert first.content == third.content != second.content
        assert room.visits == 2

    @each_same
    @each_colour
    async def test_one_caller_shares_with_itself(
        self, pair: Pair, colour: str, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, colour, tells, kept))
        one, other = await asyncio.to_thread(pair)
        first, second = await afly(room, acall("get", headers=one), acall("get", headers=other))
        assert seen(first) == seen(second)
        assert room.visits == 1

    def test_hosts_schemes_and_queries_are_separate(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(view_of(room, "sync", tells, kept))
        get = lambda path="/7/", **extra: Client(**extra).get(path)  # noqa: E731
        get(), get("/7/?a=1"), get("/7/?a=2"), get(SERVER_NAME="other.example"), get()
        Client().get("/7/", secure=True)
        assert room.visits == 5

    def test_a_scope_of_the_sites_own(self, settings: Any) -> None:
        room = Room(open=True)
        guard = single_flight(
            key="lesson:<pk>", result_ttl=60, scope=lambda request: request.headers["X-Tenant"]
        )
        settings.ROOT_URLCONF = urls(view_of(room, "sync", lambda r: HttpResponse("x"), guard))
        for tenant in "aba":
            call("get", headers={"X-Tenant": tenant})()
        assert room.visits == 2

    def test_vary_names_more(self, settings: Any) -> None:
        room = Room(open=True)
        guard = single_flight(key="lesson:<pk>", result_ttl=60, scope="global", vary=("X-Tenant",))
        settings.ROOT_URLCONF = urls(view_of(room, "sync", lambda r: HttpResponse("x"), guard))
        for tenant in "aba":
            call("get", headers={"X-Tenant": tenant})()
        assert room.visits == 2


class Token(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> Any:
        return {"token": token}


class Key(APIKeyHeader):
    param_name = "X-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> str | None:
        return key


class DrfToken(BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[User, str] | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return (User(pk=int(token)), token) if scheme == "Token" else None


class TestFrameworks:
    @pytest.mark.parametrize(
        ("auth", "headers"),
        [
            (Token(), lambda who: {"Authorization": f"Bearer {who}"}),
            (Key(), lambda who: {"X-Key": who}),
        ],
        ids=["bearer", "key"],
    )
    def test_ninja(self, auth: Any, headers: Any, settings: Any) -> None:
        room, site = Room(open=True), NinjaAPI(urls_namespace=f"test-{id(auth)}", auth=auth)

        @site.get("/{pk}/")
        @kept
        def get(request: HttpRequest, pk: str) -> Any:
            room.stay()
            return {"for": str(request.auth)}  # type: ignore[attr-defined]

        settings.ROOT_URLCONF = urls(site.urls, "")
        one, other, again = (call("get", headers=headers(name))() for name in "aba")
        assert one.content == again.content != other.content
        assert room.visits == 2
        assert call("get")().status_code == 401

    def test_rest_framework(self, settings: Any) -> None:
        room = Room(open=True)

        class Lessons(SingleFlightMixin, APIView):
            flight_key = "lesson:<pk>"
            flight_result_ttl = 60
            authentication_classes = (DrfToken,)

            def get(self, request: Any, pk: str) -> Response:
                room.stay()
                return Response([request.user.pk])

        settings.ROOT_URLCONF = urls(Lessons.as_view())
        get = lambda name: call("get", headers={"Authorization": f"Token {name}"})()  # noqa: E731
        assert [get(name).json() for name in "121"] == [[1], [2], [1]]
        assert room.visits == 2
        assert call("get")().json() == [None]


def sets_cookie(request: HttpRequest) -> HttpResponse:
    response = tells(request)
    response.set_cookie("secret", "the leader's")
    return response


def modifies_session(request: HttpRequest) -> HttpResponse:
    request.session["cart"] = "the leader's"
    return tells(request)


def uses_token(request: HttpRequest) -> HttpResponse:
    return HttpResponse(get_token(request))


def varies(request: HttpRequest) -> HttpResponse:
    response = HttpResponse(request.headers.get("X-Forwarded-For", ""))
    patch_vary_headers(response, ["X-Forwarded-For"])
    return response


UNSHAREABLE = {
    "cookie": sets_cookie,
    "session": modifies_session,
    "csrf token": uses_token,
    "vary": varies,
}


class TestWhatIsTheLeadersAlone:
    @pytest.mark.parametrize("answer", UNSHAREABLE.values(), ids=UNSHAREABLE)
    @each_colour
    async def test_followers_of_get_run_on_their_own(
        self, answer: Any, colour: str, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, colour, answer, kept))
        answers = await afly(room, acall("get"), acall("get"))
        assert statuses(answers) == ["singleflight; fwd=miss", ""]
        assert room.visits == 2
        assert (await acall("get")()).headers.get("Cache-Status") is None

    @pytest.mark.parametrize("answer", UNSHAREABLE.values(), ids=UNSHAREABLE)
    @each_colour
    async def test_followers_of_post_get_409(self, answer: Any, colour: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, colour, answer, kept))
        leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [200, 409]
        assert leader.content not in follower.content or not leader.content
        assert not follower.cookies
        assert room.visits == 1

    def test_private_is_nobodys_else_under_another_scope(self, settings: Any) -> None:
        room = Room()
        guard = single_flight(key="lesson:<pk>", scope="global")
        private = lambda r: HttpResponse("x", headers={"Cache-Control": "no-store"})  # noqa: E731
        settings.ROOT_URLCONF = urls(view_of(room, "sync", private, guard))
        assert codes(fly(room, call(), call())) == [200, 409]
        assert room.visits == 1


class TestPostRedirectGet:
    """The flash message is the leader's; its duplicate is told to look, and nothing runs twice."""

    @each_colour
    async def test_with_a_flash_message(self, colour: str, settings: Any) -> None:
        room = Room()

        def create(request: HttpRequest) -> HttpResponse:
            messages.success(request, "Lesson made.")
            return redirect("/done/")

        module = urls(view_of(room, colour, create, kept))
        done = lambda request: HttpResponse(  # noqa: E731
            ",".join(map(str, messages.get_messages(request)))
        )
        vars(module)["urlpatterns"].insert(0, path("done/", done))
        settings.ROOT_URLCONF = module
        cookie = await asyncio.to_thread(session_of, 1)
        send = acall(headers=cookie)
        leader, follower = await afly(room, send, send)
        assert codes([leader, follower]) == [302, 409]
        assert follower["Retry-After"] == "1"
        assert room.visits == 1
        shown = leader.cookies["messages"].value if "messages" in leader.cookies else ""
        cookies = with_cookie(cookie, f"messages={shown}") if shown else cookie
        page = await acall("get", "/done/", headers=cookies)()
        assert page.content == b"Lesson made."

    def test_without_one_the_redirect_is_shared(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, "sync", lambda r: redirect("/done/"), kept))
        leader, follower = fly(room, call(), call())
        assert seen(leader) == seen(follower)
        assert follower.url == "/done/"
        assert room.visits == 1


class TestCsrf:
    """The check is the middleware's, for each caller; the token is not part of what is compared."""

    def test_a_form_with_another_token_is_the_same_request(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_of(room, "sync", tells, kept))
        secret = "a" * 32
        headers = with_cookie(session_of(1), f"csrftoken={secret}")

        def post(token: str) -> Any:
            client = Client(enforce_csrf_checks=True)
            data = {"title": "a", "csrfmiddlewaretoken": token}
            return client.post("/7/", data, headers=headers)

        from django.middleware.csrf import _mask_cipher_secret  # type: ignore[attr-defined]

        one, two = _mask_cipher_secret(secret), _mask_cipher_secret(secret)
        assert one != two
        answers = fly(
            room, lambda: post(one), lambda: post(two), lambda: post("x" * 32 + "y" * 32), waiting=1
        )
        assert codes(answers) == [200, 200, 403]
        assert room.visits == 1
