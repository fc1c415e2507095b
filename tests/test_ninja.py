"""The lock on Django Ninja's operations, beneath their route decorators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import ninja
import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from ninja import NinjaAPI, Router, Schema
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import APIKeyHeader, HttpBearer

from singleflight_django import semaphore_lock
from singleflight_django.exceptions import NestedFlightError
from tests.meeting import Room, ameet, apost, codes, held, listening, meet, post, urls

# Ninja 1.7 would rather have a Status; earlier ones have no other way than the tuple.
pytestmark = pytest.mark.filterwarnings("ignore:Returning tuple:DeprecationWarning")

guard = semaphore_lock(key="lesson:<pk>")


class LessonIn(Schema):
    name: str
    title: str = ""


class LessonOut(Schema):
    made: bool


class Token(HttpBearer):
    """It returns a user, as sites do."""

    def authenticate(self, request: HttpRequest, token: str) -> User:
        return User(pk=int(token), username=token)


class Key(APIKeyHeader):
    """It returns what is no user."""

    param_name = "X-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> str | None:
        return key


def api(**options: Any) -> NinjaAPI:
    return NinjaAPI(urls_namespace=f"test-{id(options)}", **options)


Answer = Callable[[], Any]
ANSWERS: dict[str, tuple[Answer, int, bytes]] = {
    "value": (lambda: {"made": True}, 200, b'{"made": true}'),
    "status tuple": (lambda: (201, {"made": True}), 201, b'{"made": true}'),
    "response": (lambda: HttpResponse("made", status=202), 202, b"made"),
}
if hasattr(ninja, "Status"):
    ANSWERS["status"] = (lambda: ninja.Status(201, {"made": True}), 201, b'{"made": true}')
each_answer = pytest.mark.parametrize(("answer", "code", "body"), ANSWERS.values(), ids=ANSWERS)


class TestPlacements:
    @each_answer
    def test_beneath_the_route(self, answer: Answer, code: int, body: bytes, settings: Any) -> None:
        room, site = Room(), api()

        @site.post("/{pk}/", response={200: LessonOut, 201: LessonOut})
        @guard
        def create(request: HttpRequest, pk: int) -> Any:
            room.stay()
            return answer()

        settings.ROOT_URLCONF = urls(site.urls, "")
        first, second = meet(room, post(), post())
        assert (first.status_code, first.content) == (code, body)
        assert second.status_code == 429
        assert second["Retry-After"] == "1"
        assert second.json()["type"] == "urn:singleflight-django:conflict"
        assert room.visits == 1
        assert not held("lesson:7")

    @each_answer
    async def test_beneath_the_route_of_an_async_operation(
        self, answer: Answer, code: int, body: bytes, settings: Any
    ) -> None:
        room, site = Room(), api()

        @site.post("/{pk}/", response={200: LessonOut, 201: LessonOut})
        @guard
        async def create(request: HttpRequest, pk: int) -> Any:
            await room.astay()
            return answer()

        settings.ROOT_URLCONF = urls(site.urls, "")
        first, second = await ameet(room, apost(), apost())
        assert (first.status_code, first.content) == (code, body)
        assert second.status_code == 429
        assert room.visits == 1
        assert not await asyncio.to_thread(held, "lesson:7")

    def test_a_router_of_its_own(self, settings: Any) -> None:
        room, site, router = Room(), api(), Router()

        @router.post("/{pk}/")
        @guard
        def create(request: HttpRequest, pk: int) -> str:
            return room.stay().content.decode()

        site.add_router("/lessons", router)
        settings.ROOT_URLCONF = urls(site.urls, "")
        assert codes(meet(room, post("/lessons/7/"), post("/lessons/7/"))) == [200, 429]

    def test_around_the_whole_operation(self, settings: Any) -> None:
        """``decorate_view`` puts it before authentication: fine for a key without <user>."""
        room, site = Room(), api()

        @site.post("/{pk}/")
        @decorate_view(guard)
        def create(request: HttpRequest, pk: int) -> str:
            return room.stay().content.decode()

        settings.ROOT_URLCONF = urls(site.urls, "")
        assert codes(meet(room, post(), post())) == [200, 429]

    @pytest.mark.parametrize("kind", ["api", "router"])
    def test_above_the_route_it_is_refused_and_the_cure_is_named(self, kind: str) -> None:
        routes: Any = api() if kind == "api" else Router()
        with pytest.raises(TypeError, match=r"beneath, between @router\.post\(\.\.\.\)"):

            @guard
            @routes.post("/{pk}/")
            def create(request: HttpRequest, pk: int) -> str:
                return ""

    def test_above_the_route_of_an_async_operation(self) -> None:
        with pytest.raises(TypeError, match="which never calls it"):

            @guard
            @api().post("/{pk}/")
            async def create(request: HttpRequest, pk: int) -> str:
                return ""

    def test_between_two_routes_it_would_guard_one_only(self) -> None:
        site = api()
        with pytest.raises(TypeError, match="which never calls it"):

            @site.post("/a/{pk}/")
            @guard
            @site.post("/b/{pk}/")
            def create(request: HttpRequest, pk: int) -> str:
                return ""

    def test_two_routes_above_it(self, settings: Any) -> None:
        room, site = Room(), api()

        @site.post("/a/{pk}/")
        @site.post("/b/{pk}/")
        @guard
        def create(request: HttpRequest, pk: int) -> str:
            return room.stay().content.decode()

        settings.ROOT_URLCONF = urls(site.urls, "")
        assert codes(meet(room, post("/a/7/"), post("/b/7/"))) == [200, 429]

    def test_two_guards_of_one_key_are_nested(self, settings: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @guard
        @guard
        def create(request: HttpRequest, pk: int) -> str:
            return ""

        settings.ROOT_URLCONF = urls(site.urls, "")
        with pytest.raises(NestedFlightError):
            post()()

    def test_an_error_frees_the_key(self, settings: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @guard
        def create(request: HttpRequest, pk: int) -> str:
            assert held("lesson:7")
            raise HttpError(418, "teapot")

        settings.ROOT_URLCONF = urls(site.urls, "")
        assert post()().status_code == 418
        assert not held("lesson:7")


class TestTheOperation:
    """Ninja sees the guarded function as it was written."""

    def test_names_of_types_are_resolved_where_the_function_is(self, settings: Any) -> None:
        """This module has ``from __future__ import annotations``, as many have."""
        site = api()

        @site.post("/{pk}/", response=LessonOut)
        @semaphore_lock(key="lesson:<body.name>")
        def create(request: HttpRequest, pk: int, data: LessonIn, dry: bool = False) -> Any:
            assert held(f"lesson:{data.name}")
            return {"made": not dry}

        settings.ROOT_URLCONF = urls(site.urls, "")
        send = partial(Client().post, content_type="application/json")
        assert send("/7/?dry=1", {"name": "a"}).json() == {"made": False}
        assert send("/7/", {"title": "a"}).status_code == 422
        assert send("/7/", {"name": ""}).status_code == 400
        (operation,) = site.get_openapi_schema()["paths"]["/{pk}/"].values()
        assert operation["summary"] == "Create"
        assert {p["name"] for p in operation["parameters"]} == {"pk", "dry"}

    def test_what_ninja_refuses_takes_no_lease(self, settings: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @guard
        def create(request: HttpRequest, pk: int) -> str:
            return ""

        settings.ROOT_URLCONF = urls(site.urls, "")
        with listening("lease_acquired") as told:
            assert post("/seven/")().status_code == 422
        assert told == []

    def test_the_lease_is_on_the_request(self, settings: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @guard
        def create(request: Any, pk: int) -> str:
            request.lease.check()
            return str(request.lease.key)

        settings.ROOT_URLCONF = urls(site.urls, "")
        assert post()().json() == "semaphore_lock:lesson:7"


class TestConflicts:
    def test_skip(self, settings: Any) -> None:
        room, site = Room(), api()

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<pk>", on_conflict="skip")
        def create(request: HttpRequest, pk: int) -> str:
            return room.stay().content.decode()

        settings.ROOT_URLCONF = urls(site.urls, "")
        _, skipped = meet(room, post(), post())
        assert (skipped.status_code, skipped.content) == (204, b"")

    @pytest.mark.parametrize("colour", ["sync", "async"])
    async def test_a_callable_may_answer_with_a_value(self, colour: str, settings: Any) -> None:
        room, site = Room(), api()
        lock = semaphore_lock(
            key="lesson:<pk>", on_conflict=lambda request, conflict: (409, {"made": False})
        )

        @lock
        def create(request: HttpRequest, pk: int) -> Any:
            room.stay()
            return 200, {"made": True}

        @lock
        async def acreate(request: HttpRequest, pk: int) -> Any:
            await room.astay()
            return 200, {"made": True}

        operation: Any = create if colour == "sync" else acreate
        site.post("/{pk}/", response={200: LessonOut, 409: LessonOut})(operation)
        settings.ROOT_URLCONF = urls(site.urls, "")
        first, second = await ameet(room, apost(), apost())
        assert (first.status_code, first.json()) == (200, {"made": True})
        assert (second.status_code, second.json()) == (409, {"made": False})

    def test_a_bad_field_is_named(self, settings: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<body.uuid>")
        def create(request: HttpRequest, pk: int) -> str:
            return ""

        settings.ROOT_URLCONF = urls(site.urls, "")
        response = Client().post("/7/", {}, content_type="application/json")
        assert (response.status_code, response.json()["field"]) == (400, "body.uuid")


class TestTheUser:
    """``<user>`` is whom Ninja has authenticated."""

    def test_that_a_token_stands_for(self, settings: Any) -> None:
        room, site = Room(), api(auth=Token())

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<user>:<pk>")
        def create(request: HttpRequest, pk: int) -> str:
            return room.stay().content.decode()

        settings.ROOT_URLCONF = urls(site.urls, "")
        seven = lambda: Client(headers={"Authorization": "Bearer 7"}).post("/1/")  # noqa: E731
        answers = meet(room, seven, seven, lambda: held("lesson:7:1"))
        assert codes(answers[:2]) == [200, 429]
        assert answers[2]
        eight = Client(headers={"Authorization": "Bearer 8"}).post("/1/")
        assert eight.status_code == 200

    async def test_of_an_async_operation(self, settings: Any) -> None:
        site = api(auth=Token())

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<user>:<pk>")
        async def create(request: Any, pk: int) -> str:
            return str(request.lease.key)

        settings.ROOT_URLCONF = urls(site.urls, "")
        response = await AsyncClient().post("/1/", headers={"Authorization": "Bearer 7"})
        assert response.json() == "semaphore_lock:lesson:7:1"

    def test_a_denied_request_takes_no_lease(self, settings: Any) -> None:
        site = api(auth=Token())

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<user>:<pk>")
        def create(request: HttpRequest, pk: int) -> str:
            return ""

        settings.ROOT_URLCONF = urls(site.urls, "")
        with listening("lease_acquired") as told:
            assert post()().status_code == 401
        assert told == []

    def test_something_that_is_no_user_is_nobody(self, settings: Any) -> None:
        site = api(auth=Key())

        @site.post("/{pk}/")
        @semaphore_lock(key="lesson:<user>:<pk>")
        def create(request: HttpRequest, pk: int) -> str:
            return ""

        settings.ROOT_URLCONF = urls(site.urls, "")
        assert Client(headers={"X-Key": "k"}).post("/1/").status_code == 403
