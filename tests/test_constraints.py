"""``unique=`` and ``on_duplicate=``: what a view's duplicate is answered, on each database."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, OperationalError, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client
from django.views import View

from singleflight_django import (
    SemaphoreLockMixin,
    acreate_or_existing,
    create_or_existing,
    semaphore_lock,
    single_flight,
)
from singleflight_django.constraints import Duplicates
from singleflight_django.responses import is_refusal
from singleflight_django.uniques import declared
from singleflight_django.violations import Violation
from tests.flying import they_wait
from tests.library.models import Book, Owner, Queued
from tests.library.threads import Aside, race
from tests.meeting import PATIENCE, held, listening, soon_free, urls

U = uuid.UUID(int=7)
UNIQUE = "library.Book.uuid"

told: list[Violation] = []


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What is wrong on purpose is none of the other tests' business."""
    told.clear()
    before = set(declared)
    yield
    declared.clear()
    declared.update(before)


def caught(view: Callable[..., Any], *args: Any) -> Callable[[HttpRequest], Any]:
    """The plain view, whose duplicates are caught."""
    duplicates = Duplicates(*args)
    return lambda request: duplicates.catch(lambda: view(request), request, told.append)


def acaught(view: Callable[..., Any], *args: Any) -> Callable[[HttpRequest], Any]:
    duplicates = Duplicates(*args)

    async def catching(request: HttpRequest) -> Any:
        return await duplicates.acatch(lambda: view(request), request, told.append)

    return catching


def create(request: HttpRequest) -> HttpResponse:
    """The double create as everybody writes it, with a write before it."""
    Owner.objects.create(name="before")
    data = request.POST
    if not Book.objects.filter(uuid=data["uuid"]).exists():
        Book.objects.create(**data.dict())
        return HttpResponse(status=201)
    return HttpResponse("exists", status=200)


def blind(request: HttpRequest) -> HttpResponse:
    """It doesn't look before."""
    Owner.objects.create(name="before")
    Book.objects.create(**request.POST.dict())
    return HttpResponse(status=201)


async def ablind(request: HttpRequest) -> HttpResponse:
    await Owner.objects.acreate(name="before")
    await Book.objects.acreate(**request.POST.dict())
    return HttpResponse(status=201)


def post(view: Any, settings: Any, **data: Any) -> Any:
    settings.ROOT_URLCONF = urls(view, "")
    return Client(raise_request_exception=False).post("/", {"uuid": U, **data})


async def apost(view: Any, settings: Any, **data: Any) -> Any:
    settings.ROOT_URLCONF = urls(view, "")
    try:
        return await AsyncClient(raise_request_exception=False).post("/", {"uuid": U, **data})
    finally:
        await sync_to_async(connections.close_all)()


@contextmanager
def atomic_requests(using: str) -> Iterator[None]:
    connections.settings[using]["ATOMIC_REQUESTS"] = True
    connections[using].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        yield
    finally:
        connections.settings[using]["ATOMIC_REQUESTS"] = False
        connections[using].settings_dict["ATOMIC_REQUESTS"] = False


class TestTheAnswer:
    def test_is_a_409_that_machines_can_read(self, using: str, settings: Any) -> None:
        Book.objects.create(uuid=U)

        response = post(caught(blind, UNIQUE), settings)

        assert response.status_code == 409
        assert response.headers["Content-Type"] == "application/problem+json"
        assert json.loads(response.content) == {
            "type": "urn:singleflight-django:duplicate",
            "title": "Already exists",
            "status": 409,
            "detail": "This already exists.",
        }

    def test_is_a_204_under_skip(self, using: str, settings: Any) -> None:
        """A webhook that is delivered twice is a success: the event is stored."""
        Book.objects.create(uuid=U)

        assert post(caught(blind, UNIQUE, "skip"), settings).status_code == 204

    def test_is_what_a_callable_returns(self, using: str, settings: Any) -> None:
        book = Book.objects.create(uuid=U, title="first")

        def answer(request: HttpRequest, violation: Violation) -> HttpResponse:
            existing = violation.existing(uuid=request.POST["uuid"])
            return JsonResponse({"pk": existing.pk, "title": existing.title})

        response = post(caught(blind, UNIQUE, answer), settings, title="second")

        assert response.status_code == 200
        assert response.json() == {"pk": book.pk, "title": "first"}

    def test_of_a_callable_is_a_refusal_if_it_says_no(self, using: str, settings: Any) -> None:
        Book.objects.create(uuid=U)
        answers: list[HttpResponse] = []

        def answer(status: int) -> Callable[..., HttpResponse]:
            return lambda *args: answers.append(HttpResponse(status=status)) or answers[-1]

        for status in (200, 422):
            post(caught(blind, UNIQUE, answer(status)), settings)

        assert [is_refusal(response) for response in answers] == [False, True]

    def test_comes_with_one_report_and_one_warning(
        self, using: str, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        Book.objects.create(uuid=U)

        with caplog.at_level(logging.WARNING):
            post(caught(blind, UNIQUE), settings)

        assert [(each.model, each.fields, each.using) for each in told] == [
            (Book, ("uuid",), using)
        ]
        # The warning is the listener's, to whom the guard tells it.
        assert caplog.records == []

    @pytest.mark.parametrize("field", ["pages", "owner_id", "isbn"])
    def test_to_any_other_refusal_is_the_failure_that_it_is(
        self, using: str, settings: Any, field: str
    ) -> None:
        """A webhook that fails is a 500, so that its provider sends it again."""
        Book.objects.create(uuid=uuid.uuid4(), isbn="1")
        value = {"pages": "0", "owner_id": "404", "isbn": "1"}[field]

        response = post(caught(blind, UNIQUE, "skip"), settings, **{field: value})

        assert response.status_code == 500
        assert told == []

    def test_without_a_duplicate_is_the_views(self, using: str, settings: Any) -> None:
        assert post(caught(blind, UNIQUE), settings).status_code == 201
        assert Book.objects.count() == 1


class TestWhatTheViewWroteBefore:
    def test_is_rolled_back(self, using: str, settings: Any) -> None:
        Book.objects.create(uuid=U)

        post(caught(blind, UNIQUE), settings)

        assert Owner.objects.count() == 0

    def test_is_rolled_back_in_somebody_elses_transaction_which_goes_on(
        self, using: str, settings: Any
    ) -> None:
        Book.objects.create(uuid=U)
        view = caught(blind, UNIQUE)

        def around(request: HttpRequest) -> Any:
            Owner.objects.create(name="around")
            response = view(request)
            Owner.objects.create(name=f"after {response.status_code}")
            return response

        with atomic_requests(using):
            assert post(around, settings).status_code == 409

        assert {each.name for each in Owner.objects.all()} == {"around", "after 409"}

    async def test_stays_in_an_async_view(self, using: str, settings: Any) -> None:
        await sync_to_async(Book.objects.create)(uuid=U)

        assert (await apost(acaught(ablind, UNIQUE), settings)).status_code == 409
        assert await Owner.objects.acount() == 1
        await sync_to_async(connections.close_all)()


class TestAsyncViews:
    @pytest.mark.parametrize(("on_duplicate", "status"), [("reject", 409), ("skip", 204)])
    async def test_are_answered_alike(
        self, using: str, settings: Any, on_duplicate: str, status: int
    ) -> None:
        await sync_to_async(Book.objects.create)(uuid=U)

        response = await apost(acaught(ablind, UNIQUE, on_duplicate), settings)

        assert response.status_code == status
        assert len(told) == 1

    async def test_may_have_a_callable_of_either_colour(self, using: str, settings: Any) -> None:
        await sync_to_async(Book.objects.create)(uuid=U, title="first")

        def answer(request: HttpRequest, violation: Violation) -> HttpResponse:
            return HttpResponse(violation.existing(uuid=U).title)

        async def aanswer(request: HttpRequest, violation: Violation) -> HttpResponse:
            return HttpResponse((await violation.aexisting(uuid=U)).title)

        for ask in (answer, aanswer, lambda *args: aanswer(*args)):
            response = await apost(acaught(ablind, UNIQUE, ask), settings)
            assert response.content == b"first"

    async def test_fail_as_they_fail(self, using: str, settings: Any) -> None:
        response = await apost(acaught(ablind, UNIQUE), settings, pages="0")

        assert response.status_code == 500

    async def test_succeed_as_they_succeed(self, using: str, settings: Any) -> None:
        def sync_in_async_clothes(request: HttpRequest) -> HttpResponse:
            return HttpResponse(status=201)

        assert (await apost(acaught(ablind, UNIQUE), settings)).status_code == 201
        assert (await apost(acaught(sync_in_async_clothes, UNIQUE), settings)).status_code == 201


class TestDeferredConstraints:
    def enqueue(self, request: HttpRequest) -> HttpResponse:
        Queued.objects.create(number=1)
        return HttpResponse(status=201)

    def test_that_fail_at_commit(self, using: str, settings: Any) -> None:
        """In its own transaction at COMMIT, in somebody else's before the view's savepoint ends."""
        if not connections[using].features.supports_deferrable_unique_constraints:
            pytest.skip("No such constraint here.")
        view = caught(self.enqueue, "library.Queued.number")

        assert post(view, settings).status_code == 201
        assert post(view, settings).status_code == 409
        with atomic_requests(using):
            assert post(view, settings).status_code == 409
        assert Queued.objects.count() == 1

    @pytest.mark.parametrize("using", ["postgres"], indirect=True)
    def test_are_no_success_of_a_flight(self, using: str, settings: Any) -> None:
        """D63: the view has returned its 201, and ATOMIC_REQUESTS commits after it."""
        entered, statuses = threading.Event(), list[int]()

        def lead(request: HttpRequest) -> HttpResponse:
            entered.set()
            if not statuses:
                they_wait(1)
                with Aside() as other:
                    other.step(lambda: self.enqueue(request))
            response = self.enqueue(request)
            statuses.append(response.status_code)
            return response

        guarded = single_flight("queue", wait=PATIENCE, result_ttl=60)(lead)
        settings.ROOT_URLCONF = urls(guarded, "")

        def leader() -> int:
            return Client(raise_request_exception=False).post("/").status_code

        def follower() -> int:
            assert entered.wait(PATIENCE)
            return leader()

        with atomic_requests(using):
            assert race(leader, follower) == [500, 503]
            # The one of the other caller, whom no guard has stopped.
            assert Queued.objects.count() == 1
            # Neither the 201 nor the failure is kept: the next one runs.
            assert leader() == 500
            Queued.objects.all().delete()
            # What is committed is kept: of these two the second has the first one's.
            assert [leader(), leader()] == [201, 201]
        assert statuses == [201, 201, 201]
        assert Queued.objects.count() == 1


class TestRaces:
    @pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
    @pytest.mark.parametrize("view", [create, blind])
    def test_of_a_double_click_one_creates_and_nobody_fails(
        self, using: str, settings: Any, view: Any, atomic: bool
    ) -> None:
        """exists() says no to both; select_for_update() would find no row to lock, either."""
        if using == "sqlite" and atomic:
            pytest.skip("There Django's own transaction has to begin IMMEDIATE: transaction_mode.")
        guarded = caught(transaction.atomic(view) if atomic else view, UNIQUE)
        settings.ROOT_URLCONF = urls(guarded, "")
        for number in range(3):
            data = {"uuid": uuid.UUID(int=number)}
            answers = race(*[lambda data=data: Client().post("/", data).status_code] * 4)
            assert answers.count(201) == 1
            assert set(answers) <= {201, 200, 409}
        assert Book.objects.count() == 3

    def test_where_both_have_looked_before_either_writes(self, using: str, settings: Any) -> None:
        if using == "sqlite":
            pytest.skip("There the second one looks when the first has committed.")
        both = threading.Barrier(2, timeout=PATIENCE)

        def look_then_create(request: HttpRequest) -> HttpResponse:
            assert not Book.objects.select_for_update().filter(uuid=U).exists()
            both.wait()
            Book.objects.create(uuid=U)
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(caught(look_then_create, UNIQUE), "")
        answers = race(*[lambda: Client().post("/").status_code] * 2)

        assert sorted(answers) == [201, 409]
        assert Book.objects.count() == 1


class TestWithCreateOrExisting:
    def test_a_view_may_write_more_than_the_row(self, using: str, settings: Any) -> None:
        def view(request: HttpRequest) -> HttpResponse:
            Owner.objects.create(name="before")
            _, created = create_or_existing(Book.objects, uuid=request.POST["uuid"])
            return HttpResponse(status=201 if created else 200)

        answers = [post(caught(view, UNIQUE), settings).status_code for _ in range(2)]

        assert answers == [201, 200]
        assert Owner.objects.count() == 2


def test_a_constraint_that_is_none_is_told_at_the_first_request(using: str, settings: Any) -> None:
    settings.ROOT_URLCONF = urls(caught(blind, "library.Book.title"), "")

    with pytest.raises(ImproperlyConfigured, match="Add unique=True"):
        Client().post("/", {"uuid": U})


def test_an_error_without_a_database_behind_it_stays_what_it_is(using: str, settings: Any) -> None:
    def raise_it(request: HttpRequest) -> HttpResponse:
        raise IntegrityError("of the site's own")

    settings.ROOT_URLCONF = urls(caught(raise_it, UNIQUE), "")

    with pytest.raises(IntegrityError, match="of the site's own"):
        Client().post("/")


def locked(view: Callable[..., Any], **options: Any) -> Any:
    return semaphore_lock("book", **{"unique": UNIQUE, **options})(view)


class TestBeneathALock:
    """The whole thing, with the lease that makes it rare."""

    @pytest.mark.parametrize(
        ("options", "status"),
        [
            ({}, 409),
            ({"on_conflict": "skip"}, 204),
            ({"on_conflict": lambda *args: HttpResponse(status=423)}, 409),
            ({"on_conflict": "skip", "on_duplicate": "reject"}, 409),
            ({"on_duplicate": "skip"}, 204),
            ({"on_duplicate": lambda *args: HttpResponse(status=200)}, 200),
            ({"unique": [UNIQUE, "library.Book.isbn"]}, 409),
        ],
    )
    def test_a_duplicate_is_answered_like_a_conflict(
        self, using: str, settings: Any, options: dict[str, Any], status: int
    ) -> None:
        Book.objects.create(uuid=U)

        assert post(locked(blind, **options), settings).status_code == status
        assert Owner.objects.count() == 0
        assert not held("book")

    async def test_and_in_an_async_view(self, using: str, settings: Any) -> None:
        await sync_to_async(Book.objects.create)(uuid=U)

        assert (await apost(locked(ablind), settings)).status_code == 409
        assert not held("book")

    @pytest.mark.parametrize("observe", [False, True])
    def test_it_is_told_once(
        self, using: str, settings: Any, caplog: pytest.LogCaptureFixture, observe: bool
    ) -> None:
        Book.objects.create(uuid=U)

        with listening("duplicate_caught") as events:
            response = post(locked(blind, observe=observe), settings)

        assert response.status_code == (500 if observe else 409)
        ((_, facts),) = events
        assert facts.reason == ("observe: " if observe else "") + UNIQUE
        assert (facts.key, facts.namespace) == ("semaphore_lock:book", "semaphore_lock")
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        assert len(warnings) == 1

    async def test_it_is_told_once_in_an_async_view_that_is_only_observed(
        self, using: str, settings: Any
    ) -> None:
        await sync_to_async(Book.objects.create)(uuid=U)

        with listening("duplicate_caught") as events:
            response = await apost(locked(ablind, observe=True), settings)
            failed = await apost(locked(ablind, observe=True), settings, pages="0")

        assert (response.status_code, failed.status_code) == (500, 500)
        assert len(events) == 1

    def test_what_is_only_observed_and_succeeds(self, using: str, settings: Any) -> None:
        assert post(locked(blind, observe=True), settings).status_code == 201

    async def test_what_is_only_observed_and_succeeds_in_async(
        self, using: str, settings: Any
    ) -> None:
        assert (await apost(locked(ablind, observe=True), settings)).status_code == 201

    def test_the_constraint_holds_when_the_store_is_away(self, using: str, settings: Any) -> None:
        Book.objects.create(uuid=U)
        view = locked(blind, cache="dead", on_store_error="proceed")

        assert post(view, settings).status_code == 409

    def test_with_atomic_requests(self, using: str, settings: Any) -> None:
        """The duplicate is found outside of the view's transaction and beneath its lease."""
        view = locked(blind)

        with atomic_requests(using):
            assert post(view, settings).status_code == 201
            assert post(view, settings).status_code == 409

        assert (Book.objects.count(), Owner.objects.count()) == (1, 1)

    def test_a_deferred_constraint_with_atomic_requests(self, using: str, settings: Any) -> None:
        if not connections[using].features.supports_deferrable_unique_constraints:
            pytest.skip("No such constraint here.")
        view = locked(TestDeferredConstraints().enqueue, unique="library.Queued.number")

        with atomic_requests(using):
            assert post(view, settings).status_code == 201
            assert post(view, settings).status_code == 409

    @pytest.mark.parametrize("options", [{}, {"unique": None}])
    def test_anothers_row_is_a_409(self, using: str, settings: Any, options: Any) -> None:
        """What create_or_existing() raises is answered, and tells nothing of the row."""
        Book.objects.create(uuid=U, title="private", owner=Owner.objects.create())

        def view(request: HttpRequest) -> HttpResponse:
            create_or_existing(Book.objects.filter(owner=None), uuid=U)
            return HttpResponse(status=201)

        response = post(locked(view, **options), settings)

        assert response.status_code == 409
        assert response.json()["type"] == "urn:singleflight-django:duplicate-mismatch"
        assert b"private" not in response.content

    async def test_anothers_row_is_a_409_in_an_async_view(self, using: str, settings: Any) -> None:
        await sync_to_async(Book.objects.create)(uuid=U, deleted=True)

        async def view(request: HttpRequest) -> HttpResponse:
            await acreate_or_existing(Book.visible, uuid=U)
            return HttpResponse(status=201)

        assert (await apost(locked(view), settings)).status_code == 409

    def test_class_views(self, using: str, settings: Any) -> None:
        class Create(SemaphoreLockMixin, View):
            lock_key = "book"
            lock_on_conflict = "skip"
            lock_unique = UNIQUE

            def post(self, request: HttpRequest) -> HttpResponse:
                return blind(request)

        assert [post(Create.as_view(), settings).status_code for _ in range(2)] == [201, 204]


def cross(request: HttpRequest, both: threading.Barrier) -> HttpResponse:
    """Two of these, with the numbers swapped, each want the row that the other one has made."""
    Owner.objects.create(name="before")
    Book.objects.create(uuid=request.POST["first"])
    both.wait()
    Book.objects.create(uuid=request.POST["second"])
    return HttpResponse(status=201)


class Crossing:
    """The view, guarded in each place; a lock of its own for each of the two callers."""

    def __init__(self, using: str) -> None:
        self.using, both = using, threading.Barrier(2, timeout=PATIENCE)
        self.view = lambda request: cross(request, both)
        # InnoDB locks the gap beside a row that was deleted a moment ago: no other test had these.
        self.keys = [str(uuid.uuid4()) for _ in range(2)]
        self.guard = semaphore_lock("book:<body.first>", unique=UNIQUE)

    def race(self) -> list[Any]:
        def click(first: str, second: str) -> Any:
            client = Client(raise_request_exception=False)
            return client.post("/", {"first": first, "second": second})

        one, two = self.keys
        return race(lambda: click(one, two), lambda: click(two, one))

    def outermost(self) -> Any:
        return self.guard(self.view)

    def beneath(self) -> Any:
        guard, view = self.guard, self.view

        class Create(View):
            def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
                Owner.objects.create(name="outside of the guard")
                return super().dispatch(request, *args, **kwargs)

            @guard
            def post(self, request: HttpRequest) -> Any:
                return view(request)

        return Create.as_view()

    def deeper(self) -> Any:
        """A second block around it: only an exception rolls both back."""
        guarded = self.guard(self.view)
        return transaction.atomic(using=self.using)(lambda request: guarded(request))


@pytest.mark.parametrize("using", ["postgres", "mariadb"], indirect=True)
class TestADeadlock:
    """Two callers with different keys, who both write the same two rows."""

    @pytest.mark.parametrize(
        ("place", "atomic", "status"),
        [
            ("outermost", False, 503),
            ("outermost", True, 503),
            ("beneath", True, 503),
            ("deeper", True, 500),
        ],
    )
    def test_is_answered_and_leaves_nothing_half_done(
        self, using: str, settings: Any, place: str, atomic: bool, status: int
    ) -> None:
        crossing = Crossing(using)
        settings.ROOT_URLCONF = urls(getattr(crossing, place)(), "")

        with atomic_requests(using) if atomic else nullcontext():
            answers = crossing.race()

        assert sorted(answer.status_code for answer in answers) == [201, status]
        assert (Owner.objects.count(), Book.objects.count()) == (2 if place == "beneath" else 1, 2)
        for key in crossing.keys:
            soon_free(f"book:{key}")

    def test_tells_the_client_when_and_the_log_why(
        self, using: str, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        crossing = Crossing(using)
        settings.ROOT_URLCONF = urls(crossing.outermost(), "")

        answers = crossing.race()

        (refused,) = (answer for answer in answers if answer.status_code != 201)
        assert refused.json()["type"] == "urn:singleflight-django:contention"
        assert refused.headers["Retry-After"] == "1"
        assert b"lock" not in refused.content
        (record,) = (each for each in caplog.records if each.levelname == "WARNING")
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], OperationalError)
        assert record.exc_info[1].__cause__ is not None


@contextmanager
def serializable(using: str) -> Iterator[None]:
    """Each transaction of this thread's connection is SERIALIZABLE."""
    level = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL "
    with connections[using].cursor() as cursor:
        cursor.execute(level + "SERIALIZABLE")
    try:
        yield
    finally:
        with connections[using].cursor() as cursor:
            cursor.execute(level + "READ COMMITTED")


def skewed(using: str, other: Aside) -> None:
    """Count, and write; somebody else who has counted the same has written and committed first."""

    def theirs() -> None:
        with serializable(using), transaction.atomic(using=using):
            Owner.objects.create(name=f"theirs {Owner.objects.count()}")

    number = Owner.objects.count()
    other.step(theirs)
    Owner.objects.create(name=f"ours {number}")


@pytest.mark.parametrize("using", ["postgres"], indirect=True)
class TestASerializationFailureAtCommit:
    """The view has returned its 201 by then."""

    @pytest.mark.parametrize(
        ("guard", "atomic", "status"),
        [("unique", False, 503), ("unique", True, 503), ("lock", True, 500), ("flight", True, 500)],
    )
    def test_is_no_success(
        self, using: str, settings: Any, guard: str, atomic: bool, status: int
    ) -> None:
        with Aside() as other, serializable(using):

            def view(request: HttpRequest) -> HttpResponse:
                skewed(using, other)
                return HttpResponse(status=201)

            guards: dict[str, Any] = {
                "unique": semaphore_lock("book", unique=UNIQUE),
                "lock": semaphore_lock("book"),
                "flight": single_flight("book", result_ttl=60),
            }
            with atomic_requests(using) if atomic else nullcontext():
                answers = [post(guards[guard](view), settings).status_code for _ in range(2)]

        # Neither is kept for the next one, who runs by himself.
        assert answers == [status, status]
        assert {each.name for each in Owner.objects.all()} == {"theirs 0", "theirs 1"}
        assert not held("book")

    def test_nor_is_it_for_a_follower(self, using: str, settings: Any) -> None:
        entered = threading.Event()

        def lead(request: HttpRequest) -> HttpResponse:
            entered.set()
            they_wait(1)
            with Aside() as other:
                skewed(using, other)
            return HttpResponse(status=201)

        settings.ROOT_URLCONF = urls(single_flight("book", wait=PATIENCE)(lead), "")

        def leader() -> int:
            with serializable(using):
                return Client(raise_request_exception=False).post("/").status_code

        def follower() -> int:
            entered.wait(PATIENCE)
            return Client(raise_request_exception=False).post("/").status_code

        with atomic_requests(using):
            answers = race(leader, follower)

        assert answers == [500, 503]
        assert [each.name for each in Owner.objects.all()] == ["theirs 0"]

    async def test_in_an_async_view_it_is_answered_too(
        self, using: str, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def write() -> None:
            with Aside() as other, serializable(using), transaction.atomic(using=using):
                skewed(using, other)

        async def view(request: HttpRequest) -> HttpResponse:
            await sync_to_async(write)()
            return HttpResponse(status=201)

        response = await apost(locked(view), settings)

        assert response.status_code == 503
        assert response.json()["type"] == "urn:singleflight-django:contention"


class TestOtherFailuresOfTheDatabase:
    """They stay what they are."""

    def broken(self, request: HttpRequest) -> HttpResponse:
        Owner.objects.create(name="before")
        raise OperationalError("the disk is full")

    async def abroken(self, request: HttpRequest) -> HttpResponse:
        raise OperationalError("the disk is full")

    def test_in_a_view(self, using: str, settings: Any) -> None:
        assert post(locked(self.broken), settings).status_code == 500
        assert Owner.objects.count() == 0

    async def test_in_an_async_view(self, using: str, settings: Any) -> None:
        assert (await apost(locked(self.abroken), settings)).status_code == 500

    @pytest.mark.parametrize("using", ["postgres"], indirect=True)
    def test_where_the_site_ends_its_transactions_itself(self, using: str, settings: Any) -> None:
        """What it has written before is not ours to undo."""
        with Aside() as other, serializable(using):

            def view(request: HttpRequest) -> HttpResponse:
                other.step(lambda: Owner.objects.update(name="theirs"))
                Owner.objects.update(name="ours")
                return HttpResponse(status=201)

            Owner.objects.create(name="nobody's")
            connections[using].set_autocommit(False)
            try:
                Owner.objects.count()
                assert post(locked(view), settings).status_code == 500
            finally:
                connections[using].rollback()
                connections[using].set_autocommit(True)

    def test_of_an_on_commit_hook_of_the_sites_own(self, using: str, settings: Any) -> None:
        """All is committed by then: to say that it is a duplicate would not be true."""

        def view(request: HttpRequest) -> HttpResponse:
            Book.objects.create(uuid=U)
            transaction.on_commit(lambda: Book.objects.create(uuid=U), using=using)
            return HttpResponse(status=201)

        assert post(locked(view), settings).status_code == 500
        assert Book.objects.count() == 1


@pytest.mark.parametrize("using", ["sqlite"], indirect=True)
def test_a_writer_that_never_ends_is_no_500(using: str, settings: Any) -> None:
    """D66: "database is locked", when SQLite's own patience is at its end."""
    with Aside() as other, connections[using].cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
        other.step(lambda: transaction.set_autocommit(False, using=using))
        other.step(lambda: Owner.objects.create(name="theirs"))

        response = post(locked(blind), settings)

        other.step(lambda: transaction.rollback(using=using))
    assert response.status_code == 503
    assert Owner.objects.count() == 0


QUERYING = "{% load books %}"


def querying_page(settings: Any, using: str) -> None:
    """The site's own problem page shows how many owners there are, as its context processor tells."""
    settings.TEMPLATES = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {
                "loaders": [
                    (
                        "django.template.loaders.locmem.Loader",
                        {"singleflight_django/problem.html": "{{ status }}, {{ owners }} owners"},
                    )
                ],
                "context_processors": [f"{__name__}.owners"],
            },
        }
    ]


def owners(request: HttpRequest) -> dict[str, int]:
    return {"owners": Owner.objects.count()}


def in_the_way(using: str) -> OperationalError:
    """As the driver raises it when somebody else is writing."""
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorcode = sqlite3.SQLITE_BUSY
    error = OperationalError("database is locked")
    error.__cause__ = cause
    return error


def beneath(view: Callable[[HttpRequest], HttpResponse]) -> Any:
    """The view as a guarded handler: Django's transaction is around the guard."""

    class Create(View):
        @semaphore_lock("book", unique=UNIQUE)
        def post(self, request: HttpRequest) -> HttpResponse:
            return view(request)

    return Create.as_view()


@pytest.mark.parametrize("using", ["sqlite"], indirect=True)
class TestAPageThatQueries:
    """A browser's 503 is rendered before the rollback, after which no query is allowed."""

    @pytest.mark.parametrize("atomic", [False, True])
    def test_is_the_answer_to_contention(self, using: str, settings: Any, atomic: bool) -> None:
        def view(request: HttpRequest) -> HttpResponse:
            Owner.objects.create(name="undone")
            raise in_the_way(using)

        querying_page(settings, using)
        settings.ROOT_URLCONF = urls(beneath(view), "")
        with atomic_requests(using) if atomic else nullcontext():
            response = Client().post("/", headers={"accept": "text/html"})

        assert response.status_code == 503
        assert response.content == b"503, 0 owners"
        assert Owner.objects.count() == 0

    async def test_so_it_is_in_an_async_view(self, using: str, settings: Any) -> None:
        async def view(request: HttpRequest) -> HttpResponse:
            raise in_the_way(using)

        querying_page(settings, using)
        settings.ROOT_URLCONF = urls(locked(view), "")
        response = await AsyncClient().post("/", headers={"accept": "text/html"})

        assert response.status_code == 503
        assert response.content == b"503, 0 owners"

    def test_is_left_out_where_no_query_is_allowed_any_more(
        self, using: str, settings: Any
    ) -> None:
        """As on MySQL, where a deadlock ends the whole transaction, and its savepoints."""

        def view(request: HttpRequest) -> HttpResponse:
            connections[using].savepoint_commit(connections[using].savepoint_ids[-1])
            raise in_the_way(using)

        querying_page(settings, using)
        settings.ROOT_URLCONF = urls(beneath(view), "")
        with atomic_requests(using):
            response = Client().post("/", headers={"accept": "text/html"})

        assert response.status_code == 503
        assert response.json()["type"] == "urn:singleflight-django:contention"


class TestMisuse:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"unique": "uuid.Book"}, "write a field as"),
            ({"unique": None, "on_duplicate": "skip"}, "say which constraint"),
            ({"on_duplicate": "ignore"}, "on_duplicate must be one of"),
        ],
    )
    def test_is_told_at_decoration(self, options: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            locked(blind, **options)

    def test_is_told_where_there_is_no_view(self) -> None:
        with (
            pytest.raises(ValueError, match="use create_or_existing"),
            semaphore_lock("book", unique=UNIQUE),
        ):
            pass
