"""Each check has a test that turns it on and one that keeps it off."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from django.core import mail
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from singleflight_django import SingleFlight, checks
from singleflight_django.checks import database
from tests.checking import deployment_messages, lock, messages, of_view
from tests.settings import DEAD_URL, django_core, django_redis

BACKENDS = "django.core.cache.backends"


class OwnLocMem(LocMemCache):
    """A site's own subclass is as private to its process as what it is made from."""


class OwnRedis(RedisCache):
    """A site's own subclass of a backend that is fine is fine."""


@pytest.fixture
def cache(settings: Any) -> Any:
    """Set the cache that the leases are in."""

    def set_cache(backend: str, location: Any = "", **options: Any) -> None:
        default = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        settings.CACHES = {"default": default}

    return set_cache


@pytest.fixture(autouse=True)
def _only_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of other files, which share the process, are not on this site."""
    monkeypatch.setattr(database, "declared", WeakSet())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a check opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


class TestAll:
    def test_nothing_to_say_about_a_good_site(self) -> None:
        assert messages() == {}
        assert deployment_messages() == {}

    def test_they_are_bound(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_TTL = 0

        with pytest.raises(SystemCheckError, match=r"singleflight_django\.E002"):
            call_command("check")
        with pytest.raises(SystemCheckError, match=r"singleflight_django\.E002"):
            call_command("check", "--tag", "singleflight")

    def test_the_deployment_checks_are_bound(self, settings: Any, cache: Any) -> None:
        settings.DEBUG = True
        cache(f"{BACKENDS}.locmem.LocMemCache")

        def ids(deployment: bool) -> set[str | None]:
            found = run_checks(tags=["singleflight"], include_deployment_checks=deployment)
            return {message.id for message in found}

        assert ids(False) == {"singleflight_django.W015"}
        assert ids(True) == {f"singleflight_django.{n}" for n in ("W015", "E016", "W040")}

    def test_all_are_silent_while_the_library_is_off(self, settings: Any, cache: Any) -> None:
        cache(f"{BACKENDS}.dummy.DummyCache")
        settings.SINGLEFLIGHT_TLL = 3
        settings.SINGLEFLIGHT_TTL = 0
        assert set(messages()) == {"W001", "E002", "E012"}

        settings.SINGLEFLIGHT_ENABLED = False

        assert messages() == {}
        assert deployment_messages() == {}

    def test_none_is_silent_while_the_library_only_observes(
        self, settings: Any, cache: Any
    ) -> None:
        cache(f"{BACKENDS}.dummy.DummyCache")
        settings.SINGLEFLIGHT_ENABLED = "observe"

        assert set(messages()) == {"E012"}

    @pytest.mark.usefixtures("no_network")
    @pytest.mark.parametrize("alias", ["default", "core", "dead", "dead_ignoring", "valkey"])
    def test_none_opens_a_connection(self, settings: Any, alias: str) -> None:
        if alias not in settings.CACHES:
            pytest.skip(f"there is no package for {alias}")
        settings.SINGLEFLIGHT_CACHE = alias

        assert "E010" not in messages()

    def test_every_message_has_a_hint(self, settings: Any, cache: Any) -> None:
        cache(f"{BACKENDS}.dummy.DummyCache")
        settings.SINGLEFLIGHT_TLL = 3
        settings.SINGLEFLIGHT_ANYTHING_AT_ALL = 3
        settings.SINGLEFLIGHT_TTL = 0

        assert all(message.hint for message in messages().values())


class TestSettingNames:
    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("SINGLEFLIGHT_TLL", "SINGLEFLIGHT_TTL"),
            ("SINGLEFLIGHT_ENABLE", "SINGLEFLIGHT_ENABLED"),
            ("SINGLEFLIGHT_MAXHOLD", "SINGLEFLIGHT_MAX_HOLD"),
            ("SINGLE_FLIGHT_CACHE", "SINGLEFLIGHT_CACHE"),
            ("SINGELFLIGHT_PREFIX", "SINGLEFLIGHT_PREFIX"),
        ],
    )
    def test_a_misspelt_one_is_told_with_the_nearest(
        self, settings: Any, name: str, nearest: str
    ) -> None:
        setattr(settings, name, 3)

        message = messages()["W001"]

        assert name in message.msg
        assert message.hint == f"Did you mean {nearest}?"

    def test_one_that_resembles_none_is_told_with_all(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_ZZZ_QQQ_JJJ_KKK_XXX = 3

        assert "SINGLEFLIGHT_POLL_INTERVAL" in str(messages()["W001"].hint)

    @pytest.mark.parametrize("name", ["FLIGHT_TTL", "CACHE_TTL", "SINGLE_SIGN_ON_CACHE"])
    def test_another_apps_is_left_alone(self, settings: Any, name: str) -> None:
        setattr(settings, name, 3)

        assert messages() == {}


class TestSettingValues:
    def test_an_impossible_one_is_told_by_its_name(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_TTL = "10"

        assert messages()["E002"].msg.startswith("SINGLEFLIGHT_TTL must be a number of seconds")

    def test_so_is_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLL_MAX_WAIT_SEC", "a minute")

        assert "POLL_MAX_WAIT_SEC" in messages()["E002"].msg

    def test_an_impossible_store_is_told_once(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = "memcached"
        settings.SINGLEFLIGHT_CACHE = None

        assert [message.id for message in checks.check()] == ["singleflight_django.E002"] * 2


class TestStorePath:
    def test_one_that_cannot_be_imported(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = "shop.stores.EtcdStore"

        assert set(messages()) == {"E003"}

    @pytest.mark.parametrize("store", ["builtins.object", "redis", "cache", "database"])
    def test_one_that_can(self, settings: Any, store: str) -> None:
        settings.SINGLEFLIGHT_STORE = store

        assert messages() == {}


class TestAlias:
    def test_one_that_is_missing_is_told_with_the_nearest(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_CACHE = "defualt"

        assert messages()["E010"].hint == "Did you mean 'default'?"

    def test_one_that_resembles_none(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_CACHE = "xyz"

        assert "SINGLEFLIGHT_CACHE" in str(messages()["E010"].hint)

    def test_one_that_exists(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_CACHE = "core"

        assert messages() == {}

    @pytest.mark.parametrize("store", ["database", "builtins.object"])
    def test_a_store_that_is_no_cache_needs_none(self, settings: Any, store: str) -> None:
        settings.SINGLEFLIGHT_CACHE = "xyz"
        settings.SINGLEFLIGHT_STORE = store

        assert messages() == {}


class TestBackend:
    @pytest.mark.parametrize("path", ["", "shop.caches.EtcdCache", f"{BACKENDS}.redis.RedisCash"])
    def test_one_that_cannot_be_imported(self, cache: Any, path: str) -> None:
        cache(path)

        assert set(messages()) == {"E011"}

    def test_one_that_can(self, cache: Any) -> None:
        cache(f"{BACKENDS}.redis.RedisCache", DEAD_URL)

        assert messages() == {}


class TestExclusion:
    @pytest.mark.parametrize(
        ("backend", "number"),
        [
            ("dummy.DummyCache", "E012"),
            ("filebased.FileBasedCache", "E013"),
            ("db.DatabaseCache", "E014"),
        ],
    )
    def test_backends_that_give_a_lease_to_several_callers(
        self, cache: Any, backend: str, number: str
    ) -> None:
        cache(f"{BACKENDS}.{backend}", "leases")

        message = messages()[number]

        assert message.is_serious()
        assert "'default'" in message.msg
        assert "SINGLEFLIGHT_ENABLED = False" in str(message.hint)

    @pytest.mark.parametrize(
        "backend",
        [
            f"{BACKENDS}.redis.RedisCache",
            f"{BACKENDS}.memcached.PyMemcacheCache",
            f"{BACKENDS}.memcached.PyLibMCCache",
            "django_redis.cache.RedisCache",
            f"{__name__}.OwnRedis",
            f"{BACKENDS}.base.BaseCache",  # stands for one that we have never heard of
        ],
    )
    def test_backends_that_are_fine_or_unknown(self, cache: Any, backend: str) -> None:
        cache(backend, DEAD_URL, **({"timeout": 2} if "PyMemcache" in backend else {}))

        assert messages() == {}
        assert deployment_messages() == {}

    def test_another_alias_may_be_what_it_likes(self, settings: Any) -> None:
        settings.CACHES = {
            "default": {"BACKEND": f"{BACKENDS}.dummy.DummyCache"},
            "leases": django_core(DEAD_URL),
        }
        settings.SINGLEFLIGHT_CACHE = "leases"

        assert messages() == {}


class TestShared:
    @pytest.fixture(
        autouse=True, params=[f"{BACKENDS}.locmem.LocMemCache", f"{__name__}.OwnLocMem"]
    )
    def private(self, request: pytest.FixtureRequest, cache: Any) -> None:
        cache(request.param)

    def test_memory_of_one_process_is_a_warning_while_developing(self, settings: Any) -> None:
        settings.DEBUG = True

        assert set(messages()) == {"W015"}
        assert set(deployment_messages()) == {"E016", "W040"}

    def test_it_is_a_warning_in_a_test_run(self, settings: Any) -> None:
        """The test runner turns DEBUG off and then checks: an error would stop every test."""
        assert settings.DEBUG is False

        assert set(messages()) == {"W015"}

    def test_it_is_an_error_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(mail, "outbox")

        assert set(messages()) == {"E016"}
        assert set(deployment_messages()) == {"W040"}, "told once is enough"


class TestSharedForReal:
    """Settings in a file, and `manage.py check` as a person types it."""

    @pytest.mark.parametrize(
        ("debug", "arguments", "status", "number"),
        [
            (True, [], 0, "W015"),
            (True, ["--deploy", "--tag", "singleflight"], 1, "E016"),
            (False, [], 1, "E016"),
        ],
    )
    def test_exit_status(
        self, tmp_path: Path, debug: bool, arguments: list[str], status: int, number: str
    ) -> None:
        (tmp_path / "site_settings.py").write_text(
            f"DEBUG = {debug}\nSECRET_KEY = 'x'\nINSTALLED_APPS = ['singleflight_django']\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "django", "check", *arguments],
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "site_settings",
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())]),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

        assert done.returncode == status, done.stderr
        assert f"singleflight_django.{number}" in done.stderr


class TestOutagesShow:
    @pytest.fixture
    def ignoring(self, settings: Any) -> None:
        settings.CACHES = {"default": django_redis(DEAD_URL, IGNORE_EXCEPTIONS=True)}

    @pytest.mark.usefixtures("ignoring")
    def test_an_option_that_hides_them(self) -> None:
        message = messages()["W017"]

        assert "IGNORE_EXCEPTIONS" in message.msg
        assert 'SINGLEFLIGHT_STORE = "redis"' in str(message.hint)

    @pytest.mark.usefixtures("ignoring")
    def test_leases_that_do_not_go_through_the_cache_are_not_hidden(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = "redis"

        assert messages() == {}

    @pytest.mark.parametrize(
        ("backend", "name"),
        [
            ("django_redis.cache.RedisCache", "DJANGO_REDIS_IGNORE_EXCEPTIONS"),
            ("django_valkey.cache.ValkeyCache", "DJANGO_VALKEY_IGNORE_EXCEPTIONS"),
        ],
    )
    def test_the_site_wide_setting_of_the_backend(
        self, settings: Any, cache: Any, backend: str, name: str
    ) -> None:
        pytest.importorskip(backend.split(".")[0])
        setattr(settings, name, True)

        cache(backend, DEAD_URL)
        assert name in messages()["W017"].msg

        cache(backend, DEAD_URL, IGNORE_EXCEPTIONS=False)
        assert messages() == {}

        cache(f"{BACKENDS}.redis.RedisCache", DEAD_URL)
        assert messages() == {}

    def test_memcacheds_own_option(self, cache: Any) -> None:
        backend = f"{BACKENDS}.memcached.PyMemcacheCache"

        cache(backend, "127.0.0.1:1", ignore_exc=True, timeout=2)
        message = messages()["W017"]
        assert message.hint == "Point SINGLEFLIGHT_CACHE at an alias without ignore_exc."

        cache(backend, "127.0.0.1:1", ignore_exc=False, timeout=2)
        assert messages() == {}


class TestTtlIsKept:
    @pytest.mark.parametrize(
        "client", ["django_redis.client.HerdClient", "django_valkey.client.HerdClient"]
    )
    def test_a_client_that_adds_to_it(self, cache: Any, client: str) -> None:
        package = client.split(".")[0]
        pytest.importorskip(package)
        backends = {"django_redis": "RedisCache", "django_valkey": "ValkeyCache"}
        cache(f"{package}.cache.{backends[package]}", DEAD_URL, CLIENT_CLASS=client)

        assert set(messages()) == {"W018"}

    @pytest.mark.parametrize(
        "client", ["django_redis.client.DefaultClient", "no.such.Client", None]
    )
    def test_a_client_that_does_not(self, cache: Any, client: str | None) -> None:
        cache("django_redis.cache.RedisCache", DEAD_URL, CLIENT_CLASS=client)

        assert messages() == {}


class TestOneServerDecides:
    @pytest.mark.parametrize(
        "location", [[DEAD_URL, DEAD_URL], (DEAD_URL, DEAD_URL), f"{DEAD_URL},{DEAD_URL}"]
    )
    def test_writes_that_fail_over(self, cache: Any, location: object) -> None:
        cache("django_redis.cache.RedisCache", location, REPLICA_READ_ONLY=False)

        assert set(messages()) == {"W019"}

    @pytest.mark.parametrize(
        ("location", "read_only"),
        [(DEAD_URL, False), ([DEAD_URL], False), ([DEAD_URL, DEAD_URL], True), (None, False)],
    )
    def test_writes_that_do_not(self, cache: Any, location: object, read_only: bool) -> None:
        cache("django_redis.cache.RedisCache", location, REPLICA_READ_ONLY=read_only)

        assert messages() == {}

    def test_another_backend_does_not_fail_over(self, cache: Any) -> None:
        cache(f"{BACKENDS}.redis.RedisCache", [DEAD_URL, DEAD_URL], REPLICA_READ_ONLY=False)

        assert messages() == {}


class TestACacheThatGuardsName:
    @pytest.fixture(autouse=True)
    def caches(self, settings: Any) -> None:
        settings.CACHES = {
            "default": django_redis(DEAD_URL),
            "locks": {"BACKEND": f"{BACKENDS}.dummy.DummyCache"},
        }

    def test_it_is_asked_about_too(self, settings: Any) -> None:
        message = of_view(settings, lock("<pk>", cache="locks"))["E012"]

        assert "'locks'" in message.msg
        assert str(message.hint).startswith("Point cache= of the guards at ")

    def test_so_it_is_where_a_single_flight_names_it(self) -> None:
        answers = SingleFlight("answers", cache="locks")

        assert "'locks'" in messages()["E012"].msg

        del answers
        gc.collect()
        assert messages() == {}

    def test_it_is_not_where_nobody_names_it(self, settings: Any) -> None:
        assert of_view(settings, lock("<pk>")) == {}

    def test_it_is_not_where_leases_are_in_the_database(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = "database"

        assert of_view(settings, lock("<pk>", cache="locks")) == {}
