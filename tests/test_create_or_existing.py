"""``create_or_existing()`` on each database, against other transactions that really run."""

from __future__ import annotations

import datetime
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connections,
    models,
    transaction,
)
from django.db.models.signals import post_save, pre_save
from django.test import TestCase

from singleflight_django import acreate_or_existing, create_or_existing
from singleflight_django.creating import ATTEMPTS
from singleflight_django.exceptions import DuplicateMismatchError
from tests.library.models import (
    Book,
    Card,
    GoldCard,
    Label,
    Loan,
    Member,
    Owner,
    Queued,
    Seat,
    Ticket,
)
from tests.library.threads import Aside, race
from tests.meeting import PATIENCE

U = uuid.UUID(int=7)
DAY = datetime.date(2026, 11, 30)


def make(title: str = "", **more: Any) -> tuple[Book, bool]:
    return create_or_existing(Book.objects, uuid=U, defaults={"title": title}, **more)


@contextmanager
def told(signal: Any, sender: type[models.Model]) -> Iterator[list[models.Model]]:
    instances: list[models.Model] = []

    def listener(instance: models.Model, **kwargs: Any) -> None:
        instances.append(instance)

    signal.connect(listener, sender=sender)
    yield instances
    signal.disconnect(listener, sender=sender)


@contextmanager
def isolation(using: str, level: str) -> Iterator[None]:
    """A transaction of this isolation level that has read something."""
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        if using == "postgres":
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        Book.objects.count()
        yield


@contextmanager
def mariadb_isolation(using: str, level: str, strict: bool = False) -> Iterator[None]:
    with connections[using].cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        cursor.execute("SET SESSION innodb_snapshot_isolation = %s", [strict])
    with isolation(using, level):
        yield


class TestAlone:
    def test_the_first_creates_and_the_next_gets_it(self, using: str) -> None:
        book, created = make("first")
        again, created_again = make("second")

        assert (created, created_again) == (True, False)
        assert (again.pk, again.title) == (book.pk, "first")

    @pytest.mark.parametrize("spelling", [str(U), str(U).upper(), U.hex, U.urn, f"{{{U}}}"])
    def test_every_spelling_of_a_uuid_is_one_row(self, using: str, spelling: str) -> None:
        make()

        assert create_or_existing(Book.objects, uuid=spelling)[1] is False

    def test_a_tuple_of_fields(self, using: str) -> None:
        owner = Owner.objects.create()

        def lend(**more: Any) -> bool:
            defaults = {"book": "x"}
            return create_or_existing(
                Loan.objects, owner=owner, day=DAY, defaults=defaults, **more
            )[1]

        assert lend() is True
        assert lend() is False
        assert lend(constraint=("owner", "day")) is False
        assert lend(constraint="library_one_a_day") is False
        assert lend(constraint=("library.Loan.owner", "day")) is False

    def test_a_manager_of_a_relation_is_a_scope(self, using: str) -> None:
        owner = Owner.objects.create()

        book, created = create_or_existing(owner.books, uuid=U)

        assert (book.owner, created) == (owner, True)
        assert create_or_existing(owner.books, uuid=U) == (book, False)
        assert create_or_existing(owner.loan_set, day=DAY)[1] is True
        assert create_or_existing(owner.loan_set, day=DAY)[1] is False

    def test_the_alias_may_be_pinned(self, using: str) -> None:
        for rows in (Book.objects.using(using), Book.objects.db_manager(using), Book.objects):
            assert create_or_existing(rows, uuid=U)[0]._state.db == using

    def test_callables_are_called_once(self, using: str) -> None:
        calls: list[str] = []
        make("first")

        create_or_existing(
            Book.objects, uuid=U, defaults={"title": lambda: calls.append("x") or "x"}
        )

        assert calls == ["x"]

    def test_a_lookup_that_is_no_value_only_finds(self, using: str) -> None:
        for created in (True, False):
            label, done = create_or_existing(
                Label.objects,
                code__iexact="ABC",
                defaults={"code": "abc"},
                constraint="code",
            )
            assert (label.code, done) == ("abc", created)

    def test_a_composite_key(self, using: str) -> None:
        assert create_or_existing(Seat.objects, row=1, place=2)[1] is True
        assert create_or_existing(Seat.objects, pk=(1, 2))[1] is False

    def test_an_expression(self, using: str) -> None:
        if not connections[using].features.supports_expression_indexes:
            pytest.skip("No such constraint here.")

        def join(email: str) -> bool:
            return create_or_existing(
                Member.objects,
                email__iexact=email,
                defaults={"email": email},
                constraint="library_email_once",
            )[1]

        assert join("a@example.org") is True
        assert join("A@example.org") is False

    async def test_async_code(self, using: str) -> None:
        book, created = await acreate_or_existing(Book.objects, uuid=U)

        assert created is True
        assert await acreate_or_existing(Book.objects, uuid=U) == (book, False)
        await sync_to_async(connections.close_all)()

    def test_no_signal_tells_of_a_row_that_was_not_created(self, using: str) -> None:
        with told(post_save, Book) as saved, told(pre_save, Book) as tried:
            make()
            make()

        assert (len(saved), len(tried)) == (1, 2)


class TestNothingIsOverwritten:
    @pytest.mark.parametrize("model", [Card, Ticket])
    def test_by_a_client_that_chooses_the_key(self, using: str, model: Any) -> None:
        for created in (True, False):
            row, done = create_or_existing(model.objects, id=U, defaults={"title": str(created)})
            assert (row.title, done) == ("True", created)

        assert model.objects.get().title == "True"

    def test_by_a_child_with_the_key_of_a_parent(self, using: str) -> None:
        Card.objects.create(id=U, title="first")

        with pytest.raises(DuplicateMismatchError):
            create_or_existing(GoldCard.objects, pk=U, defaults={"number": 1, "title": "second"})

        assert Card.objects.get().title == "first"

    def test_by_a_second_child(self, using: str) -> None:
        def upgrade(title: str) -> tuple[GoldCard, bool]:
            return create_or_existing(
                GoldCard.objects, id=U, defaults={"number": 1, "title": title}
            )

        assert upgrade("first")[1] is True
        assert upgrade("second")[0].title == "first"
        assert Card.objects.get().title == "first"


class TestOtherRefusals:
    @pytest.mark.parametrize(
        "defaults", [{"title": None}, {"pages": 0}, {"owner_id": 404}, {"isbn": "1"}, {"id": 2000}]
    )
    def test_stay_what_they_are(self, using: str, defaults: dict[str, Any]) -> None:
        Book.objects.create(id=2000, uuid=uuid.uuid4(), isbn="1")

        with pytest.raises(IntegrityError):
            create_or_existing(Book.objects, uuid=U, defaults=defaults)

    def test_of_an_on_commit_hook_come_out_and_the_row_is_there(self, using: str) -> None:
        def hook_on_save(**kwargs: Any) -> None:
            transaction.on_commit(lambda: Book(uuid=U).save(), using=using)

        post_save.connect(hook_on_save, sender=Book)
        try:
            with pytest.raises(IntegrityError):
                make()
        finally:
            post_save.disconnect(hook_on_save, sender=Book)

        assert Book.objects.count() == 1


class TestTheOneThatExists:
    def test_of_somebody_else_is_not_given(self, using: str) -> None:
        """Whoever guesses an id learns that it is taken, and nothing else."""
        mine, theirs = Owner.objects.create(), Owner.objects.create()
        create_or_existing(theirs.books, uuid=U, defaults={"title": "private"})

        for rows, lookup in [
            (mine.books, {}),
            (Book.objects.filter(owner=mine), {}),
            (Book.objects, {"owner": mine}),
        ]:
            with pytest.raises(DuplicateMismatchError):
                create_or_existing(rows, uuid=U, defaults={"title": "x"}, **lookup)

        assert Book.objects.get().title == "private"

    def test_that_is_hidden_is_an_error_and_no_loop(self, using: str) -> None:
        Book.objects.create(uuid=U, deleted=True)

        with pytest.raises(DuplicateMismatchError, match="isn't among those") as caught:
            create_or_existing(Book.visible, uuid=U)

        assert isinstance(caught.value.__cause__, IntegrityError)

    def test_has_to_be_the_same_where_that_is_asked(self, using: str) -> None:
        owner, other = Owner.objects.create(), Owner.objects.create()
        create_or_existing(Book.objects, uuid=U, defaults={"owner": owner, "pages": "3"})

        def again(**defaults: Any) -> bool:
            same = ("owner_id", "pages")
            return create_or_existing(Book.objects, uuid=U, defaults=defaults, same=same)[1]

        assert again(owner=owner, pages=3) is False
        assert again(owner_id=str(owner.pk), pages="3") is False
        for defaults in ({"owner": other, "pages": 3}, {"owner": owner, "pages": 4}):
            with pytest.raises(DuplicateMismatchError, match="differs in"):
                again(**defaults)

    @pytest.mark.parametrize("code", ["order-abc", "Order-ABC ", "Order-ÄBC"])
    def test_is_not_what_only_the_collation_holds_equal(self, using: str, code: str) -> None:
        create_or_existing(Label.objects, code="Order-ABC")

        try:
            label, created = create_or_existing(Label.objects, code=code)
        except DuplicateMismatchError:
            assert using == "mariadb"
        else:
            assert (label.code, created) == (code, True)
            assert using != "mariadb" or "Ä" in code

    def test_may_be_equal_in_all_of_its_constraints(self, using: str) -> None:
        """The database tells of one of them, whichever it looks at first."""
        for constraint, lookup in [
            ("uuid", {"uuid": U}),
            ("isbn", {"isbn": "1"}),
            (None, {"uuid": U, "isbn": "1"}),
        ]:
            _, created = create_or_existing(
                Book.objects,
                **lookup,
                constraint=constraint,
                defaults={"uuid": U, "isbn": "1", "pk": 2000},
            )
            assert created is (constraint == "uuid")

        with pytest.raises(IntegrityError):
            create_or_existing(Book.objects, uuid=uuid.uuid4(), defaults={"isbn": "1"})


class TestInTransactions:
    def test_what_was_written_before_is_kept(self, using: str) -> None:
        """The failed INSERT does not break the transaction around it."""
        make("first")

        with transaction.atomic(using=using), transaction.atomic(using=using):
            Owner.objects.create(name="before")
            assert make("second")[1] is False
            Owner.objects.create(name="after")

        assert {owner.name for owner in Owner.objects.all()} == {"before", "after"}

    def test_a_deferred_constraint(self, using: str) -> None:
        if not connections[using].features.supports_deferrable_unique_constraints:
            pytest.skip("No such constraint here.")

        assert create_or_existing(Queued.objects, number=1)[1] is True
        assert create_or_existing(Queued.objects, number=1)[1] is False
        with transaction.atomic(using=using):
            assert create_or_existing(Queued.objects, number=1)[1] is False
            assert create_or_existing(Queued.objects, number=2)[1] is True
            # It is deferred again.
            Queued.objects.create(number=2).delete()

        assert Queued.objects.count() == 2

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
    def test_that_have_read_before_the_winner_committed(self, using: str, level: str) -> None:
        if using == "sqlite":
            pytest.skip("There a reader that writes waits, or is refused.")
        enter = mariadb_isolation if using == "mariadb" else isolation

        with Aside() as winner, enter(using, level):
            winner.step(make)
            if using == "postgres" and level == "REPEATABLE READ":
                with pytest.raises(DuplicateMismatchError, match="snapshot"):
                    make()
                Owner.objects.create()
            else:
                assert make()[1] is False

        assert Book.objects.count() == 1

    def test_that_mariadb_keeps_strictly_to_their_snapshot(self, using: str) -> None:
        """It rolls back, and nothing may be committed even if somebody catches the error."""
        if using != "mariadb":
            pytest.skip("No such setting there.")

        with Aside() as winner, mariadb_isolation(using, "REPEATABLE READ", strict=True):
            Owner.objects.create(name="before")
            winner.step(make)
            with pytest.raises(DuplicateMismatchError, match="snapshot"):
                make()
            assert connections[using].needs_rollback

        assert Owner.objects.count() == 0
        assert Book.objects.count() == 1

    def test_two_losers_do_not_deadlock(self, using: str) -> None:
        """On MySQL each has a shared lock on the row when it reads it."""
        if using == "sqlite":
            pytest.skip("It has one writer at a time.")
        make()
        both = threading.Barrier(2, timeout=PATIENCE)

        def lose() -> bool:
            with transaction.atomic(using=using):
                try:
                    Book.objects.count()
                    with transaction.atomic(using=using):
                        Book.objects.create(uuid=U)
                except IntegrityError:
                    both.wait()
                    return make()[1]
            raise AssertionError

        assert race(lose, lose) == [False, False]


class TestInATestCase(TestCase):
    def test_it_works(self) -> None:
        assert make("first")[1] is True
        assert make("second")[1] is False
        with pytest.raises(IntegrityError):
            make(constraint="pk")
        assert Book.objects.count() == 1


class TestRaces:
    def test_of_many_one_creates(self, using: str) -> None:
        for number in range(5):
            u = uuid.UUID(int=number)
            answers = race(*[lambda u=u: create_or_existing(Book.objects, uuid=u)] * 8)

            assert sorted(created for _, created in answers) == [False] * 7 + [True]
            assert len({book.pk for book, _ in answers}) == 1

    def test_of_many_one_creates_in_transactions_that_have_read(self, using: str) -> None:
        if using == "sqlite":
            pytest.skip("There a reader that writes waits, or is refused.")

        def read_and_make() -> bool:
            with transaction.atomic(using=using):
                Book.objects.count()
                return make()[1]

        assert sorted(race(*[read_and_make] * 8)) == [False] * 7 + [True]

    def test_where_the_winner_rolls_back_a_loser_creates(self, using: str) -> None:
        """InnoDB lets all but one of those who wait for that rollback die in a deadlock."""
        inserted, others = threading.Event(), threading.Barrier(3, timeout=PATIENCE)

        def win_and_roll_back() -> None:
            with transaction.atomic(using=using):
                Book.objects.create(uuid=U)
                inserted.set()
                others.wait()
                if using != "sqlite":
                    await_waiters(using, 2)
                transaction.set_rollback(True, using=using)

        def lose() -> bool:
            inserted.wait(PATIENCE)
            others.wait()
            return make()[1]

        _, *answers = race(win_and_roll_back, lose, lose)

        assert sorted(answers) == [False, True]
        assert Book.objects.count() == 1

    def test_where_the_row_vanishes_it_is_created(self, using: str) -> None:
        make()

        with vanishing(using, times=1) as deleted:
            assert make()[1] is True

        assert deleted == [1]

    def test_where_the_row_always_vanishes_the_error_comes_out(self, using: str) -> None:
        make()

        with vanishing(using, times=ATTEMPTS, again=True) as deleted, pytest.raises(IntegrityError):
            make()

        assert len(deleted) == ATTEMPTS

    def test_a_deadlock_is_not_ours_to_repeat_in_somebody_elses_transaction(
        self, using: str
    ) -> None:
        if using == "sqlite":
            pytest.skip("It has one writer at a time.")
        one, two = (Owner.objects.create(name=name) for name in "ab")
        both = threading.Barrier(2, timeout=PATIENCE)

        def cross(first: Owner, u: int, other: int) -> bool:
            with transaction.atomic(using=using):
                create_or_existing(first.books, uuid=uuid.UUID(int=u))
                both.wait()
                return create_or_existing(first.books, uuid=uuid.UUID(int=other))[1]

        answers = race(lambda: cross(one, 1, 2), lambda: cross(two, 2, 1))

        assert sorted(type(answer) for answer in answers if answer is not True) == [
            OperationalError
        ]
        assert Book.objects.count() == 2


def await_waiters(using: str, number: int) -> None:
    """Return when ``number`` transactions wait for a lock, which only the server can tell."""
    query = {
        "postgres": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mariadb": "SELECT sum(trx_state = 'LOCK WAIT') FROM information_schema.innodb_trx",
    }[using]
    with Aside() as onlooker:

        def waiting() -> int:
            with connections[using].cursor() as cursor:
                cursor.execute(query)
                return int(cursor.fetchone()[0])

        for _ in range(1000):
            if onlooker.step(waiting) >= number:
                return
    raise AssertionError("They don't wait.")


@contextmanager
def vanishing(using: str, *, times: int, again: bool = False) -> Iterator[list[int]]:
    """Delete the row between a refused INSERT and the look at it; ``again`` puts it back later."""
    deleted: list[int] = []

    with Aside() as other:

        def watch(execute: Any, sql: str, *rest: Any) -> Any:
            looks = sql.startswith("SELECT") and "library_book" in sql
            if looks and len(deleted) < len(refused):
                deleted.append(other.step(lambda: Book.objects.all().delete()[0]))
                looks = False
            try:
                result = execute(sql, *rest)
            except DatabaseError:
                refused.append(sql)
                raise
            if looks and again:
                other.step(lambda: Book.objects.create(uuid=U))
            return result

        refused: list[str] = []
        with connections[using].execute_wrapper(watch):
            yield deleted
    assert len(deleted) == times


def test_a_database_that_goes_away_before_the_look(using: str) -> None:
    make()

    def away(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("SELECT") and "library_book" in sql:
            raise OperationalError("away")
        return execute(sql, *rest)

    with connections[using].execute_wrapper(away), pytest.raises(OperationalError, match="away"):
        make()


class TestMisuse:
    def test_a_value_for_no_field(self, using: str) -> None:
        with pytest.raises(TypeError, match="nothing"):
            create_or_existing(Book.objects, uuid=U, defaults={"nothing": 1})

    def test_a_lookup_without_a_constraint(self, using: str) -> None:
        with pytest.raises(ValueError, match="add them, or say constraint="):
            create_or_existing(Book.objects, title="x")

    def test_a_constraint_that_is_none(self, using: str) -> None:
        with pytest.raises(Exception, match="Add unique=True"):
            make(constraint="title")

    def test_same_without_a_value(self, using: str) -> None:
        with pytest.raises(ValueError, match="neither lookup nor defaults"):
            make(same=("owner",))

    def test_same_as_a_str(self, using: str) -> None:
        with pytest.raises(TypeError, match="a tuple of names"):
            make(same="title")
