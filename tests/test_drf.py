"""The lock on Django REST framework's views, through its own authentication and negotiation."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.http import HttpRequest
from django.test import Client
from django.urls import include
from django.utils.decorators import method_decorator
from rest_framework import exceptions, status
from rest_framework.authentication import BaseAuthentication, BasicAuthentication
from rest_framework.decorators import (
    action,
    api_view,
    authentication_classes,
    permission_classes,
    throttle_classes,
)
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView, exception_handler
from rest_framework.viewsets import ViewSet

from singleflight_django import SemaphoreLockMixin, semaphore_lock
from singleflight_django.exceptions import NestedFlightError
from tests.meeting import Room, codes, held, listening, meet, post, urls

guard = semaphore_lock(key="lesson:<pk>")


class TokenAuthentication(BaseAuthentication):
    """A token is the name of a user that no database has to know."""

    def authenticate(self, request: Any) -> tuple[User, str] | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return (User(pk=int(token), username=token), token) if scheme == "Token" else None

    def authenticate_header(self, request: Any) -> str:
        return "Token"


class NobodyMay(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return False


class TooOften(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return False


def made(room: Room) -> Response:
    room.stay()
    return Response({"made": True}, status=status.HTTP_201_CREATED)


def as_api_view(room: Room, guard: Any) -> Any:
    @api_view(["POST"])
    @guard
    def create(request: Any, pk: str) -> Response:
        return made(room)

    return create


def as_handler(room: Room, guard: Any) -> Any:
    class Lessons(APIView):
        @guard
        def post(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view()


def as_method_decorator(room: Room, guard: Any) -> Any:
    class Lessons(APIView):
        @method_decorator(guard)
        def post(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view()


def on_dispatch(room: Room, guard: Any) -> Any:
    @method_decorator(guard, name="dispatch")
    class Lessons(APIView):
        def post(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view()


def on_the_callback(room: Room, guard: Any) -> Any:
    class Lessons(APIView):
        def post(self, request: Any, pk: str) -> Response:
            return made(room)

    return guard(Lessons.as_view())


def in_a_viewset(room: Room, guard: Any) -> Any:
    class Lessons(ViewSet):
        @guard
        def create(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view({"post": "create"})


def beneath_action(room: Room, guard: Any) -> Any:
    class Lessons(ViewSet):
        @action(detail=True, methods=["post"])
        @guard
        def publish(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view({"post": "publish"})


def above_action(room: Room, guard: Any) -> Any:
    class Lessons(ViewSet):
        @guard
        @action(detail=True, methods=["post"])
        def publish(self, request: Any, pk: str) -> Response:
            return made(room)

    assert Lessons.publish.mapping == {"post": "publish"}
    assert [extra.__name__ for extra in Lessons.get_extra_actions()] == ["publish"]
    return Lessons.as_view({"post": "publish"})


def mixin_view(room: Room, guard: Any) -> Any:
    class Lessons(SemaphoreLockMixin, APIView):
        lock_key = "lesson:<pk>"

        def post(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view()


def mixin_viewset(room: Room, guard: Any) -> Any:
    class Lessons(SemaphoreLockMixin, ViewSet):
        lock_key = "lesson:<pk>"

        @action(detail=True, methods=["post"])
        def publish(self, request: Any, pk: str) -> Response:
            return made(room)

    return Lessons.as_view({"post": "publish"})


PLACEMENTS = {
    placement.__name__: placement
    for placement in (
        as_api_view,
        as_handler,
        as_method_decorator,
        on_dispatch,
        on_the_callback,
        in_a_viewset,
        beneath_action,
        above_action,
        mixin_view,
        mixin_viewset,
    )
}
each_placement = pytest.mark.parametrize("build", PLACEMENTS.values(), ids=PLACEMENTS)


class TestPlacements:
    @each_placement
    def test_one_of_two_runs(self, build: Callable[..., Any], settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, guard))
        first, second = meet(room, post(), post())
        assert codes([first, second]) == [201, 429]
        assert first.json() == {"made": True}
        assert second["Retry-After"] == "1"
        assert room.visits == 1
        assert not held("lesson:7")

    @each_placement
    def test_an_error_frees_the_key(self, build: Callable[..., Any], settings: Any) -> None:
        class Failing(Room):
            def stay(self, *args: Any, **kwargs: Any) -> Any:
                assert held("lesson:7")
                raise exceptions.ValidationError("no")

        settings.ROOT_URLCONF = urls(build(Failing(), guard))
        assert post()().status_code == 400
        assert not held("lesson:7")

    def test_a_router_finds_the_actions_of_a_locked_viewset(self, settings: Any) -> None:
        room = Room()

        class Lessons(SemaphoreLockMixin, ViewSet):
            lock_key: ClassVar = {
                "create": "lesson:<uuid:body.uuid>",
                "publish": "publish:<url.pk>",
            }

            def list(self, request: Any) -> Response:
                return Response([])

            def create(self, request: Any) -> Response:
                return made(room)

            def destroy(self, request: Any, pk: str) -> Response:
                return Response(status=204)

            @action(detail=True, methods=["post"])
            def publish(self, request: Any, pk: str) -> Response:
                return made(room)

        router = SimpleRouter()
        router.register("lessons", Lessons, basename="lesson")
        settings.ROOT_URLCONF = urls(include(router.urls), "")
        uuid = "8f7d4c8e-7f4a-4c0e-9a4e-0d2f3a5b6c7d"
        create = lambda: Client().post("/lessons/", {"uuid": uuid})  # noqa: E731
        delete = lambda: Client().delete("/lessons/7/")  # noqa: E731
        again = lambda: Client().post(  # noqa: E731
            "/lessons/", {"uuid": uuid.upper()}, content_type="application/json"
        )
        assert codes(meet(room, create, create, again, delete)) == [201, 429, 429, 204]
        assert held(f"lesson:{uuid}") is False
        assert Client().post("/lessons/", {"uuid": "None"}).status_code == 400
        assert Client().get("/lessons/").status_code == 200
        assert Client().post("/lessons/9/publish/").status_code == 201

    def test_above_api_view_it_is_refused_and_the_cure_is_named(self) -> None:
        with pytest.raises(TypeError, match="beneath, between @api_view and the function"):

            @guard
            @api_view(["POST"])
            def create(request: Any, pk: str) -> Response:
                return Response()

    def test_the_attributes_of_a_viewset_survive(self) -> None:
        class Lessons(ViewSet):
            def create(self, request: Any) -> Response:
                return Response()

        view = Lessons.as_view({"post": "create"})
        guarded: Any = semaphore_lock(key="x")(view)
        assert guarded.cls is Lessons
        assert guarded.actions == {"post": "create"}
        assert guarded.initkwargs == view.initkwargs  # type: ignore[attr-defined]
        assert guarded.csrf_exempt

    def test_beside_a_decorator_of_the_same_key_it_is_nested(self, settings: Any) -> None:
        class Lessons(SemaphoreLockMixin, APIView):
            lock_key = "lesson:<pk>"

            @guard
            def post(self, request: Any, pk: str) -> Response:
                return Response()

        settings.ROOT_URLCONF = urls(Lessons.as_view())
        with pytest.raises(NestedFlightError):
            post()()

    def test_the_lease_is_on_both_requests(self, settings: Any) -> None:
        @api_view(["POST"])
        @guard
        def create(request: Any, pk: str) -> Response:
            assert request.lease is request._request.lease
            request.lease.check()
            return Response(request.lease.key)

        settings.ROOT_URLCONF = urls(create)
        assert post()().json() == "semaphore_lock:lesson:7"


class TestAfterTheChecks:
    """What DRF denies takes no lease and reads no key."""

    @pytest.mark.parametrize(
        ("attributes", "code"),
        [
            ({"permission_classes": [NobodyMay]}, 403),
            ({"permission_classes": [IsAuthenticated]}, 403),
            ({"throttle_classes": [TooOften]}, 429),
            ({"authentication_classes": [TokenAuthentication]}, 201),
        ],
        ids=["permission", "authentication", "throttle", "none"],
    )
    @pytest.mark.parametrize("build", [mixin_view, as_handler, mixin_viewset, beneath_action])
    def test_denied(self, build: Any, attributes: Any, code: int, settings: Any) -> None:
        room = Room(open=True)
        view = build(room, guard)
        for name, value in attributes.items():
            setattr(view.cls, name, value)
        settings.ROOT_URLCONF = urls(view)
        with listening("lease_acquired", "lease_rejected") as told:
            assert post()().status_code == code
        assert len(told) == room.visits == (code == 201)

    @pytest.mark.parametrize(
        ("decorator", "code"),
        [(permission_classes([NobodyMay]), 403), (throttle_classes([TooOften]), 429)],
        ids=["permission", "throttle"],
    )
    def test_denied_by_api_view(self, decorator: Any, code: int, settings: Any) -> None:
        @api_view(["POST"])
        @decorator
        @guard
        def create(request: Any, pk: str) -> Response:
            return Response()

        settings.ROOT_URLCONF = urls(create)
        with listening("lease_acquired") as told:
            assert post()().status_code == code
        assert told == []


class TestTheUser:
    """``<user>`` is who DRF has authenticated, whichever way."""

    @staticmethod
    def build(room: Room, kind: str) -> Any:
        locked = semaphore_lock(key="lesson:<user>:<pk>")
        if kind == "api_view":

            @api_view(["POST"])
            @authentication_classes([TokenAuthentication, BasicAuthentication])
            @locked
            def create(request: Any, pk: str) -> Response:
                return made(room)

            return create

        class Decorated(APIView):
            authentication_classes = (TokenAuthentication, BasicAuthentication)

            @locked
            def post(self, request: Any, pk: str) -> Response:
                return made(room)

        class Mixed(SemaphoreLockMixin, ViewSet):
            authentication_classes = (TokenAuthentication, BasicAuthentication)
            lock_key = "lesson:<user>:<pk>"

            def create(self, request: Any, pk: str) -> Response:
                return made(room)

        return Decorated.as_view() if kind == "handler" else Mixed.as_view({"post": "create"})

    @pytest.mark.parametrize("kind", ["api_view", "handler", "viewset"])
    def test_by_token(self, kind: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(self.build(room, kind))
        seven = lambda: Client(headers={"Authorization": "Token 7"}).post("/1/")  # noqa: E731
        answers = meet(room, seven, seven, lambda: held("lesson:7:1"))
        assert codes(answers[:2]) == [201, 429]
        assert answers[2]
        eight = Client(headers={"Authorization": "Token 8"}).post("/1/")
        assert eight.status_code == 201

    @pytest.mark.parametrize("kind", ["api_view", "handler", "viewset"])
    def test_of_nobody(self, kind: str, settings: Any) -> None:
        """NotAuthenticated, which DRF answers 401 with the scheme to use; never a shared key."""
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(self.build(room, kind))
        response = post("/1/")()
        assert response.status_code == 401
        assert response["WWW-Authenticate"] == "Token"
        assert room.visits == 0

    @pytest.mark.django_db(transaction=True)
    def test_by_basic_authentication(self, settings: Any) -> None:
        user = User.objects.create_user("ann", password="secret")
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(self.build(room, "handler"))
        credentials = base64.b64encode(b"ann:secret").decode()
        with listening("lease_acquired") as told:
            response = Client(headers={"Authorization": f"Basic {credentials}"}).post("/1/")
        assert response.status_code == 201
        assert told[0][1].key == f"semaphore_lock:lesson:{user.pk}:1"


class TestTheBody:
    def test_the_view_reads_its_data_after_the_key_did(self, settings: Any) -> None:
        @api_view(["POST"])
        @semaphore_lock(key="lesson:<body.order.id>")
        def create(request: Any, pk: str) -> Response:
            assert held("lesson:9")
            return Response(request.data)

        settings.ROOT_URLCONF = urls(create)
        body = {"order": {"id": 9}, "more": [1, 2]}
        response = Client().post("/7/", body, content_type="application/json")
        assert response.json() == body

    def test_a_malformed_body_is_the_views_own_400(self, settings: Any) -> None:
        @api_view(["POST"])
        @semaphore_lock(key="lesson:<body.order.id>")
        def create(request: Any, pk: str) -> Response:
            return Response(request.data)

        settings.ROOT_URLCONF = urls(create)
        response = Client().post("/7/", "{", content_type="application/json")
        assert response.status_code == 400
        assert "JSON parse error" in response.json()["detail"]

    def test_a_bad_field_is_named(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(
            as_api_view(Room(open=True), semaphore_lock(key="lesson:<body.uuid>"))
        )
        response = Client().post("/7/", {"uuid": "x"}, content_type="application/json")
        assert (response.status_code, response.json()["field"]) == (400, "body.uuid")


def hiding_handler(error: Exception, context: Any) -> Response | None:
    """As sites write them: a new response, without the headers of the old one."""
    response = exception_handler(error, context)
    return response and Response({"error": str(error)}, status=response.status_code)


class TestResponses:
    def test_a_custom_exception_handler_strips_nothing(self, settings: Any) -> None:
        settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": f"{__name__}.hiding_handler"}
        room = Room()
        settings.ROOT_URLCONF = urls(as_api_view(room, guard))
        _, refused = meet(room, post(), post())
        assert refused.status_code == 429
        assert refused["Retry-After"] == "1"
        assert refused["Content-Type"] == "application/problem+json"

    def test_skip_is_204_without_a_body(self, settings: Any) -> None:
        room = Room()
        lock = semaphore_lock(key="lesson:<pk>", on_conflict="skip")
        settings.ROOT_URLCONF = urls(as_handler(room, lock))
        _, skipped = meet(room, post(), post())
        assert (skipped.status_code, skipped.content) == (204, b"")
        assert "Content-Type" not in skipped

    def test_a_callable_may_answer_with_a_response_of_drf(self, settings: Any) -> None:
        lock = semaphore_lock(
            key="lesson:<pk>",
            on_conflict=lambda request, conflict: Response({"busy": True}, status=409),
        )
        room = Room()
        settings.ROOT_URLCONF = urls(as_handler(room, lock))
        _, refused = meet(room, post(), post())
        assert (refused.status_code, refused.json()) == (409, {"busy": True})

    def test_a_callable_may_raise_an_exception_of_drf(self, settings: Any) -> None:
        def answer(request: HttpRequest, conflict: Exception) -> Response:
            raise exceptions.Throttled(wait=1)

        room = Room()
        lock = semaphore_lock(key="lesson:<pk>", on_conflict=answer)
        settings.ROOT_URLCONF = urls(as_handler(room, lock))
        _, refused = meet(room, post(), post())
        assert (refused.status_code, refused["Retry-After"]) == (429, "1")

    def test_rendering_happens_under_the_lease(self, settings: Any) -> None:
        from rest_framework.renderers import JSONRenderer

        seen = []

        class Noting(JSONRenderer):
            def render(self, *args: Any, **kwargs: Any) -> Any:
                seen.append(held("lesson:7"))
                return super().render(*args, **kwargs)

        view = as_handler(Room(open=True), guard)
        view.cls.renderer_classes = [Noting]
        settings.ROOT_URLCONF = urls(view)
        assert post()().status_code == 201
        assert seen == [True]
        assert not held("lesson:7")


@pytest.mark.django_db(transaction=True)
class TestTransactions:
    def test_the_mixin_takes_the_lease_outside(self, monkeypatch: Any, settings: Any) -> None:
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)

        class Lessons(SemaphoreLockMixin, ViewSet):
            lock_key: ClassVar = {"create": "lesson:<pk>"}

            def create(self, request: Any, pk: str) -> Response:
                return Response(connection.in_atomic_block)

            def update(self, request: Any, pk: str) -> Response:
                return Response(connection.in_atomic_block)

        view = Lessons.as_view({"post": "create", "put": "update"})
        settings.ROOT_URLCONF = urls(view)
        assert Client().put("/7/").json() is True
        assert Client().post("/7/").json() is True
        assert not held("lesson:7")
