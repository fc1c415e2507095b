"""``manage.py singleflight release``: ends a lease by hand, and says whose it was."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from singleflight_django.stores.base import Conflict, Grant, Joining, Landing, Led, Status, Store
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.registry import get_store

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

    def set_answer(given: Any) -> None:
        def typed(prompt: str) -> str:
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
