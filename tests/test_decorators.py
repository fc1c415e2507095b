"""``semaphore_lock`` and ``single_flight`` on views, wherever one can put them, through Django."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.test import Client
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from singleflight_django import semaphore_lock, single_flight
from tests.flying import acall, afly, call, fly, seen
from tests.meeting import (
    Room,
    afunction,
    ameet,
    apost,
    codes,
    function,
    held,
    listening,
    meet,
    post,
    request_like,
    urls,
)

Build = Callable[[Room, Any], Any]
guard = functools.partial(semaphore_lock, key="lesson:<pk>")
flight = functools.partial(single_flight, key="lesson:<pk>")


def other_decorator(view: Callable[..., Any]) -> Callable[..., Any]:
    """As third parties write them: it keeps the colour of the view."""
    if iscoroutinefunction(view):

        async def ainner(*args: Any, **kwargs: Any) -> Any:
            return await view(*args, **kwargs)

        return functools.wraps(view)(ainner)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return functools.wraps(view)(inner)


def returns_the_coroutine(view: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around an async view, marked as Django asks for it."""

    @functools.wraps(view)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return markcoroutinefunction(inner)


class Called:
    """An object that is a view."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def __call__(self, request: HttpRequest, pk: str) -> HttpResponse:
        return self.room.stay()


class AsyncCalled(Called):
    def __init__(self, room: Room) -> None:
        super().__init__(room)
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest, pk: str) -> HttpResponse:  # type: ignore[override]
        return await self.room.astay()


def view_class(room: Room, decorate: Callable[[Any], Any] = lambda view: view) -> type[View]:
    class Lessons(View):
        @decorate
        def post(self, request: HttpRequest, pk: str) -> HttpResponse:
            return room.stay()

    return Lessons


def async_view_class(room: Room, decorate: Callable[[Any], Any] = lambda view: view) -> type[View]:
    class Lessons(View):
        @decorate
        async def post(self, request: HttpRequest, pk: str) -> HttpResponse:
            return await room.astay()

    return Lessons


def on_dispatch(view: type[View], decorate: Callable[[Any], Any]) -> type[View]:
    class Guarded(view):  # type: ignore[valid-type,misc]
        @decorate
        def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(request, *args, **kwargs)

    return Guarded


def calls_super(view: type[View]) -> type[View]:
    class Sub(view):  # type: ignore[valid-type,misc]
        def post(self, request: HttpRequest, pk: str) -> Any:
            response = super().post(request, pk)
            response["X-Sub"] = "yes"
            return response

    return Sub


def acalls_super(view: type[View]) -> type[View]:
    class Sub(view):  # type: ignore[valid-type,misc]
        async def post(self, request: HttpRequest, pk: str) -> Any:
            response = await super().post(request, pk)
            response["X-Sub"] = "yes"
            return response

    return Sub


SYNC: dict[str, Build] = {
    "function": lambda room, guard: guard(function(room)),
    "partial": lambda room, guard: guard(functools.partial(function(room))),
    "callable object": lambda room, guard: guard(Called(room)),
    "above another": lambda room, guard: guard(other_decorator(function(room))),
    "beneath another": lambda room, guard: other_decorator(guard(function(room))),
    "method": lambda room, guard: view_class(room, guard).as_view(),
    "method_decorator": lambda room, guard: view_class(room, method_decorator(guard)).as_view(),
    "dispatch": lambda room, guard: on_dispatch(view_class(room), guard).as_view(),
    "method_decorator on dispatch": lambda room, guard: on_dispatch(
        view_class(room), method_decorator(guard)
    ).as_view(),
    "class, name=post": lambda room, guard: method_decorator(guard, name="post")(
        view_class(room)
    ).as_view(),
    "class, name=dispatch": lambda room, guard: method_decorator(guard, name="dispatch")(
        view_class(room)
    ).as_view(),
    "as_view": lambda room, guard: guard(view_class(room).as_view()),
    "super": lambda room, guard: calls_super(view_class(room, guard)).as_view(),
    "super, method_decorator": lambda room, guard: calls_super(
        view_class(room, method_decorator(guard))
    ).as_view(),
}
ASYNC: dict[str, Build] = {
    "function": lambda room, guard: guard(afunction(room)),
    "partial": lambda room, guard: guard(functools.partial(afunction(room))),
    "callable object": lambda room, guard: guard(AsyncCalled(room)),
    "above another": lambda room, guard: guard(other_decorator(afunction(room))),
    "beneath another": lambda room, guard: other_decorator(guard(afunction(room))),
    "above a plain wrapper": lambda room, guard: guard(returns_the_coroutine(afunction(room))),
    "method": lambda room, guard: async_view_class(room, guard).as_view(),
    "method_decorator": lambda room, guard: async_view_class(
        room, method_decorator(guard)
    ).as_view(),
    "dispatch": lambda room, guard: on_dispatch(async_view_class(room), guard).as_view(),
    "method_decorator on dispatch": lambda room, guard: on_dispatch(
        async_view_class(room), method_decorator(guard)
    ).as_view(),
    "class, name=post": lambda room, guard: method_decorator(guard, name="post")(
        async_view_class(room)
    ).as_view(),
    "class, name=dispatch": lambda room, guard: method_decorator(guard, name="dispatch")(
        async_view_class(room)
    ).as_view(),
    "as_view": lambda room, guard: guard(async_view_class(room).as_view()),
    "super": lambda room, guard: acalls_super(async_view_class(room, guard)).as_view(),
}
each_sync = pytest.mark.parametrize("build", SYNC.values(), ids=SYNC)
each_async = pytest.mark.parametrize("build", ASYNC.values(), ids=ASYNC)


class TestPlacements:
    """One of two overlapping requests runs, wherever the guard stands, in both stacks."""

    @each_sync
    def test_a_sync_view_under_wsgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, guard()))
        assert codes(meet(room, post(), post())) == [201, 429]
        assert codes([post("/8/")()]) == [201]
        assert room.visits == 2
        assert not held("lesson:7")

    @each_sync
    async def test_a_sync_view_under_asgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, guard()))
        assert codes(await ameet(room, apost(), apost())) == [201, 429]
        assert room.visits == 1
        assert not await asyncio.to_thread(held, "lesson:7")

    @each_async
    async def test_an_async_view_under_asgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, guard()))
        assert codes(await ameet(room, apost(), apost())) == [201, 429]
        assert room.visits == 1
        assert not await asyncio.to_thread(held, "lesson:7")

    @each_async
    def test_an_async_view_under_wsgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, guard()))
        assert codes(meet(room, post(), post())) == [201, 429]
        assert room.visits == 1
        assert not held("lesson:7")

    @pytest.mark.parametrize("view", [function(Room()), functools.partial(function(Room()))])
    def test_a_sync_view_stays_sync(self, view: Any) -> None:
        assert not iscoroutinefunction(guard()(view))

    @pytest.mark.parametrize(
        "view",
        [
            afunction(Room()),
            functools.partial(afunction(Room())),
            AsyncCalled(Room()),
            async_view_class(Room()).as_view(),
            returns_the_coroutine(afunction(Room())),
        ],
    )
    def test_an_async_view_stays_async(self, view: Any) -> None:
        assert iscoroutinefunction(view)
        assert iscoroutinefunction(guard()(view))

    async def test_an_unmarked_async_object_is_awaited_under_its_lease(self) -> None:
        class Unmarked:
            async def __call__(self, request: HttpRequest, pk: str) -> bool:
                return await asyncio.to_thread(held, "lesson:7")

        view = guard()(Unmarked())
        assert not iscoroutinefunction(view)
        assert await view(request_like(), pk="7") is True
        assert not await asyncio.to_thread(held, "lesson:7")

    async def test_a_plain_function_that_returns_a_coroutine_is_awaited_under_its_lease(
        self,
    ) -> None:
        async def look() -> bool:
            return await asyncio.to_thread(held, "lesson:7")

        @guard()
        def view(request: HttpRequest, pk: str) -> Any:
            return look()

        assert await view(request_like(), pk="7") is True
        assert not await asyncio.to_thread(held, "lesson:7")

    async def test_a_dispatch_that_answers_without_awaiting_frees_the_key(
        self, settings: Any
    ) -> None:
        class Denying(async_view_class(Room(open=True))):  # type: ignore[misc]
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return HttpResponse(status=403)

        view = method_decorator(guard(), name="dispatch")(Denying).as_view()
        settings.ROOT_URLCONF = urls(view)
        assert (await apost()()).status_code == 403
        assert not await asyncio.to_thread(held, "lesson:7")

    async def test_a_dispatch_that_raises_before_it_awaits_frees_the_key(
        self, settings: Any
    ) -> None:
        class Refusing(async_view_class(Room(open=True))):  # type: ignore[misc]
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                raise Http404

        view = method_decorator(guard(), name="dispatch")(Refusing).as_view()
        settings.ROOT_URLCONF = urls(view)
        assert (await apost()()).status_code == 404
        assert not await asyncio.to_thread(held, "lesson:7")

    def test_two_views_of_one_guard_keep_their_own_names(self, settings: Any) -> None:
        shared = guard()

        @shared
        def one(request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse()

        @shared
        def two(request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse()

        with listening("lease_acquired") as told:
            one(request_like(), pk="7")
            two(request_like(), pk="7")
        assert [facts.view.rsplit(".", 1)[1] for _, facts in told] == ["one", "two"]

    def test_a_decorated_method_has_its_own_name_in_the_signals(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(view_class(room, method_decorator(guard())).as_view())
        with listening("lease_acquired") as told:
            post()()
        assert told[0][1].view.endswith("Lessons.post")


def assert_flown_once(room: Room, leader: Any, follower: Any) -> None:
    assert leader.status_code == 201
    assert seen(follower) == seen(leader)
    assert room.visits == 1


class TestPlacementsOfAFlight:
    """One of two overlapping requests runs, and both get its answer, wherever the guard stands."""

    @each_sync
    def test_a_sync_view_under_wsgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, flight()))
        assert_flown_once(room, *fly(room, call(), call()))

    @each_sync
    async def test_a_sync_view_under_asgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, flight()))
        assert_flown_once(room, *(await afly(room, acall(), acall())))

    @each_async
    async def test_an_async_view_under_asgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, flight()))
        assert_flown_once(room, *(await afly(room, acall(), acall())))

    @each_async
    def test_an_async_view_under_wsgi(self, build: Build, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(build(room, flight()))
        assert_flown_once(room, *fly(room, call(), call()))

    @pytest.mark.parametrize("order", ["above", "beneath"])
    @pytest.mark.parametrize("make", [function, afunction])
    def test_csrf_exempt_in_both_orders(self, order: str, make: Any, settings: Any) -> None:
        room = Room()
        view = make(room)
        both = flight()(csrf_exempt(view)) if order == "above" else csrf_exempt(flight()(view))
        settings.ROOT_URLCONF = urls(both)
        send = lambda: Client(enforce_csrf_checks=True).post("/7/")  # noqa: E731
        assert codes(fly(room, send, send)) == [201, 201]
        assert room.visits == 1
        settings.ROOT_URLCONF = urls(flight()(view))
        assert send().status_code == 403


class TestMethods:
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
    def test_safe_methods_pass_while_a_post_is_inside(self, method: str, settings: Any) -> None:
        room = Room()

        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return room.stay() if request.method == "POST" else HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        safe = functools.partial(Client().generic, method, "/7/")
        assert codes(meet(room, post(), safe)) == [201, 200]

    def test_a_slow_preflight_does_not_refuse_its_own_post(self, settings: Any) -> None:
        room = Room()

        class Lessons(View):
            @method_decorator(guard())
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                return super().dispatch(request, *args, **kwargs)

            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse(status=201)

            def options(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
                return room.stay()

        settings.ROOT_URLCONF = urls(Lessons.as_view())
        preflight = functools.partial(Client().options, "/7/")
        assert codes(meet(room, preflight, post())) == [201, 201]

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
    def test_unsafe_methods_are_guarded(self, method: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard()(function(room)))
        unsafe = functools.partial(Client().generic, method, "/7/")
        assert codes(meet(room, unsafe, post())) == [201, 429]

    def test_methods_can_be_chosen(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(methods=("GET",))(function(room)))
        get = functools.partial(Client().get, "/7/")
        first, second = meet(room, get, get)
        assert codes([first, second]) == [201, 429]
        assert codes([post()()]) == [201]


class TestAttributes:
    """What others have noted on a view survives, in both orders."""

    @pytest.mark.parametrize("order", ["above", "beneath"])
    def test_csrf_exemption(self, order: str, settings: Any) -> None:
        view = function(Room(open=True))
        both = guard()(csrf_exempt(view)) if order == "above" else csrf_exempt(guard()(view))
        settings.ROOT_URLCONF = urls(both)
        assert Client(enforce_csrf_checks=True).post("/7/").status_code == 201
        settings.ROOT_URLCONF = urls(guard()(view))
        assert Client(enforce_csrf_checks=True).post("/7/").status_code == 403

    @pytest.mark.parametrize("order", ["above", "beneath"])
    def test_opting_out_of_transactions(self, order: str) -> None:
        view, out = function(Room()), transaction.non_atomic_requests
        both = guard()(out(view)) if order == "above" else out(guard()(view))
        assert both._non_atomic_requests == {"default"}  # type: ignore[union-attr]

    def test_what_introspection_reads(self) -> None:
        view = view_class(Room()).as_view()
        guarded = guard()(view)
        assert guarded.view_class is view.view_class
        assert guarded.view_initkwargs == {}
        assert (guarded.__name__, guarded.__doc__) == (view.__name__, view.__doc__)

    def test_name_module_and_signature(self) -> None:
        def create(request: HttpRequest, pk: int = 0, *, dry: bool = False) -> HttpResponse:
            """Create it."""
            return HttpResponse()

        guarded = guard()(create)
        assert (guarded.__name__, guarded.__doc__) == ("create", "Create it.")
        assert guarded.__module__ == __name__
        assert list(inspect.signature(guarded).parameters) == ["request", "pk", "dry"]
        assert inspect.signature(guarded).return_annotation is HttpResponse

    def test_a_signature_with_names_for_type_checkers_only_is_left_alone(self) -> None:
        def create(request: Nowhere) -> HttpResponse:  # type: ignore[name-defined]  # noqa: F821
            return HttpResponse()

        parameters = inspect.signature(guard()(create)).parameters
        assert parameters["request"].annotation == "Nowhere"


class TestMisuse:
    """Wrong use fails when the module is imported, and says what to do."""

    def test_a_class(self) -> None:
        with pytest.raises(TypeError, match=r"method_decorator.*SemaphoreLockMixin"):
            guard()(View)

    def test_no_callable(self) -> None:
        with pytest.raises(TypeError, match="decorates a view"):
            guard()("create")  # type: ignore[type-var]

    def test_a_function_that_takes_nothing(self) -> None:
        def task() -> None: ...

        with pytest.raises(TypeError, match=r"takes no request.*with semaphore_lock"):
            guard()(task)

    @pytest.mark.parametrize("kind", ["generator", "async generator"])
    def test_a_generator(self, kind: str) -> None:
        def generator(request: HttpRequest) -> Any:
            yield b""

        async def async_generator(request: HttpRequest) -> Any:
            yield b""

        view: Any = generator if kind == "generator" else async_generator
        with pytest.raises(TypeError, match="StreamingHttpResponse"):
            guard()(view)

    def test_a_call_without_a_request(self) -> None:
        @semaphore_lock(key="import")
        def task(number: int) -> None: ...

        with pytest.raises(TypeError, match="with semaphore_lock"):
            task(7)

    async def test_an_async_call_without_a_request(self) -> None:
        @semaphore_lock(key="import")
        async def task(number: int) -> None: ...

        with pytest.raises(TypeError, match="with semaphore_lock"):
            await task(7)

    def test_something_that_has_a_request_is_not_taken_for_it(self) -> None:
        class Lessons(View):
            _request: Any = None

            @semaphore_lock(key="lesson:<pk>")
            def post(self, request: HttpRequest, pk: str) -> HttpRequest:
                return request

        view = Lessons()
        view._request = request_like(path="/another/")
        request = request_like()
        assert view.post(request, pk="7") is request

    def test_the_status_form_on_a_view(self) -> None:
        with pytest.raises(ValueError, match='"yield" is for `with`'):
            guard(on_conflict="yield")(function(Room()))

    @pytest.mark.parametrize(
        ("options", "error", "cure"),
        [
            ({"key": ""}, ValueError, "key"),
            ({"key": "lesson:<"}, ValueError, "lesson"),
            ({"key": 7}, TypeError, "template"),
            ({"key": []}, ValueError, "names no key"),
            ({"key": ("a", "b")}, TypeError, "tuple"),
            ({"ttl": 0}, ValueError, "ttl must be more than 0"),
            ({"ttl": -1}, ValueError, "ttl must be more than 0"),
            ({"ttl": timedelta(0)}, ValueError, "ttl must be more than 0"),
            ({"ttl": "30"}, TypeError, "ttl must be a number of seconds or a timedelta"),
            ({"ttl": True}, TypeError, "ttl must be a number"),
            ({"ttl": float("inf")}, ValueError, "ttl"),
            ({"ttl": float("nan")}, ValueError, "ttl"),
            ({"wait": -1}, ValueError, "wait must be 0 or more"),
            ({"wait": None}, ValueError, "wait must be a number"),
            ({"max_hold": 0}, ValueError, "max_hold must be more than 0"),
            ({"namespace": ""}, ValueError, "namespace must be a non-empty str"),
            ({"namespace": None}, ValueError, "namespace must be a non-empty str"),
            ({"limit": 0}, ValueError, "limit must be a whole number of 1 or more"),
            ({"limit": 1.5}, ValueError, "limit must be a whole number"),
            ({"limit": True}, ValueError, "limit must be a whole number"),
            ({"methods": "POST"}, TypeError, r'\("POST", "PUT"\)'),
            ({"methods": ("post",)}, ValueError, "'post' is not one"),
            ({"methods": ()}, ValueError, "never be used"),
            ({"methods": 7}, TypeError, "methods must be a tuple"),
            ({"on_conflict": "wait"}, ValueError, "'reject', 'skip', 'yield'"),
            ({"on_store_error": "ignore"}, ValueError, "'reject', 'proceed'"),
            ({"renew": "no"}, TypeError, "renew must be True or False"),
            ({"observe": 1}, TypeError, "observe must be True or False"),
            ({"cache": "nowhere"}, ValueError, "cache must be one of 'default'"),
            ({"timeout": 5}, TypeError, "timeout"),
        ],
        ids=str,
    )
    def test_a_bad_option(self, options: Any, error: Any, cure: str) -> None:
        with pytest.raises(error, match=cure):
            semaphore_lock(**{"key": "lesson:<pk>", **options})

    @pytest.mark.parametrize("ttl", [0.0004, 0.5, 0.999, 1.9, timedelta(seconds=0.6), 30])
    def test_a_short_ttl_is_no_shorter_than_asked(self, ttl: Any, redis_client: Any) -> None:
        """Sub-second lives are rounded up to a millisecond, never down to nothing (D04)."""
        with semaphore_lock("import:7", ttl=ttl, renew=False) as lease:
            assert lease.ttl == (0.6 if isinstance(ttl, timedelta) else ttl)
            if lease.ttl > 0.1:
                assert held("import:7")

    def test_without_a_ttl_the_setting_is_meant(self, settings: Any) -> None:
        lock = semaphore_lock("import:7")
        settings.SINGLEFLIGHT_TTL = 3
        with lock as lease:
            assert lease.ttl == 3
