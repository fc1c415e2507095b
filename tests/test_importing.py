"""What importing the package does, and above all what it doesn't do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import singleflight_django

SETTINGS = """
import django
from django.conf import settings
settings.configure(
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}},
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["singleflight_django"],
    SECRET_KEY="x",
)
django.setup()
"""


def said_by(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", singleflight_django.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(singleflight_django, name).__name__ == name
    assert name in dir(singleflight_django)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'semaphore'"):
        singleflight_django.semaphore  # noqa: B018


def test_the_package_alone_loads_nothing_of_django() -> None:
    """So it costs no time that the site does not spend anyway."""
    program = "import sys, singleflight_django; print('django' in sys.modules)"
    assert said_by(program) == "False"


def test_before_the_first_use_there_is_no_thread_and_no_connection() -> None:
    """Nor is redis-py loaded: the server named here does not exist."""
    program = f"""{SETTINGS}
import sys, threading
from singleflight_django import *

@semaphore_lock(key="lesson:<uuid>")
def create(request): ...

@single_flight(key="lesson:<uuid>")
def detail(request): ...

answers = SingleFlight("answers")
print(threading.active_count(), "redis" in sys.modules)
"""
    assert said_by(program) == "1 False"
