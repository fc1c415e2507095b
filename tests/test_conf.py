"""The settings are read at use, in one form, and impossible ones say what is possible."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from singleflight_django.conf import LONGEST, SETTING_NAMES, checked, conf, seconds

DEFAULTS = {
    "SINGLEFLIGHT_CACHE": "default",
    "SINGLEFLIGHT_STORE": None,
    "SINGLEFLIGHT_PREFIX": "singleflight",
    "SINGLEFLIGHT_TTL": 10,
    "SINGLEFLIGHT_WAIT": 60,
    "SINGLEFLIGHT_POLL_INTERVAL": 0.5,
    "SINGLEFLIGHT_RESULT_TTL": 0,
    "SINGLEFLIGHT_MAX_HOLD": 600,
    "SINGLEFLIGHT_MAX_BYTES": 1_000_000,
    "SINGLEFLIGHT_ENABLED": True,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """No setting and no variable of the machine that runs the tests."""
    monkeypatch.delenv("POLL_MAX_WAIT_SEC", raising=False)
    for name in SETTING_NAMES:
        if hasattr(settings, name):
            delattr(settings, name)


class TestSeconds:
    @pytest.mark.parametrize(
        ("value", "number"),
        [
            (3, 3.0),
            (0.25, 0.25),
            (Decimal("1.5"), 1.5),
            (timedelta(minutes=1, milliseconds=500), 60.5),
            (LONGEST, float(LONGEST)),
        ],
    )
    def test_a_number_or_a_timedelta_becomes_a_float(self, value: object, number: float) -> None:
        answer = seconds(value, "ttl")

        assert number == answer
        assert isinstance(answer, float)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            0,
            -1,
            timedelta(0),
            timedelta(seconds=-1),
            float("nan"),
            float("inf"),
            float("-inf"),
            Decimal("NaN"),
            Decimal("sNaN"),
            LONGEST + 1,
            10**400,
            -(10**400),
        ],
    )
    def test_what_is_not_positive_and_finite_is_a_value_error(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"^ttl must be "):
            seconds(value, "ttl")

    @pytest.mark.parametrize("value", [True, False, "10", b"10", [10], object()])
    def test_another_type_is_a_type_error(self, value: object) -> None:
        with pytest.raises(TypeError, match=r"^ttl must be a number of seconds or a timedelta"):
            seconds(value, "ttl")

    def test_zero_will_do_only_where_it_is_asked_for(self) -> None:
        assert seconds(0, "wait", zero=True) == 0.0
        assert seconds(timedelta(0), "wait", zero=True) == 0.0
        with pytest.raises(ValueError, match="wait must be 0 or more"):
            seconds(-0.001, "wait", zero=True)


class TestDefaults:
    def test_every_setting_has_its_documented_default(self) -> None:
        assert {name: getattr(conf, name) for name in SETTING_NAMES} == DEFAULTS


class TestReadAtUse:
    def test_override_settings_works_and_ends(self) -> None:
        with override_settings(SINGLEFLIGHT_TTL=3, SINGLEFLIGHT_CACHE="locks"):
            assert conf.SINGLEFLIGHT_TTL == 3.0
            assert conf.SINGLEFLIGHT_CACHE == "locks"

        assert conf.SINGLEFLIGHT_TTL == 10.0
        assert conf.SINGLEFLIGHT_CACHE == "default"

    @pytest.mark.parametrize(
        "name",
        [
            "SINGLEFLIGHT_TTL",
            "SINGLEFLIGHT_WAIT",
            "SINGLEFLIGHT_POLL_INTERVAL",
            "SINGLEFLIGHT_RESULT_TTL",
            "SINGLEFLIGHT_MAX_HOLD",
        ],
    )
    def test_a_timedelta_is_as_good_as_seconds(self, settings: Any, name: str) -> None:
        setattr(settings, name, timedelta(seconds=2))

        assert getattr(conf, name) == 2.0

    def test_a_flight_may_be_waited_for_not_at_all(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_WAIT = 0

        assert conf.SINGLEFLIGHT_WAIT == 0.0


class TestWaitFromTheEnvironment:
    @pytest.mark.parametrize(("text", "number"), [("45", 45.0), (" 1.5 ", 1.5), ("", 60.0)])
    def test_the_variable_is_the_default(
        self, monkeypatch: pytest.MonkeyPatch, text: str, number: float
    ) -> None:
        monkeypatch.setenv("POLL_MAX_WAIT_SEC", text)

        assert number == conf.SINGLEFLIGHT_WAIT

    def test_the_setting_goes_before_the_variable(
        self, monkeypatch: pytest.MonkeyPatch, settings: Any
    ) -> None:
        monkeypatch.setenv("POLL_MAX_WAIT_SEC", "45")
        settings.SINGLEFLIGHT_WAIT = 5

        assert conf.SINGLEFLIGHT_WAIT == 5.0

    @pytest.mark.parametrize("text", ["a minute", "nan", "inf", "-1"])
    def test_an_impossible_variable_is_named(
        self, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        monkeypatch.setenv("POLL_MAX_WAIT_SEC", text)

        with pytest.raises(ImproperlyConfigured, match="environment variable POLL_MAX_WAIT_SEC"):
            conf.SINGLEFLIGHT_WAIT  # noqa: B018


class TestImpossibleValues:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SINGLEFLIGHT_CACHE", None),
            ("SINGLEFLIGHT_CACHE", ""),
            ("SINGLEFLIGHT_STORE", "memcached"),
            ("SINGLEFLIGHT_STORE", ""),
            ("SINGLEFLIGHT_STORE", object),
            ("SINGLEFLIGHT_PREFIX", ""),
            ("SINGLEFLIGHT_PREFIX", "my locks"),
            ("SINGLEFLIGHT_PREFIX", "{locks}"),
            ("SINGLEFLIGHT_PREFIX", "l" * 41),
            ("SINGLEFLIGHT_PREFIX", None),
            ("SINGLEFLIGHT_TTL", None),
            ("SINGLEFLIGHT_TTL", 0),
            ("SINGLEFLIGHT_TTL", "10"),
            ("SINGLEFLIGHT_WAIT", None),
            ("SINGLEFLIGHT_WAIT", -1),
            ("SINGLEFLIGHT_POLL_INTERVAL", 0),
            ("SINGLEFLIGHT_RESULT_TTL", -1),
            ("SINGLEFLIGHT_MAX_HOLD", 0),
            ("SINGLEFLIGHT_MAX_BYTES", 0),
            ("SINGLEFLIGHT_MAX_BYTES", 1e6),
            ("SINGLEFLIGHT_MAX_BYTES", True),
            ("SINGLEFLIGHT_ENABLED", "False"),
            ("SINGLEFLIGHT_ENABLED", 0),
            ("SINGLEFLIGHT_ENABLED", None),
        ],
    )
    def test_it_is_refused_at_use_by_its_name(
        self, settings: Any, name: str, value: object
    ) -> None:
        setattr(settings, name, value)

        with pytest.raises(ImproperlyConfigured, match=rf"^{name} must be .+, not .+\.$"):
            getattr(conf, name)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SINGLEFLIGHT_STORE", "redis"),
            ("SINGLEFLIGHT_STORE", "cache"),
            ("SINGLEFLIGHT_STORE", "database"),
            ("SINGLEFLIGHT_STORE", "shop.stores.EtcdStore"),
            ("SINGLEFLIGHT_PREFIX", "shop:locks"),
            ("SINGLEFLIGHT_MAX_BYTES", 1),
            ("SINGLEFLIGHT_ENABLED", False),
            ("SINGLEFLIGHT_ENABLED", "observe"),
        ],
    )
    def test_every_possible_form_is_taken(self, settings: Any, name: str, value: object) -> None:
        setattr(settings, name, value)

        assert value == getattr(conf, name)


class TestRemembering:
    """A value is checked once for each setting of it, and never outlives that."""

    def test_what_is_set_while_it_is_read_is_not_covered_up(self, settings: Any) -> None:
        """By another thread: A reads 5, B sets 77, A remembers; the next one has to get 77."""
        settings.SINGLEFLIGHT_TTL = 5

        class Slow:
            @checked
            def SINGLEFLIGHT_TTL(self) -> float:  # noqa: N802
                found: float = settings.SINGLEFLIGHT_TTL
                settings.SINGLEFLIGHT_TTL = 77
                return found

        slow = Slow()
        assert slow.SINGLEFLIGHT_TTL == 5
        assert slow.SINGLEFLIGHT_TTL == 77

    def test_settings_of_another_package_are_read_each_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Dynamic:
            """As dynaconf's: what it says is not among its attributes."""

            def __init__(self, inner: Any) -> None:
                self.inner, self.ttl = inner, 7.0

            def __getattr__(self, name: str) -> Any:
                return self.ttl if name == "SINGLEFLIGHT_TTL" else getattr(self.inner, name)

        dynamic = Dynamic(django_settings._wrapped)
        monkeypatch.setattr(django_settings, "_wrapped", dynamic)
        assert conf.SINGLEFLIGHT_TTL == 7
        dynamic.ttl = 9.0
        # Django itself remembers what it has once looked up.
        vars(django_settings).pop("SINGLEFLIGHT_TTL", None)
        assert conf.SINGLEFLIGHT_TTL == 9

    def test_one_that_is_deleted_is_the_default_again(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_TTL = 5
        assert conf.SINGLEFLIGHT_TTL == 5
        del settings.SINGLEFLIGHT_TTL
        assert conf.SINGLEFLIGHT_TTL == 10

    def test_one_that_is_set_by_hand_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert conf.SINGLEFLIGHT_TTL == 10
        monkeypatch.setattr(django_settings, "SINGLEFLIGHT_TTL", 3, raising=False)
        assert conf.SINGLEFLIGHT_TTL == 3
        monkeypatch.undo()
        assert conf.SINGLEFLIGHT_TTL == 10
