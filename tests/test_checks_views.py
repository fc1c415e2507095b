"""The checks of guarded views, on real URLconfs: each turned on, and kept off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
from django.contrib.auth.decorators import login_not_required, login_required, permission_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.core.checks import CheckMessage
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View

from singleflight_django import SemaphoreLockMixin, SingleFlightMixin, semaphore_lock, single_flight
from singleflight_django.checks import database
from singleflight_django.checks.guarded import find_guarded
from singleflight_django.exceptions import WaitInTransactionError
from tests.checking import PK, deployment_messages, flight, lock, messages, mixin, of_view, plain
from tests.meeting import urls


@pytest.fixture(autouse=True)
def _only_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "declared", WeakSet())


class TestUrlFields:
    def test_a_name_that_is_nearly_right(self, settings: Any) -> None:
        found = of_view(settings, lock("<url.lesson_di>"), "<int:lesson_id>/")

        assert found["E030"].hint == "Did you mean <url.lesson_id>?"

    def test_a_route_without_any(self, settings: Any) -> None:
        found = of_view(settings, lock("<url.pk>"), "new/")

        assert "body, the query string or a header" in str(found["E030"].hint)

    def test_the_check_is_true(self, settings: Any) -> None:
        found = of_view(settings, lock("<url.id>"))

        assert set(found) == {"E030"}
        assert Client().post("/7/").status_code == 400

    @pytest.mark.parametrize(
        "pattern",
        [
            path("<int:id>/", lock("<url.id>")),
            re_path(r"^(?P<id>\d+)/$", lock("<url.id>")),
            path("new/", lock("<url.id>"), {"id": 7}),
            path("<int:id>/", include([path("new/", lock("<url.id>"))])),
            path("new/", include([path("", lock("<url.id>"))]), {"id": 7}),
            path("7/", lock("<query.id>")),
            path("7/", lock("<id>")),
        ],
    )
    def test_a_name_that_the_route_has(self, settings: Any, pattern: Any) -> None:
        site = urls(plain)
        vars(site)["urlpatterns"] = [pattern]
        settings.ROOT_URLCONF = site

        assert len(find_guarded()) == 1
        assert messages() == {}

    def test_a_pattern_of_its_own_kind_is_not_judged(self, settings: Any) -> None:
        site = urls(lock("<url.id>"))
        (pattern,) = vars(site)["urlpatterns"]
        known = pattern.pattern

        class Own:
            def __str__(self) -> str:
                return "own"

            match, check = known.match, known.check

        pattern.pattern = Own()
        settings.ROOT_URLCONF = site

        assert len(find_guarded()) == 1
        assert messages() == {}


class TestBodyFields:
    @pytest.mark.parametrize(
        ("view", "methods"),
        [
            (mixin("<body.uuid>", "post", "delete").as_view(), "DELETE"),
            (mixin("<body.uuid>", "get", "post", base=SingleFlightMixin).as_view(), "GET, HEAD"),
            (lock("<body.uuid>", methods=("POST", "DELETE")), "DELETE"),
            (flight("<body.uuid>", methods=("GET",)), "GET"),
        ],
    )
    def test_methods_without_one(self, settings: Any, view: Any, methods: str) -> None:
        message = of_view(settings, view)["W031"]

        assert f"and {methods} requests" in message.msg

    @pytest.mark.parametrize(
        "view",
        [
            mixin("<body.uuid>", "post", "put").as_view(),
            mixin("<body.uuid>", "get", "post").as_view(),
            mixin({"post": "<body.uuid>", "delete": "<url.pk>"}, "post", "delete").as_view(),
            mixin("<body.uuid>", "post", "delete", lock_methods=("POST",)).as_view(),
            mixin("<url.pk>", "post", "delete").as_view(),
            lock("<body.uuid>"),
            flight("<body.uuid>"),
            flight("<body.uuid>", methods=("POST",)),
        ],
    )
    def test_methods_with_one_or_unknown(self, settings: Any, view: Any) -> None:
        assert of_view(settings, view) == {}

    def test_the_check_is_true(self, settings: Any) -> None:
        found = of_view(settings, mixin("<body.uuid>", "post", "delete").as_view())

        assert set(found) == {"W031"}
        assert Client().delete("/7/").status_code == 400


class TestCoarseKeys:
    @pytest.mark.parametrize(
        "view",
        [
            lock("everything"),
            lock(["one", "other"]),
            lock("<method>"),
            flight("everything", methods=("POST",)),
            mixin("everything", "post").as_view(),
            mixin("everything", "post", base=SingleFlightMixin).as_view(),
        ],
    )
    def test_a_key_that_all_share(self, settings: Any, view: Any) -> None:
        assert set(of_view(settings, view)) == {"W032"}

    @pytest.mark.parametrize(
        "view",
        [
            lock("lesson:<url.pk>"),
            lock(["everything", "<url.pk>"]),
            lock("<path>"),
            lock(lambda request, **kwargs: "import"),
            lock("three at once", limit=3),
            # Path, query and caller are in the identity of a flight.
            flight("everything"),
            flight("everything", methods=("GET",)),
            mixin("everything", "get", base=SingleFlightMixin).as_view(),
        ],
    )
    def test_a_key_that_tells_calls_apart_or_says_so(self, settings: Any, view: Any) -> None:
        assert of_view(settings, view) == {}


class TestFineKeys:
    @pytest.mark.parametrize(
        "view",
        [
            lock("<url.pk>:<header.X-Request-ID>"),
            lock("<header.traceparent>"),
            lock("<header.X-Amzn-Trace-Id>"),
            lock("<header.Date>"),
            lock("<body.timestamp>"),
            lock("<body.meta.sent_at>"),
            lock("<query.ts>"),
            lock("<nonce>"),
            lock("<requestId>"),
            flight("<url.pk>", vary=("X-Request-Id",)),
        ],
    )
    def test_what_is_another_one_in_each_request(self, settings: Any, view: Any) -> None:
        assert set(of_view(settings, view)) == {"W033"}

    @pytest.mark.parametrize(
        ("view", "route"),
        [
            (lock("<header.Idempotency-Key>"), PK),
            (lock("<header.X-GitHub-Delivery>"), PK),
            (lock("<body.date>"), PK),
            (lock("<url.timestamp>"), "<int:timestamp>/"),
            (lock("<timestamp>"), "<int:timestamp>/"),
            (flight("<url.pk>", vary=("X-Tenant",)), PK),
        ],
    )
    def test_what_a_repeated_call_repeats(self, settings: Any, view: Any, route: str) -> None:
        assert of_view(settings, view, route) == {}


class TestSharedWithStrangers:
    LOGIN = "django.contrib.auth.middleware.LoginRequiredMiddleware"

    def everyone(self, **options: Any) -> Any:
        return flight("<url.pk>", **{"scope": "global", **options})

    @pytest.mark.parametrize(
        "decorate",
        [login_required, permission_required("shop.read")],
        ids=["login", "permission"],
    )
    def test_login_by_a_decorator(self, settings: Any, decorate: Any) -> None:
        assert set(of_view(settings, decorate(self.everyone()))) == {"W034"}
        beneath = single_flight("<url.pk>", scope="global")(decorate(plain))
        assert set(of_view(settings, beneath)) == {"W034"}

    def test_login_by_a_mixin(self, settings: Any) -> None:
        cls = mixin("<url.pk>", "get", base=SingleFlightMixin, flight_scope="global")
        asking = type("Asking", (LoginRequiredMixin, cls), {})

        assert "LoginRequiredMixin" in of_view(settings, asking.as_view())["W034"].msg
        assert of_view(settings, cls.as_view()) == {}

    def test_login_by_a_handlers_decorator(self, settings: Any) -> None:
        class Page(View):
            @method_decorator(login_required)
            @method_decorator(single_flight("<url.pk>", scope="global"))
            def get(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        assert set(of_view(settings, Page.as_view())) == {"W034"}

    def test_login_everywhere(self, settings: Any) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, self.LOGIN]

        assert set(of_view(settings, self.everyone())) == {"W034"}
        assert of_view(settings, login_not_required(self.everyone())) == {}

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"scope": "user"},
            {"scope": lambda request: "tenant"},
            {"authorize": lambda request: True},
            {"vary": ("Cookie",)},
            {"vary": ("Authorization",)},
        ],
    )
    def test_no_login_or_no_strangers(self, settings: Any, options: Any) -> None:
        view = self.everyone(**options)

        assert of_view(settings, login_required(view) if options else view) == {}

    @pytest.mark.parametrize("key", ["<user>", "<session>", "<header.Authorization>"])
    def test_a_key_that_keeps_callers_apart(self, settings: Any, key: str) -> None:
        view = login_required(flight(key, scope="global"))

        assert of_view(settings, view) == {}

    def test_a_lock_shares_no_answers(self, settings: Any) -> None:
        assert of_view(settings, login_required(lock("<url.pk>"))) == {}


@pytest.fixture
def atomic(db: None) -> Iterator[None]:
    options = connections.settings["default"]
    options["ATOMIC_REQUESTS"] = True
    yield
    options["ATOMIC_REQUESTS"] = False


class Beneath(View):
    @method_decorator(single_flight("<url.pk>"))
    def get(self, request: HttpRequest, pk: str) -> HttpResponse:
        return HttpResponse("done")


class BeneathAnother(SemaphoreLockMixin, Beneath):
    lock_key: ClassVar = {"post": "<url.pk>"}

    def post(self, request: HttpRequest, pk: str) -> HttpResponse:
        return HttpResponse("done")


class Both(SemaphoreLockMixin, SingleFlightMixin, View):
    """The second mixin is around the first."""

    lock_key = "<url.pk>"
    lock_wait = 5
    lock_methods = ("GET",)
    flight_key = "<url.pk>"

    def get(self, request: HttpRequest, pk: str) -> HttpResponse:
        return HttpResponse("done")


ONE = single_flight("<url.pk>")
TWO = semaphore_lock("<url.pk>", methods=("GET",))

WAITS_INSIDE = {
    "a handler": Beneath.as_view(),
    "a handler beside a mixin": BeneathAnother.as_view(),
    "a partial": partial(ONE(plain), more=1),
    "beneath another guard": TWO(ONE(plain)),
    "beneath a guard around as_view": TWO(Beneath.as_view()),
    "one mixin beneath the other": Both.as_view(),
}
WAITS_OUTSIDE = {
    "the callback": ONE(plain),
    "the callback, with a decorator around": login_not_required(ONE(plain)),
    "around another guard": ONE(TWO(plain)),
    "a mixin": mixin("<url.pk>", "get", base=SingleFlightMixin).as_view(),
    "no transaction": transaction.non_atomic_requests(Beneath.as_view()),
}


class NoWait(View):
    @method_decorator(TWO)
    def get(self, request: HttpRequest, pk: str) -> HttpResponse:
        return HttpResponse("done")


@method_decorator(ONE, name="dispatch")
class Dispatch(View):
    def get(self, request: HttpRequest, pk: str) -> HttpResponse:
        return HttpResponse("done")


WAITS_OUTSIDE |= {"a handler that never waits": NoWait.as_view(), "dispatch": Dispatch.as_view()}


@pytest.mark.django_db(transaction=True)
class TestWaitsOutside:
    """What the check says is what happens to a request."""

    @pytest.mark.parametrize("view", WAITS_INSIDE.values(), ids=WAITS_INSIDE)
    def test_a_transaction_that_is_open_already(
        self, settings: Any, view: Any, atomic: None
    ) -> None:
        assert set(of_view(settings, view)) == {"E035"}
        with pytest.raises(WaitInTransactionError):
            Client().get("/7/")

    @pytest.mark.parametrize("view", WAITS_INSIDE.values(), ids=WAITS_INSIDE)
    def test_no_transaction(self, settings: Any, view: Any) -> None:
        assert of_view(settings, view) == {}
        assert Client().get("/7/").content == b"done"

    @pytest.mark.parametrize("view", WAITS_OUTSIDE.values(), ids=WAITS_OUTSIDE)
    def test_a_transaction_that_is_opened_inside(
        self, settings: Any, view: Any, atomic: None
    ) -> None:
        assert of_view(settings, view) == {}
        assert Client().get("/7/").content == b"done"

    def test_a_guard_that_only_observes(self, settings: Any, atomic: None) -> None:
        class Page(View):
            @method_decorator(single_flight("<url.pk>", observe=True))
            def get(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse("done")

        assert of_view(settings, Page.as_view()) == {}
        assert Client().get("/7/").content == b"done"

    def test_async_views_are_for_django_to_refuse(self, settings: Any, atomic: None) -> None:
        class Page(View):
            @method_decorator(single_flight("<url.pk>"))
            async def get(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse("done")

        assert of_view(settings, Page.as_view()) == {}


class TestServerWaits:
    @pytest.fixture(autouse=True)
    def _no_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GUNICORN_CMD_ARGS", raising=False)
        monkeypatch.delenv("UWSGI_HARAKIRI", raising=False)

    def told(self, settings: Any, view: Any) -> dict[str, CheckMessage]:
        settings.ROOT_URLCONF = urls(view)
        assert "W036" not in messages(), "it is for deployment only"
        return deployment_messages()

    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("GUNICORN_CMD_ARGS", "--timeout 30"),
            ("GUNICORN_CMD_ARGS", "--bind=0.0.0.0:8000 --timeout=30 --workers 4"),
            ("GUNICORN_CMD_ARGS", "-w 4 -t 30 -k sync"),
            ("UWSGI_HARAKIRI", "30"),
        ],
    )
    def test_a_server_that_waits_for_less(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
    ) -> None:
        monkeypatch.setenv(variable, value)

        message = self.told(settings, flight("<url.pk>"))["W036"]

        assert "may wait for 60 seconds" in message.msg
        assert f"by {variable} the server ends a request after 30" in message.msg
        assert "W036" in self.told(settings, lock("<url.pk>", wait=30))

    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("GUNICORN_CMD_ARGS", "--timeout 90"),
            ("GUNICORN_CMD_ARGS", "--timeout 0"),
            ("GUNICORN_CMD_ARGS", "--timeout soon"),
            ("GUNICORN_CMD_ARGS", "--timeout"),
            ("GUNICORN_CMD_ARGS", "--bind 'unclosed"),
            ("GUNICORN_CMD_ARGS", "--workers 4"),
            ("GUNICORN_CMD_ARGS", "--timeout 30 --threads 8"),
            ("GUNICORN_CMD_ARGS", "--timeout 30 -k uvicorn.workers.UvicornWorker"),
            ("UWSGI_HARAKIRI", "90"),
            ("UWSGI_HARAKIRI", ""),
        ],
    )
    def test_a_server_that_waits_or_does_not_say(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
    ) -> None:
        monkeypatch.setenv(variable, value)

        assert self.told(settings, flight("<url.pk>")) == {}

    def test_a_guard_that_waits_for_less(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GUNICORN_CMD_ARGS", "--timeout 30")

        assert self.told(settings, flight("<url.pk>", wait=20)) == {}
        assert self.told(settings, lock("<url.pk>")) == {}
        settings.SINGLEFLIGHT_WAIT = 20
        assert self.told(settings, flight("<url.pk>")) == {}
