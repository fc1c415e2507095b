"""``manage.py singleflight list``: who holds what, as a table, as JSON, and again and again."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse

from singleflight_django import semaphore_lock
from singleflight_django.management.singleflight.list import HEADS, PAGE
from singleflight_django.stores.base import Joining, Led, Store
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.listing import seconds_text
from singleflight_django.stores.registry import get_store
from tests.meeting import urls
from tests.servers import Valkey
from tests.test_stores_listing import plant

LONG = 60.0
CacheAt = Callable[..., str]


def listed(*arguments: str) -> str:
    out = StringIO()
    call_command("singleflight", "list", *arguments, stdout=out, no_color=True)
    return out.getvalue()


@pytest.fixture
def busy() -> Store:
    """A lease, a semaphore with two holders, and a flight with two followers."""
    store = get_store()
    store.acquire("semaphore_lock:import:7", "t1@web-1:11", LONG, 1, 0.0)
    store.acquire("semaphore_lock:pool", "t2@web-2:22", LONG, 2, 0.0)
    store.acquire("semaphore_lock:pool", "t3@web-3:33", LONG, 2, 0.0)
    assert isinstance(store.join("answers:s1", Joining("t4@web-4:44", LONG, LONG)), Led)
    for token in ("t5", "t6"):
        store.join("answers:s1", Joining(token, LONG, LONG))
    return store


def test_nothing_is_held() -> None:
    assert listed() == "Nothing is held.\n"


def test_the_table_says_who_holds_what(busy: Store) -> None:
    head, *rows, total = listed().splitlines()
    assert tuple(head.split()) == HEADS
    assert total == "4 held."
    cells = [re.split(r" {2,}", row) for row in rows]
    assert [(row[0], row[1], row[2], row[5]) for row in cells] == [
        ("answers:s1", "flight", "web-4:44", "2"),
        ("semaphore_lock:import:7", "lease", "web-1:11", "-"),
        ("semaphore_lock:pool", "lease", "web-2:22", "-"),
        ("semaphore_lock:pool", "lease", "web-3:33", "-"),
    ]
    # All columns begin where their heads do.
    kinds = {row.index(cell[1], len(cell[0])) for row, cell in zip(rows, cells, strict=True)}
    assert kinds == {head.index("KIND")}
    assert re.fullmatch(r"\d\.\d s", cells[0][3])
    assert re.fullmatch(r"5\d s|1 min 0 s", cells[0][4])
    assert re.fullmatch(r"\d{16}", cells[0][6])


def test_no_token_is_shown(busy: Store) -> None:
    for text in (listed(), listed("--json")):
        assert not re.search(r"\bt[1-6]\b", text)
        assert "token" not in text


def test_a_filter_shows_the_keys_that_contain_it(busy: Store) -> None:
    assert listed("import").splitlines()[1].startswith("semaphore_lock:import:7 ")
    assert listed("import").endswith("1 held.\n")
    assert listed("*") == "Nothing is held.\n"


def test_json_is_one_document_with_the_documented_fields(busy: Store) -> None:
    document = json.loads(listed("--json"))
    assert list(document) == ["holdings"]
    by_key = {each["key"]: each for each in document["holdings"]}
    assert len(document["holdings"]) == 4
    flight = by_key["answers:s1"]
    assert list(flight) == [
        "key", "kind", "holder", "age", "remaining", "followers", "fence", "flight",
    ]  # fmt: skip
    assert (flight["kind"], flight["holder"], flight["followers"]) == ("flight", "web-4:44", 2)
    assert flight["flight"] == flight["fence"] > 10**15
    lease = by_key["semaphore_lock:import:7"]
    assert (lease["followers"], lease["flight"]) == (None, 0)
    assert 0 <= lease["age"] < 30 < lease["remaining"] <= LONG
    assert json.loads(listed("--json", "nothing has this")) == {"holdings": []}


@pytest.fixture
def secret(settings: Any) -> str:
    """A lease whose key has what a header says; the key as it is."""

    @semaphore_lock("pay:<header.Idempotency-Key>")
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    settings.ROOT_URLCONF = urls(pay, "")
    get_store().acquire("semaphore_lock:pay:s3cret", "t1@web-1:11", LONG, 1, 0.0)
    return "semaphore_lock:pay:s3cret"


def test_what_a_header_says_is_shown_as_a_digest(secret: str, busy: Store) -> None:
    table, document = listed(), listed("--json")

    assert "s3cret" not in table + document
    assert re.search(r"^semaphore_lock:pay:<[0-9a-f]{8}> ", table, re.M)
    (shown,) = (each["key"] for each in json.loads(document)["holdings"] if "pay" in each["key"])
    # It finds what it shows, and nothing by what it hides.
    assert listed(shown).endswith("1 held.\n")
    assert listed("s3cret") == "Nothing is held.\n"
    assert "semaphore_lock:import:7 " in table


def test_what_a_header_says_is_shown_on_request(secret: str) -> None:
    assert f"{secret} " in listed("--show-secrets")
    assert listed("--show-secrets", "s3cret").endswith("1 held.\n")
    (each,) = json.loads(listed("--show-secrets", "--json"))["holdings"]
    assert each["key"] == secret


def test_watch_shows_digests_too(secret: str) -> None:
    screen = Screen()
    call_command("singleflight", "list", "--watch", "0.1", stdout=screen, no_color=True)
    assert "semaphore_lock:pay:<" in screen.getvalue()
    assert "s3cret" not in screen.getvalue()


def test_many_are_written_page_by_page(redis_server: Valkey, cache_at: CacheAt) -> None:
    alias = cache_at(redis_server.url())
    with redis_server.client() as client:
        plant(client, 2 * PAGE + 5, "singleflight")
    lines = listed("--cache", alias).splitlines()
    assert lines[-1] == f"{2 * PAGE + 5} held."
    assert sum(line.split()[0] == "KEY" for line in lines) == 1
    assert len(set(lines[1:-1])) == 2 * PAGE + 5


class Screen(StringIO):
    """A terminal at which somebody presses Ctrl-C after the second picture."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if "held." in text and self.getvalue().count("held.") == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return written


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_draws_it_again_until_ctrl_c(busy: Store, terminal: bool) -> None:
    screen = Screen()
    screen.terminal = terminal
    call_command("singleflight", "list", "--watch", "0.1", stdout=screen, no_color=True)
    text = screen.getvalue()
    assert text.count("4 held.") == 2
    assert text.count("\x1b[2J") == (2 if terminal else 0)
    assert len(re.findall(r"\d\d:\d\d:\d\d$", text, re.M)) == 2


def test_watch_outlasts_an_outage(redis_server: Valkey, cache_at: CacheAt) -> None:
    alias = cache_at(redis_server.url())

    class Outage(Screen):
        def write(self, text: str) -> int:
            if "Nothing is held." in text and "did not answer" not in self.getvalue():
                redis_server.kill()
            if "did not answer" in text:
                redis_server.start()
            return super().write(text)

    screen = Outage()
    call_command(
        "singleflight", "list", "--watch", "0.1", "--cache", alias, stdout=screen, no_color=True
    )
    text = screen.getvalue()
    assert text.count("Nothing is held.") == 2
    assert "did not answer" in text


@pytest.mark.parametrize("wrong", [["--json", "--watch"], ["--cache", "nowhere"], ["--watch", "0"]])
def test_what_can_not_be_asked_for(wrong: list[str]) -> None:
    with pytest.raises(CommandError):
        listed(*wrong)


def test_a_store_that_is_away_or_can_not_list_says_so() -> None:
    with pytest.raises(CommandError, match=r"did not answer.*doctor"):
        listed("--cache", "dead")
    with pytest.raises(CommandError, match="can't list"):
        listed("--cache", "locmem")
    with pytest.raises(CommandError, match="can't list"):
        listed("--cache", "locmem", "--watch", "1")


def test_the_database_is_listed_alone_or_beside_redis(using: str, settings: Any) -> None:
    store = DatabaseStore("singleflight")
    store.acquire("semaphore_lock:in-the-database", "t@web-9:9", LONG, 1, 0.0)
    get_store().acquire("semaphore_lock:in-redis", "t@web-8:8", LONG, 1, 0.0)
    assert "in-the-database" not in listed()
    both = listed("--database")
    assert "in-the-database" in both
    assert "in-redis" in both
    settings.SINGLEFLIGHT_STORE = "database"
    alone = listed()
    assert "web-9:9" in alone
    assert "in-redis" not in alone


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7830, "2 h 10 min"),
    ],
)
def test_seconds_are_told_as_people_do(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text
