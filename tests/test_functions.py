"""``SingleFlight``: its options, its keys, its values, and where it may not wait."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from datetime import timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import transaction
from django.test import TestCase

from singleflight_django.exceptions import WaitInTransactionError
from singleflight_django.functions import SingleFlight


class Runs:
    """Counts the runs of what it is given to return."""

    def __init__(self, *values: Any) -> None:
        self.count, self.values = 0, values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.values[0] if self.values else (args, kwargs)

    async def task(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


# Options


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"namespace": ""}, ValueError),
        ({"namespace": None}, ValueError),
        ({"ttl": 0}, ValueError),
        ({"ttl": -1}, ValueError),
        ({"wait": -1}, ValueError),
        ({"result_ttl": "1"}, (TypeError, ValueError)),
        ({"retry": -1}, ValueError),
        ({"retry": 1.5}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"max_followers": -1}, ValueError),
        ({"on_lost": "ignore"}, ValueError),
        ({"serializer": "yaml"}, ValueError),
        ({"returns": int}, TypeError),
        ({"returns": User, "serializer": "pickle"}, ValueError),
        ({"on_store_error": "ignore"}, ValueError),
    ],
)
def test_options_that_can_not_work_are_refused(options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        SingleFlight(**{"namespace": "f", **options})


def test_times_are_seconds_or_timedeltas() -> None:
    flights = SingleFlight("f", ttl=timedelta(seconds=5), wait=timedelta(0), result_ttl=60)
    work = Runs(1)
    assert [flights.run("k", work) for _ in range(2)] == [1, 1]
    assert work.count == 1


def test_settings_are_read_at_each_call(settings: Any) -> None:
    flights, work = SingleFlight("f"), Runs(1)
    settings.SINGLEFLIGHT_RESULT_TTL = 60
    flights.run("k", work)
    flights.run("k", work)
    assert work.count == 1
    settings.SINGLEFLIGHT_ENABLED = False
    flights.run("k", work)
    assert work.count == 2


@pytest.mark.parametrize("enabled", [False, "observe"])
async def test_switched_off_it_only_calls(enabled: Any, settings: Any) -> None:
    settings.SINGLEFLIGHT_ENABLED = enabled
    flights, work = SingleFlight("f", result_ttl=60, cache="dead"), Runs()
    assert flights.run("k", work, 1, a=2) == ((1,), {"a": 2})
    assert await flights.arun("k", work.task, 1, a=2) == ((1,), {"a": 2})


# Keys


def test_arguments_are_passed_on_and_do_not_matter_to_the_key() -> None:
    flights, seen = SingleFlight("f", result_ttl=60), []
    for number in (1, 2):
        flights.run("k", lambda n, *, m: seen.append((n, m)), number, m=0)
    assert seen == [(1, 0)]


def test_a_tuple_is_a_key_whose_parts_do_not_run_together() -> None:
    flights, work = SingleFlight("f", result_ttl=60), Runs(1)
    for key in [("a", "bc"), ("ab", "c"), "abc", ("a", 1), ("a", "1", "c")]:
        flights.run(key, work)
    assert work.count == 5


@pytest.mark.parametrize("key", ["", None, 7, ("a", None)])
async def test_what_is_no_key_is_refused(key: Any) -> None:
    flights = SingleFlight("f")
    with pytest.raises((TypeError, ValueError)):
        flights.run(key, Runs())
    with pytest.raises((TypeError, ValueError)):
        await flights.arun(key, Runs().task)


def test_a_function_is_coalesced_by_its_arguments() -> None:
    flights, runs = SingleFlight("f", result_ttl=60), []

    @flights.coalesce(key="<session>:<message>")
    def answer(session: str, message: int = 7) -> str:
        """Answer."""
        runs.append((session, message))
        return f"{session}{message}"

    assert answer("s") == answer(session="s", message=7) == answer("s", message=7) == "s7"
    assert answer("s", 8) == "s8"
    assert runs == [("s", 7), ("s", 8)]
    assert (answer.__name__, answer.__doc__) == ("answer", "Answer.")


async def test_an_async_function_is_coalesced_by_its_arguments() -> None:
    flights, runs = SingleFlight("f", result_ttl=60), []

    @flights.coalesce(key=lambda session, message: (session, message))
    async def answer(session: str, message: int) -> str:
        runs.append((session, message))
        return f"{session}{message}"

    assert await answer("s", 7) == await answer("s", 7) == "s7"
    assert runs == [("s", 7)]


def test_a_methods_key_may_leave_self_out() -> None:
    flights = SingleFlight("f", result_ttl=60)

    class Model:
        runs = 0

        @flights.coalesce(key="<prompt>")
        def answer(self, prompt: str) -> str:
            Model.runs += 1
            return prompt

    assert Model().answer("p") == Model().answer("p") == "p"
    assert Model.runs == 1


# Values


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None]}, "text", 7, True, [[], {}]])
async def test_json_comes_back_equal(value: Any) -> None:
    flights, work = SingleFlight("f", result_ttl=60), Runs(value)
    assert flights.run("k", work) == flights.run("k", work) == value
    assert await flights.arun("k", work.task) == value
    assert work.count == 1


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, object(), {"a": {1}}, float("nan"), b"bytes"])
def test_what_json_does_not_give_back_is_not_shared(value: Any) -> None:
    flights, work = SingleFlight("f", result_ttl=60), Runs(value)
    assert all(flights.run("k", work) is value for _ in range(3))
    assert work.count == 3


def test_pickle_by_explicit_choice_carries_what_json_does_not() -> None:
    flights, work = SingleFlight("f", result_ttl=60, serializer="pickle"), Runs((1, {2: {3}}))
    assert flights.run("k", work) == flights.run("k", work) == (1, {2: {3}})
    assert work.count == 1


def test_a_value_that_breaks_its_serializer_is_the_callers_all_the_same() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise RuntimeError

    flights, work = SingleFlight("f", serializer="pickle"), Runs(Broken())
    assert isinstance(flights.run("k", work), Broken)


def test_a_value_over_max_bytes_is_not_shared() -> None:
    flights = SingleFlight("f", result_ttl=60, max_bytes=1000)
    large, small = Runs("x" * 1001), Runs("x" * 500)
    for _ in range(2):
        flights.run("large", large)
        flights.run("small", small)
    assert (large.count, small.count) == (2, 1)


def test_a_record_that_can_not_be_read_counts_as_none(redis_client: redis.Redis) -> None:
    flights, work = SingleFlight("f", result_ttl=60), Runs("one")
    flights.run("k", work)
    (key,) = redis_client.scan_iter("*:flight")
    redis_client.hset(key, "kept", b"garbage")
    assert flights.run("k", work) == "one"
    assert work.count == 2


@pytest.mark.django_db
def test_a_model_is_sent_by_its_primary_key() -> None:
    user = User.objects.create(username="a")
    flights, work = SingleFlight("f", result_ttl=60, returns=User), Runs(user)
    flights.run("k", work)
    User.objects.update(username="b")
    assert flights.run("k", work).username == "b"
    assert work.count == 1
    user.delete()
    flights.run("k", work)
    assert work.count == 2


# Transactions


on_real_databases = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def alias(request: pytest.FixtureRequest, postgres: str) -> str:
    name: str = request.param
    return name


@on_real_databases
def test_a_call_inside_a_transaction_is_refused_contended_or_not(alias: str) -> None:
    """Guarantee 12."""
    flights, work = SingleFlight("f"), Runs(1)
    with transaction.atomic(using=alias), pytest.raises(WaitInTransactionError) as caught:
        flights.run("k", work)
    assert caught.value.key == "f:k"
    assert alias in str(caught.value)
    assert work.count == 0
    assert flights.run("k", work) == 1


@on_real_databases
def test_savepoints_and_what_follows_a_rollback(alias: str) -> None:
    flights, work = SingleFlight("f"), Runs(1)
    with contextlib.suppress(LookupError), transaction.atomic(using=alias):
        with transaction.atomic(using=alias), pytest.raises(WaitInTransactionError):
            flights.run("k", work)
        raise LookupError
    assert flights.run("k", work) == 1


@on_real_databases
def test_a_coalesced_function_is_refused_too(alias: str) -> None:
    @SingleFlight("f").coalesce(key="<n>")
    def work(n: int) -> int:
        return n

    with transaction.atomic(using=alias), pytest.raises(WaitInTransactionError):
        work(1)
    assert work(1) == 1


@on_real_databases
def test_the_work_may_open_transactions_of_its_own(alias: str) -> None:
    def work() -> int:
        with transaction.atomic(using=alias):
            return User.objects.using(alias).count()

    assert SingleFlight("f").run("k", work) == 0


@on_real_databases
def test_a_task_that_a_transaction_waits_for_is_refused_too(alias: str) -> None:
    """It runs in another thread, with connections of its own."""
    flights, work = SingleFlight("f"), Runs(1)

    async def as_a_task() -> int:
        return await asyncio.create_task(flights.arun("k", work.task))

    with transaction.atomic(using=alias):
        for arun in (functools.partial(flights.arun, "k", work.task), as_a_task):
            with pytest.raises(WaitInTransactionError) as caught:
                async_to_sync(arun)()
            assert alias in str(caught.value)
    assert work.count == 0
    assert async_to_sync(flights.arun)("k", work.task) == 1


async def test_a_task_that_has_outlived_its_sync_caller_has_nobody_to_ask() -> None:
    flights, work, door, tasks = SingleFlight("f"), Runs(1), asyncio.Event(), []

    async def later() -> int:
        await door.wait()
        return await flights.arun("k", work.task)

    async def start() -> None:
        tasks.append(asyncio.create_task(later()))

    await sync_to_async(async_to_sync(start))()
    door.set()
    assert await tasks[0] == 1


async def test_a_task_outside_of_any_transaction_is_not_refused() -> None:
    assert await SingleFlight("f").arun("k", Runs(1).task) == 1


class InsideTestCase(TestCase):
    """Its own transactions don't count."""

    def test_a_call_is_not_refused(self) -> None:
        User.objects.create(username="a")
        assert SingleFlight("f").run("k", User.objects.count) == 1

    def test_a_call_in_a_transaction_of_ones_own_is(self) -> None:
        with transaction.atomic(), pytest.raises(WaitInTransactionError):
            SingleFlight("f").run("k", User.objects.count)


def test_a_store_of_ones_own_alias_is_used() -> None:
    flights, work = SingleFlight("f", cache="locmem", result_ttl=60), Runs(1)
    flights.run("k", work)
    flights.run("k", work)
    assert work.count == 1
