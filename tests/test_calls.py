"""The key of a call."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from singleflight_django.calls import arguments_key, key_text


def answer(session: str, message: int = 0, *rest: object, **more: object) -> None: ...


def test_a_text_is_a_key_and_a_tuple_is_one() -> None:
    assert key_text("k") == "k"
    assert key_text(("a", 1)) != key_text(("a", "b"))


def test_different_tuples_are_different_keys() -> None:
    keys = [("a", "b"), ("a:b",), ("a:", "b"), ("a", ":b"), ("a", 1), ("a", 1, "b")]
    assert len({key_text(key) for key in keys}) == len(keys)


@pytest.mark.parametrize("key", ["", None, 1, b"k", ["a"], ("a", None), ("a", object())])
def test_what_is_no_key_is_refused(key: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        key_text(key)


def test_fields_are_arguments_however_they_are_passed() -> None:
    key_of = arguments_key("<session>:<message>", answer)
    assert key_of("s", 1) == key_of(session="s", message=1) == key_of("s", message=1)
    assert key_of("s") == key_of("s", 0)
    assert key_of("s", 1) != key_of("s", 2)
    assert key_of("a:1", 2) != key_of("a", 1)


def test_a_uuid_is_the_same_key_as_its_text() -> None:
    number = uuid.uuid4()
    key_of = arguments_key("<session>", answer)
    assert key_of(number) == key_of(str(number))


def test_a_key_may_be_a_callable() -> None:
    def key(session: str, message: int) -> Any:
        return session, message

    key_of = arguments_key(key, answer)
    assert key_of("s", 1) == key_text(("s", 1))


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("<nobody>", ValueError, "no argument"),
        ("fixed", ValueError, "no <fields>"),
        (7, TypeError, "template or a callable"),
    ],
)
def test_a_key_that_can_not_work_is_refused_at_decoration(
    key: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        arguments_key(key, answer)


def test_a_call_that_the_function_itself_would_refuse_is_a_type_error() -> None:
    key_of = arguments_key("<session>", answer)
    with pytest.raises(TypeError):
        key_of()


def test_an_argument_that_is_no_part_is_refused() -> None:
    with pytest.raises(TypeError):
        arguments_key("<session>", answer)(object())
