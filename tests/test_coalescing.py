"""``single_flight`` beneath REST framework and Ninja; its options; the session after a wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import ninja
import pytest
from django.http import HttpRequest, HttpResponse
from ninja import NinjaAPI, Schema
from ninja.errors import HttpError
from rest_framework import exceptions, serializers
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from singleflight_django import SingleFlightMixin, single_flight
from singleflight_django.coalescing import Coalescer, ViewOptions
from tests.flying import acall, afly, call, fly, problem, seen, statuses
from tests.meeting import PATIENCE, Room, codes, listening, urls

pytestmark = pytest.mark.filterwarnings("ignore:Returning tuple:DeprecationWarning")

flight = single_flight(key="lesson:<pk>")
Answer = Callable[[], Any]


def as_api_view(room: Room, answer: Answer) -> Any:
    @api_view(["GET", "POST"])
    @flight
    def create(request: Any, pk: str) -> Any:
        room.stay()
        return answer()

    return create


def as_handler(room: Room, answer: Answer) -> Any:
    class Lessons(APIView):
        @flight
        def post(self, request: Any, pk: str) -> Any:
            room.stay()
            return answer()

    return Lessons.as_view()


def by_mixin(room: Room, answer: Answer) -> Any:
    class Lessons(SingleFlightMixin, APIView):
        flight_key = "lesson:<pk>"

        def post(self, request: Any, pk: str) -> Any:
            room.stay()
            return answer()

    return Lessons.as_view()


def in_a_viewset(room: Room, answer: Answer) -> Any:
    class Lessons(ViewSet):
        @flight
        def create(self, request: Any, pk: str) -> Any:
            room.stay()
            return answer()

    return Lessons.as_view({"post": "create"})


def beneath_action(room: Room, answer: Answer) -> Any:
    class Lessons(ViewSet):
        @action(detail=True, methods=["post"])
        @flight
        def publish(self, request: Any, pk: str) -> Any:
            room.stay()
            return answer()

    return Lessons.as_view({"post": "publish"})


def on_the_callback(room: Room, answer: Answer) -> Any:
    class Lessons(APIView):
        def post(self, request: Any, pk: str) -> Any:
            room.stay()
            return answer()

    return flight(Lessons.as_view())


BUILDS = [as_api_view, as_handler, by_mixin, in_a_viewset, beneath_action, on_the_callback]
each_build = pytest.mark.parametrize("build", BUILDS)


def raising(error: Exception) -> Answer:
    def answer() -> Any:
        raise error

    return answer


class TestRestFramework:
    @each_build
    def test_one_response_for_all(self, build: Any, settings: Any) -> None:
        room = Room()
        answer = lambda: Response({"made": [1, None, "é"]}, status=201)  # noqa: E731
        settings.ROOT_URLCONF = urls(build(room, answer))
        leader, *followers = fly(room, call(), call(), call())
        assert leader.status_code == 201
        assert [seen(one) for one in followers] == [seen(leader)] * 2
        assert statuses([leader, followers[0]]) == [
            "singleflight; fwd=miss; stored",
            "singleflight; fwd=miss; collapsed",
        ]
        assert room.visits == 1

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (exceptions.NotFound("no lesson"), 404),
            (exceptions.ValidationError({"name": ["too long"]}), 400),
            (serializers.ValidationError("no"), 400),
            (exceptions.MethodNotAllowed("POST"), 405),
        ],
    )
    @each_build
    def test_an_api_exception_is_an_answer(
        self, build: Any, error: Any, code: int, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, raising(error)))
        leader, follower = fly(room, call(), call())
        assert leader.status_code == code
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    @each_build
    def test_a_refusal_is_about_one_caller(self, build: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, raising(exceptions.PermissionDenied())))
        assert codes(fly(room, call(), call())) == [403, 403]
        assert room.visits == 2

    @each_build
    def test_a_failure_is_503(self, build: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, raising(ValueError("broken"))))
        leader, follower = fly(room, call(), call())
        assert codes([leader, follower]) == [500, 503]
        assert b"broken" not in follower.content
        assert room.visits == 1

    def test_formats_are_separate(self, settings: Any) -> None:
        room = Room(open=True)

        class Lessons(SingleFlightMixin, APIView):
            flight_key = "lesson:<pk>"
            flight_result_ttl = 60

            def get(self, request: Any, pk: str) -> Any:
                room.stay()
                return Response({"a": 1})

        settings.ROOT_URLCONF = urls(Lessons.as_view())
        one = call("get", headers={"Accept": "application/json"})()
        other = call("get", headers={"Accept": "text/html"})()
        assert (one["Content-Type"], room.visits) == ("application/json", 2)
        assert other["Content-Type"].startswith("text/html")


class LessonOut(Schema):
    made: bool


def operation(room: Room, answer: Answer, kind: str = "sync", guard: Any = flight) -> Any:
    site = NinjaAPI(urls_namespace=f"test-{id(room)}")
    route = site.api_operation(["GET", "POST"], "/{pk}/", response={200: LessonOut, 201: LessonOut})

    def create(request: HttpRequest, pk: int) -> Any:
        room.stay()
        return answer()

    async def acreate(request: HttpRequest, pk: int) -> Any:
        await room.astay()
        return answer()

    route(guard(create if kind == "sync" else acreate))
    return urls(site.urls, "")


VALUES: dict[str, Answer] = {
    "value": lambda: {"made": True},
    "status tuple": lambda: (201, {"made": True}),
    "response": lambda: HttpResponse("made", status=202),
}
if hasattr(ninja, "Status"):
    VALUES["status"] = lambda: ninja.Status(201, {"made": True})


class TestNinja:
    @pytest.mark.parametrize("answer", VALUES.values(), ids=VALUES)
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_one_value_for_all(self, answer: Answer, kind: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = operation(room, answer, kind)
        leader, *followers = await afly(room, acall(), acall(), acall())
        assert leader.status_code in (200, 201, 202)
        assert [seen(one) for one in followers] == [seen(leader)] * 2
        assert room.visits == 1

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_an_http_error_is_an_answer(self, kind: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = operation(room, raising(HttpError(418, "a teapot")), kind)
        leader, follower = await afly(room, acall(), acall())
        assert (leader.status_code, leader.json()) == (418, {"detail": "a teapot"})
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    def test_a_failure_is_503(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = operation(room, raising(ValueError("broken")))
        assert codes(fly(room, call(), call())) == [500, 503]
        assert room.visits == 1

    def test_a_failed_status_is_503(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = operation(room, raising(HttpError(502, "away")))
        assert codes(fly(room, call(), call())) == [502, 503]

    @pytest.mark.parametrize("what", ["header", "cookie"])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_headers_beside_a_value_are_the_leaders_alone(
        self, what: str, kind: str, settings: Any
    ) -> None:
        room, site = Room(), NinjaAPI(urls_namespace=f"test-{what}-{kind}")

        def touch(response: HttpResponse) -> dict[str, bool]:
            if what == "header":
                response["X-Secret"] = "the leader's"
            else:
                response.set_cookie("secret", "the leader's")
            return {"made": True}

        def create(request: HttpRequest, response: HttpResponse, pk: int) -> Any:
            room.stay()
            return touch(response)

        async def acreate(request: HttpRequest, response: HttpResponse, pk: int) -> Any:
            await room.astay()
            return touch(response)

        site.post("/{pk}/", response=LessonOut)(flight(create if kind == "sync" else acreate))
        settings.ROOT_URLCONF = urls(site.urls, "")
        with listening("share_refused") as told:
            leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [200, 409]
        assert [facts.reason for _, facts in told] == ["headers beside a value"]
        assert room.visits == 1

    def test_a_value_that_json_cant_carry(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = operation(room, lambda: LessonOut(made=True))
        leader, follower = fly(room, call(), call())
        assert leader.status_code == 200
        assert problem(follower) == "in-flight"
        assert room.visits == 1


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"scope": "nobody"}, ValueError),
            ({"scope": 7}, ValueError),
            ({"vary": "X-Tenant"}, TypeError),
            ({"vary": ("X Tenant",)}, ValueError),
            ({"methods": "GET"}, TypeError),
            ({"methods": ("get",)}, ValueError),
            ({"authorize": True}, TypeError),
            ({"on_timeout": "later"}, TypeError),
            ({"on_unshareable": 204}, TypeError),
            ({"wait": -1}, ValueError),
            ({"ttl": 0}, ValueError),
            ({"retry": -1}, ValueError),
            ({"max_bytes": 0}, ValueError),
            ({"max_followers": -1}, ValueError),
            ({"on_lost": "ignore"}, ValueError),
            ({"on_store_error": "ignore"}, ValueError),
            ({"cache": "no such"}, ValueError),
        ],
        ids=str,
    )
    def test_what_cant_work_is_refused_at_once(self, options: Any, error: Any) -> None:
        with pytest.raises(error, match=next(iter(options))):
            single_flight(key="lesson:<pk>", **options)

    @pytest.mark.parametrize("key", [["a", "b"], [lambda request: "a"]])
    def test_a_flight_has_one_key(self, key: Any) -> None:
        with pytest.raises(TypeError, match="one key"):
            single_flight(key=key)

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_callable_that_returns_several_keys_is_400(
        self, kind: str, settings: Any
    ) -> None:
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse()

        async def aview(request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse()

        guarded = single_flight(key=lambda request, pk: ["a", "b"])(
            view if kind == "sync" else aview
        )
        settings.ROOT_URLCONF = urls(guarded)
        assert (await acall()()).status_code == 400

    def test_one_decorator_on_two_views_makes_two_namespaces(self) -> None:
        one, other = (Coalescer("k", ViewOptions(), view) for view in ("a.one", "a.other"))
        assert one.qualified(("k",)) != other.qualified(("k",))


class TestTheSessionAfterAWait:
    """D82: a follower has read its session before the leader changed it."""

    @pytest.mark.parametrize("every", [False, True])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_follower_writes_no_old_session_back(
        self, every: bool, kind: str, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
        settings.SESSION_SAVE_EVERY_REQUEST = every
        settings.MIDDLEWARE = [
            f"{__name__}.tells_when_all_is_saved",
            *settings.MIDDLEWARE,
            f"{__name__}.reads_the_session",
        ]
        _all_is_saved.clear()
        session = await asyncio.to_thread(_new_session)
        room = Room()

        def view(request: HttpRequest, pk: str) -> HttpResponse:
            room.stay()
            request.session["cart"] = "full"
            return HttpResponse()

        async def aview(request: HttpRequest, pk: str) -> HttpResponse:
            await room.astay()
            await request.session.aset("cart", "full")
            return HttpResponse()

        settings.ROOT_URLCONF = urls(flight(view if kind == "sync" else aview))
        headers = {"Cookie": f"{settings.SESSION_COOKIE_NAME}={session.session_key}"}
        send = acall(headers=headers)
        assert codes(await afly(room, send, send)) == [200, 409]
        assert room.visits == 1
        again = await asyncio.to_thread(lambda: dict(type(session)(session.session_key).items()))
        assert again == {"cart": "full", "was": "read"}

    async def test_who_runs_the_view_after_all_finds_a_new_one(self, settings: Any) -> None:
        settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
        settings.MIDDLEWARE = [
            f"{__name__}.tells_when_all_is_saved",
            *settings.MIDDLEWARE,
            f"{__name__}.reads_the_session",
        ]
        session = await asyncio.to_thread(_new_session)
        room = Room()
        found: list[Any] = []

        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            first = not room.entered.is_set()
            await room.astay()
            # Synchronously, as it could before: a middleware has read the session.
            found.append(request.session.get("was"))
            return HttpResponse(status=403 if first else 200)

        settings.ROOT_URLCONF = urls(flight(view))
        _all_is_saved.set()
        send = acall(headers={"Cookie": f"sessionid={session.session_key}"})
        assert codes(await afly(room, send, send)) == [403, 200]
        assert found == ["read", "read"]


def _new_session() -> Any:
    from django.contrib.sessions.backends.cache import SessionStore

    session = SessionStore()
    session["was"] = "read"
    session.create()
    session["was"] = "read"
    session.save()
    return session


_all_is_saved = threading.Event()


def tells_when_all_is_saved(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        response = get_response(request)
        if response.status_code == 200:
            _all_is_saved.set()
        return response

    return middleware


def reads_the_session(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        request.session.get("was")
        response = get_response(request)
        # The leader's session is saved after its flight has landed.
        assert response.status_code == 200 or _all_is_saved.wait(PATIENCE)
        return response

    return middleware
