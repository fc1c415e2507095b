"""D82: a leader changes its session, and a follower of the same session has read it before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from django.conf import settings as configured
from django.contrib.auth import alogin, alogout, login, logout
from django.contrib.auth.models import User
from django.db import connections
from django.http import HttpRequest, HttpResponse

from singleflight_django import single_flight
from tests.flying import acall, afly, problem
from tests.meeting import PATIENCE, Room, ameet, codes, urls

pytestmark = pytest.mark.django_db(transaction=True)

flight = single_flight(key="lesson:<pk>")
BACKEND = "django.contrib.auth.backends.ModelBackend"
# What a server keeps; signed cookies are with the client alone.
KEPT = ["db", "cached_db", "cache"]
EVERYWHERE = [*KEPT, "signed_cookies"]
each_colour = pytest.mark.parametrize("colour", ["sync", "async"])
each_change = pytest.mark.parametrize("change", ["login", "logout", "flush"])
each_backend = pytest.mark.parametrize("backend", EVERYWHERE)
_leader_may_save, _leader_has_saved = threading.Event(), threading.Event()


def outermost(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        try:
            response = get_response(request)
            if response.status_code == 200:
                _leader_has_saved.set()
            return response
        finally:
            # The request's thread ends with it.
            connections.close_all()

    return middleware


def innermost(get_response: Any) -> Any:
    """It reads the session before the guard, and a refused follower's answer goes out last."""

    def middleware(request: HttpRequest) -> Any:
        request.session.get("was")
        response = get_response(request)
        assert response.status_code != 200 or _leader_may_save.wait(PATIENCE)
        assert response.status_code != 409 or _leader_has_saved.wait(PATIENCE)
        return response

    return middleware


@pytest.fixture(autouse=True)
def _middleware(settings: Any) -> None:
    _leader_has_saved.clear()
    _leader_may_save.set()
    settings.MIDDLEWARE = [
        f"{__name__}.outermost",
        *settings.MIDDLEWARE,
        f"{__name__}.innermost",
    ]


@pytest.fixture
def user(transactional_db: None) -> User:
    return User.objects.create_user("ann")


async def in_a_thread(work: Callable[[], Any]) -> Any:
    def closing() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    return await asyncio.to_thread(closing)


def store(key: str | None = None) -> Any:
    return import_module(configured.SESSION_ENGINE).SessionStore(key)


def new_session(user: User | None) -> str:
    session = store()
    session["was"] = "read"
    if user is not None:
        session["_auth_user_id"] = str(user.pk)
        session["_auth_user_backend"] = BACKEND
        session["_auth_user_hash"] = user.get_session_auth_hash()
    session.save()
    return str(session.session_key)


def content(key: str) -> dict[str, Any]:
    return dict(store(key).items())


def key_after(key: str, *responses: Any) -> str:
    """What a browser sends next that got these answers in this order."""
    for response in responses:
        if "sessionid" in response.cookies:
            key = response.cookies["sessionid"].value
    return key


def changes(change: str, user: User) -> Callable[[HttpRequest], None]:
    return {
        "cart": lambda request: request.session.update({"cart": "full"}),
        "login": lambda request: login(request, user, BACKEND),
        "logout": logout,
        "flush": lambda request: request.session.flush(),
        "mine": lambda request: request.session.update({"mine": "yes"}),
        "nothing": lambda request: None,
    }[change]


def achanges(change: str, user: User) -> Callable[[HttpRequest], Any]:
    async def nothing(request: HttpRequest) -> None: ...

    return {
        "cart": lambda request: request.session.aupdate({"cart": "full"}),
        "login": lambda request: alogin(request, user, BACKEND),
        "logout": alogout,
        "flush": lambda request: request.session.aflush(),
        "mine": lambda request: request.session.aupdate({"mine": "yes"}),
        "nothing": nothing,
    }[change]


def view_of(room: Room, colour: str, user: User, leader: str, follower: str = "nothing") -> Any:
    """A view in which the first caller makes one change and the others make another one."""

    def view(request: HttpRequest, pk: str) -> HttpResponse:
        change = follower if room.entered.is_set() else leader
        room.stay()
        changes(change, user)(request)
        return HttpResponse()

    async def aview(request: HttpRequest, pk: str) -> HttpResponse:
        change = follower if room.entered.is_set() else leader
        await room.astay()
        await achanges(change, user)(request)
        return HttpResponse()

    return flight(view if colour == "sync" else aview)


async def two(room: Room, key: str, method: str = "post") -> tuple[Any, Any]:
    send = acall(method, headers={"Cookie": f"sessionid={key}"})
    leader, follower = await afly(room, send, send)
    return leader, follower


class TestAChangedSession:
    @pytest.mark.parametrize(
        ("backend", "every"),
        # Whoever sends a signed cookie again at each request overwrites others' changes with it.
        [*((b, False) for b in EVERYWHERE), *((b, True) for b in KEPT)],
    )
    @each_colour
    async def test_survives_a_refused_follower(
        self, backend: str, every: bool, colour: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        settings.SESSION_SAVE_EVERY_REQUEST = every
        room, key = Room(), await in_a_thread(lambda: new_session(None))
        settings.ROOT_URLCONF = urls(view_of(room, colour, user, "cart"))
        leader, follower = await two(room, key)
        assert codes([leader, follower]) == [200, 409]
        assert problem(follower) == "in-flight"
        assert room.visits == 1
        after = key_after(key, leader, follower)
        assert await in_a_thread(lambda: content(after)) == {"was": "read", "cart": "full"}

    @each_backend
    @each_colour
    async def test_survives_a_follower_that_reads_on_its_own(
        self, backend: str, colour: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        room, key = Room(), await in_a_thread(lambda: new_session(None))
        settings.ROOT_URLCONF = urls(view_of(room, colour, user, "cart"))
        leader, follower = await two(room, key, "get")
        assert codes([leader, follower]) == [200, 200]
        assert room.visits == 2
        assert "sessionid" in leader.cookies
        assert not follower.cookies
        after = key_after(key, leader, follower)
        assert await in_a_thread(lambda: content(after)) == {"was": "read", "cart": "full"}


class TestAnotherSession:
    """The leader's login or logout takes the session away that its followers came with."""

    @each_change
    @each_backend
    @each_colour
    async def test_followers_of_post_get_409(
        self, change: str, backend: str, colour: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        before = None if change == "login" else user
        room, key = Room(), await in_a_thread(lambda: new_session(before))
        settings.ROOT_URLCONF = urls(view_of(room, colour, user, change))
        leader, follower = await two(room, key)
        assert codes([leader, follower]) == [200, 409]
        assert problem(follower) == "in-flight"
        assert room.visits == 1
        assert not follower.cookies
        after = key_after(key, leader, follower)
        found = await in_a_thread(lambda: content(after))
        if change == "login":
            assert (found["was"], found["_auth_user_id"]) == ("read", str(user.pk))
        else:
            assert (after, found) == ("", {})
        if backend in KEPT:
            assert await in_a_thread(lambda: content(key)) == {}

    @pytest.mark.parametrize("backend", KEPT)
    @each_colour
    async def test_followers_of_post_get_409_where_each_request_saves(
        self, backend: str, colour: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        settings.SESSION_SAVE_EVERY_REQUEST = True
        room, key = Room(), await in_a_thread(lambda: new_session(None))
        settings.ROOT_URLCONF = urls(view_of(room, colour, user, "login"))
        leader, follower = await two(room, key)
        # No SessionInterrupted, which is a 400.
        assert codes([leader, follower]) == [200, 409]
        after = key_after(key, leader)
        found = await in_a_thread(lambda: content(after))
        assert (found["was"], found["_auth_user_id"]) == ("read", str(user.pk))
        assert await in_a_thread(lambda: content(key)) == {}

    @each_change
    @each_backend
    @each_colour
    async def test_followers_of_get_run_on_their_own_and_may_write(
        self, change: str, backend: str, colour: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        before = None if change == "login" else user
        room, key = Room(), await in_a_thread(lambda: new_session(before))
        settings.ROOT_URLCONF = urls(view_of(room, colour, user, change, "mine"))
        leader, follower = await two(room, key, "get")
        assert codes([leader, follower]) == [200, 200]
        assert room.visits == 2
        own = await in_a_thread(lambda: content(key_after(key, follower)))
        assert own["mine"] == "yes"
        if backend in KEPT:
            # Nothing of the session that is gone comes back.
            assert own == {"mine": "yes"}
            assert await in_a_thread(lambda: content(key)) == {}
        if change == "login":
            found = await in_a_thread(lambda: content(key_after(key, leader)))
            assert found["_auth_user_id"] == str(user.pk)


class TestWhatIsAskedAfterAWait:
    """On the event loop, too, it finds the session as it did before."""

    @pytest.mark.parametrize("backend", EVERYWHERE)
    @pytest.mark.parametrize("option", ["authorize", "on_unshareable", "on_timeout"])
    async def test_may_read_the_session_synchronously(
        self, option: str, backend: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        room, key = Room(), await in_a_thread(lambda: new_session(None))
        found: list[Any] = []

        async def asked(request: HttpRequest) -> Any:
            found.append(request.session.get("was"))
            room.door.set()
            return True if option == "authorize" else HttpResponse(status=202)

        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            await room.astay()
            if option != "authorize":
                await request.session.aset("cart", "full")
            return HttpResponse()

        options: dict[str, Any] = {option: asked}
        if option == "on_timeout":
            options["wait"] = 0.2
        settings.ROOT_URLCONF = urls(single_flight(key="lesson:<pk>", **options)(view))
        send = acall(headers={"Cookie": f"sessionid={key}"})
        if option == "on_timeout":
            answers = await ameet(room, send, send)
        else:
            answers = await afly(room, send, send)
        assert codes(answers) == [200, 200 if option == "authorize" else 202]
        assert found == ["read"]
        assert room.visits == 1

    @pytest.mark.parametrize("backend", KEPT)
    async def test_and_no_old_session_is_saved_for_it(
        self, backend: str, user: User, settings: Any
    ) -> None:
        settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{backend}"
        settings.SESSION_SAVE_EVERY_REQUEST = True
        room, key = Room(), await in_a_thread(lambda: new_session(None))

        async def asked(request: HttpRequest) -> Any:
            request.session.get("was")
            _leader_may_save.set()
            return HttpResponse(status=409)

        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            await room.astay()
            await request.session.aset("cart", "full")
            return HttpResponse()

        _leader_may_save.clear()
        guard = single_flight(key="lesson:<pk>", on_unshareable=asked)
        settings.ROOT_URLCONF = urls(guard(view))
        leader, follower = await two(room, key)
        assert codes([leader, follower]) == [200, 409]
        assert await in_a_thread(lambda: content(key)) == {"was": "read", "cart": "full"}
