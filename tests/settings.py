"""The settings of the test run. Importing them starts nothing: they only choose where things are.

The test process chooses ports and paths once and leaves them in its environment, so that the
processes which a test starts with these settings find the same servers and the same database.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

from tests.servers import database_settings, free_port, with_database

# Workers of pytest-xdist share their parent's environment, but nothing else.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")


def _chosen(name: str, choose: Callable[[], str]) -> str:
    variable = f"SINGLEFLIGHT_RUN_{name}_{WORKER}"
    if variable not in os.environ:
        os.environ[variable] = choose()
    return os.environ[variable]


def _run_directory() -> str:
    return os.path.join(tempfile.gettempdir(), f"singleflight-tests-{os.getpid()}")


def _redis_url() -> str:
    given = os.environ.get("SINGLEFLIGHT_TEST_REDIS_URL", "")
    if not given:
        return f"redis://127.0.0.1:{free_port()}/0"
    number = int(WORKER.removeprefix("gw")) if WORKER.startswith("gw") else 0
    return with_database(given, plus=number)


def _postgres_url() -> str:
    given = os.environ.get("SINGLEFLIGHT_TEST_POSTGRES_URL", "")
    return given or f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"


RUN_DIRECTORY = _chosen("DIRECTORY", _run_directory)
REDIS_URL = _chosen("REDIS_URL", _redis_url)
# Nobody listens there, and no server of ours can be given that port.
DEAD_URL = "redis://127.0.0.1:1/0"
POSTGRES_URL = _chosen("POSTGRES_URL", _postgres_url)
# The database of the "default" alias, and the variable that names the aliases besides.
DEFAULT_DATABASE = os.environ.get("SINGLEFLIGHT_TEST_DATABASE", "sqlite")
MORE_DATABASES = f"SINGLEFLIGHT_RUN_MORE_DATABASES_{WORKER}"

SECRET_KEY = "not a secret: only tests use it"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "tests.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    *(
        app
        for app in ("rest_framework", "singleflight_django", "testproject.lessons")
        if importlib.util.find_spec(app.split(".")[0]) is not None
        and importlib.util.find_spec(app) is not None
    ),
    "tests.library",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# A file, not memory: threads and processes share it. NAME is the test database itself, so that
# processes which a test starts open that one.
_SQLITE = os.path.join(RUN_DIRECTORY, "db.sqlite3")
# Fast rather than crash-proof: a disk that is busy makes each commit wait for a tenth of a second.
UNSAFE = {"init_command": "PRAGMA synchronous=OFF"}


def database(kind: str) -> dict[str, Any]:
    """The settings of a database alias: "sqlite", "postgres" or "mariadb"."""
    if kind == "postgres":
        return database_settings(POSTGRES_URL, WORKER)
    if kind == "mariadb":
        pymysql = importlib.import_module("pymysql")
        # Django looks for a recent mysqlclient.
        pymysql.version_info = (2, 2, 7, "final", 0)
        pymysql.install_as_MySQLdb()
        return database_settings(os.environ["SINGLEFLIGHT_TEST_MARIADB_URL"], WORKER)
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _SQLITE,
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE", **UNSAFE},
        "TEST": {"NAME": _SQLITE},
    }


DATABASES = {
    "default": database(DEFAULT_DATABASE),
    **{alias: database(alias) for alias in os.environ.get(MORE_DATABASES, "").split()},
}


# In seconds: what a busy machine needs now and then is no fault. Tests of faults set their own.
SOCKET_TIMEOUT = 5.0


def django_redis(url: str, **options: Any) -> dict[str, Any]:
    """A cache alias as a site with django-redis writes it."""
    bounds = dict.fromkeys(("SOCKET_CONNECT_TIMEOUT", "SOCKET_TIMEOUT"), SOCKET_TIMEOUT)
    options = {**bounds, **options}
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": options}


def django_core(url: str, **options: Any) -> dict[str, Any]:
    """A cache alias as a site with Django's own Redis backend writes it."""
    bounds = dict.fromkeys(("socket_connect_timeout", "socket_timeout"), SOCKET_TIMEOUT)
    options = {**bounds, **options}
    return {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": url,
        "OPTIONS": options,
    }


CACHES: dict[str, dict[str, Any]] = {
    "default": django_redis(REDIS_URL),
    "core": django_core(REDIS_URL),
    "ignoring": django_redis(REDIS_URL, IGNORE_EXCEPTIONS=True),
    "dead": django_redis(DEAD_URL),
    "dead_core": django_core(DEAD_URL),
    "dead_ignoring": django_redis(DEAD_URL, IGNORE_EXCEPTIONS=True),
    "locmem": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "locmem"},
    "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
}
if importlib.util.find_spec("django_valkey") is not None:
    CACHES["valkey"] = {
        "BACKEND": "django_valkey.cache.ValkeyCache",
        "LOCATION": REDIS_URL.replace("redis://", "valkey://", 1),
        "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": SOCKET_TIMEOUT, "SOCKET_TIMEOUT": SOCKET_TIMEOUT},
    }
