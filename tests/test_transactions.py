"""The lease is outside of the transaction, or ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from singleflight_django import SemaphoreLockMixin, semaphore_lock, single_flight
from singleflight_django.exceptions import LeaseConflictError, WaitInTransactionError
from singleflight_django.renewal import keeper
from singleflight_django.signals import lease_acquired, lease_released
from testproject.lessons.models import LooseLessonSession

LEASE = "singleflight:{{semaphore_lock:{}}}:lease"

journal: list[str] = []
held: Callable[[str], bool]


def note(request: HttpRequest) -> HttpResponse:
    """The plain view: it writes, and notes what it finds around it."""
    journal.append("view in a transaction" if connection.in_atomic_block else "view")
    transaction.on_commit(lambda: journal.append(f"on_commit, held: {held('order:7')}"))
    LooseLessonSession.objects.create(uuid=request.GET["uuid"], course="x", user_id=1)
    if request.GET.get("raise"):
        raise Http404
    return HttpResponse(status=201)


locked = semaphore_lock(key="order:7")(note)
flown = single_flight(key="order:<query.uuid>")(note)


class Beneath(View):
    """Guarded where the transaction is open already."""

    @semaphore_lock(key="order:7")
    def post(self, request: HttpRequest) -> HttpResponse:
        return note(request)

    @method_decorator(single_flight(key="order:7"))
    def put(self, request: HttpRequest) -> HttpResponse:
        return note(request)

    @semaphore_lock(key="order:7", wait=1)
    def patch(self, request: HttpRequest) -> HttpResponse:
        return note(request)


class Plain(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return note(request)


@method_decorator(semaphore_lock(key="order:7"), name="dispatch")
class Dispatched(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return note(request)

    def post(self, request: HttpRequest) -> HttpResponse:
        return note(request)


@method_decorator(semaphore_lock(key="order:7"), name="dispatch")
class DispatchedAsync(View):
    async def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@method_decorator(transaction.non_atomic_requests, name="dispatch")
class OptedOut(Dispatched):
    """Its parent has not opted out."""


@semaphore_lock(key="order:7")
async def locked_async(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@semaphore_lock(key="order:7")
@transaction.non_atomic_requests
def opted_out(request: HttpRequest) -> HttpResponse:
    return note(request)


class Mixed(SemaphoreLockMixin, View):
    lock_key = "order:7"

    def post(self, request: HttpRequest) -> HttpResponse:
        return note(request)


class Rest(SemaphoreLockMixin, APIView):
    lock_key = "order:7"

    def post(self, request: Any) -> HttpResponse:
        return note(request)


@api_view(["POST"])
@semaphore_lock(key="order:7")
def rest_function(request: Any) -> HttpResponse:
    return note(request)


urlpatterns = [
    path("mixed", Mixed.as_view()),
    path("rest", Rest.as_view()),
    path("rest-function", rest_function),
    path("plain", note),
    path("locked", locked),
    path("flown", flown),
    path("opted-out-above", transaction.non_atomic_requests(semaphore_lock(key="order:7")(note))),
    path("opted-out-below", opted_out),
    path("as-view", semaphore_lock(key="order:7")(Plain.as_view())),
    path("dispatched", Dispatched.as_view()),
    path("one-of-two", transaction.non_atomic_requests(Dispatched.as_view())),
    path("subclass", OptedOut.as_view()),
    path("beneath", Beneath.as_view()),
    path("async", locked_async),
    path("dispatched-async", DispatchedAsync.as_view()),
]
pytestmark = pytest.mark.urls(__name__)
U = "6c84fb90-12c4-11e1-840d-7b25c5ee775a"


@pytest.fixture
def journalled(redis_client: redis.Redis) -> Iterator[list[str]]:
    """What happens in a request, in its order."""
    global held
    held = lambda key: bool(redis_client.exists(LEASE.format(key)))  # noqa: E731
    journal.clear()

    def acquired(**_: Any) -> None:
        journal.append("acquire")

    def released(**_: Any) -> None:
        journal.append("release")

    lease_acquired.connect(acquired)
    lease_released.connect(released)
    yield journal
    lease_acquired.disconnect(acquired)
    lease_released.disconnect(released)


@pytest.fixture
def atomic_requests(transactional_db: None, django_user_model: Any) -> Iterator[None]:
    """ATOMIC_REQUESTS on the default database, and the user that lessons belong to."""
    django_user_model.objects.create(pk=1, username="ann")
    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    yield
    connections.settings["default"]["ATOMIC_REQUESTS"] = False


def rows() -> int:
    return LooseLessonSession.objects.filter(uuid=U).count()


OUTSIDE = ["acquire", "view in a transaction", "on_commit, held: True", "release"]


@pytest.mark.parametrize("url", ["locked", "flown", "as-view", "dispatched"])
def test_acquire_begin_view_commit_hooks_release(
    url: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.post(f"/{url}?uuid={U}").status_code == 201

    # A flight is led, not acquired.
    expected = OUTSIDE[1:] if url == "flown" else OUTSIDE
    assert [line.replace("held: False", "held: True") for line in journalled] == expected
    assert rows() == 1


@pytest.mark.parametrize("url", ["plain", "locked", "flown", "as-view", "dispatched", "beneath"])
def test_an_exception_rolls_back(
    url: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.post(f"/{url}?uuid={U}&raise=1").status_code == 404

    assert rows() == 0
    assert not held("order:7")


def in_a_transaction(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware that has one of its own around everything."""

    def middleware(request: HttpRequest) -> Any:
        with transaction.atomic():
            return get_response(request)

    return middleware


@pytest.mark.parametrize("url", ["plain", "locked", "as-view", "dispatched", "mixed", "rest"])
def test_inside_of_a_middleware_s_transaction_the_view_still_has_its_own(
    url: str,
    atomic_requests: None,
    journalled: list[str],
    client: Client,
    settings: Any,
) -> None:
    """A savepoint, as Django makes it: what it wrote is rolled back, what the site wrote stays."""
    settings.MIDDLEWARE = [f"{__name__}.in_a_transaction"]
    assert client.post(f"/{url}?uuid={U}&raise=1").status_code == 404
    assert rows() == 0
    assert not held("order:7")
    assert client.post(f"/{url}?uuid={U}").status_code == 201
    assert rows() == 1
    assert not held("order:7")


@pytest.mark.parametrize("url", ["rest", "rest-function"])
def test_what_rest_framework_answers_for_an_exception_rolls_back(
    url: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.post(f"/{url}?uuid={U}&raise=1").status_code == 404
    assert rows() == 0
    assert not held("order:7")
    assert client.post(f"/{url}?uuid={U}").status_code == 201
    assert rows() == 1
    assert not held("order:7")


def test_after_a_rollback_the_lease_ends_with_the_request_however_busy_the_keeper_is(
    atomic_requests: None, journalled: list[str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "give_back_later", lambda lease: None)
    assert client.post(f"/rest-function?uuid={U}&raise=1").status_code == 404
    assert not held("order:7")


def test_a_request_that_is_handled_twice_has_its_transactions_each_time(
    atomic_requests: None, journalled: list[str], settings: Any, client: Client
) -> None:
    settings.MIDDLEWARE = [f"{__name__}.once_more"]
    assert client.post(f"/locked?uuid={U}").status_code == 201
    assert journalled == [*OUTSIDE, *OUTSIDE]


def once_more(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware that tries again whatever came of it."""

    def middleware(request: HttpRequest) -> Any:
        get_response(request)
        return get_response(request)

    return middleware


def test_a_method_that_passes_has_its_transaction_all_the_same(
    atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.get(f"/dispatched?uuid={U}").status_code == 201

    assert journalled == ["view in a transaction", "on_commit, held: False"]


@pytest.mark.parametrize("url", ["opted-out-above", "opted-out-below"])
def test_non_atomic_requests_still_counts(
    url: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.post(f"/{url}?uuid={U}").status_code == 201

    assert journalled == ["acquire", "view", "on_commit, held: True", "release"]


@pytest.mark.parametrize("first", ["one-of-two", "subclass"])
def test_non_atomic_requests_is_about_one_of_the_views_that_share_a_dispatch(
    first: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    for url in (first, "dispatched"):
        assert client.post(f"/{url}?uuid={U}").status_code == 201

    assert journalled == ["acquire", "view", "on_commit, held: True", "release", *OUTSIDE]


def test_beneath_the_callback_the_lease_ends_with_the_commit(
    atomic_requests: None, journalled: list[str], client: Client
) -> None:
    assert client.post(f"/beneath?uuid={U}").status_code == 201

    assert journalled == OUTSIDE


@pytest.mark.parametrize("method", ["put", "patch"])
def test_beneath_the_callback_what_could_wait_is_an_error(
    method: str, atomic_requests: None, journalled: list[str], client: Client
) -> None:
    with pytest.raises(WaitInTransactionError, match="non_atomic_requests"):
        getattr(client, method)(f"/beneath?uuid={U}")

    assert journalled == []


@pytest.mark.parametrize("url", ["async", "dispatched-async"])
async def test_async_views_keep_django_s_own_error(
    url: str, transactional_db: None, async_client: AsyncClient
) -> None:
    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    try:
        with pytest.raises(RuntimeError, match="You cannot use ATOMIC_REQUESTS with async views"):
            await async_client.post(f"/{url}")
    finally:
        connections.settings["default"]["ATOMIC_REQUESTS"] = False


@pytest.mark.django_db(transaction=True)
class TestInsideAnOpenTransaction:
    def test_the_lease_ends_with_the_commit(self, journalled: list[str]) -> None:
        with transaction.atomic():
            with semaphore_lock("order:7"):
                pass
            assert held("order:7")
            transaction.on_commit(lambda: journal.append("later hook"))

        assert not held("order:7")
        assert journalled == ["acquire", "release", "later hook"]

    def test_or_soon_after_a_rollback(self, journalled: list[str]) -> None:
        with transaction.atomic():
            with semaphore_lock("order:7") as lease:
                pass
            transaction.set_rollback(True)

        with semaphore_lock("order:7", wait=5):
            assert not lease.held

    def test_or_of_a_connection_that_is_closed(self, journalled: list[str]) -> None:
        def work() -> None:
            transaction.get_connection().set_autocommit(True)
            with transaction.atomic():
                with semaphore_lock("order:7"):
                    pass
                connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(5)

        with semaphore_lock("order:7", wait=5):
            pass

    def test_not_where_no_store_knows_of_it(self, journalled: list[str], settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = False
        with transaction.atomic():
            with semaphore_lock("order:7") as lease:
                pass
            assert not lease.held
            assert connection.run_on_commit == []

    def test_not_with_the_rollback_of_a_savepoint(self, journalled: list[str]) -> None:
        with transaction.atomic():
            with pytest.raises(LookupError), transaction.atomic():
                with semaphore_lock("order:7") as lease:
                    pass
                raise LookupError
            assert held("order:7")
            assert lease.held

        assert not held("order:7")

    def test_whatever_another_hook_raises(self, journalled: list[str]) -> None:
        def fail() -> None:
            raise LookupError

        with pytest.raises(LookupError), transaction.atomic():
            transaction.on_commit(fail)
            with semaphore_lock("order:7"):
                pass

        with semaphore_lock("order:7", wait=5):
            pass

    def test_with_the_last_of_several_commits(self, journalled: list[str], postgres: str) -> None:
        with transaction.atomic(using="default"):
            with transaction.atomic(using=postgres):
                with semaphore_lock("order:7"):
                    pass
            assert held("order:7")

        assert not held("order:7")

    test_with_the_last_of_several_commits = pytest.mark.django_db(
        transaction=True, databases=["default", "postgres"]
    )(test_with_the_last_of_several_commits)

    def test_a_body_that_raises_leaves_the_lease_to_the_rollback(
        self, journalled: list[str]
    ) -> None:
        with pytest.raises(LookupError), transaction.atomic(), semaphore_lock("order:7"):
            raise LookupError

        with semaphore_lock("order:7", wait=5):
            pass

    def test_nobody_waits(self, journalled: list[str]) -> None:
        with (
            transaction.atomic(),
            pytest.raises(WaitInTransactionError),
            semaphore_lock("order:7", wait=1),
        ):
            pass

    def test_nobody_waits_in_a_coroutine_that_the_transaction_waits_for(
        self, journalled: list[str]
    ) -> None:
        async def wait() -> None:
            async with semaphore_lock("order:7", wait=1):
                pass

        with transaction.atomic(), pytest.raises(WaitInTransactionError):
            async_to_sync(wait)()
        async_to_sync(wait)()


@pytest.mark.django_db
class TestInsideTestCaseOnly:
    def test_the_lease_ends_with_its_body(self, journalled: list[str]) -> None:
        with semaphore_lock("order:7", wait=1):
            assert held("order:7")

        assert not held("order:7")

    def test_a_request_of_the_test_client_leaves_nothing_behind(
        self, journalled: list[str], client: Client, django_user_model: Any
    ) -> None:
        django_user_model.objects.create(pk=1, username="ann")
        connections.settings["default"]["ATOMIC_REQUESTS"] = True
        try:
            for url in ("locked", "beneath", "locked", "beneath"):
                assert client.post(f"/{url}?uuid={U}").status_code == 201
        finally:
            connections.settings["default"]["ATOMIC_REQUESTS"] = False

        assert not held("order:7")


@pytest.mark.django_db(transaction=True)
def test_a_conflict_inside_a_transaction_is_told_at_once(journalled: list[str]) -> None:
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with semaphore_lock("order:7"):
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(10)
        with transaction.atomic(), pytest.raises(LeaseConflictError), semaphore_lock("order:7"):
            pass
    finally:
        done.set()
        thread.join(10)
