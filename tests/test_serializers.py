"""Values of functions: what comes back is equal, or is not shared."""

from __future__ import annotations

from collections import OrderedDict
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from django.contrib.auth.models import AbstractUser, Group, User
from django.contrib.sessions.models import Session
from django.db import models
from django.utils import timezone

from singleflight_django.exceptions import UnshareableResultError
from singleflight_django.records import MODEL, UNREADABLE, seal
from singleflight_django.serializers import codec

JSON, PICKLE = codec("json"), codec("pickle")

EVERYWHERE: list[Any] = [
    None,
    False,
    True,
    0,
    "",
    [],
    {},
    1.0,
    1.5e300,
    10**30,
    "é\ud800",
    {"a": [1, {"b": None}]},
    OrderedDict(b=1, a=2),
]
PICKLE_ONLY: list[Any] = [
    (1, 2),
    {"a": (1,)},
    {1: "a"},
    {None: 1},
    {1: "a", "1": "b"},
    {1, 2},
    b"x",
    Decimal("1.10"),
    date(2024, 2, 29),
    float("inf"),
]


class Late(models.TextChoices):
    YES = "yes"


class Sly:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class TestJSON:
    @pytest.mark.parametrize("value", EVERYWHERE)
    async def test_a_value_comes_back_equal_and_of_its_type(self, value: Any) -> None:
        for copy in (JSON.decode(JSON.encode(value)), await JSON.adecode(JSON.encode(value))):
            assert copy == value
            assert isinstance(value, type(copy))

    @pytest.mark.parametrize("value", [*PICKLE_ONLY, float("nan"), object(), Enum])
    def test_what_json_would_change_is_not_shareable(self, value: Any) -> None:
        with pytest.raises(UnshareableResultError):
            JSON.encode(value)

    @pytest.mark.parametrize("make", [deep, circular, Sly, lambda: 10**5000])
    def test_what_breaks_the_writer_is_not_shareable(self, make: Any) -> None:
        with pytest.raises(UnshareableResultError):
            JSON.encode(make())

    def test_a_choice_is_its_value(self) -> None:
        assert JSON.decode(JSON.encode({"late": Late.YES})) == {"late": "yes"}

    def test_it_is_the_default(self) -> None:
        assert JSON.decode(codec().encode([1])) == [1]


class TestPickle:
    @pytest.mark.parametrize("value", [*EVERYWHERE, *PICKLE_ONLY])
    async def test_a_value_comes_back_equal(self, value: Any) -> None:
        assert PICKLE.decode(PICKLE.encode(value)) == value
        assert await PICKLE.adecode(PICKLE.encode(value)) == value

    def test_what_cannot_be_pickled_is_not_shareable(self) -> None:
        with pytest.raises(UnshareableResultError, match="can't be pickled"):
            PICKLE.encode(lambda: None)

    def test_a_class_that_has_gone_since_is_no_outcome(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        record = PICKLE.encode(Late.YES)
        monkeypatch.delattr(f"{__name__}.Late")
        assert PICKLE.decode(record) is UNREADABLE
        assert "AttributeError" in caplog.text

    def test_json_does_not_open_it_nor_it_json(self) -> None:
        assert JSON.decode(PICKLE.encode(1)) is UNREADABLE
        assert PICKLE.decode(JSON.encode(1)) is UNREADABLE


@pytest.mark.django_db
class TestModels:
    def test_the_follower_reads_the_row_itself(self, django_assert_num_queries: Any) -> None:
        users = codec(returns=User)
        record = users.encode(User.objects.create(username="ann"))
        User.objects.update(first_name="Ann")
        with django_assert_num_queries(1):
            assert users.decode(record).first_name == "Ann"

    def test_none_is_a_result(self) -> None:
        users = codec(returns=User)
        assert users.decode(users.encode(None)) is None

    def test_a_row_that_has_gone_is_no_outcome(self, caplog: pytest.LogCaptureFixture) -> None:
        users, ann = codec(returns=User), User.objects.create(username="ann")
        record = users.encode(ann)
        ann.delete()
        assert users.decode(record) is UNREADABLE
        assert "DoesNotExist" in caplog.text

    @pytest.mark.parametrize("value", [User(username="x"), User(pk=1), Group(pk=1), 7, False])
    def test_what_is_no_saved_instance_is_not_shareable(self, value: Any) -> None:
        with pytest.raises(UnshareableResultError):
            codec(returns=User).encode(value)

    def test_another_models_record_is_no_outcome(self) -> None:
        record = codec(returns=Group).encode(Group.objects.create(name="g"))
        assert codec(returns=User).decode(record) is UNREADABLE
        assert codec(returns=User).decode(JSON.encode(1)) is UNREADABLE

    @pytest.mark.parametrize(
        "head",
        [
            {"model": "auth.User", "pk": "x", "using": "default"},
            {"model": "auth.User", "pk": "1", "using": "gone"},
        ],
    )
    async def test_a_key_or_a_database_that_makes_no_sense_is_no_outcome(self, head: Any) -> None:
        record = seal(MODEL, head, b"")
        assert codec(returns=User).decode(record) is UNREADABLE
        assert await codec(returns=User).adecode(record) is UNREADABLE

    def test_a_proxy_of_the_model_is_one_of_it(self) -> None:
        class Person(User):
            class Meta:
                proxy = True
                app_label = "auth"

        person = Person.objects.create(username="ann")
        assert codec(returns=User).decode(codec(returns=User).encode(person)) == person

    def test_any_primary_key_will_do(self) -> None:
        sessions = codec(returns=Session)
        made = Session.objects.create(session_key="a" * 32, expire_date=timezone.now())
        assert sessions.decode(sessions.encode(made)) == made

    def test_the_row_is_read_from_the_database_that_it_came_from(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        users, ann = codec(returns=User), User.objects.create(username="ann")
        ann._state.db = "archive"
        assert users.decode(users.encode(ann)) is UNREADABLE
        assert "ConnectionDoesNotExist" in caplog.text


@pytest.mark.django_db(transaction=True)
class TestModelsAsync:
    async def test_the_follower_reads_the_row_itself(self) -> None:
        users = codec(returns=User)
        ann = await User.objects.acreate(username="ann")
        assert await users.adecode(users.encode(ann)) == ann
        assert await users.adecode(users.encode(None)) is None
        record = users.encode(ann)
        await ann.adelete()
        assert await users.adecode(record) is UNREADABLE
        assert await users.adecode(b"") is UNREADABLE


class TestOptions:
    @pytest.mark.parametrize("serializer", ["yaml", None, JSON])
    def test_another_serializer_is_refused(self, serializer: Any) -> None:
        with pytest.raises(ValueError, match='"json" or "pickle"'):
            codec(serializer)

    @pytest.mark.parametrize("returns", ["auth.User", User(), AbstractUser, dict])
    def test_what_is_no_model_is_refused(self, returns: Any) -> None:
        with pytest.raises(TypeError, match="returns must be a model"):
            codec(returns=returns)

    def test_a_model_needs_no_serializer(self) -> None:
        with pytest.raises(ValueError, match="primary key"):
            codec("pickle", User)
