"""One connection: the short way over its socket says what the driver's own way says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from singleflight_django.stores.redis.clients import Server
from singleflight_django.stores.redis.commands import pack
from singleflight_django.stores.redis.wires import ShortWire, Wire, wire_on
from tests.proxy import Proxy

Open = Callable[..., Wire]


@pytest.fixture
def opened(proxy: Proxy) -> Iterator[Open]:
    """``opened(protocol=3)``: a wire to the server, through the proxy."""
    connections: list[Any] = []

    def connect(kind: type[Wire] | None = None, **options: Any) -> Wire:
        options = {"socket_timeout": 5, "retry_on_error": [], **options}
        with redis.Redis.from_url(proxy.url(), **options) as client:
            server = Server(client)
            connection = server.connection()
            connection.connect()
        connections.append(connection)
        return Wire(connection, server) if kind is Wire else wire_on(connection, server)

    yield connect
    for connection in connections:
        connection.disconnect()


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_short_way_is_the_one_in_use(opened: Open, protocol: int) -> None:
    """It takes what no driver promises: its connection's socket, and its parser's reader."""
    assert type(opened(protocol=protocol)) is ShortWire


def test_without_a_reader_in_c_the_drivers_own_way_serves(opened: Open) -> None:
    python = pytest.importorskip("redis._parsers")._RESP2Parser
    wire = opened(parser_class=python, protocol=2)
    assert type(wire) is Wire
    assert wire.exchange(pack("ECHO", "x"), 1) == [b"x"]


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_ways_say_the_same(opened: Open, protocol: int) -> None:
    opened().exchange(pack("HSET", "wires", "a", "1"), 1)
    for command in (
        ("ECHO", "x" * 200_000),
        ("GET", "absent"),
        ("SET", "wires:text", "x"),
        ("HGETALL", "wires"),
        ("EVAL", "return {1, 'two', {3, false}}", 0),
    ):
        short = opened(protocol=protocol).exchange(pack(*command), 1)
        assert short == opened(Wire, protocol=protocol).exchange(pack(*command), 1)


@pytest.mark.parametrize("kind", [Wire, ShortWire])
def test_an_error_stands_in_the_place_of_its_reply(opened: Open, kind: type[Wire]) -> None:
    wire = opened(kind)
    several = pack("ECHO", "a") + pack("EVALSHA", "0" * 40, 0) + pack("ECHO", "b")
    first, error, last = wire.exchange(several, 3)
    assert (first, last) == (b"a", b"b")
    assert isinstance(error, redis.exceptions.NoScriptError)


@pytest.mark.parametrize("kind", [Wire, ShortWire])
@pytest.mark.parametrize(
    ("reply", "raised"),
    [
        ("LOADING Redis is loading", redis.exceptions.BusyLoadingError),
        ("NOAUTH Authentication required.", redis.exceptions.AuthenticationError),
    ],
)
def test_what_says_that_the_server_is_of_no_use_is_raised(
    opened: Open, kind: type[Wire], reply: str, raised: type[Exception]
) -> None:
    said = f"return redis.error_reply('{reply}')"
    with pytest.raises(raised):
        opened(kind).exchange(pack("EVAL", said, 0), 1)


@pytest.mark.parametrize("kind", [Wire, ShortWire])
def test_a_connection_that_ends_is_the_drivers_connection_error(
    opened: Open, kind: type[Wire], proxy: Proxy
) -> None:
    wire = opened(kind)
    proxy.trap(b"ECHO", then="drop")
    with pytest.raises(redis.exceptions.ConnectionError):
        wire.exchange(pack("ECHO", "x"), 1)


@pytest.mark.parametrize("kind", [Wire, ShortWire])
def test_silence_is_the_drivers_timeout(opened: Open, kind: type[Wire], proxy: Proxy) -> None:
    wire: Any = opened(kind)
    # Not before it is connected: a busy machine may take longer for that.
    wire._connection._sock.settimeout(0.1)
    trap = proxy.trap(b"ECHO", then="hold")
    with pytest.raises(redis.exceptions.TimeoutError):
        wire.exchange(pack("ECHO", "x"), 1)
    trap.release()


def test_a_closed_wire_is_used_no_more(opened: Open) -> None:
    wire = opened()
    wire.close()
    assert not wire.is_open
    with pytest.raises(redis.exceptions.ConnectionError):
        wire.exchange(pack("ECHO", "x"), 1)


@pytest.mark.parametrize("kind", [Wire, ShortWire])
def test_nothing_within_the_time_closes_it_and_nil_does_not(opened: Open, kind: type[Wire]) -> None:
    """A reply that comes later would be the next caller's."""
    silent, told = opened(kind), opened(kind)
    assert silent.exchange_within(pack("BLPOP", "wires:none", 3), 0.05) is None
    assert not silent.is_open
    assert told.exchange_within(pack("GET", "wires:none"), 5.0) is None
    assert told.is_open
    assert told.exchange(pack("ECHO", "x"), 1) == [b"x"]
