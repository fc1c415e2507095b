"""Which IntegrityErrors are duplicates: told by codes and names, on each database."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections, models, transaction

from singleflight_django.uniques import Unique
from singleflight_django.violations import Violation, is_transient, violation_of
from tests.library.models import (
    Book,
    Card,
    GoldCard,
    Label,
    Loan,
    Magazine,
    Member,
    Owner,
    Queued,
    Seat,
    Ticket,
)

U = uuid.UUID(int=7)
DAY = datetime.date(2026, 11, 30)


def refused(write: Callable[[], object]) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught, transaction.atomic():
        write()
    return caught.value


def violated(write: Callable[[], object], spec: object) -> Violation | None:
    return violation_of(refused(write), Unique(spec).constraints)


def twice(model: type[models.Model], **values: Any) -> Callable[[], object]:
    """Two rows that are equal in ``values``; the second is refused."""
    model._default_manager.create(**values)
    return lambda: model._default_manager.create(**values)


DUPLICATES = [
    (Book, {"uuid": U}, {}, "library.Book.uuid"),
    (Book, {"id": 7}, {"uuid": U}, "library.Book.pk"),
    (Ticket, {"id": U}, {}, "library.Ticket.pk"),
    (Label, {"code": "it's a 'key'"}, {}, "library.Label.code"),
    (Loan, {"owner_id": 1, "day": DAY}, {"place": 1}, ("library.Loan.owner", "day")),
    (Loan, {"owner_id": 1, "day": DAY}, {"place": 1}, "library_one_a_day"),
    (Loan, {"day": DAY}, {"owner_id": 1}, ("library.Loan.day", "shelf", "place")),
    (Seat, {"row": 1, "place": 2}, {}, "library.Seat.pk"),
    (GoldCard, {"number": 1}, {"id": U}, "library.GoldCard.number"),
]


@pytest.mark.parametrize(("model", "equal", "different", "spec"), DUPLICATES)
def test_a_duplicate_is_recognised(
    using: str, model: type[models.Model], equal: Any, different: Any, spec: Any
) -> None:
    for owner in (1, 2):
        Owner.objects.create(id=owner)
    first: dict[str, Any] = {"owner_id": 2} if "owner_id" in different else {}
    if model in (Book, GoldCard):
        first["uuid" if model is Book else "id"] = uuid.uuid4()
    model._default_manager.create(**{**first, **equal})

    found = violated(lambda: model._default_manager.create(**equal, **different), spec)

    assert found is not None
    assert (found.model, found.using) == (model, using)


def test_a_violation_says_what_and_where(using: str) -> None:
    found = violated(twice(Book, uuid=U), "library.Book.uuid")

    assert found is not None
    assert found.fields == ("uuid",)
    assert found.constraint == "library.Book.uuid"
    assert isinstance(found.error, IntegrityError)


def test_of_several_declared_constraints_it_is_the_one_that_was_violated(using: str) -> None:
    found = violated(twice(Book, uuid=U), ["library.Magazine.uuid", "library.Book.uuid"])

    assert found is not None
    assert found.model is Book


@pytest.mark.parametrize("model", [Card, GoldCard])
def test_the_key_of_a_child_is_its_parents(using: str, model: type[Card]) -> None:
    Card.objects.create(id=U)

    def write() -> None:
        row = GoldCard(id=U, number=1)
        row.save(force_insert=(models.Model,))

    assert violated(write, f"library.{model.__name__}.pk") is not None


def other_refusals() -> dict[str, Callable[[], object]]:
    return {
        "NOT NULL": lambda: Book.objects.create(uuid=uuid.uuid4(), title=None),
        "CHECK": lambda: Book.objects.create(uuid=uuid.uuid4(), pages=0),
        "foreign key": lambda: Book.objects.create(uuid=uuid.uuid4(), owner_id=404),
        "another unique field": lambda: Book.objects.create(uuid=uuid.uuid4(), isbn="1"),
        "the primary key": lambda: Book.objects.create(id=1, uuid=uuid.uuid4()),
        "another table's field of that name": lambda: Magazine.objects.create(uuid=U),
        "an UPDATE of another table": lambda: Magazine.objects.filter(id=2).update(uuid=U),
        "another table's bulk_create": lambda: Magazine.objects.bulk_create([Magazine(uuid=U)]),
    }


@pytest.mark.parametrize("what", list(other_refusals()))
def test_every_other_refusal_stays_what_it_is(using: str, what: str) -> None:
    Book.objects.create(id=1, uuid=U, isbn="1")
    Magazine.objects.create(id=1, uuid=U)
    Magazine.objects.create(id=2, uuid=uuid.uuid4())

    assert violated(other_refusals()[what], "library.Book.uuid") is None


@pytest.mark.parametrize(
    "write",
    [
        lambda: Book.objects.filter(id=2000).update(uuid=U),
        lambda: Book.objects.bulk_create([Book(uuid=uuid.uuid4()), Book(uuid=U)]),
        lambda: Book(id=2000, uuid=U).save(),
        lambda: (
            connection_of(Book)
            .cursor()
            .execute(
                "INSERT INTO library_book (uuid, title, pages, deleted) "
                "SELECT uuid, title, pages, deleted FROM library_book WHERE title = 'first'"
            )
        ),
    ],
    ids=["update", "bulk_create", "save", "raw"],
)
def test_however_the_row_was_written(using: str, write: Callable[[], object]) -> None:
    Book.objects.create(uuid=U, title="first")
    Book.objects.create(id=2000, uuid=uuid.uuid4())

    assert violated(write, "library.Book.uuid") is not None


def connection_of(model: type[models.Model]) -> Any:
    return connections[model._default_manager.db]


def test_an_expression(using: str) -> None:
    if not connections[using].features.supports_expression_indexes:
        pytest.skip("No such constraint here.")
    Member.objects.create(email="a@example.org")

    found = violated(lambda: Member.objects.create(email="A@example.org"), "library_email_once")

    assert found is not None
    assert found.fields == ()


def test_a_deferred_constraint_that_fails_at_commit(using: str) -> None:
    if not connections[using].features.supports_deferrable_unique_constraints:
        pytest.skip("No such constraint here.")

    found = violated(twice(Queued, number=1), "library.Queued.number")

    assert found is not None


def test_a_constraint_that_a_migration_has_renamed_since(using: str) -> None:
    if using != "postgres":
        pytest.skip("Only there it has a statement that all versions know.")
    assert violated(twice(Book, uuid=U), "library.Book.uuid") is not None
    rename = "ALTER TABLE library_book RENAME CONSTRAINT {} TO {}".format
    names = ("library_book_uuid_key", "renamed")

    with connections[using].cursor() as cursor:
        cursor.execute(rename(*names))
        try:
            found = violated(lambda: Book.objects.create(uuid=U), "library.Book.uuid")
        finally:
            cursor.execute(rename(*reversed(names)))

    assert found is not None


def test_an_error_that_no_database_made(using: str) -> None:
    constraints = Unique("library.Book.uuid").constraints

    assert violation_of(IntegrityError("of the site's own"), constraints) is None
    # What a statement looked like isn't known: on MariaDB its table isn't, either.
    assert violation_of(IntegrityError(1062, "Duplicate entry"), constraints) is None
    assert not is_transient(IntegrityError("of the site's own"), using)


class TestTheRowThatWon:
    def violation(self) -> Violation:
        found = violated(lambda: Book.objects.create(uuid=U), "library.Book.uuid")
        assert found is not None
        return found

    def test_is_read_on_request(self, using: str) -> None:
        book = Book.objects.create(uuid=U)

        assert self.violation().existing(uuid=str(U).upper()) == book

    async def test_is_read_on_request_by_async_code(self, using: str) -> None:
        found = await sync_to_async(lambda: (Book.objects.create(uuid=U), self.violation())[1])()

        assert (await found.aexisting(uuid=U)).uuid == U
        await sync_to_async(connections.close_all)()

    def test_is_not_anothers(self, using: str) -> None:
        owner = Owner.objects.create()
        Book.objects.create(uuid=U)
        violation = self.violation()

        assert violation.existing(uuid=U, owner=owner) is None
        assert violation.existing(owner.books, uuid=U) is None

    def test_is_asked_for_by_all_of_its_fields(self, using: str) -> None:
        owner = Owner.objects.create()
        Book.objects.create(uuid=U, owner=owner)

        with pytest.raises(ValueError, match="a value for each of uuid"):
            self.violation().existing(owner=owner)

    def test_equals_what_was_asked_for(self, using: str) -> None:
        """A collation that ignores case finds a row that isn't the one."""
        Label.objects.create(code="Order-ABC")
        found = violated(lambda: Label.objects.create(code="Order-ABC"), "library.Label.code")

        assert found is not None
        assert found.existing(code="order-abc") is None
