"""``single_flight`` on views: one request runs it, the others get its answer; through Django."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.db import transaction
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotModified,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client
from django.urls import path
from django.views import View
from ninja import NinjaAPI
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from singleflight_django import (
    SingleFlightMixin,
    acreate_or_existing,
    create_or_existing,
    publishing,
    single_flight,
)
from singleflight_django.exceptions import (
    DuplicateError,
    DuplicateMismatchError,
    LeaseLostError,
    WaitInTransactionError,
)
from singleflight_django.renewal import keeper
from singleflight_django.seats import _taken
from tests.flying import acall, afly, call, fly, problem, seen, statuses, they_wait
from tests.meeting import PATIENCE, Room, codes, listening, meet, request_like, urls
from tests.servers import until

flight = functools.partial(single_flight, key="lesson:<pk>")
Answer = Callable[[], Any]
LED, FOLLOWED = "singleflight; fwd=miss; stored", "singleflight; fwd=miss; collapsed"


def sync_view(room: Room, answer: Answer) -> Callable[..., Any]:
    def view(request: HttpRequest, pk: str) -> Any:
        room.stay()
        return answer()

    return view


def async_view(room: Room, answer: Answer) -> Callable[..., Any]:
    async def view(request: HttpRequest, pk: str) -> Any:
        await room.astay()
        return answer()

    return view


class Rendered(TemplateResponse):
    """Rendered from a text, as the last step of Django's handler."""

    def __init__(self, text: str = "made {{ n }}", **kwargs: Any) -> None:
        template = engines["django"].from_string(text)
        super().__init__(None, template, {"n": next(_numbers)}, **kwargs)  # type: ignore[arg-type]


_numbers = itertools.count()
ANSWERS: dict[str, Answer] = {
    "plain": lambda: HttpResponse("made", status=201, reason="Just Made"),
    "bytes": lambda: HttpResponse(b"\x00\xff", content_type="application/octet-stream"),
    "json": lambda: JsonResponse({"n": next(_numbers)}),
    "redirect": lambda: HttpResponseRedirect("/elsewhere/"),
    "no content": lambda: HttpResponse(status=204),
    "not modified": lambda: HttpResponseNotModified(headers={"ETag": '"a"'}),
    "headers": lambda: HttpResponse("x", headers={"ETag": '"a"', "Link": "</>", "X-Id": "7"}),
    "rendered": lambda: Rendered(status=202),
    "client error": lambda: HttpResponse("no", status=422),
    "private": lambda: HttpResponse("x", headers={"Cache-Control": "private"}),
    "own cache status": lambda: HttpResponse("x", headers={"Cache-Status": "origin; hit"}),
}
each_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
each_method = pytest.mark.parametrize("method", ["get", "head", "post", "put", "patch", "delete"])


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    """Whatever became of a flight, it has landed, and nobody waits."""
    yield
    assert set(_taken.values()) == {0}
    assert not [lease for lease in keeper._watched if lease.held]


class TestOneAnswerForAll:
    @each_answer
    def test_sync(self, answer: Answer, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, answer)))
        leader, *followers = fly(room, call(), call(), call())
        assert [seen(one) for one in followers] == [seen(leader)] * 2
        assert statuses([leader])[0].endswith(LED)
        assert statuses(followers) == [FOLLOWED] * 2
        assert room.visits == 1

    @each_answer
    async def test_async(self, answer: Answer, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(async_view(room, answer)))
        leader, *followers = await afly(room, acall(), acall(), acall())
        assert [seen(one) for one in followers] == [seen(leader)] * 2
        assert statuses([leader])[0].endswith(LED)
        assert statuses(followers) == [FOLLOWED] * 2
        assert room.visits == 1

    async def test_a_sync_view_under_asgi(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        leader, follower = await afly(room, acall(), acall())
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    def test_an_async_view_under_wsgi(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(async_view(room, ANSWERS["rendered"])))
        leader, follower = fly(room, call(), call())
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    @each_method
    def test_each_method(self, method: str, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        leader, follower = fly(room, call(method), call(method))
        assert seen(follower) == seen(leader)
        assert room.visits == 1

    def test_another_method_passes(self, settings: Any) -> None:
        room = Room(open=True)
        view = flight(methods=("POST",))(sync_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        assert statuses([call("get")(), call()()]) == ["", LED]

    def test_head_and_get_are_separate(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))

        def head() -> Any:
            room.door.set()
            return call("head")()

        assert codes(meet(room, call("get"), head)) == [201, 201]
        assert room.visits == 2

    def test_another_key_is_another_flight(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        eight = call(path="/8/")

        def other() -> Any:
            room.door.set()
            return eight()

        assert codes(meet(room, call(), other)) == [201, 201]
        assert room.visits == 2

    def test_the_next_call_runs_again(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        assert statuses([call()(), call()()]) == [LED, LED]
        assert room.visits == 2

    def test_a_kept_answer_serves_later_callers(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(sync_view(room, ANSWERS["headers"])))
        first, second = call()(), call()()
        assert seen(second) == seen(first)
        assert statuses([first, second]) == [LED, "singleflight; hit; ttl=60"]
        assert room.visits == 1

    @pytest.mark.parametrize("answer", ["private", "not found"])
    def test_what_is_never_kept(self, answer: str, settings: Any) -> None:
        def not_found() -> Any:
            raise Http404

        made = {**ANSWERS, "not found": not_found}[answer]
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(sync_view(room, made)))
        assert len(set(codes([call()(), call()()]))) == 1
        assert room.visits == 2

    def test_the_lease_is_on_the_request(self, settings: Any) -> None:
        def view(request: Any, pk: str) -> HttpResponse:
            request.lease.check()
            return HttpResponse(request.lease.key)

        settings.ROOT_URLCONF = urls(flight(namespace="lessons")(view))
        assert call()().content.startswith(b"lessons:lesson:7")

    @pytest.mark.parametrize("options", [{"observe": True}, {"cache": "dead"}])
    @pytest.mark.parametrize("send", ["sync", "async"])
    async def test_a_view_that_runs_on_its_own_has_a_lease_as_well(
        self, options: Any, send: str, settings: Any
    ) -> None:
        def view(request: Any, pk: str) -> HttpResponse:
            request.lease.check()
            return HttpResponse("on its own")

        async def aview(request: Any, pk: str) -> HttpResponse:
            return view(request, pk)

        settings.ROOT_URLCONF = urls(flight(**options)(view if send == "sync" else aview))
        assert (await acall("get")()).content == b"on its own"

    async def test_an_object_whose_call_is_async_but_that_is_not_marked(self) -> None:
        class Unmarked:
            async def __call__(self, request: Any, pk: str) -> Any:
                request.lease.check()
                return HttpResponse("made")

        def returns_it(request: Any, pk: str) -> Any:
            return Unmarked()(request, pk)

        for view in (Unmarked(), returns_it):
            response = await flight()(view)(request_like(), pk="7")
            assert statuses([response]) == [LED]


class TestRendering:
    def test_the_middlewares_process_template_response_is_in_the_answer(
        self, settings: Any
    ) -> None:
        room = Room()
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.renames"]
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["rendered"])))
        leader, follower = fly(room, call(), call())
        assert leader.content == follower.content == b"made by a middleware"

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_where_it_raises_the_followers_get_503(self, kind: str, settings: Any) -> None:
        room = Room()
        make = sync_view if kind == "sync" else async_view
        view = flight()(make(room, lambda: Rendered("{{ n.no|add:n|date:n }}{% now %}")))
        settings.ROOT_URLCONF = urls(view)
        leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [500, 503]

    def test_what_is_replaced_before_it_is_rendered_has_failed(self, settings: Any) -> None:
        room = Room()
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.replaces"]
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["rendered"])))
        leader, follower = fly(room, call(), call())
        assert codes([leader, follower]) == [200, 503]


def renames(get_response: Any) -> Any:
    class Middleware:
        def __call__(self, request: Any) -> Any:
            return get_response(request)

        def process_template_response(self, request: Any, response: Any) -> Any:
            response.context_data["n"] = "by a middleware"
            return response

    return Middleware()


def replaces(get_response: Any) -> Any:
    class Middleware:
        def __call__(self, request: Any) -> Any:
            return get_response(request)

        def process_template_response(self, request: Any, response: Any) -> Any:
            return Rendered("another")

    return Middleware()


RAISED: dict[str, tuple[Callable[[], Exception], int]] = {
    "not found": (lambda: Http404("no lesson"), 404),
    "bad request": (lambda: BadRequest("no"), 400),
    "suspicious": (lambda: SuspiciousOperation("no"), 400),
}


def raising(make: Callable[[], BaseException]) -> Answer:
    def answer() -> Any:
        raise make()

    return answer


class TestWhatTheLeaderRaised:
    @pytest.mark.parametrize(("make", "code"), RAISED.values(), ids=RAISED)
    def test_an_answer_of_djangos_is_shared(self, make: Any, code: int, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, raising(make))))
        leader, follower = fly(room, call(), call())
        assert seen(leader) == seen(follower)
        assert leader.status_code == code
        assert room.visits == 1

    @pytest.mark.parametrize(("make", "code"), RAISED.values(), ids=RAISED)
    async def test_an_answer_of_djangos_is_shared_async(
        self, make: Any, code: int, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(async_view(room, raising(make))))
        leader, follower = await afly(room, acall(), acall())
        assert seen(leader) == seen(follower)
        assert leader.status_code == code
        assert room.visits == 1

    @pytest.mark.parametrize("make", [ValueError, lambda: HttpResponse(status=502)])
    def test_a_failure_is_503_for_followers_and_reported_once(
        self, make: Any, settings: Any, caplog: Any
    ) -> None:
        room = Room()
        answer = raising(ValueError) if make is ValueError else make
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(sync_view(room, answer)))
        leader, *followers = fly(room, call(), call(), call())
        assert leader.status_code == (500 if make is ValueError else 502)
        assert [problem(one) for one in followers] == ["leader-failed"] * 2
        assert {one["Retry-After"] for one in followers} == {"1"}
        assert sum("ValueError" in (r.exc_text or "") for r in caplog.records) <= 1
        assert room.visits == 1
        assert call()().status_code == leader.status_code, "nothing is kept"
        assert room.visits == 2

    async def test_a_failure_is_503_for_followers_async(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(async_view(room, raising(ValueError))))
        leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [500, 503]
        assert room.visits == 1

    def test_retry_lets_followers_try_again(self, settings: Any) -> None:
        room = Room()
        answers = iter([raising(ValueError), raising(ValueError), lambda: HttpResponse("made")])
        view = sync_view(room, lambda: next(answers)())
        settings.ROOT_URLCONF = urls(flight(retry=1)(view))
        assert sorted(codes(fly(room, call(), call(), call()))) == [500, 500, 503]
        assert room.visits == 2

    @pytest.mark.parametrize("code", [401, 403, 408, 425, 429])
    def test_what_is_about_one_caller_lets_followers_take_part_again(
        self, code: int, settings: Any
    ) -> None:
        room = Room()
        refused = iter([True])
        answer = lambda: HttpResponse(status=code if next(refused, False) else 200)  # noqa: E731
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, answer)))
        leader, *followers = fly(room, call(), call(), call())
        assert codes([leader, *followers]) == [code, 200, 200]
        assert room.visits == 2

    def test_permission_denied_is_about_one_caller(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, raising(PermissionDenied))))
        assert codes(fly(room, call(), call())) == [403, 403]
        assert room.visits == 2

    @pytest.mark.parametrize(
        ("error", "slug"),
        [(DuplicateMismatchError, "duplicate-mismatch"), (DuplicateError, "duplicate")],
    )
    @pytest.mark.parametrize("scope", ["user", "global"])
    def test_a_duplicate_row_is_an_answer_for_all_that_is_not_kept(
        self, error: Any, slug: str, scope: Any, settings: Any, caplog: Any
    ) -> None:
        room = Room()
        view = flight(scope=scope, result_ttl=60)(sync_view(room, raising(lambda: error("secret"))))
        settings.ROOT_URLCONF = urls(view)
        browser = call(headers={"Accept": "application/json"})
        answers = fly(room, browser, browser, browser)
        assert codes(answers) == [409] * 3
        assert [problem(one) for one in answers] == [slug] * 3
        assert not any(b"secret" in one.content for one in answers)
        assert "ERROR" not in caplog.text
        assert room.visits == 1
        assert codes([browser()]) == [409]
        assert room.visits == 2

    async def test_a_duplicate_row_is_an_answer_for_all_async(self, settings: Any) -> None:
        room = Room()
        answer = raising(DuplicateMismatchError)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(async_view(room, answer)))
        answers = await afly(room, acall(), acall(), acall())
        assert [problem(one) for one in answers] == ["duplicate-mismatch"] * 3
        assert room.visits == 1
        assert problem(await acall()()) == "duplicate-mismatch"
        assert room.visits == 2

    @pytest.mark.parametrize("kind", ["sync", "async", "returned"])
    async def test_a_duplicate_row_is_409_for_who_runs_alone_too(
        self, kind: str, settings: Any
    ) -> None:
        room = Room(open=True)
        aview = async_view(room, raising(DuplicateError))
        view = {
            "sync": sync_view(room, raising(DuplicateError)),
            "async": aview,
            "returned": lambda request, pk: aview(request, pk),
        }[kind]
        led, alone = flight()(view), flight(cache="dead", on_store_error="proceed")(view)
        for guarded in (led, alone):
            response = guarded(request_like(), pk="7")
            response = await response if isawaitable(response) else response
            assert problem(Answered(response)) == "duplicate"

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_another_content_of_an_existing_row_is_409(self, kind: str, settings: Any) -> None:
        User.objects.create(username="a", email="a@example.org")

        def create(request: HttpRequest, pk: str) -> HttpResponse:
            create_or_existing(User.objects, username="a", defaults={"email": pk}, same=["email"])
            return HttpResponse("made", status=201)

        async def acreate(request: HttpRequest, pk: str) -> HttpResponse:
            await acreate_or_existing(
                User.objects, username="a", defaults={"email": pk}, same=["email"]
            )
            return HttpResponse("made", status=201)

        settings.ROOT_URLCONF = urls(flight()(create if kind == "sync" else acreate))
        assert problem(call()()) == "duplicate-mismatch"
        assert call(path="/a@example.org/")().status_code == 201

    def test_our_own_refusal_is_never_shared(self, settings: Any) -> None:
        room = Room()
        inner = single_flight(key="inner:<pk>", authorize=lambda r: True, cache="dead")

        def refused(request: HttpRequest, pk: str) -> Any:
            room.stay()
            return inner(lambda request, pk: HttpResponse())(request, pk=pk)

        settings.ROOT_URLCONF = urls(flight()(refused))
        assert codes(fly(room, call(), call())) == [503, 503]
        assert room.visits == 2


def in_a_mixin(answer: Answer) -> Any:
    class Lessons(SingleFlightMixin, View):
        flight_key, flight_result_ttl = "lesson:<pk>", 60

        def post(self, request: HttpRequest, pk: str) -> Any:
            return answer()

    return urls(Lessons.as_view())


def in_an_async_mixin(answer: Answer) -> Any:
    class Lessons(SingleFlightMixin, View):
        flight_key, flight_result_ttl = "lesson:<pk>", 60

        async def post(self, request: HttpRequest, pk: str) -> Any:
            return await asyncio.to_thread(answer)

    return urls(Lessons.as_view())


def in_rest_framework(answer: Answer) -> Any:
    class Lessons(SingleFlightMixin, APIView):
        flight_key, flight_result_ttl = "lesson:<pk>", 60

        def post(self, request: Any, pk: str) -> Any:
            return answer()

    return urls(Lessons.as_view())


def in_an_api_view(answer: Answer) -> Any:
    @api_view(["POST"])
    @flight(result_ttl=60)
    def create(request: Any, pk: str) -> Any:
        return answer()

    return urls(create)


def in_ninja(answer: Answer) -> Any:
    site = NinjaAPI(urls_namespace=f"test-{next(_numbers)}")

    @site.post("/{pk}/")
    @flight(result_ttl=60)
    def create(request: HttpRequest, pk: str) -> Any:
        return answer()

    return urls(site.urls, "")


def in_async_ninja(answer: Answer) -> Any:
    site = NinjaAPI(urls_namespace=f"test-{next(_numbers)}")

    @site.post("/{pk}/")
    @flight(result_ttl=60)
    async def create(request: HttpRequest, pk: str) -> Any:
        return await asyncio.to_thread(answer)

    return urls(site.urls, "")


class TestDuplicatesInFrameworks:
    """No framework has a handler for it, or would make a 500 of it: the guard answers first."""

    @staticmethod
    def answer(room: Room) -> Answer:
        def answer() -> Any:
            room.stay()
            raise DuplicateMismatchError

        return answer

    @pytest.mark.parametrize("debug", [False, True])
    @pytest.mark.parametrize(
        "make",
        [
            in_a_mixin,
            in_an_async_mixin,
            in_rest_framework,
            in_an_api_view,
            in_ninja,
            in_async_ninja,
        ],
    )
    def test_under_wsgi(self, make: Any, debug: bool, settings: Any) -> None:
        room, settings.DEBUG = Room(), debug
        settings.ROOT_URLCONF = make(self.answer(room))
        answers = fly(room, call(), call())
        assert [problem(one) for one in answers] == ["duplicate-mismatch"] * 2
        assert room.visits == 1
        assert problem(call()()) == "duplicate-mismatch"
        assert room.visits == 2

    @pytest.mark.parametrize("make", [in_an_async_mixin, in_async_ninja])
    async def test_under_asgi(self, make: Any, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = make(self.answer(room))
        answers = await afly(room, acall(), acall())
        assert [problem(one) for one in answers] == ["duplicate-mismatch"] * 2
        assert room.visits == 1


class Answered:
    """A response as the test client gives it."""

    def __init__(self, response: HttpResponse) -> None:
        self.response = response

    def __getitem__(self, header: str) -> str:
        return self.response[header]

    def json(self) -> Any:
        return json.loads(self.response.content)


class Breakage(Http404):
    def __init__(self) -> None:
        super().__init__(Unprintable("x"))


class Unprintable(str):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class TestNothingLeavesAFlightUnlanded:
    """A bug of ours, or of the site's, on the way to the store is not the leader's client's."""

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_what_cant_be_frozen_is_the_leaders_alone(self, kind: str, settings: Any) -> None:
        room = Room()
        make = sync_view if kind == "sync" else async_view
        settings.ROOT_URLCONF = urls(flight()(make(room, Unfreezable)))
        with listening("share_refused") as told:
            leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [200, 409]
        assert problem(follower) == "in-flight"
        assert "no body today" in told[0][1].reason
        assert room.visits == 1

    def test_an_exception_without_a_text_is_a_failure(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, raising(Breakage))))
        _, follower = fly(room, call(), call())
        assert follower.status_code == 503
        assert room.visits == 1


class Unfreezable(HttpResponse):
    """It breaks when it is looked at for sharing, and only then."""

    def has_header(self, header: str) -> bool:
        if header == "Set-Cookie":
            raise RuntimeError("no body today")
        return super().has_header(header)


class TestStreaming:
    @staticmethod
    def streams(room: Room) -> Any:
        return sync_view(room, lambda: StreamingHttpResponse(iter([b"a", b"b"])))

    def test_followers_of_get_run_on_their_own(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(self.streams(room)))
        with listening("share_refused") as told:
            answers = fly(room, call("get"), call("get"), call("get"))
        assert [b"".join(one) for one in answers] == [b"ab"] * 3
        assert statuses(answers) == ["singleflight; fwd=miss", "", ""]
        assert room.visits == 3
        assert [facts.reason for _, facts in told] == ["streaming"]
        # For a while, nobody is coalesced here.
        assert statuses([call("get")()]) == [""]

    def test_followers_of_post_get_409_when_the_stream_has_ended(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(self.streams(room)))

        def read() -> bytes:
            response = call()()
            with contextlib.closing(response):
                return b"".join(response)

        body, follower = fly(room, read, call())
        assert body == b"ab"
        assert problem(follower) == "in-flight"
        assert follower["Retry-After"] == "1"
        assert room.visits == 1


def with_cookie() -> HttpResponse:
    response = HttpResponse("x")
    response.set_cookie("a", "1")
    return response


class TestWhatIsNotForSharing:
    def test_on_unshareable(self, settings: Any) -> None:
        room = Room()
        view = flight(on_unshareable=lambda request: HttpResponse("look", status=202))(
            sync_view(room, with_cookie)
        )
        settings.ROOT_URLCONF = urls(view)
        leader, follower = fly(room, call(), call())
        assert (follower.status_code, follower.content) == (202, b"look")
        assert "a" in leader.cookies
        assert not follower.cookies
        assert room.visits == 1

    async def test_on_unshareable_async(self, settings: Any) -> None:
        async def look(request: HttpRequest) -> HttpResponse:
            return HttpResponse("look", status=202)

        room = Room()
        view = flight(on_unshareable=look)(async_view(room, with_cookie))
        settings.ROOT_URLCONF = urls(view)
        leader, follower = await afly(room, acall(), acall())
        assert codes([leader, follower]) == [200, 202]
        assert room.visits == 1

    def test_max_bytes(self, settings: Any) -> None:
        room = Room()
        view = flight(max_bytes=3)(sync_view(room, lambda: HttpResponse("four")))
        settings.ROOT_URLCONF = urls(view)
        assert codes(fly(room, call(), call())) == [200, 409]
        assert room.visits == 1

    @pytest.mark.parametrize("make", [sync_view, async_view])
    def test_a_body_too_large_to_compare_is_not_shared(self, make: Any, settings: Any) -> None:
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(make(room, ANSWERS["plain"])))
        big = call(data=b"x" * 11, content_type="application/octet-stream")
        assert statuses([big(), big()]) == ["", ""]
        assert room.visits == 2

    def test_a_record_that_cant_be_read_runs_no_unsafe_method_again(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(sync_view(room, ANSWERS["plain"])))
        with _old_records():
            call()(), call("get")()
        answers = [call()(), call("get")()]
        assert codes(answers) == [409, 201]
        assert room.visits == 3


@contextlib.contextmanager
def _old_records() -> Iterator[None]:
    """Records are as another version of this package may have left them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "freeze_result", lambda *args, **kwargs: b"\x00of old")
        yield


class TestFingerprint:
    def test_another_content_under_way_is_409_at_once(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        leader, same, other = fly(
            room,
            call(data={"title": "a"}),
            call(data={"title": "a"}),
            meanwhile=[call(data={"title": "b"})],
        )
        assert codes([leader, other, same]) == [201, 409, 201]
        assert problem(other) == "fingerprint-mismatch"
        assert room.visits == 1

    def test_another_content_than_the_kept_answers_is_409(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(sync_view(room, ANSWERS["plain"])))
        assert codes([call(data={"t": n})() for n in "aba"]) == [201, 409, 201]
        assert room.visits == 1

    def test_json_is_compared_by_what_it_says(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight()(sync_view(room, ANSWERS["plain"])))
        one = call(data=b'{"a": 1, "b": 2}', content_type="application/json")
        two = call(data=b'{"b":2,"a":1}', content_type="application/json")
        assert codes(fly(room, one, two)) == [201, 201]
        assert room.visits == 1


class TestWaiting:
    def test_wait_used_up_is_504(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight(wait=0.05)(sync_view(room, ANSWERS["plain"])))
        leader, follower = meet(room, call(), call())
        assert codes([leader, follower]) == [201, 504]
        assert problem(follower) == "timeout"
        assert follower["Retry-After"] == "1"

    async def test_wait_used_up_is_504_async(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight(wait=0.05)(async_view(room, ANSWERS["plain"])))
        running = asyncio.ensure_future(acall()())
        await room.await_()
        assert problem(await acall()()) == "timeout"
        room.door.set()
        assert (await running).status_code == 201

    def test_on_timeout(self, settings: Any) -> None:
        room = Room()
        later = lambda request: HttpResponse("later", status=202)  # noqa: E731
        view = flight(wait=0, on_timeout=later)(sync_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        assert codes(meet(room, call(), call())) == [201, 202]

    def test_too_many_followers_are_503_at_once(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight(max_followers=1)(sync_view(room, ANSWERS["plain"])))
        *answers, refused = fly(room, call(), call(), meanwhile=[call()])
        assert codes(answers) == [201, 201]
        assert problem(refused) == "too-many-followers"
        assert refused["Retry-After"] == "1"
        assert room.visits == 1

    def test_max_followers_0_lets_nobody_wait(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(flight(max_followers=0)(sync_view(room, ANSWERS["plain"])))
        leader, follower = meet(room, call(), call())
        assert problem(follower) == "too-many-followers"
        assert leader.status_code == 201

    @pytest.mark.parametrize("workers", [4, 8])
    def test_a_site_under_a_burst_goes_on_answering(self, workers: int, settings: Any) -> None:
        """D44: a pool of workers, as gunicorn's gthread has it; more callers than workers."""
        room = Room()
        module = urls(flight(ttl=1.5)(sync_view(room, ANSWERS["plain"])))
        health = path("health", lambda request: HttpResponse("ok"))
        vars(module)["urlpatterns"].append(health)
        settings.ROOT_URLCONF = module
        with ThreadPoolExecutor(workers) as pool:
            leader = pool.submit(call())
            try:
                room.wait()
                # The keeper's thread is no worker.
                until(lambda: keeper._thread, "the keeper", PATIENCE)
                burst = [pool.submit(call()) for _ in range(3 * workers)]
                answer = pool.submit(call("get", "/health")).result(PATIENCE)
                assert answer.content == b"ok"
            finally:
                room.door.set()
            assert set(codes([one.result(PATIENCE) for one in burst])) <= {201, 503}
            assert leader.result(PATIENCE).status_code == 201


class TestAuthorize:
    """D81: it is asked for each follower, and for who gets a kept answer."""

    def test_followers_and_later_callers(self, settings: Any) -> None:
        room = Room()
        asked: list[str] = []

        def authorize(request: HttpRequest) -> bool:
            asked.append(request.headers["X-Request-Id"])
            return asked[-1] == "b"

        view = flight(authorize=authorize, result_ttl=60)(sync_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        by = lambda name: call(headers={"X-Request-Id": name})  # noqa: E731
        assert codes(fly(room, by("a"), by("b"), by("c"))) == [201, 201, 403]
        assert codes([by("d")(), by("b")()]) == [403, 201]
        assert sorted(asked) == ["b", "b", "c", "d"]

    @pytest.mark.parametrize("colour", ["sync", "async"])
    async def test_async(self, colour: str, settings: Any) -> None:
        async def aauthorize(request: HttpRequest) -> bool:
            return False

        room = Room()
        authorize = aauthorize if colour == "async" else lambda request: False
        view = flight(authorize=authorize)(async_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        assert codes(await afly(room, acall(), acall())) == [201, 403]


@pytest.mark.django_db(transaction=True)
class TestInTransactions:
    """Guarantee 12, contended or not; also where another thread has it open."""

    @pytest.mark.parametrize("make", [sync_view, async_view])
    def test_a_caller_in_a_transaction_is_refused(self, make: Any, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(flight()(make(room, ANSWERS["plain"])))
        with transaction.atomic(), pytest.raises(WaitInTransactionError):
            Client().post("/7/")
        assert room.visits == 0
        assert Client().post("/7/").status_code == 201


class TestTakeover:
    @pytest.mark.parametrize(("takeover", "code"), [(True, 201), (False, 503)])
    def test_when_the_leader_has_ended_its_process(
        self, takeover: bool, code: int, settings: Any
    ) -> None:
        room = Room()
        ends = iter([raising(SystemExit)])
        answer = lambda: next(ends, ANSWERS["plain"])()  # noqa: E731
        settings.ROOT_URLCONF = urls(flight(takeover=takeover)(sync_view(room, answer)))

        def leader() -> Any:
            with pytest.raises(SystemExit):
                call()()

        _, follower = fly(room, leader, call())
        assert follower.status_code == code
        assert room.visits == (2 if takeover else 1)


class TestWithoutAStore:
    @pytest.mark.parametrize(
        ("method", "policy", "code"),
        [
            ("get", None, 201),
            ("head", None, 201),
            ("post", None, 503),
            ("get", "reject", 503),
            ("post", "proceed", 201),
        ],
    )
    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    def test_the_policies(
        self, method: str, policy: Any, code: int, cache: str, settings: Any
    ) -> None:
        room = Room(open=True)
        view = flight(cache=cache, on_store_error=policy)(sync_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        with listening("unprotected_run", "share_refused") as told:
            assert call(method)().status_code == code
        assert room.visits == (code == 201)
        assert [name for name, _ in told] == ["unprotected_run" if code == 201 else "share_refused"]

    async def test_async(self, settings: Any) -> None:
        room = Room(open=True)
        view = flight(cache="dead")(async_view(room, ANSWERS["plain"]))
        settings.ROOT_URLCONF = urls(view)
        assert codes([await acall()(), await acall("get")()]) == [503, 201]


class TestSwitches:
    @pytest.mark.parametrize("enabled", [False, "observe"])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_switched_off_everybody_runs(
        self, enabled: Any, kind: str, settings: Any
    ) -> None:
        settings.SINGLEFLIGHT_ENABLED = enabled
        room = Room(open=True)
        make = sync_view if kind == "sync" else async_view
        settings.ROOT_URLCONF = urls(flight(result_ttl=60)(make(room, ANSWERS["plain"])))
        assert statuses([await acall()(), await acall()()]) == ["", ""]
        assert room.visits == 2


class TestLost:
    @pytest.mark.parametrize("on_lost", ["raise", "return"])
    def test_a_lease_that_was_lost(self, on_lost: Any, settings: Any, redis_client: Any) -> None:
        def view(request: Any, pk: str) -> HttpResponse:
            redis_client.flushdb()
            return HttpResponse("made")

        settings.ROOT_URLCONF = urls(flight(on_lost=on_lost)(view))
        if on_lost == "raise":
            with pytest.raises(LeaseLostError):
                Client().post("/7/")
        else:
            assert Client().post("/7/").content == b"made"


class Sync:
    """A middleware that knows no async: the work of its request can't outlive it."""

    async_capable, sync_capable = False, True

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)


class Gate:
    """The inside of an async view, held without a thread."""

    def __init__(self) -> None:
        self.visits = self.ended = 0
        self.entered, self.door = asyncio.Event(), asyncio.Event()

    async def view(self, request: HttpRequest, pk: str) -> HttpResponse:
        self.visits += 1
        self.entered.set()
        try:
            await asyncio.wait_for(self.door.wait(), PATIENCE)
        finally:
            self.ended += 1
        return HttpResponse("made", status=201)


class TestDisconnects:
    """D46, D47: a client that goes away cancels the task of its request."""

    @staticmethod
    async def leaves(task: asyncio.Task[Any]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_leader_goes_on_for_its_followers(self, settings: Any) -> None:
        gate = Gate()
        settings.ROOT_URLCONF = urls(flight()(gate.view))
        leader = asyncio.ensure_future(acall()())
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        followers = [asyncio.ensure_future(acall()()) for _ in range(3)]
        await asyncio.to_thread(they_wait, 3)
        await self.leaves(leader)
        assert gate.ended == 0
        gate.door.set()
        assert codes(await asyncio.gather(*followers)) == [201] * 3
        assert gate.visits == 1

    async def test_without_followers_it_is_cancelled(self, settings: Any) -> None:
        gate = Gate()
        settings.ROOT_URLCONF = urls(flight()(gate.view))
        leader = asyncio.ensure_future(acall()())
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        await self.leaves(leader)
        await asyncio.to_thread(until, lambda: gate.ended, "the end of the work", PATIENCE)
        assert not gate.door.is_set()

    @pytest.mark.parametrize("why", ["max_run", "middleware"])
    async def test_where_it_cant_go_on_a_follower_takes_over(self, why: str, settings: Any) -> None:
        if why == "middleware":
            settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Sync"]
        gate = Gate()
        options = {"max_run": 0.05} if why == "max_run" else {}
        settings.ROOT_URLCONF = urls(flight(ttl=1.5, **options)(gate.view))
        leader = asyncio.ensure_future(acall()())
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        follower = asyncio.ensure_future(acall()())
        await asyncio.to_thread(they_wait, 1)
        gate.entered.clear()
        await self.leaves(leader)
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        gate.door.set()
        assert (await follower).status_code == 201
        assert gate.visits == 2

    async def test_a_follower_that_leaves_harms_nobody(self, settings: Any) -> None:
        gate = Gate()
        settings.ROOT_URLCONF = urls(flight()(gate.view))
        leader = asyncio.ensure_future(acall()())
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        gone, stays = (asyncio.ensure_future(acall()()) for _ in range(2))
        await asyncio.to_thread(they_wait, 2)
        await self.leaves(gone)
        gate.door.set()
        assert codes(await asyncio.gather(leader, stays)) == [201, 201]
        assert gate.visits == 1

    async def test_a_coroutine_that_is_closed_leaves_its_flight(self) -> None:
        gate = Gate()
        work = flight(ttl=60)(gate.view)(request_like(), pk="7")
        task = asyncio.ensure_future(work)
        await asyncio.wait_for(gate.entered.wait(), PATIENCE)
        with listening("flight_failed") as told:
            work.close()
            until(lambda: told, "the keeper to tell of it")
        assert [facts.reason for _, facts in told] == ["abandoned"]
        task.cancel()
        with pytest.raises(RuntimeError, match="already awaited"):
            await task
