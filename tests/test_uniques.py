"""How unique constraints are named, and what is said of names that mean none."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from singleflight_django.uniques import Unique, constraints_of
from tests.library.models import Book, Card, GoldCard


def named(spec: object, model: Any = None) -> list[str]:
    return [str(each) for each in Unique(spec, model).constraints]


@pytest.mark.parametrize(
    ("spec", "constraints"),
    [
        ("library.Book.uuid", ["library.Book.uuid"]),
        ("library.book.uuid", ["library.Book.uuid"]),
        ("library.Book.pk", ["library.Book.id"]),
        (("library.Book.uuid",), ["library.Book.uuid"]),
        (("library.Loan.owner", "day"), ["library.Loan.library_one_a_day"]),
        (("library.Loan.day", "library.Loan.owner_id"), ["library.Loan.library_one_a_day"]),
        (("library.Loan.place", "shelf", "day"), ["library.Loan.day,shelf,place"]),
        ("library.Loan.library_one_a_day", ["library.Loan.library_one_a_day"]),
        ("library_one_a_day", ["library.Loan.library_one_a_day"]),
        ("library.Seat.pk", ["library.Seat.row,place"]),
        ("library.GoldCard.number", ["library.GoldCard.number"]),
        (
            ["library.Book.uuid", ("library.Loan.owner", "day")],
            ["library.Book.uuid", "library.Loan.library_one_a_day"],
        ),
    ],
)
def test_one_or_several_constraints_are_named(spec: object, constraints: list[str]) -> None:
    assert named(spec) == constraints


def test_the_key_of_a_child_is_that_of_its_parent_too() -> None:
    for name in ("pk", "card_ptr", "id"):
        found = Unique(f"library.GoldCard.{name}").constraints
        assert {each.table for each in found} == {"library_card", "library_goldcard"}


def test_a_model_goes_without_saying() -> None:
    assert named("uuid", Book) == ["library.Book.uuid"]
    assert named("library.Card.pk", GoldCard) == named("pk", GoldCard)


def test_a_constraint_made_of_expressions_is_known_by_its_name() -> None:
    (found,) = Unique("library_email_once").constraints
    assert found.fields == ()


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ([], ValueError, "names no constraint"),
        ((), TypeError, "write a field as"),
        (None, TypeError, "write a field as"),
        ("", TypeError, "write a field as"),
        (Book, TypeError, "write a field as"),
        ([["library.Book.uuid"]], TypeError, "write a field as"),
        ("Book.uuid", ValueError, "write a field as"),
        ("library.models.Book.uuid", ValueError, "write a field as"),
        (("library.Book.uuid", "library.Card.id"), ValueError, "fields of several models"),
    ],
)
def test_what_can_mean_nothing_is_refused_at_once(
    spec: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Unique(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("library.Boook.uuid", "Boook"),
        ("nowhere.Book.uuid", "nowhere"),
        ("library.Book.title", "Add unique=True"),
        ("library.Book.titel", "Add unique=True"),
        (("library.Loan.owner", "shelf"), "Add unique=True"),
        ("library_two_a_day", "no model has"),
    ],
)
def test_what_means_nothing_is_told_at_first_use(spec: object, says: str) -> None:
    unique = Unique(spec)

    with pytest.raises(ImproperlyConfigured, match=says):
        _ = unique.constraints


def test_a_constraint_of_another_model_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="is none of library"):
        _ = Unique("library.Book.uuid", Card).constraints


def test_every_constraint_of_a_model_is_known() -> None:
    assert {str(each) for each in constraints_of(GoldCard)} == {
        "library.GoldCard.card_ptr",
        "library.GoldCard.number",
        "library.GoldCard.id",
    }
