"""Owner tokens tell where their owner runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from singleflight_django import owners
from singleflight_django.owners import holder_of, new_token
from singleflight_django.stores.base import Grant
from singleflight_django.stores.registry import get_store


def test_a_token_names_its_process_behind_128_random_bits() -> None:
    token = new_token()
    secret, _, where = token.partition("@")
    assert len(bytes.fromhex(secret)) == 16
    assert where == holder_of(token)
    assert where.endswith(f":{os.getpid()}")
    assert len({new_token() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("token", ["", "a", "0f" * 16])
def test_a_token_that_says_nothing_has_no_holder(token: str) -> None:
    assert holder_of(token) == ""


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("web-1.example.com", "web-1.example.com"),
        ("höst one:@{}", "h-st-one----"),
        (
            "lessons-production-web-7d9f8b6c5d-with-more-x2x4z",
            "lessons-production-..c5d-with-more-x2x4z",
        ),
        ("", ""),
    ],
)
def test_a_host_is_told_in_ascii_and_briefly(host: str, told: str) -> None:
    assert owners._name_of(host) == told
    assert len(told) <= owners.MOST


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_names_itself() -> None:
    parent = holder_of(new_token())
    child = os.fork()
    if child == 0:
        mine = holder_of(new_token())
        os._exit(0 if mine != parent and mine.endswith(f":{os.getpid()}") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_of_its_own_names_itself_in_the_store() -> None:
    code = "from singleflight_django.owners import new_token; print(new_token())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    token = told.stdout.strip()
    store = get_store()
    assert isinstance(store.acquire("k", token, 30.0, 1, 0.0), Grant)
    (holding,) = store.holdings()
    host, _, pid = holding.holder.rpartition(":")
    assert host == owners._name_of(socket.gethostname())
    assert int(pid) != os.getpid()
