"""The test kit: off, apart, and someone else."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, SimpleTestCase, override_settings
from django.urls import path

from singleflight_django import LeaseConflictError, semaphore_lock
from singleflight_django.conf import conf
from singleflight_django.stores import registry
from singleflight_django.testing import IsolatedKeysMixin, disabled, held, isolated_keys


@semaphore_lock(key="lesson:<name>")
def locked(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=201)


@semaphore_lock(key="lesson:<name>", limit=2, namespace="seats")
async def seats(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=201)


urlpatterns = [path("locked", locked), path("seats", seats)]
pytestmark = pytest.mark.urls(__name__)


def is_free(key: str) -> bool:
    with semaphore_lock(key, on_conflict="yield") as lease:
        return lease.acquired


class TestDisabled:
    """The stand of SINGLEFLIGHT_ENABLED."""

    def test_it_switches_guards_off(self, client: Client) -> None:
        with held("lesson:7"), disabled():
            assert client.post("/locked", {"name": "7"}).status_code == 201

    def test_it_nests_and_puts_back_what_was_there(self) -> None:
        with override_settings(SINGLEFLIGHT_ENABLED="observe"):
            with disabled():
                with disabled():
                    assert conf.SINGLEFLIGHT_ENABLED is False
                assert conf.SINGLEFLIGHT_ENABLED is False
            assert conf.SINGLEFLIGHT_ENABLED == "observe"

    @disabled()
    def test_it_decorates_a_test(self) -> None:
        assert conf.SINGLEFLIGHT_ENABLED is False

    @disabled()
    async def test_it_decorates_an_async_test(self) -> None:
        assert conf.SINGLEFLIGHT_ENABLED is False

    def test_it_is_on_again_after_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), disabled():
            raise ZeroDivisionError
        assert conf.SINGLEFLIGHT_ENABLED is True


@disabled()
class TestDisabledClass(SimpleTestCase):
    def test_it_decorates_a_class(self) -> None:
        assert conf.SINGLEFLIGHT_ENABLED is False


class TestHeld:
    """Someone else holds the key."""

    def test_the_request_meets_a_conflict(self, client: Client) -> None:
        with held("lesson:7") as lease:
            assert lease.acquired
            assert client.post("/locked", {"name": "7"}).status_code == 429
            assert client.post("/locked", {"name": "8"}).status_code == 201
        assert client.post("/locked", {"name": "7"}).status_code == 201

    async def test_an_async_request_meets_a_conflict(self, async_client: AsyncClient) -> None:
        async with held("lesson:7", namespace="seats", limit=2):
            assert (await async_client.post("/seats", {"name": "7"})).status_code == 429
        assert (await async_client.post("/seats", {"name": "7"})).status_code == 201

    def test_all_places_are_taken(self, client: Client) -> None:
        with held("lesson:7", namespace="seats", limit=2):
            assert client.post("/seats", {"name": "7"}).status_code == 429

    def test_it_is_no_nested_use_but_another_holder(self) -> None:
        with (
            held("lesson:7"),
            pytest.raises(LeaseConflictError),
            semaphore_lock("lesson:7"),
        ):
            pass

    def test_a_tuple_of_parts_is_the_key_that_a_template_makes_of_them(
        self, client: Client
    ) -> None:
        with held(("lesson", "a b:c")):
            assert client.post("/locked", {"name": "a b:c"}).status_code == 429

    def test_a_key_with_fields_is_refused(self) -> None:
        with pytest.raises(ValueError, match="needs a request"):
            held("lesson:<name>")

    @held("lesson:7")
    def test_it_decorates_a_test(self) -> None:
        assert not is_free("lesson:7")

    def test_what_is_held_already_is_a_conflict_and_stays_held(self) -> None:
        with semaphore_lock("lesson:7"):
            with pytest.raises(LeaseConflictError), held("lesson:7"):
                pass
            with held("lesson:8"):
                pass
            with pytest.raises(LeaseConflictError), held("lesson:7"):
                pass
        assert is_free("lesson:7")

    def test_of_several_places_none_stays_taken_where_not_all_are_free(self) -> None:
        with held("k", namespace="n", limit=1):
            with pytest.raises(LeaseConflictError), held("k", namespace="n", limit=1):
                pass
            with pytest.raises(LeaseConflictError), held("k", namespace="n", limit=2):
                pass
            with semaphore_lock("k", namespace="n", limit=2) as lease:
                assert lease.acquired
        with held("k", namespace="n", limit=2):
            pass

    async def test_what_is_held_already_is_an_async_conflict(self) -> None:
        async with held("lesson:7"):
            with pytest.raises(LeaseConflictError):
                async with held("lesson:7"):
                    pass

    def test_it_is_free_after_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), held("lesson:7"):
            raise ZeroDivisionError
        assert is_free("lesson:7")

    @pytest.mark.parametrize("alias", ["core", "locmem", "valkey"])
    def test_it_takes_the_key_where_the_guard_looks_for_it(self, alias: str) -> None:
        with (
            held("import:7", cache=alias),
            semaphore_lock("import:7", cache=alias, on_conflict="yield") as lease,
        ):
            assert not lease.acquired


@held("lesson:7")
class TestHeldClass(unittest.TestCase):
    def test_it_decorates_a_class(self) -> None:
        assert not is_free("lesson:7")


class TestIsolatedKeys:
    """Keys of a test's own."""

    def test_what_was_left_behind_is_not_seen(self) -> None:
        with held("lesson:7"):
            with isolated_keys():
                assert is_free("lesson:7")
                with held("lesson:7"), isolated_keys():
                    assert is_free("lesson:7")
            assert not is_free("lesson:7")

    def test_the_prefix_is_put_back_and_no_store_stays(self) -> None:
        before, stores = conf.SINGLEFLIGHT_PREFIX, dict(registry._stores)
        with isolated_keys() as prefix:
            assert prefix == conf.SINGLEFLIGHT_PREFIX != before
            assert prefix.startswith(before)
            assert is_free("lesson:7")
        assert before == conf.SINGLEFLIGHT_PREFIX
        assert not [which for which in registry._stores if which[1] == prefix]
        assert stores.keys() <= registry._stores.keys()

    @override_settings(SINGLEFLIGHT_PREFIX="p" * 40)
    def test_a_long_prefix_stays_a_possible_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1234567890")
        with isolated_keys():
            assert is_free("lesson:7")

    @pytest.mark.parametrize("kind", [None, "cache"])
    @pytest.mark.parametrize("alias", ["locmem", "core"])
    def test_where_leases_are_entries_of_a_cache_its_key_prefix_does_it(
        self, alias: str, kind: str | None
    ) -> None:
        with override_settings(SINGLEFLIGHT_CACHE=alias, SINGLEFLIGHT_STORE=kind):
            with held("lesson:7"), isolated_keys():
                assert is_free("lesson:7")
            caches["locmem"].set("mine", 1)
            with isolated_keys():
                pass
            assert caches["locmem"].get("mine") == 1

    @override_settings(SINGLEFLIGHT_CACHE="misspelt")
    def test_a_cache_that_does_not_exist_is_not_its_business(self) -> None:
        with isolated_keys():
            pass

    @isolated_keys()
    async def test_it_decorates_an_async_test(self) -> None:
        assert ".test." in conf.SINGLEFLIGHT_PREFIX or ".gw" in conf.SINGLEFLIGHT_PREFIX


class WithoutPytest(IsolatedKeysMixin, SimpleTestCase):
    seen: list[Any] = []  # noqa: RUF012

    def setUp(self) -> None:
        self.seen.append(conf.SINGLEFLIGHT_PREFIX)
        held("lesson:7").enable()

    def test_one(self) -> None:
        self.seen.append(conf.SINGLEFLIGHT_PREFIX)

    async def test_two(self) -> None:
        self.seen.append(conf.SINGLEFLIGHT_PREFIX)


def test_a_mixin_gives_each_test_of_a_class_keys_of_its_own() -> None:
    WithoutPytest.seen.clear()
    before = conf.SINGLEFLIGHT_PREFIX

    result = unittest.TestResult()
    unittest.TestSuite([WithoutPytest("test_one"), WithoutPytest("test_two")]).run(result)
    WithoutPytest("test_one").debug()

    assert result.wasSuccessful(), result.errors
    seen = WithoutPytest.seen
    assert seen[0] == seen[1] != before
    assert seen[2] == seen[3] != before
    assert len({*seen}) == 3
    assert before == conf.SINGLEFLIGHT_PREFIX
