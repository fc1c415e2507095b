"""The proxy and the servers do what the fault tests rely on."""

from __future__ import annotations

import threading

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.proxy import Proxy, value_end
from tests.servers import Valkey


def client(proxy: Proxy) -> redis.Redis:
    return redis.Redis(port=proxy.port, socket_timeout=1.5, retry=Retry(NoBackoff(), 0))


def test_a_value_ends_where_the_protocol_says() -> None:
    command = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    assert value_end(command + b"+OK\r\n") == len(command)
    assert value_end(command[:-1]) is None
    assert value_end(b"$-1\r\n") == 5
    assert value_end(b"%1\r\n+a\r\n:1\r\n") == 12


def test_it_passes_everything_on_and_counts(proxy: Proxy) -> None:
    with client(proxy) as redis_client:
        redis_client.set("k", b"a\r\nb\0")
        assert redis_client.get("k") == b"a\r\nb\0"
    assert (proxy.count(b"get k"), proxy.connections) == (1, 1)


def test_a_lost_reply_is_of_a_command_that_was_carried_out(
    proxy: Proxy, redis_server: Valkey
) -> None:
    trap = proxy.trap(b"SET")
    with client(proxy) as redis_client, pytest.raises(redis.ConnectionError):
        redis_client.set("k", "v")
    trap.wait()
    with redis_server.client() as direct:
        assert direct.get("k") == b"v"


def test_a_lost_request_never_reached_the_server(proxy: Proxy, redis_server: Valkey) -> None:
    proxy.trap(b"SET", at="request")
    with client(proxy) as redis_client, pytest.raises(redis.ConnectionError):
        redis_client.set("k", "v")
    with redis_server.client() as direct:
        assert direct.get("k") is None


def test_a_held_reply_arrives_when_it_is_let_go(proxy: Proxy) -> None:
    trap = proxy.trap(b"PING", then="hold")
    answers: list[object] = []
    with redis.Redis(port=proxy.port) as redis_client:
        asking = threading.Thread(target=lambda: answers.append(redis_client.ping()))
        asking.start()
        trap.wait()
        assert answers == []
        trap.release()
        asking.join(20)
    assert answers == [True]


def test_it_hangs_refuses_and_heals(proxy: Proxy) -> None:
    with client(proxy) as redis_client:
        assert redis_client.ping()
        proxy.hang()
        with pytest.raises(redis.TimeoutError):
            redis_client.ping()
        proxy.heal()
        assert redis_client.ping()
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            redis_client.ping()
        proxy.heal()
        assert redis_client.ping()
