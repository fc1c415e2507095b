"""
Plain Django settings. The environment may say:

REDIS_URL          where the leases live (redis://127.0.0.1:6379/0)
DATABASE_URL       the database (a SQLite file beside manage.py); see ``database_url``
POLL_MAX_WAIT_SEC  longest time a caller waits; the library reads it itself
SINGLEFLIGHT_STORE the kind of store, where it isn't to be chosen by the cache's backend
LESSON_WORK_MS     how long a lesson's creation takes (30)
MODEL_URL          the model (http://127.0.0.1:8001); see ``racing.model``
PLANNER_URL        a service that plans lessons; see ``lessons.planning``
"""

from __future__ import annotations

import os
from pathlib import Path

from testproject import database_url

BASE_DIR = Path(__file__).resolve().parent.parent

# A test project: it listens on the loopback only and guards nothing.
SECRET_KEY = "not-a-secret"
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
# Off, so that a 500 is the small page that a real user would see.
DEBUG = False

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "rest_framework",
    "singleflight_django",
    "testproject.lessons",
]
# Neither sessions nor CSRF: the clients here are scripts that say who they are.
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES = {
    "default": database_url.parse(
        os.environ.get("DATABASE_URL") or f"sqlite:///{BASE_DIR / 'db.sqlite3'}"
    )
}

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ.get("REDIS_URL") or "redis://127.0.0.1:6379/0",
        # Without them a Redis that hangs would hang every view that asks it.
        "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2},
    }
}
SINGLEFLIGHT_STORE = os.environ.get("SINGLEFLIGHT_STORE") or None

# Without DEBUG Django would send the tracebacks to the ADMINS alone.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"]},
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
}

# Seconds; see ``testproject.lessons.creating``.
LESSON_WORK = int(os.environ.get("LESSON_WORK_MS") or 30) / 1000

MODEL_URL = os.environ.get("MODEL_URL") or "http://127.0.0.1:8001"
PLANNER_URL = os.environ.get("PLANNER_URL") or ""
