"""``manage.py singleflight release``: ends a lease by hand, and says whose it was."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse

from singleflight_django import redaction, semaphore_lock
from singleflight_django.live import ShownKeys
from singleflight_django.stores.base import Conflict, Grant, Joining, Landing, Led, Status, Store
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.registry import get_store
from tests.meeting import urls

LONG = 60.0
KEY = "semaphore_lock:import:7"


def release(*arguments: str) -> str:
    out = StringIO()
    call_command("singleflight", "release", *arguments, stdout=out, no_color=True)
    return out.getvalue()


@pytest.fixture
def store() -> Store:
    store = get_store()
    store.acquire(KEY, "t1@web-1:11", LONG, 1, 0.0)
    return store


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``answer("y")`` is what somebody types, ``answer(EOFError())`` that nobody is there."""

    def set_answer(given: Any, asked: list[str] | None = None) -> None:
        def typed(prompt: str) -> str:
            (asked if asked is not None else []).append(prompt)
            assert prompt.startswith("Release ")
            if isinstance(given, BaseException):
                raise given
            return str(given() if callable(given) else given)

        monkeypatch.setattr(builtins, "input", typed)

    return set_answer


def is_free(store: Store, key: str = KEY) -> bool:
    return isinstance(store.acquire(key, "probe", LONG, 1, 0.0), Grant)


def test_it_says_whose_it_was_and_the_next_caller_gets_in(store: Store) -> None:
    text = release(KEY, "--yes")
    assert re.search(
        rf"^{KEY} is held by web-1:11 for \d\.\d s \(lease; \S+.* left\)\.$", text, re.M
    )
    assert "Released: it was web-1:11's." in text
    assert "has not been stopped" in text
    assert is_free(store)
    assert store.release(KEY, "t1@web-1:11") is False


@pytest.mark.parametrize(
    ("typed", "released"), [("y", True), ("YES", True), ("", False), ("n", False)]
)
def test_it_asks(store: Store, answer: Callable[..., None], typed: str, released: bool) -> None:
    answer(typed)
    if released:
        release(KEY)
    else:
        with pytest.raises(CommandError, match="Nothing was released"):
            release(KEY)
    assert is_free(store) is released


def test_where_nobody_can_be_asked_it_wants_yes(store: Store, answer: Callable[..., None]) -> None:
    answer(EOFError())
    with pytest.raises(CommandError, match="--yes"):
        release(KEY)
    assert not is_free(store)


def test_who_came_after_the_question_is_left_alone(
    store: Store, answer: Callable[..., None]
) -> None:
    def meanwhile() -> str:
        store.release(KEY, "t1@web-1:11")
        store.acquire(KEY, "successor@web-2:22", LONG, 1, 0.0)
        return "y"

    answer(meanwhile)
    assert "It has ended by itself: web-1:11 gave it back" in release(KEY)
    assert isinstance(store.acquire(KEY, "third", LONG, 1, 0.0), Conflict)
    assert store.release(KEY, "successor@web-2:22") is True


def test_a_follower_takes_over_a_flight_that_is_released(store: Store) -> None:
    led = store.join("answers:s1", Joining("leader@web-3:33", LONG, LONG))
    assert isinstance(led, Led)
    store.join("answers:s1", Joining("follower", LONG, LONG))
    text = release("answers:s1", "--yes")
    assert "(flight, 1 follower;" in text
    assert "A follower takes it over" in text
    landing = store.wait_landing("answers:s1", led.flight, "0", 1.0)
    assert isinstance(landing, Landing)
    assert landing.status == Status.VACANT
    joining = Joining("follower", LONG, LONG, flight=led.flight, seen=landing.seen)
    again = store.join("answers:s1", joining)
    assert isinstance(again, Led)
    assert again.flight == led.flight


def test_of_a_semaphore_all_go_or_one(store: Store) -> None:
    for n in (1, 2, 3):
        store.acquire("semaphore_lock:pool", f"p{n}@web:{n}", LONG, 3, 0.0)
    assert release("semaphore_lock:pool", "--yes", "--holder", "web:2").count("Released") == 1
    assert {each.holder for each in store.holdings("pool")} == {"web:1", "web:3"}
    with pytest.raises(CommandError, match=r"not held by 'web:2', but by web:1, web:3"):
        release("semaphore_lock:pool", "--yes", "--holder", "web:2")
    assert release("semaphore_lock:pool", "--yes").count("Released") == 2
    assert list(store.holdings("pool")) == []


def test_a_process_that_has_several_places_loses_them_all_and_that_is_said(
    answer: Callable[..., None],
) -> None:
    store = get_store()
    for token in ("p1@web:1", "p2@web:1", "p3@web:2"):
        store.acquire("semaphore_lock:pool", token, LONG, 3, 0.0)
    asked: list[str] = []
    answer("n", asked)
    with pytest.raises(CommandError, match="Nothing was released"):
        release("semaphore_lock:pool", "--holder", "web:1")
    assert asked == ["Release all 2 places of web:1? [y/N] "]

    text = release("semaphore_lock:pool", "--holder", "web:1", "--yes")

    assert "These are all 2 places of web:1." in text
    assert text.count("Released") == 2
    assert [each.token for each in store.holdings("pool")] == ["p3@web:2"]


@pytest.fixture
def payments(settings: Any) -> Store:
    """Two leases whose keys have what a header says."""

    @semaphore_lock("pay:<header.Idempotency-Key>")
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    settings.ROOT_URLCONF = urls(pay, "")
    store = get_store()
    for value in ("s3cret", "other"):
        store.acquire(f"semaphore_lock:pay:{value}", f"{value}@web-1:11", LONG, 1, 0.0)
    return store


@pytest.mark.parametrize("form", ["raw", "shown"])
def test_a_key_is_taken_as_it_is_or_as_it_is_shown(payments: Store, form: str) -> None:
    raw = "semaphore_lock:pay:s3cret"
    shown = ShownKeys()(raw)

    text = release(raw if form == "raw" else shown, "--yes")

    assert f"{shown} is held by web-1:11" in text
    assert "s3cret" not in text
    assert [each.key for each in payments.holdings()] == ["semaphore_lock:pay:other"]


def test_what_may_have_been_meant_is_named_without_secrets(payments: Store) -> None:
    with pytest.raises(CommandError, match="Did you mean 'semaphore_lock:pay:<") as caught:
        release("lock:pay:", "--yes")
    assert "s3cret" not in str(caught.value)


def test_two_keys_that_are_shown_alike_are_not_taken_for_one(
    payments: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if both secrets had the same digest of 32 bits.
    monkeypatch.setattr(redaction, "digest", lambda purpose, parts: "0123456789")
    with pytest.raises(CommandError, match="how several keys are shown"):
        release("semaphore_lock:pay:<01234567>", "--yes")
    assert len(list(payments.holdings())) == 2


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("import:7", f" Did you mean '{KEY}'?"),
        ("semaphore_lock:inport:7", f" Did you mean '{KEY}'?"),
        ("zzz", ""),
    ],
)
def test_a_key_that_nobody_holds_names_those_that_may_be_meant(
    store: Store, wrong: str, hint: str
) -> None:
    with pytest.raises(CommandError) as caught:
        release(wrong, "--yes")
    assert str(caught.value) == f"Nobody holds {wrong!r}.{hint}"
    assert caught.value.returncode == 1


def test_a_longer_key_is_not_the_one(store: Store) -> None:
    store.acquire(f"{KEY}7", "other", LONG, 1, 0.0)
    release(KEY, "--yes")
    assert [each.token for each in store.holdings()] == ["other"]


def test_a_holder_that_says_nothing_of_itself_can_be_released() -> None:
    get_store().acquire(KEY, "old", LONG, 1, 0.0)
    assert "a process that didn't say its name" in release(KEY, "--yes")


def test_a_store_that_is_away_or_can_not_list_says_so() -> None:
    with pytest.raises(CommandError, match="did not answer"):
        release(KEY, "--yes", "--cache", "dead")
    with pytest.raises(CommandError, match="can't list"):
        release(KEY, "--yes", "--cache", "locmem")


def test_what_went_to_the_database_is_released_there(using: str) -> None:
    store = DatabaseStore("singleflight")
    store.acquire(KEY, "t@web-9:9", LONG, 1, 0.0)
    assert "it was web-9:9's" in release(KEY, "--yes", "--database")
    assert is_free(store)
