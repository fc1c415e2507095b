"""What is said of results that can't be shared."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from django.contrib.auth.models import User

from singleflight_django import SingleFlight
from tests.meeting import listening

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A namespace that no other test has."""
    return f"unshareable-{next(_numbers)}"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings so far."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == ("singleflight_django", logging.WARNING)
    ]


class Unknown:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle today")


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "json": ({}, (1, 2), 'serializer="pickle", or returns=Model'),
    "pickle": ({"serializer": "pickle"}, Unknown(), "what pickle can carry"),
    "model": ({"returns": User}, User(username="a"), "a saved instance"),
}


@pytest.mark.parametrize(("options", "value", "cure"), CASES.values(), ids=CASES)
async def test_one_warning_names_the_namespace_the_type_and_the_cure(
    options: Any, value: Any, cure: str, name: str, warnings: Any
) -> None:
    flights = SingleFlight(name, **options)

    async def work() -> Any:
        return value

    with listening("share_refused") as told:
        for key in ("a", "b"):
            assert flights.run(key, lambda: value) is value
        assert await flights.arun("c", work) is value
    (warning,) = warnings()
    assert repr(name) in warning
    assert f" {type(value).__qualname__} " in warning
    assert cure in warning
    assert [facts.key for _, facts in told] == [f"{name}:{key}" for key in "abc"]


def test_each_type_and_each_namespace_has_its_own(name: str, warnings: Any) -> None:
    first, again, other = (SingleFlight(text) for text in (name, name, f"{name}-other"))
    for flights in (first, again, other):
        for number, value in enumerate([(1,), (2,), {1}]):
            flights.run(f"{id(flights)} {number}", lambda value=value: value)
    kinds = [(repr(name) in text, " tuple " in text, " set " in text) for text in warnings()]
    assert sorted(kinds) == sorted(
        [(True, True, False), (True, False, True), (False, True, False), (False, False, True)]
    )


def test_a_result_that_is_only_too_large_is_no_fault_of_the_code(name: str, warnings: Any) -> None:
    flights = SingleFlight(name, max_bytes=10)
    with listening("share_refused") as told:
        flights.run("k", lambda: "x" * 100)
    assert "over max_bytes" in told[0][1].reason
    assert warnings() == []
