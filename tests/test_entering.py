"""A view under its lease: what comes of a conflict, of a wait, and of every way to end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.http import Http404, HttpRequest, HttpResponse
from django.test import AsyncClient, Client

from singleflight_django import LeaseConflictError, semaphore_lock
from singleflight_django.exceptions import NestedFlightError
from tests.meeting import (
    PATIENCE,
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
    someone_waits,
    soon_free,
    together,
    urls,
)

guard = functools.partial(semaphore_lock, key="lesson:<pk>")


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
            await asyncio.to_thread(someone_waits)
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


def _one_waits(room: Room, post: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post())
        room.wait()
        second = pool.submit(post())
        someone_waits()
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

    async def test_two_guards_of_one_key_are_an_error_of_async_views_too(
        self, settings: Any
    ) -> None:
        settings.ROOT_URLCONF = urls(guard()(guard()(afunction(Room(open=True)))))
        with pytest.raises(NestedFlightError):
            await apost()()
        assert not await asyncio.to_thread(held, "lesson:7")

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
        soon_free("lesson:7")

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
        await asyncio.to_thread(soon_free, "lesson:7")


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
