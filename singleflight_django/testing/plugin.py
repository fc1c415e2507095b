"""The pytest plugin: fixtures that keep the keys of tests apart, or switch the library off.

``singleflight_isolate = true`` in pytest's configuration gives every test keys of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Its laws are asserts, which pytest has to explain when they fail.
pytest.register_assert_rewrite("singleflight_django.testing.contract")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "singleflight_isolate",
        "give each test keys of its own, as the fixture singleflight_isolated does",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getini("singleflight_isolate"):
        config.pluginmanager.register(_IsolatesAll(), "singleflight_isolates_all")


class _IsolatesAll:
    @pytest.fixture(autouse=True)
    def _singleflight_isolates(self, request: pytest.FixtureRequest) -> None:
        # A run may have tests that know no Django.
        from django.conf import settings

        if settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE"):
            request.getfixturevalue("singleflight_isolated")


@pytest.fixture
def singleflight_isolated(request: pytest.FixtureRequest) -> Iterator[str]:
    """Keys of this test's own: what other tests, workers or runs have left behind isn't seen.

    Returns the prefix.
    """
    from singleflight_django.testing.switches import forget_stores, isolating_settings

    new = isolating_settings()
    with _overridden(request, new):
        yield new["SINGLEFLIGHT_PREFIX"]
        forget_stores(new["SINGLEFLIGHT_PREFIX"])


@pytest.fixture
def singleflight_disabled(request: pytest.FixtureRequest) -> Iterator[None]:
    """No guard guards in this test."""
    with _overridden(request, {"SINGLEFLIGHT_ENABLED": False}):
        yield


@contextmanager
def _overridden(request: pytest.FixtureRequest, new: dict[str, Any]) -> Iterator[None]:
    from django.test.utils import override_settings

    if not request.config.pluginmanager.has_plugin("django"):
        with override_settings(**new):
            yield
        return
    # pytest-django's own fixture must undo these and the test's in one order, the last one first.
    settings = request.getfixturevalue("settings")
    for name, value in new.items():
        setattr(settings, name, value)
    yield
