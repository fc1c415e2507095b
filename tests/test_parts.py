"""The text of keys: stable, escaped, bounded, and never the same for different parts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, IntEnum, StrEnum
from itertools import product
from uuid import UUID

import pytest
from django.db import models
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from singleflight_django.parts import ANONYMOUS, MAX_BYTES, escape, join, literal, part, qualify

ID = "12345678-1234-5678-1234-567812345678"
# Characters that escaping could confuse: separators, escapes, marks, surrogates, look-alikes.
NASTY = ["a", "s", "2", "D", "%", "-", ".", ":", "/", "!", "#", "*", " ", "é", "e\u0301", "\x00"]


class Colour(Enum):
    RED = "red"
    NUMBER = 7
    BROKEN = None


class Level(IntEnum):
    HIGH = 3


class Shape(StrEnum):
    ROUND = "round one"


class Status(models.TextChoices):
    NEW = "new", "brand new"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("lesson", "lesson"),
        (" blank at the ends ", " blank at the ends "),
        (mark_safe("safe"), "safe"),
        (Loud("quiet"), "quiet"),
        (0, "0"),
        (-7, "-7"),
        (10**30, "1" + "0" * 30),
        (UUID(ID), ID),
        (date(2026, 3, 1), "2026-03-01"),
        (datetime(2026, 3, 1, 12), "2026-03-01T12:00:00"),
        (datetime(2026, 3, 1, 12, tzinfo=UTC), "2026-03-01T12:00:00+00:00"),
        (Colour.RED, "red"),
        (Colour.NUMBER, "7"),
        (Level.HIGH, "3"),
        (Shape.ROUND, "round one"),
        (Status.NEW, "new"),
        (Decimal("1.50"), "1.5"),
        (Decimal("-0.0"), "0"),
        (Decimal("1E+2"), "100"),
        (Decimal("-1E-3"), "-0.001"),
        (Decimal("12E+1000"), "12E1000"),
        (Decimal("-12E-1000"), "-12E-1000"),
    ],
)
def test_a_part_has_one_text(value: object, text: str) -> None:
    assert part(value) == text
    assert type(part(value)) is str


@pytest.mark.parametrize(
    "equal",
    [
        [Decimal("1"), Decimal("1.0"), Decimal("1.000"), Decimal("0.1E+1"), 1],
        [Decimal("0"), Decimal("0E+5"), Decimal("-0"), 0],
        [Decimal("5E+300"), Decimal("50E+299")],
        [
            datetime(2026, 3, 1, 12, tzinfo=UTC),
            datetime(2026, 3, 1, 14, tzinfo=timezone(timedelta(hours=2))),
        ],
        [UUID(ID), UUID(ID.upper()), UUID(f"urn:uuid:{ID}"), ID],
    ],
)
def test_equal_values_have_equal_texts(equal: list[object]) -> None:
    assert len({part(value) for value in equal}) == 1


def test_a_decimal_is_not_rounded_to_the_context() -> None:
    """Neither the precision nor the capitals of the current context show in a key."""
    with localcontext() as context:
        context.prec, context.capitals = 3, 0
        assert part(Decimal("1234567.1234567")) == "1234567.1234567"
        assert part(Decimal("1E+1000")) == "1E1000"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1.5,
        b"bytes",
        [1],
        (1,),
        {1},
        {"a": 1},
        object(),
        time(12),
        timedelta(1),
        gettext_lazy("lesson"),
        Colour.BROKEN,
        Colour,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_stable_text_is_a_type_error_that_names_the_cure(value: object) -> None:
    with pytest.raises(TypeError, match=r"Give a str, an int, a UUID"):
        part(value)


@pytest.mark.parametrize("number", ["NaN", "sNaN", "Infinity", "-Infinity"])
def test_a_decimal_that_is_no_number_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        part(Decimal(number))


@pytest.mark.parametrize("refuse", [part, escape, lambda text: join(("a", text))])
def test_an_empty_part_is_refused(refuse: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="every caller without it would share one key"):
        refuse("")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain-Text_1.2~3", "plain-Text_1.2~3"),
        ("a:b/c@d", "a%3Ab%2Fc%40d"),
        ("50%", "50%25"),
        ("a b\n\x00\x7f", "a%20b%0A%00%7F"),
        ("é", "%C3%A9"),
        ("🙂", "%F0%9F%99%82"),
        ("\ud83d\ude42", "%ED%A0%BD%ED%B9%82"),
        ("\udcff", "%ED%B3%BF"),
        ("*", "%2A"),
        ("{slot}", "%7Bslot%7D"),
    ],
)
def test_a_part_is_escaped(text: str, escaped: str) -> None:
    assert escape(text) == escaped
    assert escape(part(text)).isascii()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("import:7", "import:7"),
        ("a/b@c,d;e=f+g&h|i", "a/b@c,d;e=f+g&h|i"),
        ("", ""),
        ("a b%c", "a%20b%25c"),
        ("{x}!#*<>?\\\"'", "%7Bx%7D%21%23%2A%3C%3E%3F%5C%22%27"),
        ("é\x00\ud800", "%C3%A9%00%ED%A0%80"),
    ],
)
def test_literal_text_keeps_what_separates(text: str, kept: str) -> None:
    assert literal(text) == kept


def test_nothing_that_is_escaped_equals_the_part_of_a_caller_without_a_user() -> None:
    assert escape(ANONYMOUS) == "*"
    assert "*" not in {escape("*"), literal("*"), escape("%2A"), escape("anonymous")}


def test_different_tuples_never_give_one_key() -> None:
    texts = [*NASTY, *("".join(pair) for pair in product(NASTY[:8], repeat=2))]
    tuples = [(a,) for a in texts] + list(product(texts, repeat=2))
    tuples += list(product(NASTY, repeat=3))
    assert len({join(parts) for parts in tuples}) == len(tuples)


def test_a_tuple_is_joined_by_colons() -> None:
    assert join(("import", 7)) == literal("import:7")
    with pytest.raises(ValueError, match="empty tuple"):
        join(())


def test_namespaces_never_run_into_keys() -> None:
    qualified = {qualify(a, b) for a, b in [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c")]}
    assert len(qualified) == 3
    assert qualify("semaphore_lock", "import:7") == "semaphore_lock:import:7"
    with pytest.raises(ValueError, match="empty"):
        qualify("", "a")


def test_a_long_key_keeps_a_readable_head_and_ends_in_a_digest() -> None:
    longest = qualify("lock", "k" * (MAX_BYTES - len("lock:")))
    assert longest == "lock:" + "k" * 195
    longer = qualify("lock", "k" * 196)
    assert len(longer) == MAX_BYTES
    assert longer.startswith("lock:kkkk")
    assert longer == qualify("lock", "k" * 196)


def test_long_keys_stay_distinct() -> None:
    """Hashing, not truncation: they differ in the last character only, or in length only."""
    keys = ["k" * 5000 + "a", "k" * 5000 + "b", "k" * 5000, "k" * 5001]
    assert len({qualify("lock", key) for key in keys}) == len(keys)


def test_a_short_key_cannot_imitate_a_long_one() -> None:
    digested = qualify("lock", "k" * 500).removeprefix("lock:")
    forged = {qualify("lock", make(digested)) for make in (escape, literal)}
    assert qualify("lock", "k" * 500) not in forged


def test_keys_are_the_same_in_every_process() -> None:
    """Whatever the seed of hash() and the locale are."""
    code = """
from datetime import *; from decimal import Decimal; from enum import Enum; from uuid import UUID
from singleflight_django.parts import join, qualify
from singleflight_django.keys import KeySpec
Colour = Enum("Colour", {"RED": "red"})
parts = ("text é", 7, UUID(int=7), Decimal("1.50"), date(2026, 3, 1),
         datetime(2026, 3, 1, tzinfo=timezone.utc), Colour.RED)
print(join(parts), qualify("lock", join(parts * 3)))
print(KeySpec(["b", "a", "c:1", "a"]).static_keys())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(outputs) == 1
    assert "text%20%C3%A9:7:" in outputs.pop()
