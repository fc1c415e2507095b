"""The test kit: three scenarios for guards that guard, and for those that don't."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.core.cache import caches
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, LiveServerTestCase, RequestFactory, override_settings
from django.urls import path
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view
from rest_framework.response import Response

from singleflight_django import SemaphoreLockMixin, SingleFlight, semaphore_lock, single_flight
from singleflight_django.signals import lease_acquired
from singleflight_django.stores.cache import CacheStore
from singleflight_django.testing import assert_mutual_exclusion, assert_single_flight, held
from testproject.lessons.models import LooseLessonSession

answers = SingleFlight("answers")


def work(*args: object) -> str:
    return f"answer to {args}"


async def awork(*args: object) -> str:
    await asyncio.sleep(0)
    return work(*args)


def plain(request: HttpRequest, **kwargs: object) -> HttpResponse:
    return HttpResponse(work())


async def aplain(request: HttpRequest) -> HttpResponse:
    return HttpResponse(await awork())


def rendered(request: HttpRequest) -> TemplateResponse:
    return TemplateResponse(request, engines["django"].from_string("answer"))


def streamed(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"answer"]))


async def astreamed(request: HttpRequest) -> StreamingHttpResponse:
    async def parts() -> Any:
        yield (await awork()).encode()

    return StreamingHttpResponse(parts())


class ByMixin(SemaphoreLockMixin, View):
    lock_key = "lesson:<name>"

    def post(self, request: HttpRequest) -> HttpResponse:
        return plain(request)


class Handlers:
    """Where work is done by methods."""

    @staticmethod
    def static() -> str:
        return work()

    @classmethod
    def of_class(cls) -> str:
        return cls.static()

    def of_instance(self) -> str:
        return self.of_class()


class Heirs(Handlers):
    """Where work is done by methods of others."""


@api_view(["POST"])
@semaphore_lock(key="lesson:<body.name>")
def by_drf(request: Any) -> Response:
    return Response({"answer": work()})


@semaphore_lock(key="lesson:<name>")
def by_method(request: HttpRequest) -> HttpResponse:
    return HttpResponse(Handlers().of_instance())


def released_early(request: HttpRequest) -> HttpResponse:
    with semaphore_lock(f"lesson:{request.POST['name']}"):
        pass
    return plain(request)


def never_released(request: HttpRequest) -> HttpResponse:
    semaphore_lock(f"lesson:{request.POST['name']}:{uuid4()}").__enter__()
    return plain(request)


_site = threading.Lock()


def behind_something_else(request: HttpRequest) -> HttpResponse:
    with _site, semaphore_lock(f"lesson:{request.POST['name']}"):
        return plain(request)


_first = threading.Event()


def only_the_first_asks(request: HttpRequest) -> HttpResponse:
    if _first.is_set():
        return HttpResponse()
    _first.set()
    with semaphore_lock(f"lesson:{request.POST['name']}"):
        return plain(request)


def not_shared(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=403)


def sets_a_cookie(request: HttpRequest) -> HttpResponse:
    response = HttpResponse()
    response.set_cookie("seen", "1")
    return response


def raises(request: HttpRequest) -> HttpResponse:
    raise ZeroDivisionError


def creates(request: HttpRequest) -> HttpResponse:
    LooseLessonSession.objects.create(uuid=request.POST["name"], course="x", user_id=1)
    return HttpResponse(status=201)


lock = semaphore_lock(key="lesson:<name>")
flight = single_flight(key="lesson:<name>")
by_nobody = semaphore_lock(key=lambda request: str(uuid4()))
LOCKED: dict[str, Callable[..., Any]] = {
    "plain": lock(plain),
    "async": lock(aplain),
    "rendered": lock(rendered),
    "streamed": lock(streamed),
    "skip": semaphore_lock(key="lesson:<name>", on_conflict="skip")(plain),
    "waits": semaphore_lock(key="lesson:<name>", wait=20)(plain),
    "async_waits": semaphore_lock(key="lesson:<name>", wait=20)(aplain),
    "two_places": semaphore_lock(key="lesson:<name>", limit=2)(plain),
    "two_keys": semaphore_lock(key=["lesson:<name>", "also:<name>"])(plain),
    "short": semaphore_lock(key="lesson:<name>", ttl=0.3)(plain),
    "on_locmem": semaphore_lock(key="lesson:<name>", cache="locmem")(plain),
    "mixin": ByMixin.as_view(),
    "drf": by_drf,
}
FLOWN: dict[str, Callable[..., Any]] = {
    "flown": flight(plain),
    "flown_async": flight(aplain),
    "flown_rendered": flight(rendered),
    "flown_kept": single_flight(key="lesson:<name>", result_ttl=60)(plain),
}
WRONG: dict[str, Callable[..., Any]] = {
    "coarse": semaphore_lock(key="lesson")(plain),
    "coarse_two_places": semaphore_lock(key="lesson", limit=2)(plain),
    "fine": by_nobody(plain),
    "released_early": released_early,
    "never_released": never_released,
    "observing": semaphore_lock(key="lesson:<name>", observe=True)(plain),
    "behind_something_else": behind_something_else,
    "only_the_first_asks": only_the_first_asks,
    "unguarded": plain,
    "raises": lock(raises),
    "away": semaphore_lock(key="lesson:<name>", cache="dead", on_store_error="proceed")(plain),
    "flown_fine": single_flight(key=lambda request: str(uuid4()))(plain),
    "flown_coarse": single_flight(key="lesson", scope="global")(plain),
    "flown_not_shared": flight(not_shared),
    "flown_with_a_cookie": flight(sets_a_cookie),
    "flown_raises": flight(raises),
}
urlpatterns = [
    path("creates", lock(creates)),
    path("live", csrf_exempt(lock(plain))),
    *(path(name, view) for name, view in {**LOCKED, **FLOWN, **WRONG}.items()),
]
pytestmark = pytest.mark.urls(__name__)
WORK = f"{__name__}.work"


def posting(url: str, name: str) -> Callable[[Any], Any]:
    return lambda client: client.post(f"/{url}", {"name": name})


def try_out(assertion: Callable[..., None], url: str, **options: Any) -> None:
    assertion(Client(), posting(url, "7"), posting(url, "8"), **options)


class Sloppy(CacheStore):
    """Looks first and takes then, as many a hand-made lock does."""

    two_at_once = threading.Event()
    both_have_looked = threading.Barrier(2)

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__("locmem")

    def take(self, slot: str, token: str, ttl: float, more: str = "", key: str = "") -> Any:
        if self.two_at_once.is_set() and caches["locmem"].get(slot) is None:
            self.both_have_looked.wait(10)
            return None
        return super().take(slot, token, ttl, more, key)


class TestGuardsThatGuard:
    @pytest.mark.parametrize("url", LOCKED)
    def test_a_lock_is_told_to_be_one(self, url: str) -> None:
        # Rendered and streamed ones don't work().
        working = {} if "ed" in url else {"work": WORK}
        try_out(assert_mutual_exclusion, url, **working)

    @pytest.mark.parametrize("url", FLOWN)
    def test_a_flight_is_told_to_be_one(self, url: str) -> None:
        working = {} if "rendered" in url else {"work": WORK}
        try_out(assert_single_flight, url, **working)

    @pytest.mark.parametrize(
        ("assertion", "url"),
        [
            (assert_mutual_exclusion, "async"),
            (assert_mutual_exclusion, "waits"),
            (assert_single_flight, "flown_async"),
            (assert_single_flight, "flown"),
        ],
    )
    async def test_an_async_client_and_an_async_test_will_do(
        self, assertion: Callable[..., None], url: str, async_client: AsyncClient
    ) -> None:
        assertion(async_client, posting(url, "7"), posting(url, "8"), work=WORK)

    @pytest.mark.parametrize(
        "view", [lock(rendered), lock(streamed), lock(aplain), lock(astreamed), ByMixin.as_view()]
    )
    def test_views_can_be_called_directly(self, view: Any, rf: RequestFactory) -> None:
        def calling(name: str) -> Callable[[Any], Any]:
            return lambda view: view(rf.post("/", {"name": name}))

        assert_mutual_exclusion(view, calling("7"), calling("8"))

    def test_what_is_no_view_will_do(self) -> None:
        def build(lesson: str) -> None:
            with semaphore_lock(f"build:{lesson}"):
                work()

        assert_mutual_exclusion(build, lambda f: f("7"), lambda f: f("8"), work=WORK)

    def test_a_function_will_do(self) -> None:
        answer = answers.coalesce(key="<lesson>")(lambda lesson: work(lesson))
        assert_single_flight(answer, lambda f: f("7"), lambda f: f("8"), work=WORK)

    def test_an_async_function_will_do(self) -> None:
        async def answer(lesson: str) -> str:
            return await awork(lesson)

        coalesced = answers.coalesce(key="<lesson>")(answer)
        awaited = f"{__name__}.awork"
        assert_single_flight(coalesced, lambda f: f("7"), lambda f: f("8"), work=awaited)

    @pytest.mark.parametrize("name", ["static", "of_class", "of_instance"])
    def test_work_may_be_a_method(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        before = vars(Handlers)[name]
        drive = lock(lambda request: HttpResponse(Handlers().of_instance()))
        rf = RequestFactory()
        assert_mutual_exclusion(
            drive,
            lambda view: view(rf.post("/", {"name": "7"})),
            lambda view: view(rf.post("/", {"name": "8"})),
            work=f"{__name__}.Handlers.{name}",
        )
        assert vars(Handlers)[name] is before

    def test_work_may_be_an_inherited_method(self) -> None:
        rf = RequestFactory()
        assert_mutual_exclusion(
            lock(lambda request: HttpResponse(Heirs().of_instance())),
            lambda view: view(rf.post("/", {"name": "7"})),
            lambda view: view(rf.post("/", {"name": "8"})),
            work=f"{__name__}.Heirs.of_instance",
        )
        assert "of_instance" not in vars(Heirs)

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("lessens.views.create", "there is no module 'lessens'"),
            (f"{__name__}.Handlers.of_nobody", "Handlers has no 'of_nobody'"),
            (f"{__name__}.Handlers.objects.create", "has no 'objects'"),
            ("create", "there is no module 'create'"),
        ],
    )
    def test_work_that_is_nowhere_is_an_error_that_says_how_it_is_written(
        self, path: str, why: str
    ) -> None:
        with pytest.raises(ValueError, match=f"work='{path}': .*{why}.* dotted path"):
            try_out(assert_mutual_exclusion, "plain", work=path)

    def test_a_client_keeps_its_cookies_and_errors_to_itself(self) -> None:
        client = Client()
        client.cookies["who"] = "ann"
        seen = []

        def same(client: Client) -> Any:
            seen.append((client, client.cookies["who"].value))
            client.cookies["who"] = "bob"
            return client.post("/plain", {"name": "7"})

        assert_mutual_exclusion(client, same, posting("plain", "8"))
        assert {who for _, who in seen} == {"ann"}
        assert client not in [used for used, _ in seen]
        assert client.cookies["who"].value == "ann"

    def test_each_scenario_can_begin_anew(self) -> None:
        resets = []
        try_out(assert_mutual_exclusion, "plain", reset=lambda: resets.append(1))
        assert resets == [1, 1, 1]

    def test_what_is_a_success_can_be_told(self) -> None:
        def conflict_in_the_data(client: Client) -> HttpResponse:
            client.post("/plain", {"name": "7"})
            return HttpResponse(status=409)

        def is_known(response: Any) -> bool:
            return response.status_code in (200, 409)

        with pytest.raises(AssertionError, match=r"Scenario 1.*409"):
            assert_mutual_exclusion(Client(), conflict_in_the_data, posting("plain", "8"))
        assert_mutual_exclusion(
            Client(), conflict_in_the_data, posting("plain", "8"), succeeded=is_known
        )

    def test_nobody_listens_afterwards(self) -> None:
        try_out(assert_mutual_exclusion, "plain")
        assert lease_acquired.receivers == []

    @pytest.mark.django_db(transaction=True)
    def test_a_view_that_writes_will_do(self, django_user_model: Any) -> None:
        django_user_model.objects.create(pk=1, username="ann")
        assert_mutual_exclusion(
            Client(),
            posting("creates", str(uuid4())),
            posting("creates", str(uuid4())),
            reset=LooseLessonSession.objects.all().delete,
        )
        assert LooseLessonSession.objects.count() == 2


@override_settings(ROOT_URLCONF=__name__, STATIC_URL="/static/")
class TestALiveServer(LiveServerTestCase):
    def test_its_threads_are_seen(self) -> None:
        import httpx

        def posting(name: str) -> Callable[[Any], Any]:
            return lambda url: httpx.post(url, data={"name": name}).status_code

        url = f"{self.live_server_url}/live"
        assert_mutual_exclusion(
            url, posting("7"), posting("8"), succeeded=lambda status: status == 200, work=WORK
        )


WRONGS = [
    ("coarse", r"Scenario 3, two at once with different keys: .*Too coarse"),
    ("coarse_two_places", r"Scenario 3, .*Too coarse"),
    ("fine", r"Scenario 2, two at once with the same key: 2 got in, .*Too fine"),
    ("observing", r"Scenario 2, .*only observes"),
    ("released_early", r"Scenario 1, one alone: .*work began, or ended, .*Released early"),
    ("never_released", r"Scenario 1, .*still held although"),
    ("behind_something_else", r"Scenario 2, .*something else makes them wait"),
    ("unguarded", r"Scenario 1, .*No key was asked for.*HTTP method"),
    ("raises", r"Scenario 1, .*ZeroDivisionError"),
    ("away", r"Scenario 1, .*It ran unprotected"),
    ("flown", r"Scenario 1, .*use assert_single_flight"),
]
WRONG_FLIGHTS = [
    ("plain", r"Scenario 1, .*use assert_mutual_exclusion"),
    ("flown_fine", r"Scenario 2, .*Too fine"),
    ("flown_coarse", r"Scenario 3, .*Too coarse"),
    ("flown_with_a_cookie", r"Scenario 1, .*Nothing is shared: .*ookie"),
    ("flown_raises", r"Scenario 1, .*ZeroDivisionError"),
]


class TestGuardsThatDoNotGuard:
    @pytest.mark.parametrize(("url", "says"), WRONGS)
    def test_a_lock_that_is_none_is_told_what_it_lacks(self, url: str, says: str) -> None:
        with pytest.raises(AssertionError, match=says):
            try_out(assert_mutual_exclusion, url, work=WORK, timeout=1.0)

    @pytest.mark.parametrize(("url", "says"), WRONG_FLIGHTS)
    def test_a_flight_that_is_none_is_told_what_it_lacks(self, url: str, says: str) -> None:
        with pytest.raises(AssertionError, match=says):
            try_out(assert_single_flight, url)

    def test_a_store_that_is_not_atomic_is_told_of(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = f"{__name__}.Sloppy"
        resets = iter([Sloppy.two_at_once.clear, Sloppy.two_at_once.set])
        with pytest.raises(AssertionError, match=r"Scenario 2, .*Not atomic"):
            try_out(assert_mutual_exclusion, "plain", reset=lambda: next(resets)())

    def test_a_method_that_passes_is_told_of(self) -> None:
        def get(client: Client) -> Any:
            return client.get("/plain?name=7")

        with pytest.raises(AssertionError, match="HTTP method"):
            assert_mutual_exclusion(Client(), get, get)

    def test_a_key_that_is_held_already_is_told_of(self) -> None:
        with (
            held("lesson:7"),
            pytest.raises(AssertionError, match=r"Scenario 1, .*is held already"),
        ):
            try_out(assert_mutual_exclusion, "plain")

    @pytest.mark.parametrize("enabled", [False, "observe"])
    def test_a_library_that_is_off_is_told_of(self, enabled: Any, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = enabled
        with pytest.raises(AssertionError, match=r"SINGLEFLIGHT_ENABLED is (False|observe)"):
            try_out(assert_mutual_exclusion, "plain")

    def test_the_cure_for_a_database_in_memory_is_named(self) -> None:
        def create(request: Any) -> Any:
            raise OperationalError("database table is locked: lessons_lesson")

        rf = RequestFactory()
        with pytest.raises(AssertionError, match="has one lock for all threads"):
            assert_mutual_exclusion(
                lock(create),
                lambda view: view(rf.post("/", {"name": "7"})),
                lambda view: view(rf.post("/", {"name": "8"})),
            )

    def test_work_that_is_done_elsewhere_is_told_of(self) -> None:
        with pytest.raises(AssertionError, match="was never called"):
            try_out(assert_mutual_exclusion, "plain", work=f"{__name__}.awork")

    def test_two_at_work_are_told_of_though_their_leases_are_in_order(self) -> None:
        """The one that was refused does the work all the same."""
        both = threading.Barrier(2)
        calls = iter(range(3))

        def does_it_anyway(lesson: str) -> None:
            alone = next(calls) == 0
            with semaphore_lock(f"build:{lesson}", on_conflict="yield"):
                work_together(both, alone)

        with pytest.raises(AssertionError, match=r"Scenario 2, .*2 were in .*together at once"):
            assert_mutual_exclusion(
                does_it_anyway,
                lambda f: f("7"),
                lambda f: f("8"),
                work=f"{__name__}.work_together",
            )

    def test_one_that_does_not_ask_is_told_of(self) -> None:
        _first.clear()
        with pytest.raises(AssertionError, match=r"Scenario 2, .*Not all of them asked"):
            try_out(assert_mutual_exclusion, "only_the_first_asks", reset=_first.clear)

    def test_followers_that_lead_afterwards_are_told_of(self) -> None:
        def passes(response: Any) -> bool:
            return True

        with pytest.raises(AssertionError, match=r"Scenario 2, .*2 led, one after the other"):
            try_out(assert_single_flight, "flown_not_shared", succeeded=passes)

    def test_a_body_that_differs_is_told_of(self) -> None:
        def same(client: Client) -> Any:
            return client.post("/flown?name=7", {"content": str(uuid4())})

        with pytest.raises(AssertionError, match=r"Scenario 2, .*equal bodies"):
            assert_single_flight(Client(), same, posting("flown", "8"))

    def test_results_that_differ_are_told_of(self) -> None:
        def same(client: Client) -> str:
            client.post("/flown", {"name": "7"})
            return str(uuid4())

        with pytest.raises(AssertionError, match=r"Scenario 2, .*The results differ"):
            assert_single_flight(Client(), same, posting("flown", "8"))

    def test_another_guard_around_it_is_told_of(self) -> None:
        def same(client: Client) -> Any:
            with semaphore_lock("another"):
                return client.post("/flown", {"name": "7"})

        with pytest.raises(AssertionError, match=r"use assert_mutual_exclusion"):
            assert_single_flight(Client(), same, posting("flown", "8"))

    def test_followers_that_work_are_told_of(self) -> None:
        two_at_once = threading.Event()
        resets = iter([two_at_once.clear, two_at_once.set])

        def works_again(name: str) -> str:
            answer = answers.run(name, work)
            if two_at_once.is_set():
                work()
            return answer

        with pytest.raises(AssertionError, match=r"Scenario 2, .*work ran 3 times"):
            assert_single_flight(
                works_again,
                lambda f: f("7"),
                lambda f: f("8"),
                work=WORK,
                reset=lambda: next(resets)(),
            )

    def test_callers_that_never_end_are_told_of(self) -> None:
        never = threading.Event()

        def same(client: Client) -> None:
            client.post("/plain", {"name": "7"})
            never.wait()

        with pytest.raises(AssertionError, match=r"Scenario 1: .*still running"):
            assert_mutual_exclusion(Client(), same, posting("plain", "8"), timeout=0.1)
        never.set()

    @pytest.mark.django_db
    def test_a_transaction_of_the_test_is_named_as_a_cause(self) -> None:
        with pytest.raises(AssertionError, match="use a TransactionTestCase"):
            try_out(assert_mutual_exclusion, "raises")


def work_together(both: threading.Barrier, alone: bool) -> None:
    if not alone:
        both.wait(10)


@pytest.fixture(autouse=True)
def _locmem_is_empty() -> Iterator[None]:
    yield
    caches["locmem"].clear()
