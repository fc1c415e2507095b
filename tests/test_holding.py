"""What Django does after the view has returned is covered by the lease, and no more than that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar
from wsgiref.handlers import SimpleHandler
from wsgiref.util import setup_testing_defaults

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.test import Client

from singleflight_django import semaphore_lock
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
    urls,
)
from tests.servers import until

guard = semaphore_lock(key="lesson:<pk>")
KEY = "lesson:7"

# What happened, in order, with what it found.
journal: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_in_between(settings: Any) -> None:
    settings.MIDDLEWARE = []
    journal.clear()


class Noting:
    """A template: rendering it notes whether the lease is held."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error = error

    def render(self, context: Any = None, request: Any = None) -> str:
        journal.append(("render", held(KEY)))
        if self.error:
            raise self.error
        return "rendered"


def unrendered(error: type[Exception] | None = None) -> SimpleTemplateResponse:
    response = SimpleTemplateResponse("unused")
    response.resolve_template = lambda template: Noting(error)  # type: ignore[method-assign]
    response.add_post_render_callback(lambda r: journal.append(("callback", held(KEY))))
    return response


def template_middleware(get_response: Callable[..., Any]) -> Any:
    class Middleware:
        def __call__(self, request: HttpRequest) -> Any:
            return get_response(request)

        def process_template_response(self, request: HttpRequest, response: Any) -> Any:
            journal.append(("template middleware", held(KEY)))
            return response

    return Middleware()


def replacing_middleware(get_response: Callable[..., Any]) -> Callable[..., Any]:
    def middleware(request: HttpRequest) -> HttpResponse:
        replaced = get_response(request)
        journal.append(("replaced", held(KEY)))
        response = HttpResponse("another", status=202)
        response._replaced = replaced  # type: ignore[attr-defined]
        return response

    return middleware


class ReplacingTemplates:
    """It puts a rendered response in the place of an unrendered one."""

    def __init__(self, get_response: Callable[..., Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        journal.append(response)
        return TemplateResponse(request, engines["django"].from_string("another"), status=202)


@guard
def renders(request: HttpRequest, pk: str) -> Any:
    return unrendered()


@guard
async def arenders(request: HttpRequest, pk: str) -> Any:
    return unrendered()


@guard
def fails_to_render(request: HttpRequest, pk: str) -> Any:
    return unrendered(ZeroDivisionError)


@guard
async def afails_to_render(request: HttpRequest, pk: str) -> Any:
    return unrendered(ZeroDivisionError)


class TestUnrendered:
    """Rendered once, by Django, under the lease; the template middleware has had its turn."""

    IN_ORDER: ClassVar = [("template middleware", True), ("render", True), ("callback", True)]

    @pytest.fixture(autouse=True)
    def _middleware(self, settings: Any) -> None:
        settings.MIDDLEWARE = [f"{__name__}.template_middleware"]

    @pytest.mark.parametrize("view", [renders, arenders], ids=["sync", "async"])
    def test_under_wsgi(self, view: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view)
        assert post()().content == b"rendered"
        assert journal == self.IN_ORDER
        assert not held(KEY)

    @pytest.mark.parametrize("view", [renders, arenders], ids=["sync", "async"])
    async def test_under_asgi(self, view: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view)
        assert (await apost()()).content == b"rendered"
        assert journal == self.IN_ORDER
        assert not await asyncio.to_thread(held, KEY)

    @pytest.mark.parametrize("view", [fails_to_render, afails_to_render], ids=["sync", "async"])
    def test_that_fails_to_render_under_wsgi(self, view: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view)
        response = Client(raise_request_exception=False).post("/7/")
        assert response.status_code == 500
        assert not held(KEY)

    @pytest.mark.parametrize("view", [fails_to_render, afails_to_render], ids=["sync", "async"])
    async def test_that_fails_to_render_under_asgi(self, view: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(view)
        response = await apost(raise_request_exception=False)()
        assert response.status_code == 500
        assert not await asyncio.to_thread(held, KEY)

    @pytest.mark.parametrize("view", [renders, arenders], ids=["sync", "async"])
    def test_that_is_replaced_before_it_is_rendered(self, view: Any, settings: Any) -> None:
        settings.MIDDLEWARE = [f"{__name__}.ReplacingTemplates"]
        settings.ROOT_URLCONF = urls(view)
        assert post()().status_code == 202
        assert not held(KEY)

    def test_that_nobody_ever_renders(self) -> None:
        response = renders(request_like(), pk="7")
        assert held(KEY)
        del response
        gc.collect()
        until(lambda: not held(KEY), "the keeper to give it back")

    def test_two_guards_of_two_keys(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(semaphore_lock(key="outer:<pk>")(renders))
        assert post()().status_code == 200
        assert not held(KEY)
        assert not held("outer:7")
        settings.MIDDLEWARE = [f"{__name__}.ReplacingTemplates"]
        assert post()().status_code == 202
        assert not held(KEY)
        assert not held("outer:7")

    def test_a_rendered_one_is_released_at_once(self) -> None:
        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            return TemplateResponse(request, engines["django"].from_string("x")).render()

        view(request_like(), pk="7")
        assert not held(KEY)


class Chunks:
    """A body in two parts; the second waits for the door."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield b"one"
            self.room.stay()
            journal.append(("last chunk", held(KEY)))
            yield b"two"
        finally:
            self.closed = True
            journal.append(("closed", held(KEY)))

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await self.room.astay()
            journal.append(("last chunk", await asyncio.to_thread(held, KEY)))
            yield b"two"
        finally:
            self.closed = True


def streaming(chunks: Chunks, *, asynchronous: bool) -> Any:
    @guard
    def view(request: HttpRequest, pk: str) -> Any:
        return StreamingHttpResponse(iter(chunks))

    @guard
    async def aview(request: HttpRequest, pk: str) -> Any:
        return StreamingHttpResponse(chunks.stream())

    return aview if asynchronous else view


def read_all(path: str = "/7/") -> bytes:
    response = Client().post(path)
    body = b"".join(response) if response.streaming else response.content
    response.close()
    return body if response.status_code == 200 else str(response.status_code).encode()


class TestStreaming:
    def test_the_key_is_held_until_the_last_chunk(self, settings: Any) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(streaming(Chunks(room), asynchronous=False))
        assert meet(room, read_all, read_all) == [b"onetwo", b"429"]
        assert journal[0] == ("last chunk", True)
        assert not held(KEY)

    async def test_the_key_is_held_until_the_last_chunk_of_an_async_stream(
        self, settings: Any
    ) -> None:
        room = Room()
        settings.ROOT_URLCONF = urls(streaming(Chunks(room), asynchronous=True))

        async def read() -> bytes:
            start, *body = await asgi_server()
            content = b"".join(message.get("body", b"") for message in body)
            return content if start["status"] == 200 else str(start["status"]).encode()

        assert await ameet(room, read, read) == [b"onetwo", b"429"]
        assert journal[0] == ("last chunk", True)
        assert not await asyncio.to_thread(held, KEY)

    def test_through_a_real_wsgi_server(self, settings: Any) -> None:
        room = Room(open=True)
        settings.ROOT_URLCONF = urls(streaming(Chunks(room), asynchronous=False))
        assert wsgi_server().endswith(b"onetwo")
        assert journal == [("last chunk", True), ("closed", True)]
        assert not held(KEY)

    def test_the_client_of_a_wsgi_server_goes_half_way(self, settings: Any) -> None:
        chunks = Chunks(Room(open=True))
        settings.ROOT_URLCONF = urls(streaming(chunks, asynchronous=False))
        body = wsgi_body()
        assert next(iter(body)) == b"one"
        assert held(KEY)
        body.close()
        assert chunks.closed
        assert journal == [("closed", True)]
        assert not held(KEY)

    async def test_through_the_asgi_handler(self, settings: Any) -> None:
        settings.ROOT_URLCONF = urls(streaming(Chunks(Room(open=True)), asynchronous=True))
        sent = await asgi_server()
        assert b"".join(m.get("body", b"") for m in sent) == b"onetwo"
        assert journal == [("last chunk", True)]
        assert not await asyncio.to_thread(held, KEY)

    async def test_the_client_of_an_asgi_server_goes_half_way(self, settings: Any) -> None:
        room = Room()
        chunks = Chunks(room)
        settings.ROOT_URLCONF = urls(streaming(chunks, asynchronous=True))
        await asgi_server(gone=room.await_)
        room.door.set()
        await asyncio.to_thread(until, lambda: not held(KEY), "free", PATIENCE)
        assert chunks.closed

    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_a_body_that_raises(self, error: type[BaseException], settings: Any) -> None:
        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            def body() -> Iterator[bytes]:
                yield b"one"
                raise error

            return StreamingHttpResponse(body())

        settings.ROOT_URLCONF = urls(view)
        body = wsgi_body()
        with pytest.raises(error):
            list(body)
        assert held(KEY)
        body.close()
        assert not held(KEY)

    def test_a_file(self, settings: Any) -> None:
        class File(io.BytesIO):
            def read(self, *args: Any) -> bytes:
                journal.append(held(KEY))
                return super().read(*args)

        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            return FileResponse(File(b"content"), filename="x.bin")

        settings.ROOT_URLCONF = urls(view)
        assert wsgi_server().endswith(b"content")
        assert journal
        assert all(journal)
        assert not held(KEY)

    def test_a_file_under_a_server_that_sends_it_by_itself(self, settings: Any) -> None:
        """``wsgi.file_wrapper``: the server closes the file, Django's response through it."""

        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            return FileResponse(io.BytesIO(b"content"), filename="x.bin")

        settings.ROOT_URLCONF = urls(view)
        body = wsgi_body(**{"wsgi.file_wrapper": lambda file, size=0: file})
        assert held(KEY)
        body.close()
        assert not held(KEY)

    def test_a_middleware_that_replaces_the_response(self, settings: Any) -> None:
        settings.MIDDLEWARE = [f"{__name__}.replacing_middleware"]
        settings.ROOT_URLCONF = urls(streaming(Chunks(Room()), asynchronous=False))
        body = wsgi_body()
        assert journal == [("replaced", True)]
        assert list(body) == [b"another"]
        body.close()
        assert not held(KEY)

    def test_a_middleware_that_raises(self, settings: Any) -> None:
        settings.MIDDLEWARE = [f"{__name__}.raising_middleware"]
        settings.ROOT_URLCONF = urls(streaming(Chunks(Room()), asynchronous=False))
        assert Client(raise_request_exception=False).post("/7/").status_code == 500
        assert not held(KEY)

    async def test_a_middleware_that_raises_in_async_code(self, settings: Any) -> None:
        settings.MIDDLEWARE = [f"{__name__}.raising_middleware"]
        settings.ROOT_URLCONF = urls(streaming(Chunks(Room()), asynchronous=True))
        assert (await apost(raise_request_exception=False)()).status_code == 500
        assert not await asyncio.to_thread(held, KEY)

    def test_another_request_from_within_the_stream_ends_nothing(self, settings: Any) -> None:
        """Its end is not the end of the request around it."""

        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            def body() -> Iterator[bytes]:
                journal.append(read_all("/8/"))
                journal.append(held(KEY))
                yield b"end"

            return StreamingHttpResponse(body()) if pk == "7" else HttpResponse("inner")

        settings.ROOT_URLCONF = urls(view)
        assert read_all() == b"end"
        assert journal == [b"inner", True]
        assert not held(KEY)


def raising_middleware(get_response: Callable[..., Any]) -> Callable[..., Any]:
    def middleware(request: HttpRequest) -> HttpResponse:
        journal.append(get_response(request))
        raise ZeroDivisionError

    return middleware


class TestTheRequest:
    def test_is_closed_once_and_as_before(self, settings: Any) -> None:
        closed = []

        @guard
        def view(request: HttpRequest, pk: str) -> Any:
            original = request.close

            def close() -> None:
                closed.append(held(KEY))
                original()

            request.close = close  # type: ignore[method-assign]
            return unrendered(ZeroDivisionError)

        settings.ROOT_URLCONF = urls(view)
        Client(raise_request_exception=False).post("/7/")
        assert closed == [True]
        assert not held(KEY)

    def test_a_plain_answer_leaves_it_alone(self) -> None:
        request = request_like()
        semaphore_lock(key="x")(lambda request: HttpResponse())(request)
        assert "close" not in vars(request)


class TestCancelledRequests:
    async def test_an_async_view_whose_client_goes_lets_its_lease_lapse(
        self, settings: Any
    ) -> None:
        """A thread of it may still be writing (guarantee 4)."""
        room = Room()

        @semaphore_lock(key="lesson:<pk>", ttl=1.5)
        async def view(request: HttpRequest, pk: str) -> HttpResponse:
            return await room.astay()

        settings.ROOT_URLCONF = urls(view)
        with listening("lease_released") as told:
            await asgi_server(gone=room.await_)
        assert [facts.reason for _, facts in told] == ["cancelled: it lapses"]
        assert await asyncio.to_thread(held, KEY)
        room.door.set()
        await asyncio.to_thread(until, lambda: not held(KEY), "lapsed", PATIENCE)

    async def test_a_sync_view_whose_client_goes_keeps_its_lease_until_it_is_done(
        self, settings: Any
    ) -> None:
        room = Room()

        @semaphore_lock(key="lesson:<pk>", ttl=60)
        def view(request: HttpRequest, pk: str) -> HttpResponse:
            return room.stay()

        settings.ROOT_URLCONF = urls(view)
        server = asyncio.create_task(asgi_server(gone=room.await_))
        await room.await_()
        assert await asyncio.to_thread(held, KEY)
        room.door.set()
        with contextlib.suppress(asyncio.CancelledError):
            await server
        await asyncio.to_thread(until, lambda: not held(KEY), "free", PATIENCE)

    async def test_a_response_that_is_dropped_on_its_way_frees_the_key(self, settings: Any) -> None:
        """Cancelled between the view and the sending of what it returned."""
        settings.MIDDLEWARE = [f"{__name__}.lingering_middleware"]
        settings.ROOT_URLCONF = urls(streaming(Chunks(Room()), asynchronous=True))
        await asgi_server(gone=lambda: asyncio.to_thread(lingering.wait))
        gc.collect()
        await asyncio.to_thread(until, lambda: not held(KEY), "free", PATIENCE)


lingering = Room()


def lingering_middleware(get_response: Callable[..., Any]) -> Callable[..., Any]:
    async def middleware(request: HttpRequest) -> HttpResponse:
        response = await get_response(request)
        lingering.entered.set()
        await asyncio.Event().wait()
        return response  # type: ignore[no-any-return]

    return middleware


lingering_middleware.async_capable = True  # type: ignore[attr-defined]
lingering_middleware.sync_capable = False  # type: ignore[attr-defined]


def environ(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": "/7/", **more}
    setup_testing_defaults(made)
    return made


def wsgi_body(**more: Any) -> Any:
    """The body as Django's WSGI handler gives it to a server."""
    return WSGIHandler()(environ(**more), lambda status, headers, error=None: None)


def wsgi_server() -> bytes:
    """What the server of the standard library puts on the wire."""
    wire = io.BytesIO()
    SimpleHandler(io.BytesIO(), wire, io.StringIO(), environ()).run(WSGIHandler())
    return wire.getvalue()


async def asgi_server(gone: Callable[[], Any] | None = None) -> list[dict[str, Any]]:
    """Serve one POST; the client disconnects when ``gone()`` is through."""
    sent: list[dict[str, Any]] = []
    received = False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await (gone() if gone else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/7/",
        "raw_path": b"/7/",
        "query_string": b"",
        "headers": [(b"host", b"testserver")],
        "server": ("testserver", 80),
    }
    await asyncio.wait_for(ASGIHandler()(scope, receive, send), PATIENCE)
    return sent
