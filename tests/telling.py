"""Every event there is, brought about through real views on the real store, sync and async."""

from __future__ import annotations

import asyncio
import functools
import itertools
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse

from singleflight_django import semaphore_lock, single_flight
from tests import settings as run
from tests.flying import acall, afly, call, fly, they_wait
from tests.library.models import Book
from tests.meeting import PATIENCE, Room, ameet, meet, request_like, urls

Answer = Callable[[], Any]


def made() -> HttpResponse:
    return HttpResponse("made", status=201)


def failed() -> HttpResponse:
    return HttpResponse(status=500)


def with_cookie() -> HttpResponse:
    response = made()
    response.set_cookie("a", "b")
    return response


def flushed() -> HttpResponse:
    """Made while the store lost all that it had."""
    with redis.Redis.from_url(run.REDIS_URL) as client:
        client.flushdb()
    return made()


class Site:
    """A guarded view and those who call it. ``sent``: what each caller sends with its request."""

    def __init__(self, settings: Any, sent: dict[str, Any] | None = None) -> None:
        self._settings, self.sent = settings, sent or {}

    def urls(self, view: Any) -> None:
        self._settings.ROOT_URLCONF = urls(view)

    def alone(self, view: Any, **more: Any) -> int:
        """One caller; the status of its answer."""
        raise NotImplementedError

    def meet(self, view: Any, room: Room) -> list[int]:
        """A second caller comes, and is answered, while the first is in the room."""
        raise NotImplementedError

    def fly(self, view: Any, room: Room) -> list[int]:
        """A second caller waits for the first."""
        raise NotImplementedError

    def take_over(self, guard: Any) -> None:
        """A leader dies, and a second caller takes over."""
        raise NotImplementedError

    def view(self, room: Room, answer: Answer = made) -> Any:
        raise NotImplementedError

    def create(self) -> Any:
        """A view that inserts the book of its query string."""
        raise NotImplementedError


class Sync(Site):
    def view(self, room: Room, answer: Answer = made) -> Any:
        def create(request: HttpRequest, pk: str) -> HttpResponse:
            room.stay()
            return answer()

        return create

    def create(self) -> Any:
        def create(request: HttpRequest, pk: str) -> HttpResponse:
            Book.objects.create(uuid=request.GET["uuid"])
            return made()

        return create

    def alone(self, view: Any, **more: Any) -> int:
        self.urls(view)
        return int(call(**self.sent, **more)().status_code)

    def meet(self, view: Any, room: Room) -> list[int]:
        self.urls(view)
        return [one.status_code for one in meet(room, *[call(**self.sent) for _ in range(2)])]

    def fly(self, view: Any, room: Room) -> list[int]:
        self.urls(view)
        return [one.status_code for one in fly(room, *[call(**self.sent) for _ in range(2)])]

    def take_over(self, guard: Any) -> None:
        room, runs = Room(), itertools.count()

        def answer() -> HttpResponse:
            if next(runs) == 0:
                raise SystemExit
            return made()

        self.urls(guard(self.view(room, answer)))

        def leader() -> None:
            with pytest.raises(SystemExit):
                call(**self.sent)()

        _, follower = fly(room, leader, call(**self.sent))
        assert follower.status_code == 201


class Async(Site):
    def view(self, room: Room, answer: Answer = made) -> Any:
        async def create(request: HttpRequest, pk: str) -> HttpResponse:
            await room.astay()
            return await asyncio.to_thread(answer)

        return create

    def create(self) -> Any:
        async def create(request: HttpRequest, pk: str) -> HttpResponse:
            try:
                await Book.objects.acreate(uuid=request.GET["uuid"])
            finally:
                # The thread that has this connection ends with the request.
                await sync_to_async(connections.close_all)()
            return made()

        return create

    def alone(self, view: Any, **more: Any) -> int:
        self.urls(view)
        return int(asyncio.run(acall(**self.sent, **more)()).status_code)

    def meet(self, view: Any, room: Room) -> list[int]:
        self.urls(view)
        sends = [acall(**self.sent) for _ in range(2)]
        return [one.status_code for one in asyncio.run(ameet(room, *sends))]

    def fly(self, view: Any, room: Room) -> list[int]:
        self.urls(view)
        sends = [acall(**self.sent) for _ in range(2)]
        return [one.status_code for one in asyncio.run(afly(room, *sends))]

    def take_over(self, guard: Any) -> None:
        async def cancelled() -> None:
            entered, door = asyncio.Event(), asyncio.Event()

            async def create(request: HttpRequest, pk: str) -> HttpResponse:
                entered.set()
                await door.wait()
                return made()

            view = guard(create)
            request = request_like()
            request.META.update(
                {f"HTTP_{n.upper().replace('-', '_')}": v for n, v in self.headers.items()}
            )
            leader, follower = (asyncio.ensure_future(view(request, pk="7")) for _ in range(2))
            await asyncio.wait_for(entered.wait(), PATIENCE)
            await asyncio.to_thread(they_wait, 1)
            door.set()
            leader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leader
            assert (await asyncio.wait_for(follower, PATIENCE)).status_code == 201

        asyncio.run(cancelled())

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.sent.get("headers", {}))


SITES = {"sync": Sync, "async": Async}


class Scenes:
    """Each brings some events about. ``lock`` and ``flight``: the decorators, with their keys."""

    def __init__(self, lock: Any = None, flight: Any = None) -> None:
        self.lock = lock or functools.partial(semaphore_lock, key="lesson:<pk>")
        self.flight = flight or functools.partial(single_flight, key="lesson:<pk>")

    def conflict(self, site: Site) -> None:
        room = Room()
        assert site.meet(self.lock(wait=0.05)(site.view(room)), room) == [201, 429]

    def lost_lease(self, site: Site) -> None:
        assert site.alone(self.lock()(site.view(Room(open=True), flushed))) == 201

    def shared(self, site: Site) -> None:
        room = Room()
        view = self.flight(result_ttl=60)(site.view(room))
        assert site.fly(view, room) == [201, 201]
        assert site.alone(view) == 201
        assert room.visits == 1

    def failed(self, site: Site) -> None:
        room = Room()
        assert site.fly(self.flight()(site.view(room, failed)), room) == [500, 503]

    def timed_out(self, site: Site) -> None:
        room = Room()
        assert site.meet(self.flight(wait=0.05)(site.view(room)), room) == [201, 504]

    def taken_over(self, site: Site) -> None:
        site.take_over(self.flight(ttl=1))

    def not_for_sharing(self, site: Site) -> None:
        view = self.flight()(site.view(Room(open=True), with_cookie))
        assert site.alone(view) == 201

    def lost_flight(self, site: Site) -> None:
        view = self.flight(on_lost="return")(site.view(Room(open=True), flushed))
        assert site.alone(view) == 201

    def duplicate(self, site: Site) -> None:
        view = self.lock(unique="library.Book.uuid")(site.create())
        book = {"path": f"/7/?uuid={uuid.UUID(int=7)}"}
        assert [site.alone(view, **book) for _ in range(2)] == [201, 409]

    def unprotected(self, site: Site) -> None:
        without = {"cache": "dead", "on_store_error": "proceed"}
        assert site.alone(self.lock(**without)(site.view(Room(open=True)))) == 201
        assert site.alone(self.flight(**without)(site.view(Room(open=True)))) == 201

    def refused_by_an_outage(self, site: Site) -> None:
        assert site.alone(self.lock(cache="dead")(site.view(Room(open=True)))) == 503
        assert site.alone(self.flight(cache="dead")(site.view(Room(open=True)))) == 503


SCENES = [name for name in vars(Scenes) if not name.startswith("_")]
EVENTS = {
    "conflict": ["lease_acquired", "lease_rejected", "lease_released"],
    "lost_lease": ["lease_acquired", "lease_lost", "lease_released"],
    "shared": ["flight_led", "lease_released", "flight_joined", "flight_joined"],
    "failed": ["flight_led", "lease_released", "flight_failed"],
    "timed_out": ["flight_led", "flight_timed_out", "lease_released"],
    "taken_over": ["flight_led", "flight_taken_over", "lease_released", "lease_released"],
    "not_for_sharing": ["flight_led", "share_refused", "lease_released"],
    "lost_flight": ["flight_led", "lease_lost", "lease_released"],
    "duplicate": ["lease_acquired", "lease_released"] * 2 + ["duplicate_caught"],
    "unprotected": ["unprotected_run", "unprotected_run"],
    "refused_by_an_outage": ["lease_rejected", "share_refused"],
}


def every_scene(site: Site, key: str = "lesson:<pk>") -> None:
    """Bring all events about, each scene with keys of its own."""
    for scene in SCENES:
        own = f"{scene}:{key}"
        scenes = Scenes(
            functools.partial(semaphore_lock, key=own), functools.partial(single_flight, key=own)
        )
        getattr(scenes, scene)(site)
