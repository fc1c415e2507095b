"""The test kit in a site's own test run: pytest, xdist, Django's runner; one Redis for all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest

from singleflight_django.testing import held
from tests.settings import REDIS_URL

# Each starts a test run, or several, on a machine that may be busy.
pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parent.parent
PLUGIN = "singleflight_django.testing.plugin"

SETTINGS = f"""
SECRET_KEY = "s"
ROOT_URLCONF = "site_views"
STATIC_URL = "/static/"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "singleflight_django"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
CACHES = {{
    "default": {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "{REDIS_URL}"}},
}}
"""
VIEWS = """
from django.http import HttpResponse
from django.urls import path
from singleflight_django import semaphore_lock
from singleflight_django.conf import conf

@semaphore_lock(key="lesson:<name>")
def create(request):
    return HttpResponse(conf.SINGLEFLIGHT_PREFIX, status=201)

urlpatterns = [path("create", create)]
"""
# Each of the tests leaves the same lease behind.
TESTS = """
from urllib.request import urlopen

import pytest
from django.test import LiveServerTestCase, TestCase, TransactionTestCase
from singleflight_django.testing import IsolatedKeysMixin, held

def leave_behind(client):
    assert client.post("/create", {"name": "7"}).status_code == 201
    held("lesson:7", ttl=60).enable()
    assert client.post("/create", {"name": "7"}).status_code == 429
"""
CLASSES = """
class InTestCase(BASES TestCase):
    def test_one(self):
        leave_behind(self.client)

    def test_two(self):
        leave_behind(self.client)

    async def test_async(self):
        assert (await self.async_client.post("/create", {"name": "7"})).status_code == 201
        held("lesson:7", ttl=60).enable()

class InTransactionTestCase(BASES TransactionTestCase):
    def test_one(self):
        leave_behind(self.client)

class InLiveServerTestCase(BASES LiveServerTestCase):
    def test_one(self):
        url = f"{self.live_server_url}/create"
        assert urlopen(url, b"name=7").status == 201
        leave_behind(self.client)
"""
FUNCTIONS = """
@pytest.mark.parametrize("number", range(3))
def test_function(number, client):
    leave_behind(client)

async def test_async_function(async_client):
    assert (await async_client.post("/create", {"name": "7"})).status_code == 201
    held("lesson:7", ttl=60).enable()

def test_that_fails(client):
    leave_behind(client)
    pytest.skip("in the middle of it")

@pytest.mark.django_db
def test_live_server(live_server, client):
    assert urlopen(f"{live_server.url}/create", b"name=7").status == 201
    leave_behind(client)
"""

Run = Callable[..., str]


@pytest.fixture
def site(tmp_path: Path) -> Run:
    """A site: its files, and what its test run says. Fails unless that ends with ``code``."""
    files = {"site_settings": SETTINGS, "site_views": VIEWS}
    known = entry_points(group="pytest11", name="singleflight_django")
    plugin = [] if known else ["-p", PLUGIN]

    def run(*args: str, code: int = 0, ini: str = "", runner: str = "pytest", **more: str) -> str:
        for name, text in {**files, **more}.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        asyncio = "" if "no:asyncio" in args else "asyncio_mode = auto\n"
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{asyncio}{ini}\n")
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
        }
        environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{tmp_path}"
        environ.pop("DJANGO_SETTINGS_MODULE", None)
        if "no:django" not in args:
            environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
        options = [*plugin, "-q", "-p", "no:cacheprovider"] if runner == "pytest" else []
        done = subprocess.run(
            [sys.executable, "-m", runner, *options, *args],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    return run


ISOLATE = "singleflight_isolate = true"
ALL = TESTS + CLASSES.replace("BASES ", "") + FUNCTIONS


@pytest.mark.soak
def test_without_isolation_a_lease_leaks_from_one_test_to_the_next(site: Run) -> None:
    said = site(test_all=ALL, code=1)
    assert "11 failed" not in said
    assert "429 == 201" in said


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_isolated_tests_see_nothing_of_each_other_nor_of_other_workers_and_runs(
    site: Run, workers: int
) -> None:
    held("lesson:7", ttl=60).enable()
    assert "10 passed, 1 skipped" in site("-n", f"{workers}", test_all=ALL, ini=ISOLATE)


def test_django_s_own_runner_isolates_by_the_mixin(site: Run) -> None:
    classes = CLASSES.replace("BASES", "IsolatedKeysMixin,")
    said = site("test", "--parallel=2", runner="django", test_all=TESTS + classes)
    assert "Ran 5 tests" in said
    assert "\nOK" in said


FIXTURES = """
import pytest
from singleflight_django.conf import conf
from singleflight_django.testing import held

def test_isolated(singleflight_isolated):
    assert conf.SINGLEFLIGHT_PREFIX == singleflight_isolated != "singleflight"

def test_settings_before(settings, singleflight_isolated):
    settings.SINGLEFLIGHT_TTL = 3
    assert conf.SINGLEFLIGHT_PREFIX == singleflight_isolated

def test_settings_after(singleflight_isolated, settings):
    settings.SINGLEFLIGHT_TTL = 3
    settings.SINGLEFLIGHT_PREFIX = "mine"

async def test_async(singleflight_isolated):
    assert conf.SINGLEFLIGHT_PREFIX == singleflight_isolated

@pytest.mark.usefixtures("singleflight_disabled")
def test_disabled(client):
    with held("lesson:7"):
        assert client.post("/create", {"name": "7"}).status_code == 201

def test_all_is_put_back():
    assert conf.SINGLEFLIGHT_PREFIX == "singleflight"
    assert conf.SINGLEFLIGHT_TTL == 10
    assert conf.SINGLEFLIGHT_ENABLED is True
"""


def test_fixtures_isolate_and_disable_one_test(site: Run) -> None:
    assert "6 passed" in site(test_fixtures=FIXTURES)


WITHOUT_PYTEST_DJANGO = """
import os
from django.conf import settings

def test_no_django_is_no_trouble():
    assert not settings.configured
    os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
    import django
    django.setup()

def test_isolated(singleflight_isolated):
    from singleflight_django.conf import conf
    assert conf.SINGLEFLIGHT_PREFIX == singleflight_isolated != "singleflight"

def test_disabled(singleflight_disabled):
    assert settings.SINGLEFLIGHT_ENABLED is False

def test_all_is_put_back(request):
    assert not hasattr(settings, "SINGLEFLIGHT_ENABLED")
    assert settings.SINGLEFLIGHT_PREFIX.startswith("singleflight.")
"""


def test_pytest_django_is_not_needed(site: Run) -> None:
    said = site("-p", "no:django", test_plain=WITHOUT_PYTEST_DJANGO, ini=ISOLATE)
    assert "4 passed" in said


LESSONS = """
from django.contrib.auth.models import Group
from django.http import HttpResponse
from django.urls import path
from singleflight_django import semaphore_lock

def create_lesson(uuid):
    if Group.objects.filter(name=uuid).exists():
        return 204
    Group.objects.create(name=uuid)
    return 201

@semaphore_lock(key="lesson:<uuid>")
def create(request):
    return HttpResponse(status=create_lesson(request.POST["uuid"]))

urlpatterns = [path("lessons/", create)]
"""


def test_the_examples_of_the_readme_are_true(site: Run) -> None:
    section = (ROOT / "README.md").read_text().split("## Testing")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = f"\nA, B, C = {[str(uuid4()) for _ in range(3)]}\n"
    # A file: race() has threads that write.
    on_file = """
ROOT_URLCONF = "lessons.views"
DATABASES["default"] |= {"TEST": {"NAME": "test.sqlite3"}, "OPTIONS": {"timeout": 20}}
"""
    said = site(
        ini=ISOLATE,
        test_readme=example + names,
        site_settings=SETTINGS + on_file,
        **{"lessons/views": LESSONS},
    )
    assert "2 passed" in said
    assert len(section.splitlines()) <= 26


STORE = """
from threading import Lock
from time import monotonic

import pytest
from singleflight_django.stores.base import Conflict, Grant, Store
from singleflight_django.testing.contract import StoreContract

class MemoryStore(Store):
    def __init__(self):
        self.lock, self.leases = Lock(), {}

    def live(self, key):
        held = self.leases.setdefault(key, {})
        for token in [token for token, ends in held.items() if ends <= monotonic()]:
            del held[token]
        return held

    def acquire(self, key, token, ttl, limit, wait):
        with self.lock:
            held = self.live(key)
            if token in held:
                return Grant(None)
            if len(held) < limit:
                held[token] = monotonic() + ttl
                return Grant(None)
            return Conflict(min(held.values()) - monotonic())

    def renew(self, claims):
        with self.lock:
            answers = [token in self.live(key) for key, token, _ in claims]
            for (key, token, ttl), ours in zip(claims, answers):
                if ours:
                    self.leases[key][token] = monotonic() + ttl
            return answers

    def release(self, key, token):
        with self.lock:
            return self.live(key).pop(token, None) is not None

    join = publish = forget = None

class OwnerlessStore(MemoryStore):
    def release(self, key, token):
        return self.leases.pop(key, None) is not None

class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()

class TestOwnerlessStore(StoreContract):
    @pytest.fixture
    def store(self):
        return OwnerlessStore()
"""


@pytest.mark.soak
def test_the_store_contract_tries_out_stores_of_others(site: Run) -> None:
    said = site("-p", "no:asyncio", ini="", test_store=STORE, code=1)
    assert "TestMemoryStore" not in said
    assert "FAILED test_store.py::TestOwnerlessStore::test_a_wrong_token_neither" in said
    assert "assert True is False" in said


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["pytest11"].values()
    assert path == PLUGIN
    assert find_spec(path) is not None


def test_importing_it_needs_no_settings_and_the_kit_no_pytest() -> None:
    code = (
        "import sys; import singleflight_django.testing; assert 'pytest' not in sys.modules;"
        f"import {PLUGIN}; from django.conf import settings; assert not settings.configured"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("DJANGO_SETTINGS_MODULE", None)
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=50)
