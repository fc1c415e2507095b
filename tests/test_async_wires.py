"""One connection of an event loop: the short way, and the driver's where that is all there is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis._parsers.resp2 import _AsyncRESP2Parser

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Conflict, Grant
from singleflight_django.stores.redis import async_transports
from singleflight_django.stores.redis.async_transports import AsyncConnectionTransport
from singleflight_django.stores.redis.async_wires import AsyncWire, ShortAsyncWire, async_wire_on
from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import pack
from singleflight_django.stores.redis.scripts import ACQUIRE
from singleflight_django.stores.redis.store import RedisStore, store_on
from singleflight_django.waiting import clock
from tests.proxy import Proxy
from tests.servers import Valkey, until
from tests.store_contract import LONG

PING = pack("PING")
# Of a socket, in seconds. A busy machine needs one now and then.
TIMEOUT = 1.5


async def wire_to(port: int, **options: Any) -> AsyncWire:
    connection = redis.asyncio.Connection(host="127.0.0.1", port=port, **options)
    await connection.connect()
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=TIMEOUT) as client:
        return async_wire_on(connection, Server(client))


@pytest.fixture(params=["short", "driver's"])
async def wire(request: pytest.FixtureRequest, proxy: Proxy) -> AsyncIterator[AsyncWire]:
    """Both ways, behind the proxy."""
    in_python = {"parser_class": _AsyncRESP2Parser, "protocol": 2, "socket_timeout": TIMEOUT}
    made = await wire_to(proxy.port, **({} if request.param == "short" else in_python))
    assert isinstance(made, ShortAsyncWire) is (request.param == "short")
    yield made
    await made.close()


@pytest.fixture
async def short(redis_server: Valkey) -> AsyncIterator[ShortAsyncWire]:
    made = await wire_to(redis_server.port)
    assert isinstance(made, ShortAsyncWire)
    yield made
    await made.close()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_it_is_the_short_one_wherever_the_driver_parses_in_c(
    protocol: int, redis_server: Valkey
) -> None:
    """It knows private attributes of the driver: they may have been renamed."""
    wire = await wire_to(redis_server.port, protocol=protocol)
    assert isinstance(wire, ShortAsyncWire)
    assert await wire.exchange(PING, 1) == [b"PONG"]
    await wire.close()


async def test_a_store_uses_it(redis_url: str, cache_at: Any) -> None:
    store = store_on(cache_at(redis_url), "t")
    await store.aacquire("k", "a", LONG, 1, 0.0)
    transport = store._link.loops.current()
    assert isinstance(transport, AsyncConnectionTransport)
    assert [type(wire) for wire in transport._idle] == [ShortAsyncWire]


async def test_the_driver_has_nothing_to_complain_of_afterwards(redis_server: Valkey) -> None:
    """Unclosed connections are warnings, and so errors here."""
    wire = await wire_to(redis_server.port)
    await wire.exchange(PING, 1)
    await wire.close()
    await asyncio.sleep(0)
    del wire
    gc.collect()


async def test_replies_come_in_order_and_errors_are_among_them(wire: AsyncWire) -> None:
    commands = [PING, pack("NOSUCHCOMMAND"), pack("ECHO", "a")]
    pong, error, echo = await wire.exchange(b"".join(commands), 3)
    assert (pong, echo) == (b"PONG", b"a")
    assert isinstance(error, redis.ResponseError)
    assert wire.is_open


async def test_a_long_reply_comes_in_pieces(wire: AsyncWire) -> None:
    word = b"x" * 1_000_000
    assert await wire.exchange(pack("ECHO", word) + PING, 2) == [word, b"PONG"]
    assert await wire.exchange(PING, 1) == [b"PONG"]


async def test_nil_is_told_from_nothing(wire: AsyncWire) -> None:
    assert await wire.exchange_within(pack("GET", "nothing"), 5.0) is None
    assert wire.is_open
    begin = clock()
    assert await wire.exchange_within(pack("BLPOP", "nothing", "5"), 0.1) is None
    assert clock() - begin < 4
    assert not wire.is_open


async def test_a_wait_may_be_longer_than_the_patience_with_a_socket(wire: AsyncWire) -> None:
    await wire.exchange(PING, 1)
    begin = clock()
    assert await wire.exchange_within(pack("BLPOP", "nothing", "1.8"), 8.0) is None
    assert clock() - begin > 1.7
    assert wire.is_open


async def test_a_server_that_hangs_is_the_drivers_timeout(wire: AsyncWire, proxy: Proxy) -> None:
    # The alarm that is set by then isn't the one for the exchange that hangs.
    await wire.exchange(PING, 1)
    await asyncio.sleep(0.3)
    proxy.hang()
    begin = clock()
    with pytest.raises(redis.TimeoutError):
        await wire.exchange(PING, 1)
    assert 0.9 * TIMEOUT < clock() - begin < 4 * TIMEOUT


async def test_a_connection_that_breaks_is_the_drivers_error(wire: AsyncWire, proxy: Proxy) -> None:
    proxy.trap(b"PING", then="drop")
    with pytest.raises(redis.ConnectionError):
        await wire.exchange(PING, 1)


async def test_one_that_was_closed_meanwhile_is_not_written_to(
    short: ShortAsyncWire, redis_server: Valkey
) -> None:
    with redis_server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.to_thread(until, lambda: not short.is_open, "the loop to notice")
    with pytest.raises(redis.ConnectionError):
        await short.exchange(PING, 1)


@pytest.mark.parametrize("state", ["-LOADING wait\r\n", "-NOAUTH who?\r\n"])
async def test_a_server_that_serves_nobody_closes_it(state: str, short: ShortAsyncWire) -> None:
    task = asyncio.create_task(short.exchange(pack("BLPOP", "nothing", "5"), 1))
    await asyncio.sleep(0)
    said(short, state.encode())
    with pytest.raises(redis.ConnectionError):
        await task
    assert not short.is_open


@pytest.mark.parametrize("words", [b"+one\r\n+more\r\n", b"nonsense\r\n"])
async def test_what_is_no_answer_to_the_command_closes_it(
    words: bytes, short: ShortAsyncWire
) -> None:
    task = asyncio.create_task(short.exchange(pack("BLPOP", "nothing", "5"), 1))
    await asyncio.sleep(0)
    said(short, words)
    with pytest.raises((redis.ConnectionError, redis.InvalidResponse)):
        await task
    assert not short.is_open


@pytest.mark.parametrize("words", [b"+late\r\n", b"$4\r\nla"])
async def test_what_comes_unasked_closes_it(words: bytes, short: ShortAsyncWire) -> None:
    assert await short.exchange(PING, 1) == [b"PONG"]
    said(short, words)
    assert not short.is_open
    with pytest.raises(redis.ConnectionError):
        await short.exchange(PING, 1)


def said(wire: ShortAsyncWire, words: bytes) -> None:
    """As if the server had said so."""
    wire.get_buffer(-1)[: len(words)] = words
    wire.buffer_updated(len(words))


# Through a store


@pytest.fixture(params=["short", "driver's"])
def store(
    request: pytest.FixtureRequest, proxy: Proxy, cache_at: Any, monkeypatch: pytest.MonkeyPatch
) -> RedisStore:
    """A store behind the proxy, on either kind of wire."""
    if request.param == "driver's":
        monkeypatch.setattr(async_transports, "async_wire_on", AsyncWire)
    return store_on(cache_at(proxy.url(), SOCKET_TIMEOUT=2), "t")


async def test_both_ways_serve_a_store(store: RedisStore) -> None:
    assert isinstance(await store.aacquire("k", "a", LONG, 1, 0.0), Grant)
    assert isinstance(await store.aacquire("k", "b", LONG, 1, 5.0), Conflict)
    assert await store.await_free("k", 0.05) is False
    assert await store.arelease("k", "a") is True
    assert await store.await_free("k", 5.0) is True


async def test_whichever_it_is_a_cancelled_one_is_closed(
    store: RedisStore, proxy: Proxy, redis_server: Valkey
) -> None:
    await store.aacquire("held", "x", LONG, 1, 0.0)
    trap = proxy.trap(b"mine", then="hold")
    task = asyncio.create_task(store.aacquire("mine", "a", LONG, 1, 0.0))
    await asyncio.to_thread(trap.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trap.release()
    for _ in range(5):
        assert isinstance(await store.aacquire("held", "b", LONG, 1, 0.0), Conflict)
    with redis_server.client() as client:
        await asyncio.to_thread(
            until, lambda: len(client.client_list()) == 2, "the connection to be closed"
        )


async def test_one_that_is_cancelled_while_it_connects_leaves_nothing_open(
    store: RedisStore, proxy: Proxy
) -> None:
    proxy.hang()
    task = asyncio.create_task(store.aacquire("k", "a", LONG, 1, 0.0))
    await asyncio.to_thread(until, lambda: proxy.connections == 1, "the connection")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proxy.heal()
    assert isinstance(await store.aacquire("k", "a", LONG, 1, 0.0), Grant)
    gc.collect()


async def test_a_server_that_hangs_is_away(store: RedisStore, proxy: Proxy) -> None:
    await store.aacquire("k", "a", LONG, 1, 0.0)
    trap = proxy.trap(ACQUIRE.sha, then="hold")
    with pytest.raises(StoreUnavailableError):
        await store.aacquire("k", "a", LONG, 1, 0.0)
    trap.release()
