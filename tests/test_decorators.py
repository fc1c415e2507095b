"""``semaphore_lock`` on views, in every place where one can put it, through Django's handlers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from singleflight_django import LeaseConflictError, semaphore_lock
from singleflight_django.exceptions import NestedFlightError
from tests.meeting import (
    PATIENCE,
    Room,
    ameet,
    apost,
    held,
    listening,
    meet,
    post,
    request_like,
    together,
    urls,
)

Build = Callable[[Room, Any], Any]
guard = functools.partial(semaphore_lock, key="lesson:<pk>")


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


def function(room: Room) -> Callable[..., Any]:
    def create(request: HttpRequest, pk: str) -> HttpResponse:
        return room.stay()

    return create


def afunction(room: Room) -> Callable[..., Any]:
    async def create(request: HttpRequest, pk: str) -> HttpResponse:
        return await room.astay()

    return create


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


def codes(responses: list[Any]) -> list[int]:
    return [response.status_code for response in responses]


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
            ({"on_store_error": "database"}, ValueError, "not there yet"),
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


class TestConflicts:
    def test_a_rejection_says_when_to_come_again(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard()(function(room)))
        _, refused = meet(room, post(), post())
        assert refused.status_code == 429
        assert refused["Retry-After"] == "1"
        assert refused["Cache-Control"] == "no-store"
        assert refused["Content-Type"] == "application/problem+json"
        assert refused.json()["type"] == "urn:singleflight-django:conflict"

    def test_a_rejection_fills_no_log_with_warnings(self, settings: Any, caplog: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard()(function(room)))
        with caplog.at_level(logging.WARNING):
            assert codes(meet(room, post(), post())) == [201, 429]
        assert caplog.records == []

    def test_skip_is_204_without_a_body_or_a_type(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict="skip")(function(room)))
        _, skipped = meet(room, post(), post())
        assert (skipped.status_code, skipped.content) == (204, b"")
        assert "Content-Type" not in skipped

    async def test_skip_in_an_async_view(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict="skip")(afunction(room)))
        _, skipped = await ameet(room, apost(), apost())
        assert (skipped.status_code, skipped.content) == (204, b"")

    @pytest.mark.parametrize("colour", ["sync", "async"])
    def test_a_callable_answers_in_a_sync_view(self, colour: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=ANSWERS[colour])(function(room)))
        _, answer = meet(room, post(), post())
        assert (answer.status_code, answer.content) == (409, b"/7/ semaphore_lock:lesson:7")

    @pytest.mark.parametrize("colour", ["sync", "async"])
    async def test_a_callable_answers_in_an_async_view(self, colour: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=ANSWERS[colour])(afunction(room)))
        _, answer = await ameet(room, apost(), apost())
        assert (answer.status_code, answer.content) == (409, b"/7/ semaphore_lock:lesson:7")

    async def test_a_sync_callable_does_not_run_on_the_event_loop(self, settings: Any) -> None:
        def answer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return HttpResponse(status=409)

        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=answer)(afunction(room)))
        assert codes(await ameet(room, apost(), apost())) == [201, 409]

    def test_a_callable_may_raise(self, settings: Any) -> None:
        def answer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
            raise Http404

        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=answer)(function(room)))
        assert codes(meet(room, post(), post())) == [201, 404]
        assert not held("lesson:7")

    def test_a_callable_that_returns_nothing_leaves_it_at_429(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=lambda r, c: None)(function(room)))
        assert codes(meet(room, post(), post())) == [201, 429]

    def test_the_remaining_lease_is_told_to_a_callable(self, settings: Any) -> None:
        told = []

        def answer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
            told.append(conflict.retry_after)
            return HttpResponse(status=429)

        room = Room()
        settings.ROOT_URLCONF = urls(guard(on_conflict=answer, ttl=30)(function(room)))
        meet(room, post(), post())
        assert 25 < told[0] <= 30

    def test_a_rejected_delivery_comes_again_and_is_processed(self, settings: Any) -> None:
        """The default says "not now", so a provider that retries on non-2xx loses nothing (D25)."""
        room, processed = Room(), []

        @guard()
        def webhook(request: HttpRequest, pk: str) -> HttpResponse:
            room.stay()
            if room.visits == 1:
                raise RuntimeError("the first delivery fails")
            processed.append(pk)
            return HttpResponse(status=200)

        settings.ROOT_URLCONF = urls(webhook)
        lenient = functools.partial(Client(raise_request_exception=False).post, "/7/")
        first, second = meet(room, lenient, post())
        assert codes([first, second]) == [500, 429]
        assert codes([post()()]) == [200]
        assert processed == ["7"]


def _answer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
    return HttpResponse(f"{request.path} {conflict.key}", status=409)


async def _aanswer(request: HttpRequest, conflict: LeaseConflictError) -> HttpResponse:
    await asyncio.sleep(0)
    return _answer(request, conflict)


ANSWERS: dict[str, Any] = {"sync": _answer, "async": _aanswer}


class TestWaiting:
    def test_a_waiting_request_runs_as_soon_as_the_first_has_left(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(wait=PATIENCE)(function(room)))
        with listening("lease_acquired") as told:
            assert codes(_one_waits(room, post)) == [201, 201]
        assert 0 < told[1][1].wait < 2  # type: ignore[operator]
        assert room.visits == 2

    async def test_a_waiting_async_request_runs_as_soon_as_the_first_has_left(
        self, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(wait=PATIENCE)(afunction(room)))
        first = asyncio.ensure_future(apost()())
        await room.await_()
        with listening("lease_acquired") as told:
            second = asyncio.ensure_future(apost()())
            await asyncio.to_thread(_someone_waits)
            room.door.set()
            assert codes(await asyncio.gather(first, second)) == [201, 201]
        assert 0 < told[0][1].wait < 2  # type: ignore[operator]

    def test_used_up_it_is_429(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(wait=0.05)(function(room)))
        assert codes(meet(room, post(), post())) == [201, 429]

    async def test_used_up_it_is_429_in_an_async_view(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(wait=0.05)(afunction(room)))
        assert codes(await ameet(room, apost(), apost())) == [201, 429]

    def test_used_up_it_is_skipped(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(wait=0.05, on_conflict="skip")(function(room)))
        assert codes(meet(room, post(), post())) == [201, 204]


def _someone_waits() -> None:
    """Return when the store knows of a waiter."""
    import redis

    from tests import settings as run
    from tests.servers import until

    with redis.Redis.from_url(run.REDIS_URL) as client:
        until(lambda: client.keys("singleflight:*:waiting"), "a waiter", PATIENCE)


def _one_waits(room: Room, post: Callable[[], Any]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post())
        room.wait()
        second = pool.submit(post())
        _someone_waits()
        room.door.set()
        return [first.result(PATIENCE), second.result(PATIENCE)]


class TestSeveralHolders:
    def test_limit_lets_so_many_in(self, settings: Any) -> None:
        rooms = [Room(), Room()]
        visits = iter(rooms)

        @guard(limit=2)
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return next(visits).stay()

        settings.ROOT_URLCONF = urls(view)
        second: Any = lambda: meet(rooms[1], post(), post())  # noqa: E731
        first, (two, three) = meet(rooms[0], post(), second)
        assert codes([first, two, three]) == [201, 201, 429]

    def test_several_keys_are_taken_all_or_none(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(guard(key=["b:<pk>", "a:<pk>"])(function(room)))
        with semaphore_lock("b:7"):
            assert codes(together(post())) == [429]
            assert not held("a:7")
        room.door.set()
        assert codes([post()()]) == [201]
        assert not held("a:7")
        assert not held("b:7")

    @pytest.mark.parametrize("wait", [0, PATIENCE])
    def test_keys_in_opposite_order_never_wait_for_each_other(self, wait: float) -> None:
        """(A, B) beside (B, A), 200 times (D27)."""
        inside: list[str] = []
        most: list[int] = []

        def view(request: HttpRequest, name: str) -> str:
            inside.append(name)
            most.append(len(inside))
            inside.remove(name)
            return "done"

        ab = semaphore_lock(key=["a", "b", "a"], wait=wait)(view)
        ba = semaphore_lock(key=["b", "a"], wait=wait)(view)

        def many(guarded: Any, name: str) -> list[Any]:
            return [guarded(request_like(), name) for _ in range(200)]

        answers = together(lambda: many(ab, "ab"), lambda: many(ba, "ba"))
        ran = [[answer for answer in some if answer == "done"] for some in answers]
        assert max(most) == 1
        assert len(ran[0]) + len(ran[1]) == 400 if wait else all(ran)
        assert not held("a")
        assert not held("b")


class TestTheLeaseInTheView:
    def test_it_is_on_the_request(self, settings: Any) -> None:
        seen: list[Any] = []

        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            lease = request.lease  # type: ignore[attr-defined]
            lease.check()
            lease.extend(60)
            seen.append((lease.acquired, lease.fence > 0, lease.lost, lease.ttl))
            return HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        assert codes([post()()]) == [200]
        assert seen == [(True, True, False, 60.0)]

    async def test_it_is_on_the_request_of_an_async_view(self, settings: Any) -> None:
        seen: list[Any] = []

        @guard()
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            lease = request.lease  # type: ignore[attr-defined]
            await lease.aextend(60)
            seen.append((lease.acquired, lease.fence > 0, lease.lost, lease.ttl))
            return HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        assert codes([await apost()()]) == [200]
        assert seen == [(True, True, False, 60.0)]

    def test_a_later_holder_has_a_greater_fence(self, settings: Any) -> None:
        fences: list[int] = []

        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            fences.append(request.lease.fence)  # type: ignore[attr-defined]
            return HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        for _ in range(5):
            post()()
        assert fences == sorted(set(fences))


class TestNesting:
    def test_the_same_key_inside_is_an_error_at_once(self, settings: Any) -> None:
        @guard(wait=PATIENCE)
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            with semaphore_lock(f"lesson:{pk}", wait=PATIENCE):
                return HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        with pytest.raises(NestedFlightError, match="already held in this very context"):
            post()()
        assert not held("lesson:7")

    async def test_the_same_key_inside_an_async_view(self, settings: Any) -> None:
        @guard(wait=PATIENCE)
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            async with semaphore_lock(f"lesson:{pk}", wait=PATIENCE):
                return HttpResponse()

        settings.ROOT_URLCONF = urls(view)
        with pytest.raises(NestedFlightError):
            await apost()()
        assert not await asyncio.to_thread(held, "lesson:7")

    def test_two_guards_of_one_key_are_an_error_on_every_call(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(guard()(guard()(function(Room(open=True)))))
        for _ in range(2):
            with pytest.raises(NestedFlightError):
                post()()

    def test_a_request_to_the_same_view_from_within(self, settings: Any) -> None:
        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return post()()  # type: ignore[no-any-return]

        settings.ROOT_URLCONF = urls(view)
        with pytest.raises(NestedFlightError):
            post()()

    def test_a_request_for_another_key_from_within(self, settings: Any) -> None:
        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return post("/8/")() if pk == "7" else HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        assert codes([post()()]) == [201]
        assert not held("lesson:7")
        assert not held("lesson:8")


class TestExits:
    """The key is free again however the body ended, and what ended it goes on unchanged (D07)."""

    @pytest.mark.parametrize(
        "kind",
        [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError],
    )
    def test_of_a_sync_view(self, kind: type[BaseException]) -> None:
        error = kind("as it was")

        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            assert held("lesson:7")
            raise error

        with pytest.raises(kind) as raised:
            view(request_like(), pk="7")
        assert raised.value is error
        assert not held("lesson:7")

    @pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
    def test_of_an_async_view(self, kind: type[BaseException]) -> None:
        error = kind("as it was")

        @guard()
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            await asyncio.to_thread(held, "lesson:7")
            raise error

        with pytest.raises(kind) as raised:
            asyncio.run(view(request_like(), pk="7"))
        assert raised.value is error
        _soon_free("lesson:7")

    async def test_of_an_async_view_whose_own_work_was_cancelled(self) -> None:
        """Its task wasn't: the body is known to have ended."""

        @guard()
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            raise asyncio.CancelledError("as it was")

        with pytest.raises(asyncio.CancelledError, match="as it was"):
            await view(request_like(), pk="7")
        assert not await asyncio.to_thread(held, "lesson:7")

    async def test_of_a_coroutine_that_nobody_finishes(self) -> None:
        inside = asyncio.Event()

        @guard()
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            inside.set()
            await asyncio.Event().wait()
            return HttpResponse()

        coroutine = view(request_like(), pk="7")
        # Driven by hand up to where it waits for ever.
        while awaited := coroutine.send(None):
            if inside.is_set():
                break
            awaited._asyncio_future_blocking = False
            await asyncio.wait([awaited])
        coroutine.close()
        await asyncio.to_thread(_soon_free, "lesson:7")


def _soon_free(key: str) -> None:
    from tests.servers import until

    until(lambda: not held(key), f"{key} is free", PATIENCE)


class TestLostLeases:
    """An ended lease turns no good answer into an error, and hides none (D01)."""

    @staticmethod
    def _evict(client: Any) -> None:
        client.flushdb()

    def test_the_answer_stays_and_the_loss_is_told(
        self, settings: Any, redis_client: Any, caplog: Any
    ) -> None:
        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            self._evict(redis_client)
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        with listening("lease_lost") as told, caplog.at_level(logging.WARNING):
            assert codes([post()()]) == [201]
        assert [facts.key for _, facts in told] == ["semaphore_lock:lesson:7"]
        assert [r.levelname for r in caplog.records if r.name == "singleflight_django"] == [
            "WARNING"
        ]

    async def test_the_answer_of_an_async_view_stays(
        self, settings: Any, redis_client: Any
    ) -> None:
        @guard()
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            await asyncio.to_thread(self._evict, redis_client)
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        with listening("lease_lost") as told:
            assert codes([await apost()()]) == [201]
        assert len(told) == 1

    def test_the_error_of_the_view_stays(self, settings: Any, redis_client: Any) -> None:
        @guard()
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            self._evict(redis_client)
            raise Http404("mine")

        settings.ROOT_URLCONF = urls(view)
        with listening("lease_lost") as told:
            assert codes([post()()]) == [404]
        assert len(told) == 1

    def test_a_late_owner_leaves_its_successor_alone(
        self, settings: Any, redis_client: Any
    ) -> None:
        room = Room()

        @guard(renew=False)
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return room.stay()

        settings.ROOT_URLCONF = urls(view)

        def succeed() -> Any:
            self._evict(redis_client)
            successor = semaphore_lock("lesson:7")
            return successor, successor.__enter__()

        _, (successor, lease) = meet(room, post(), succeed)
        assert held("lesson:7")
        lease.check()
        successor.__exit__(None, None, None)
        assert not held("lesson:7")


class TestStoreAway:
    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    def test_reject_answers_503(self, cache: str, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(guard(cache=cache)(function(room)))
        with listening("lease_rejected", "unprotected_run") as told:
            response = post()()
        assert (response.status_code, response["Retry-After"]) == (503, "1")
        assert room.visits == 0
        assert [(name, facts.reason) for name, facts in told] == [
            ("lease_rejected", "store unavailable")
        ]

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    async def test_reject_answers_503_in_an_async_view(self, cache: str, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(guard(cache=cache)(afunction(room)))
        assert codes([await apost()()]) == [503]
        assert room.visits == 0

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    def test_proceed_runs_and_tells(self, cache: str, settings: Any, caplog: Any) -> None:
        seen: list[Any] = []

        @guard(cache=cache, on_store_error="proceed")
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            lease = request.lease  # type: ignore[attr-defined]
            lease.check()
            lease.extend(30)
            seen.append((lease.acquired, lease.fence, lease.key))
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        with listening("unprotected_run", "lease_rejected", "lease_released") as told:
            assert codes([post()()]) == [201]
        assert [(name, facts.reason) for name, facts in told] == [
            ("unprotected_run", "store unavailable")
        ]
        assert seen == [(True, None, "semaphore_lock:lesson:7")]

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    async def test_proceed_runs_and_tells_in_an_async_view(self, cache: str, settings: Any) -> None:
        @guard(cache=cache, on_store_error="proceed")
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            await request.lease.aextend(30)  # type: ignore[attr-defined]
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        with listening("unprotected_run") as told:
            assert codes([await apost()()]) == [201]
        assert len(told) == 1


class TestObserving:
    @pytest.fixture(params=["option", "setting"])
    def observing(self, request: Any, settings: Any) -> Any:
        if request.param == "setting":
            settings.SINGLEFLIGHT_ENABLED = "observe"
            return guard
        return functools.partial(guard, observe=True)

    def test_nobody_is_refused_and_each_conflict_is_told_once(
        self, observing: Any, settings: Any
    ) -> None:
        settings.ROOT_URLCONF = urls(observing()(function(Room(open=True))))
        with semaphore_lock("lesson:7"), listening("lease_rejected") as told:
            assert codes(together(post())) == [201]
        assert [(facts.reason, facts.key) for _, facts in told] == [
            ("observe", "semaphore_lock:lesson:7")
        ]

    async def test_nobody_is_refused_by_an_async_view(self, observing: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(observing()(afunction(Room(open=True))))
        with listening("lease_rejected") as told:
            async with semaphore_lock("lesson:7"):
                response = await _in_a_context_of_its_own(apost())
        assert codes([response]) == [201]
        assert [facts.reason for _, facts in told] == ["observe"]

    def test_a_bad_key_field_is_told_and_not_answered_400(
        self, observing: Any, settings: Any
    ) -> None:
        settings.ROOT_URLCONF = urls(observing(key="x:<uuid>")(function(Room(open=True))))
        with listening("lease_rejected") as told:
            assert codes([post()()]) == [201]
        assert [facts.reason for _, facts in told] == ["observe: KeyFieldError"]

    def test_a_missing_user_is_told_and_not_refused(self, observing: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(observing(key="x:<user>")(function(Room(open=True))))
        assert codes([post()()]) == [201]

    def test_a_store_that_is_away_is_an_unprotected_run(
        self, observing: Any, settings: Any
    ) -> None:
        view = observing(cache="dead")(function(Room(open=True)))
        settings.ROOT_URLCONF = urls(view)
        with listening("unprotected_run") as told:
            assert codes([post()()]) == [201]
        assert len(told) == 1

    def test_a_lease_is_taken_all_the_same(self, observing: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(observing()(function(room)))
        _, taken = meet(room, post(), lambda: held("lesson:7"))
        assert taken


async def _in_a_context_of_its_own(call: Callable[[], Awaitable[Any]]) -> Any:
    """As a request that comes from elsewhere: it doesn't inherit what is held here."""
    import contextvars

    return await asyncio.create_task(call(), context=contextvars.Context())  # type: ignore[arg-type]


class TestSwitchedOff:
    def test_everyone_runs_and_the_store_is_not_asked(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = False

        @guard(key="x:<uuid>", cache="dead")
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            request.lease.check()  # type: ignore[attr-defined]
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(view)
        with listening("unprotected_run", "lease_acquired", "lease_released") as told:
            assert codes([post()()]) == [201]
        assert told == []

    async def test_everyone_runs_in_an_async_view(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = False
        settings.ROOT_URLCONF = urls(guard(cache="dead")(afunction(Room(open=True))))
        assert codes([await apost()()]) == [201]


class TestKeys:
    def test_a_bad_field_is_400_and_names_it(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(guard(key="lesson:<uuid>")(function(room)))
        response = Client().post("/7/", {"uuid": "None"})
        assert (response.status_code, response.json()["field"]) == (400, "uuid")
        assert room.visits == 0

    async def test_a_bad_field_of_an_async_view_is_400(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(guard(key="lesson:<uuid>")(afunction(Room(open=True))))
        response = await AsyncClient().post("/7/", {"uuid": ""})
        assert (response.status_code, response.json()["field"]) == (400, "uuid")

    @pytest.mark.parametrize("bad", [None, "", " ", 7, [], ()])
    def test_a_callable_that_finds_no_key_fails_loudly(self, bad: Any, settings: Any) -> None:
        """Never a key that everybody shares (D19)."""
        settings.ROOT_URLCONF = urls(guard(key=lambda request, pk: bad)(function(Room())))
        with pytest.raises((TypeError, ValueError), match="no usable key"):
            post()()

    def test_a_user_is_required_where_the_key_says_so(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(guard(key="lesson:<user>")(function(Room())))
        assert codes([post()()]) == [403]

    def test_a_key_of_the_view_and_of_a_with_are_the_same(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(
            guard(key="import:<int:pk>")(function(Room(open=True))), "<int:pk>/"
        )
        with semaphore_lock("import:7"):
            assert codes(together(post("/7/"), post("/8/"))) == [429, 201]
