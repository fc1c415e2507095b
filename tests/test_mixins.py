"""``SemaphoreLockMixin`` on Django's class views; for REST framework see ``test_drf``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.views import View
from django.views.generic import TemplateView

from singleflight_django import LeaseConflictError, SemaphoreLockMixin, semaphore_lock, signals
from singleflight_django.exceptions import NestedFlightError
from tests.meeting import (
    Room,
    ameet,
    apost,
    codes,
    held,
    listening,
    meet,
    post,
    request_like,
    together,
    urls,
)


def view_in(room: Room, *bases: type, **attributes: Any) -> Any:
    """A view class with a post() that stays in the room."""

    def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
        return room.stay()

    handler.__name__ = "post"
    attributes = {"lock_key": "lesson:<pk>", "post": handler, **attributes}
    return type("Lessons", bases or (SemaphoreLockMixin, View), attributes)


def async_view_in(room: Room, **attributes: Any) -> Any:
    async def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
        return await room.astay()

    handler.__name__ = "post"
    return view_in(room, post=handler, **attributes)


class TestPlacements:
    def test_a_view(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_in(room).as_view())
        assert codes(meet(room, post(), post())) == [201, 429]
        assert room.visits == 1
        assert not held("lesson:7")

    async def test_a_sync_view_under_asgi(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(view_in(room).as_view())
        assert codes(await ameet(room, apost(), apost())) == [201, 429]

    async def test_an_async_view(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(async_view_in(room).as_view())
        assert codes(await ameet(room, apost(), apost())) == [201, 429]
        assert room.visits == 1
        assert not await asyncio.to_thread(held, "lesson:7")

    def test_an_async_view_under_wsgi(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(async_view_in(room).as_view())
        assert codes(meet(room, post(), post())) == [201, 429]

    def test_a_subclass_that_overrides_the_handler(self, settings: Any) -> None:
        room = Room()
        parent = view_in(room)

        class Sub(parent):  # type: ignore[misc,valid-type]
            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                assert held("lesson:7")
                return super().post(request, pk)  # type: ignore[no-any-return]

        settings.ROOT_URLCONF = urls(Sub.as_view())
        assert codes(meet(room, post(), post())) == [201, 429]

    def test_another_method_than_the_view_has_is_405_and_takes_no_lease(
        self, settings: Any
    ) -> None:
        settings.ROOT_URLCONF = urls(view_in(Room()).as_view())
        with listening("lease_acquired") as told:
            assert Client().put("/7/").status_code == 405
            assert Client().options("/7/").status_code == 200
        assert told == []

    def test_get_passes(self, settings: Any) -> None:
        room = Room()
        get = lambda self, request, pk: HttpResponse()  # noqa: E731
        settings.ROOT_URLCONF = urls(view_in(room, get=get).as_view())
        assert codes(meet(room, post(), lambda: Client().get("/7/"))) == [201, 200]

    def test_after_view_it_is_refused_when_the_class_is_made(self) -> None:
        with pytest.raises(TypeError, match=r"class Late\(SemaphoreLockMixin, \.\.\.\)"):
            type("Late", (View, SemaphoreLockMixin), {"lock_key": "x"})
        with pytest.raises(TypeError, match="after View"):
            type("Later", (TemplateView, SemaphoreLockMixin), {"lock_key": "x"})

    def test_beside_a_decorator_of_the_same_key_it_is_nested(self, settings: Any) -> None:
        handler = semaphore_lock(key="lesson:<pk>")(lambda self, request, pk: HttpResponse())
        settings.ROOT_URLCONF = urls(view_in(Room(), post=handler).as_view())
        with pytest.raises(NestedFlightError):
            post()()

    def test_the_lease_is_on_the_request(self, settings: Any) -> None:
        def handler(self: Any, request: Any, pk: str) -> HttpResponse:
            request.lease.check()
            return HttpResponse(str(request.lease.key))

        settings.ROOT_URLCONF = urls(view_in(Room(), post=handler).as_view())
        assert post()().content == b"semaphore_lock:lesson:7"

    def test_the_signals_name_the_view(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view_in(Room(open=True)).as_view())
        with listening("lease_acquired") as told:
            post()()
        assert told[0][1].view == f"{__name__}.Lessons.post"


class TestAfterTheChecks:
    """A request that is denied takes no lease, whichever mixin comes first."""

    @pytest.mark.parametrize(
        "bases",
        [
            (SemaphoreLockMixin, LoginRequiredMixin, View),
            (LoginRequiredMixin, SemaphoreLockMixin, View),
        ],
        ids=["lock first", "login first"],
    )
    def test_beside_login_required(self, bases: tuple[type, ...], settings: Any) -> None:
        room = Room(open=True)
        settings.MIDDLEWARE = [f"{__name__}.authenticating"]
        settings.ROOT_URLCONF = urls(view_in(room, *bases, raise_exception=True).as_view())
        with listening("lease_acquired", "lease_rejected") as told:
            assert Client().post("/7/").status_code == 403
            assert told == []
            assert Client().post("/7/", headers={"X-User": "1"}).status_code == 201
        assert [name for name, _ in told] == ["lease_acquired"]

    def test_a_dispatch_that_denies(self, settings: Any) -> None:
        class Denying(SemaphoreLockMixin, View):
            lock_key = "lesson:<pk>"

            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                raise PermissionDenied

            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        settings.ROOT_URLCONF = urls(Denying.as_view())
        with listening("lease_acquired") as told:
            assert post()().status_code == 403
        assert told == []


def authenticating(get_response: Callable[..., Any]) -> Callable[..., Any]:
    class User(AnonymousUser):
        is_authenticated = True

    def middleware(request: Any) -> Any:
        request.user = User() if "X-User" in request.headers else AnonymousUser()
        return get_response(request)

    return middleware


class TestOptions:
    def test_each_is_an_attribute(self, settings: Any) -> None:
        room = Room()
        view = view_in(
            room,
            lock_on_conflict="skip",
            lock_namespace="lessons",
            lock_ttl=30,
            lock_wait=0.01,
            lock_methods=("POST",),
        )
        settings.ROOT_URLCONF = urls(view.as_view())
        with listening("lease_rejected") as told:
            assert codes(meet(room, post(), post())) == [201, 204]
        assert told[0][1].key == "lessons:lesson:7"

    def test_methods_that_are_not_named_pass(self, settings: Any) -> None:
        """A DELETE without a body isn't asked for a field of the body."""
        view = view_in(
            Room(open=True),
            lock_key="lesson:<body.uuid>",
            lock_methods=("POST",),
            delete=lambda self, request, pk: HttpResponse(status=204),
        )
        settings.ROOT_URLCONF = urls(view.as_view())
        assert Client().delete("/7/").status_code == 204
        assert Client().post("/7/").status_code == 400

    def test_keys_by_handler(self, settings: Any) -> None:
        room = Room()
        view = view_in(
            room,
            lock_key={"post": "lesson:<pk>"},
            put=lambda self, request, pk: HttpResponse(status=202),
        )
        settings.ROOT_URLCONF = urls(view.as_view())
        assert codes(meet(room, post(), post(), lambda: Client().put("/7/"))) == [201, 429, 202]

    def test_a_callable_key_gets_the_request_and_not_the_view(self, settings: Any) -> None:
        def key(request: HttpRequest, pk: str) -> tuple[str, str]:
            return (request.method or "", pk)

        room = Room()
        settings.ROOT_URLCONF = urls(view_in(room, lock_key=key).as_view())
        _, taken = meet(room, post(), lambda: held("POST:7"))
        assert taken

    def test_a_callable_for_conflicts_gets_the_request_and_not_the_view(
        self, settings: Any
    ) -> None:
        def answer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
            return HttpResponse(request.path, status=409)

        room = Room()
        settings.ROOT_URLCONF = urls(view_in(room, lock_on_conflict=answer).as_view())
        _, refused = meet(room, post(), post())
        assert (refused.status_code, refused.content) == (409, b"/7/")

    def test_as_view_takes_each(self, settings: Any) -> None:
        room = Room()
        view = view_in(room)
        settings.ROOT_URLCONF = urls(
            view.as_view(lock_key="import:<pk>", lock_on_conflict="skip", lock_namespace="n")
        )
        answers = meet(room, post(), post(), lambda: held("import:7", "n"))
        assert codes(answers[:2]) == [201, 204]
        assert answers[2]

    def test_as_view_may_name_the_key_alone(self, settings: Any) -> None:
        room = Room()
        view = view_in(room, lock_key=None)
        settings.ROOT_URLCONF = urls(view.as_view(lock_key="import:<pk>"))
        assert codes(meet(room, post(), post())) == [201, 429]

    def test_observing(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view_in(Room(open=True), lock_observe=True).as_view())
        with semaphore_lock("lesson:7"), listening("lease_rejected") as told:
            assert codes(together(post())) == [201]
        assert len(told) == 1

    def test_what_is_said_once_is_read_once(self, settings: Any, monkeypatch: Any) -> None:
        """The key is parsed when the class is made, not for each request."""
        settings.ROOT_URLCONF = urls(view_in(Room(open=True)).as_view())
        monkeypatch.delattr("singleflight_django.keys.parse")
        assert codes([post()(), post()()]) == [201, 201]


class TestOverrides:
    def test_get_lock_key(self, settings: Any) -> None:
        def get_lock_key(self: Any, request: HttpRequest) -> tuple[str, str]:
            return ("computed", self.kwargs["pk"])

        room = Room()
        settings.ROOT_URLCONF = urls(view_in(room, get_lock_key=get_lock_key).as_view())
        answers = meet(room, post(), post(), lambda: held("computed:7"))
        assert codes(answers[:2]) == [201, 429]
        assert answers[2]

    def test_get_lock_key_without_a_lock_key(self, settings: Any) -> None:
        get_lock_key = lambda self, request: ["b", "a"]  # noqa: E731
        room = Room()
        view = view_in(room, lock_key=None, get_lock_key=get_lock_key)
        settings.ROOT_URLCONF = urls(view.as_view())
        answers = meet(room, post(), post(), lambda: held("a") and held("b"))
        assert codes(answers[:2]) == [201, 429]
        assert answers[2]

    async def test_get_lock_key_of_an_async_view(self, settings: Any) -> None:
        get_lock_key = lambda self, request: ("computed", self.kwargs["pk"])  # noqa: E731
        room = Room()
        settings.ROOT_URLCONF = urls(async_view_in(room, get_lock_key=get_lock_key).as_view())
        assert codes(await ameet(room, apost(), apost())) == [201, 429]

    def test_get_lock_key_that_finds_none(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(
            view_in(Room(), get_lock_key=lambda self, request: None).as_view()
        )
        with pytest.raises(TypeError, match="no usable key"):
            post()()

    def test_lock_conflict(self, settings: Any) -> None:
        def lock_conflict(self: Any, request: HttpRequest, conflict: Any) -> HttpResponse:
            response = super(view, self).lock_conflict(request, conflict)
            response["X-Key"] = conflict.key
            return response  # type: ignore[no-any-return]

        room = Room()
        view = view_in(room, lock_conflict=lock_conflict, lock_on_conflict="skip")
        settings.ROOT_URLCONF = urls(view.as_view())
        _, skipped = meet(room, post(), post())
        assert (skipped.status_code, skipped["X-Key"]) == (204, "semaphore_lock:lesson:7")

    async def test_lock_conflict_of_an_async_view(self, settings: Any) -> None:
        async def lock_conflict(self: Any, request: HttpRequest, conflict: Any) -> HttpResponse:
            await asyncio.sleep(0)
            return HttpResponse(self.kwargs["pk"], status=409)

        room = Room()
        settings.ROOT_URLCONF = urls(async_view_in(room, lock_conflict=lock_conflict).as_view())
        _, refused = await ameet(room, apost(), apost())
        assert (refused.status_code, refused.content) == (409, b"7")

    async def test_a_sync_lock_conflict_of_an_async_view_may_call_the_default(
        self, settings: Any
    ) -> None:
        def lock_conflict(self: Any, request: HttpRequest, conflict: Any) -> HttpResponse:
            response = super(view, self).lock_conflict(request, conflict)
            response["X-Mine"] = "yes"
            return response  # type: ignore[no-any-return]

        room = Room()
        view = async_view_in(room, lock_conflict=lock_conflict)
        settings.ROOT_URLCONF = urls(view.as_view())
        accept = {"Accept": "text/html"}
        browser = lambda: AsyncClient().post("/7/", headers=accept)  # noqa: E731
        _, refused = await ameet(room, apost(), browser)
        assert (refused.status_code, refused["X-Mine"]) == (429, "yes")
        assert b"<html" in refused.content


class TestMisuse:
    @pytest.mark.parametrize(
        ("attributes", "error", "cure"),
        [
            ({"lock_ttl": 0}, ValueError, "ttl must be more than 0"),
            ({"lock_key": "lesson:<"}, ValueError, "lesson:<"),
            ({"lock_key": 7}, TypeError, "template"),
            ({"lock_key": {"post": "lesson:<"}}, ValueError, "lesson:<"),
            ({"lock_on_conflict": "yield"}, ValueError, "is for `with`"),
            ({"lock_on_conflict": "wait"}, ValueError, "on_conflict must be one of"),
            ({"lock_on_store_error": "ignore"}, ValueError, "on_store_error"),
            ({"lock_limit": 0}, ValueError, "limit"),
            ({"lock_methods": "POST"}, TypeError, "methods must be a tuple"),
            ({"lock_cache": "nowhere"}, ValueError, "cache must be one of"),
            ({"lock_methodes": ("POST",)}, TypeError, "Did you mean lock_methods"),
            ({"lock_keys": "lesson"}, TypeError, "Did you mean lock_key"),
        ],
        ids=str,
    )
    def test_a_bad_option_when_the_class_is_made(
        self, attributes: Any, error: Any, cure: str
    ) -> None:
        with pytest.raises(error, match=cure):
            view_in(Room(), **attributes)

    def test_an_async_get_lock_key(self) -> None:
        async def get_lock_key(self: Any, request: HttpRequest) -> str:
            return "x"

        with pytest.raises(TypeError, match="is async"):
            view_in(Room(), get_lock_key=get_lock_key)

    def test_an_attribute_of_the_users_own(self) -> None:
        view_in(Room(), lock_file="/run/lesson.lock").as_view()

    def test_a_bad_option_of_as_view_when_it_is_called(self) -> None:
        with pytest.raises(ValueError, match="ttl"):
            view_in(Room()).as_view(lock_ttl=-1)
        with pytest.raises(TypeError, match="lock_tll"):
            view_in(Room()).as_view(lock_tll=1)

    def test_no_key(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="needs a lock_key, or get_lock_key"):
            view_in(Room(), lock_key=None).as_view()

    def test_a_key_for_a_handler_that_is_not_there(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="no such handler or action"):
            view_in(Room(), lock_key={"psot": "lesson:<pk>"}).as_view()

    def test_there_is_no_key_to_call_super_for(self) -> None:
        view = view_in(Room())()
        with pytest.raises(NotImplementedError):
            view.get_lock_key(request_like())


class TestTransactions:
    """With ATOMIC_REQUESTS the lease is outside of the transaction."""

    pytestmark = pytest.mark.django_db(transaction=True)

    @pytest.fixture(autouse=True)
    def _atomic(self, monkeypatch: Any) -> None:
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)

    def test_a_locked_handler(self, settings: Any) -> None:
        seen = []

        def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            seen.append(("view", connection.in_atomic_block))
            return HttpResponse()

        def note(signal: Any, **kwargs: Any) -> None:
            name = "acquired" if signal is signals.lease_acquired else "released"
            seen.append((name, connection.in_atomic_block))

        settings.ROOT_URLCONF = urls(view_in(Room(), post=handler).as_view())
        both = (signals.lease_acquired, signals.lease_released)
        for signal in both:
            signal.connect(note)
        try:
            assert post()().status_code == 200
        finally:
            for signal in both:
                signal.disconnect(note)
        assert seen == [("acquired", False), ("view", True), ("released", False)]

    @pytest.mark.parametrize("key", ["lesson:<pk>", {"post": "lesson:<pk>"}])
    def test_a_handler_that_is_not_locked(self, key: Any, settings: Any) -> None:
        def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse(str(connection.in_atomic_block))

        view = view_in(Room(), lock_key=key, get=handler, put=handler).as_view()
        settings.ROOT_URLCONF = urls(view)
        assert Client().get("/7/").content == b"True"
        assert Client().put("/7/").content == b"True"

    def test_a_site_that_opts_out_itself(self, settings: Any) -> None:
        from django.db import transaction

        def handler(self: Any, request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse(str(connection.in_atomic_block))

        view = transaction.non_atomic_requests(view_in(Room(), post=handler).as_view())
        settings.ROOT_URLCONF = urls(view)
        assert post()().content == b"False"

    async def test_an_async_view_is_told_by_django(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(async_view_in(Room(open=True)).as_view())
        with pytest.raises(RuntimeError, match="ATOMIC_REQUESTS with async views"):
            await apost()()
