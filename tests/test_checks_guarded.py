"""How the checks find the guards of a URLconf: on functions, classes, handlers and operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
from django.contrib.auth.decorators import login_required
from django.core.checks import CheckMessage
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View

from singleflight_django import SemaphoreLockMixin, SingleFlightMixin, semaphore_lock, single_flight
from singleflight_django.checks import database
from singleflight_django.checks.guarded import find_guarded
from singleflight_django.guards import Guard, Options
from tests.checking import PK, flight, lock, messages, mixin, of_view, plain
from tests.meeting import urls


@pytest.fixture(autouse=True)
def _only_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "declared", WeakSet())


@pytest.fixture
def atomic(db: None) -> Iterator[None]:
    options = connections.settings["default"]
    options["ATOMIC_REQUESTS"] = True
    yield
    options["ATOMIC_REQUESTS"] = False


class TestTheUrlconf:
    """E030 tells of each guard that was found: its key names what no route has."""

    def found(self, settings: Any, view: Any, route: str = PK) -> CheckMessage | None:
        return of_view(settings, view, route).get("E030")

    def test_a_function(self, settings: Any) -> None:
        message = self.found(settings, lock("lesson:<url.id>"))

        assert message is not None
        assert message.msg.startswith("tests.checking.plain: the key has <url.id>")

    def test_an_async_function(self, settings: Any) -> None:
        @semaphore_lock("lesson:<url.id>")
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            return HttpResponse()

        assert self.found(settings, view)

    def test_beneath_other_decorators(self, settings: Any) -> None:
        assert self.found(settings, login_required(lock("lesson:<url.id>")))

    def test_a_partial(self, settings: Any) -> None:
        assert self.found(settings, partial(lock("lesson:<url.id>"), more=1))

    def test_an_outer_and_an_inner_guard(self, settings: Any) -> None:
        outer = semaphore_lock("lesson:<url.id>")(flight("lesson:<url.pk>"))
        inner = semaphore_lock("lesson:<url.pk>")(flight("lesson:<url.id>"))

        assert self.found(settings, outer)
        assert self.found(settings, inner)

    @pytest.mark.parametrize("base", [SemaphoreLockMixin, SingleFlightMixin])
    def test_a_mixin(self, settings: Any, base: type) -> None:
        message = self.found(settings, mixin("lesson:<url.id>", "post", base=base).as_view())

        assert message is not None
        assert "Page.post" in message.msg

    def test_a_key_that_as_view_is_given(self, settings: Any) -> None:
        cls = mixin(None, "post")

        assert self.found(settings, cls.as_view(lock_key="lesson:<url.id>"))
        assert not self.found(settings, cls.as_view(lock_key="lesson:<url.pk>"))

    def test_a_key_by_handler(self, settings: Any) -> None:
        cls = mixin({"put": "lesson:<url.id>"}, "post", "put")

        message = self.found(settings, cls.as_view())

        assert message is not None
        assert "Page.put" in message.msg

    def test_a_key_that_is_computed(self, settings: Any) -> None:
        cls = mixin(None, "post", get_lock_key=lambda self, request: "x")

        assert of_view(settings, cls.as_view()) == {}

    def test_two_mixins(self, settings: Any) -> None:
        class Both(SemaphoreLockMixin, SingleFlightMixin, View):
            lock_key = "lesson:<url.pk>"
            flight_key = "lesson:<url.id>"

            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        assert self.found(settings, Both.as_view())

    @pytest.mark.parametrize("name", ["post", "dispatch"])
    def test_method_decorator(self, settings: Any, name: str) -> None:
        @method_decorator(semaphore_lock("lesson:<url.id>"), name=name)
        class Page(View):
            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        message = self.found(settings, Page.as_view())

        assert message is not None
        assert f"Page{'.post' if name == 'post' else ''}: " in message.msg

    def test_a_bare_method(self, settings: Any) -> None:
        class Page(View):
            @semaphore_lock("lesson:<url.id>")
            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        assert self.found(settings, Page.as_view())

    def test_around_as_view(self, settings: Any) -> None:
        class Page(View):
            def post(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        assert self.found(settings, semaphore_lock("lesson:<url.id>")(Page.as_view()))

    def test_a_handler_that_is_never_guarded(self, settings: Any) -> None:
        class Page(View):
            @semaphore_lock("lesson:<url.id>")
            def get(self, request: HttpRequest, pk: str) -> HttpResponse:
                return HttpResponse()

        assert of_view(settings, Page.as_view()) == {}

    def test_includes_and_namespaces(self, settings: Any) -> None:
        inner = [path("<str:pk>/", lock("lesson:<url.id>"))]
        site = urls(plain)
        vars(site)["urlpatterns"] = [
            path("a/<str:site>/", include((inner, "shop"), namespace="one")),
            path("b/<str:id>/", include((inner, "shop"), namespace="two")),
        ]
        settings.ROOT_URLCONF = site

        message = messages()["E030"]

        assert "'a/<str:site>/<str:pk>/'" in message.msg

    def test_a_urlconf_that_includes_itself(self, settings: Any) -> None:
        site = urls(lock("lesson:<url.id>"))
        sys.modules[site.__name__] = site
        vars(site)["urlpatterns"].append(path("again/", include(site.__name__)))
        settings.ROOT_URLCONF = site.__name__

        assert set(messages()) == {"E030"}
        del sys.modules[site.__name__]

    @pytest.mark.parametrize("urlconf", ["no.such.module", "tests.checking", "", None])
    def test_a_broken_urlconf_is_left_to_django(self, settings: Any, urlconf: Any) -> None:
        settings.ROOT_URLCONF = urlconf

        assert messages() == {}

    def test_what_is_beside_a_broken_part_is_found(self, settings: Any) -> None:
        site = urls(lock("lesson:<url.id>"))
        broken = ModuleType("broken")
        vars(broken)["urlpatterns"] = 7
        vars(site)["urlpatterns"].insert(0, path("broken/", include(broken)))
        settings.ROOT_URLCONF = site

        assert set(messages()) == {"E030"}

    def test_a_view_that_cannot_be_understood_is_passed_over(self, settings: Any) -> None:
        class Strange:
            @property
            def singleflight_guards(self) -> Any:
                raise RuntimeError

            def __call__(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        site = urls(lock("lesson:<url.id>"))
        vars(site)["urlpatterns"].insert(0, path("strange/", Strange()))
        settings.ROOT_URLCONF = site

        assert set(messages()) == {"E030"}

    def test_what_is_no_route_at_all_is_passed_over(self, settings: Any) -> None:
        """urls.E004 tells of it, if the checks get that far."""
        site = urls(lock("lesson:<url.id>"))
        vars(site)["urlpatterns"].insert(0, ("order/", plain))
        vars(site)["urlpatterns"].insert(0, "order/")
        settings.ROOT_URLCONF = site

        assert set(messages()) == {"E030"}

    def test_a_guard_that_knows_no_methods_is_passed_over(self, settings: Any) -> None:
        def strange(request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        vars(strange)["singleflight_guards"] = (Guard(Options()),)
        site = urls(lock("lesson:<url.id>"))
        vars(site)["urlpatterns"].insert(0, path("strange/", strange))
        settings.ROOT_URLCONF = site

        assert set(messages()) == {"E030"}

    def test_a_question_that_fails_keeps_nobody_from_working(self, settings: Any) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, "no.such.Middleware"]

        found = of_view(settings, flight("lesson:<url.id>", scope="global"))

        assert set(found) == {"E030"}

    def test_a_view_with_several_routes_is_told_of_once(self, settings: Any) -> None:
        site = urls(lock("everything"))
        vars(site)["urlpatterns"].append(path("other/", lock("everything")))
        settings.ROOT_URLCONF = site

        assert len(find_guarded()) == 2
        assert set(messages()) == {"W032"}


class TestRestFramework:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("rest_framework")

    def test_api_view(self, settings: Any) -> None:
        from rest_framework.decorators import api_view

        view = api_view(["POST"])(lock("lesson:<url.id>"))
        reading = api_view(["GET"])(lock("lesson:<url.id>"))

        message = of_view(settings, view)["E030"]

        assert message.msg.startswith("tests.checking.plain: ")
        assert of_view(settings, reading) == {}, "it guards no GET"

    @pytest.mark.parametrize("name", ["create", "close"])
    def test_actions_of_a_viewset(self, settings: Any, name: str) -> None:
        from rest_framework.decorators import action
        from rest_framework.routers import SimpleRouter
        from rest_framework.viewsets import ViewSet

        keys = {"create": "lesson:<url.pk>", "close": "lesson:<url.pk>", name: "x:<url.id>"}

        class Lessons(ViewSet):
            @semaphore_lock("lesson" if name == "close" else keys["create"], limit=2)
            def create(self, request: Any) -> Any: ...

            @action(detail=True, methods=["post"])
            @semaphore_lock(keys["close"])
            def close(self, request: Any, pk: str) -> Any: ...

        router = SimpleRouter()
        router.register("lessons", Lessons, basename="lesson")
        site = urls(plain)
        vars(site)["urlpatterns"] = router.urls
        settings.ROOT_URLCONF = site

        assert f"Lessons.{name}: the key has <url.id>" in messages()["E030"].msg

    def test_a_viewsets_mixin(self, settings: Any) -> None:
        from rest_framework.viewsets import ViewSet

        class Lessons(SemaphoreLockMixin, ViewSet):
            lock_key: ClassVar = {"create": "lesson:<body.uuid>", "destroy": "lesson:<url.id>"}

            def create(self, request: Any) -> Any: ...

            def destroy(self, request: Any, pk: str) -> Any: ...

        assert of_view(settings, Lessons.as_view({"post": "create"})) == {}
        found = of_view(settings, Lessons.as_view({"delete": "destroy"}))
        assert "Lessons.destroy" in found["E030"].msg

    @pytest.mark.parametrize(
        ("permission", "methods", "asks"),
        [
            ("AllowAny", ["get", "post"], False),
            ("IsAuthenticated", ["get"], True),
            ("IsAuthenticatedOrReadOnly", ["get"], False),
            ("IsAuthenticatedOrReadOnly", ["get", "post"], True),
        ],
    )
    def test_permissions(
        self, settings: Any, permission: str, methods: list[str], asks: bool
    ) -> None:
        from rest_framework import permissions
        from rest_framework.views import APIView

        cls = mixin("<url.pk>", *methods, base=SingleFlightMixin, flight_scope="global")
        kinds = [getattr(permissions, permission)]
        api = type("Api", (cls, APIView), {"permission_classes": kinds})

        assert (set(of_view(settings, api.as_view())) == {"W034"}) is asks

    def test_permissions_that_the_route_is_given(self, settings: Any) -> None:
        from rest_framework.permissions import IsAdminUser, IsAuthenticated
        from rest_framework.views import APIView

        cls = mixin("<url.pk>", "get", base=SingleFlightMixin, flight_scope="global")
        api = type("Api", (cls, APIView), {})

        view = api.as_view(permission_classes=[IsAdminUser & IsAuthenticated])

        assert set(of_view(settings, view)) == {"W034"}


class TestNinja:
    @pytest.fixture
    def api(self) -> Any:
        ninja = pytest.importorskip("ninja")
        return lambda **options: ninja.NinjaAPI(urls_namespace=f"checks-{id(options)}", **options)

    def test_operations(self, settings: Any, api: Any) -> None:
        site = api()

        @site.get("/{pk}/")
        @semaphore_lock("lesson:<url.never>")
        def read(request: HttpRequest, pk: int) -> str: ...

        @site.post("/{pk}/")
        @semaphore_lock("lesson:<url.id>")
        def write(request: HttpRequest, pk: int) -> str: ...

        settings.ROOT_URLCONF = urls(site.urls, "api/")
        message = messages()["E030"]
        assert "write: the key has <url.id>" in message.msg
        assert message.hint == "The route has <url.pk>."

    def test_an_async_operation(self, settings: Any, api: Any) -> None:
        site = api()

        @site.post("/{pk}/")
        @semaphore_lock("lesson:<url.id>")
        async def write(request: HttpRequest, pk: int) -> str: ...

        settings.ROOT_URLCONF = urls(site.urls, "api/")
        assert set(messages()) == {"E030"}

    def test_a_guard_around_an_operation(self, settings: Any, api: Any) -> None:
        from ninja.decorators import decorate_view

        site = api()

        @site.post("/{pk}/")
        @decorate_view(semaphore_lock("lesson:<url.id>"))
        def write(request: HttpRequest, pk: int) -> str: ...

        settings.ROOT_URLCONF = urls(site.urls, "api/")
        assert set(messages()) == {"E030"}

    @pytest.mark.parametrize("asks", [True, False])
    def test_auth(self, settings: Any, api: Any, asks: bool) -> None:
        from ninja.security import django_auth

        site = api(auth=django_auth) if asks else api()

        @site.get("/{pk}/")
        @single_flight("lesson:<url.pk>", scope="global")
        def read(request: HttpRequest, pk: int) -> str: ...

        settings.ROOT_URLCONF = urls(site.urls, "api/")
        assert set(messages()) == ({"W034"} if asks else set())

    def test_a_wait_beneath_the_callback(self, settings: Any, api: Any, atomic: None) -> None:
        site = api()

        @site.get("/{pk}/")
        @single_flight("lesson:<url.pk>")
        def read(request: HttpRequest, pk: int) -> str: ...

        settings.ROOT_URLCONF = urls(site.urls, "api/")
        assert set(messages()) == {"E035"}
