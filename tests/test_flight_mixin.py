"""``SingleFlightMixin`` on Django's and REST framework's class views."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.contrib.auth.mixins import LoginRequiredMixin, UserPassesTestMixin
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.views import View
from django.views.generic import TemplateView
from rest_framework.decorators import action
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from singleflight_django import SemaphoreLockMixin, SingleFlightMixin
from tests.flying import acall, afly, call, fly, seen, statuses
from tests.meeting import Room, codes, held, listening, meet, request_like, urls


def view_in(room: Room, *bases: type, **attributes: Any) -> Any:
    """A view class with a post() that stays in the room."""

    def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
        return room.stay()

    handler.__name__ = "post"
    attributes = {"flight_key": "lesson:<pk>", "post": handler, **attributes}
    return type("Lessons", bases or (SingleFlightMixin, View), attributes)


def async_view_in(room: Room, **attributes: Any) -> Any:
    async def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
        return await room.astay()

    handler.__name__ = "post"
    return view_in(room, post=handler, **attributes)


class TestPlacements:
    @pytest.mark.parametrize("make", [view_in, async_view_in])
    def test_under_wsgi(self, make: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(make(room).as_view())
        leader, *followers = fly(room, call(), call(), call())
        assert [seen(one) for one in followers] == [seen(leader)] * 2
        assert codes([leader]) == [201]
        assert room.visits == 1

    @pytest.mark.parametrize("make", [view_in, async_view_in])
    async def test_under_asgi(self, make: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(make(room).as_view())
        leader, follower = await afly(room, acall(), acall())
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    def test_every_option_reaches_the_flight(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(view_in(room, flight_result_ttl=60).as_view())
        call()()
        assert statuses([call()()]) == ["singleflight; hit; ttl=60"]

    def test_as_view_may_say_otherwise(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(view_in(room).as_view(flight_result_ttl=60))
        call()()
        assert statuses([call()()]) == ["singleflight; hit; ttl=60"]

    def test_get_flight_key(self, settings: Any) -> None:
        room = Room(open=True)
        key = lambda self, request: ("lesson", self.kwargs["pk"])  # noqa: E731
        view = view_in(room, flight_key=None, get_flight_key=key, flight_result_ttl=60)
        settings.ROOT_URLCONF = urls(view.as_view())
        assert statuses([call()(), call(path="/8/")(), call()()])[1:] == [
            "singleflight; fwd=miss; stored",
            "singleflight; hit; ttl=60",
        ]

    def test_the_signals_and_the_namespace_name_the_view(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view_in(Room(open=True)).as_view())
        with listening("flight_led") as told:
            call()()
        assert told[0][1].view == told[0][1].namespace == f"{__name__}.Lessons.post"

    def test_405_and_options_pass(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view_in(Room()).as_view())
        assert codes([call("put")(), call("options")()]) == [405, 200]

    def test_head_is_served_by_get(self, settings: Any) -> None:
        room = Room()
        get = lambda self, request, pk: room.stay()  # noqa: E731
        settings.ROOT_URLCONF = urls(view_in(room, get=get).as_view())
        leader, follower = fly(room, call("head"), call("head"))
        assert seen(leader) == seen(follower)
        assert room.visits == 1

    @pytest.mark.django_db(transaction=True)
    def test_with_atomic_requests_the_handler_is_in_a_transaction_inside(
        self, settings: Any
    ) -> None:
        def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse(str(connection.in_atomic_block))

        settings.ROOT_URLCONF = urls(view_in(Room(), post=handler, get=handler).as_view())
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            assert call()().content == b"True"
            assert call("get")().content == b"True"
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False


class TestMisplaced:
    def test_the_default_key_is_not_for_calling(self) -> None:
        with pytest.raises(NotImplementedError, match="flight_key says"):
            view_in(Room())().get_flight_key(request_like())

    def test_after_view(self) -> None:
        with pytest.raises(TypeError, match=r"class Late\(SingleFlightMixin, \.\.\.\)"):
            type("Late", (View, SingleFlightMixin), {"flight_key": "x"})
        with pytest.raises(TypeError, match="after View"):
            type("Later", (TemplateView, SingleFlightMixin), {"flight_key": "x"})

    def test_a_misspelt_option(self) -> None:
        with pytest.raises(TypeError, match="Did you mean flight_result_ttl"):
            view_in(Room(), flight_resultttl=5)

    def test_an_option_that_cant_work(self) -> None:
        with pytest.raises(ValueError, match="retry"):
            view_in(Room(), flight_retry=-1)

    def test_several_keys(self) -> None:
        with pytest.raises(TypeError, match="one key"):
            view_in(Room(), flight_key=["a", "b"])

    def test_without_a_key(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="flight_key"):
            view_in(Room(), flight_key=None).as_view()

    def test_a_key_for_a_handler_that_is_not_there(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="'creat'"):
            view_in(Room(), flight_key={"creat": "x"}).as_view()


class TestAfterTheChecks:
    """Followers have passed them, too: a caller without rights gets nobody's answer."""

    @pytest.mark.parametrize("first", ["login", "flight"])
    @pytest.mark.parametrize("mixin", [LoginRequiredMixin, UserPassesTestMixin])
    def test_a_follower_that_is_denied(self, first: str, mixin: Any, settings: Any) -> None:
        room = Room()
        bases = [SingleFlightMixin, mixin] if first == "flight" else [mixin, SingleFlightMixin]
        allowed = lambda self: "X-May" in self.request.headers  # noqa: E731
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.may_be_somebody"]
        view = view_in(room, *bases, View, test_func=allowed, flight_scope="global")
        settings.ROOT_URLCONF = urls(view.as_view(raise_exception=True))
        may = call(headers={"X-May": "1"})
        assert codes(fly(room, may, may, call(), waiting=1)) == [201, 201, 403]
        assert room.visits == 1


def may_be_somebody(get_response: Any) -> Any:
    from django.contrib.auth.models import AnonymousUser, User

    def middleware(request: Any) -> Any:
        request.user = User(pk=1) if "X-May" in request.headers else AnonymousUser()
        return get_response(request)

    return middleware


class May(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return "X-May" in request.headers


def viewset_in(room: Room, **attributes: Any) -> Any:
    class Lessons(SingleFlightMixin, ViewSet):
        def list(self, request: Any) -> Response:
            room.stay()
            return Response([1])

        def create(self, request: Any) -> Response:
            room.stay()
            return Response({"made": True}, status=201)

        @action(detail=True, methods=["post"])
        def publish(self, request: Any, pk: str) -> Response:
            room.stay()
            return Response({"published": pk})

    return type("Lessons", (Lessons,), attributes)


def routed(viewset: Any) -> Any:
    from django.urls import include

    router = SimpleRouter()
    router.register("lessons", viewset, basename="lesson")
    return urls(include(router.urls), "")


class TestRestFramework:
    def test_permissions_are_checked_for_followers(self, settings: Any) -> None:
        room = Room()

        class Lessons(SingleFlightMixin, APIView):
            flight_key = "lesson:<pk>"
            flight_scope = "global"
            permission_classes = (May,)

            def post(self, request: Any, pk: str) -> Response:
                room.stay()
                return Response({"made": True}, status=201)

        settings.ROOT_URLCONF = urls(Lessons.as_view())
        may = call(headers={"X-May": "1"})
        assert codes(fly(room, may, may, call(), waiting=1)) == [201, 201, 403]
        assert room.visits == 1

    def test_an_action_of_a_viewset(self, settings: Any) -> None:
        room = Room()
        viewset = viewset_in(room, flight_key={"publish": "lesson:<pk>"})
        settings.ROOT_URLCONF = routed(viewset)
        send = call(path="/lessons/7/publish/")
        leader, follower = fly(room, send, send)
        assert seen(leader) == seen(follower)
        assert follower.json() == {"published": "7"}
        assert room.visits == 1

    def test_keys_by_action(self, settings: Any) -> None:
        room = Room(open=True)
        keys = {"create": "lesson:<name>", "publish": "lesson:<pk>"}
        viewset = viewset_in(room, flight_key=keys, flight_result_ttl=60)
        settings.ROOT_URLCONF = routed(viewset)
        assert call(path="/lessons/")().status_code == 400, "a create needs its name"
        named = call(path="/lessons/", data={"name": "a"})
        assert codes([named(), named()]) == [201, 201]
        assert room.visits == 1
        listed = call("get", "/lessons/")
        assert statuses([listed(), listed()]) == ["", ""], "which nobody has a key for"
        assert room.visits == 3


class TestBesideTheLock:
    """Reads are coalesced and writes are locked, in either order of the mixins."""

    @pytest.mark.parametrize("order", [1, -1])
    def test_each_guards_its_methods(self, order: int, settings: Any) -> None:
        mixins = [SingleFlightMixin, SemaphoreLockMixin][::order]
        writes, reads = Room(), Room()
        get = lambda self, request, pk: reads.stay()  # noqa: E731
        view = view_in(
            writes,
            *mixins,
            View,
            get=get,
            lock_key="lesson:<pk>",
            flight_methods=("GET", "HEAD"),
        )
        settings.ROOT_URLCONF = urls(view.as_view())
        assert codes(meet(writes, call(), call())) == [201, 429]
        leader, follower = fly(reads, call("get"), call("get"))
        assert seen(leader) == seen(follower)
        assert (writes.visits, reads.visits) == (1, 1)

    @pytest.mark.parametrize("outer", ["lock", "flight"])
    def test_both_on_one_method(self, outer: str, settings: Any) -> None:
        """The mixin that is listed last asks first."""
        mixins = [SingleFlightMixin, SemaphoreLockMixin][:: 1 if outer == "lock" else -1]
        room = Room()
        locked: list[bool] = []

        def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            locked.append(held("lesson:7"))
            return room.stay()

        handler.__name__ = "post"
        view = view_in(room, *mixins, View, post=handler, lock_key="lesson:<pk>")
        settings.ROOT_URLCONF = urls(view.as_view())
        together = meet if outer == "lock" else fly
        assert codes(together(room, call(), call())) == [201, 429 if outer == "lock" else 201]
        assert locked == [True]
        assert not held("lesson:7")

    async def test_both_on_an_async_view(self, settings: Any) -> None:
        room = Room()

        async def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            assert await asyncio.to_thread(held, "lesson:7")
            return await room.astay()

        handler.__name__ = "post"
        bases = (SemaphoreLockMixin, SingleFlightMixin, View)
        view = view_in(room, *bases, post=handler, lock_key="lesson:<pk>")
        settings.ROOT_URLCONF = urls(view.as_view())
        assert codes(await afly(room, acall(), acall())) == [201, 201]


def test_the_client_raises_what_the_view_raises(settings: Any) -> None:
    def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
        raise ZeroDivisionError

    settings.ROOT_URLCONF = urls(view_in(Room(), post=handler).as_view())
    with pytest.raises(ZeroDivisionError):
        Client().post("/7/")
