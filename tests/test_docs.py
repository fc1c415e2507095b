"""The pages in docs/ say what the code does: their examples run, and what they name exists."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import shutil
import sys
import time
import unittest
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import redis
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.management import call_command
from django.db import connection, connections, models
from django.http import HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import include, path

from singleflight_django import principals, semaphore_lock, signals
from singleflight_django.exceptions import LeaseLostError
from singleflight_django.testing import held
from testproject.lessons.models import LessonSession
from tests.markdown import ROOT, Page, check_example
from tests.walker import Walker

PAGES = {page.stem: Page(page) for page in sorted((ROOT / "docs").glob("*.md"))}
RECIPES, TASKS = PAGES["recipes"], PAGES["tasks"]
README = Page(ROOT / "README.md")
# What a site may do without.
OPTIONAL = (
    "celery",
    "django.tasks",
    "ninja",
    "opentelemetry",
    "prometheus_client",
    "rest_framework",
)
ON_SHOW = {'"lessons.Lesson.': '"lessons.LessonSession.', '"lessons.Event.': '"library.Event.'}

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
with_rows = pytest.mark.django_db
with_commits = pytest.mark.django_db(transaction=True)

Lessons = dict[str, list[Any]]


class Event(models.Model):
    event_id = models.CharField(max_length=100, unique=True)

    class Meta:
        app_label = "library"

    def __str__(self) -> str:
        return self.event_id


class Stock(models.Model):
    level = models.IntegerField()
    fence = models.BigIntegerField(default=0)

    class Meta:
        app_label = "library"

    def __str__(self) -> str:
        return str(self.level)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Lessons:
    """The app ``lessons`` that the examples import. Returns the calls of each of its functions."""
    calls: Lessons = {}

    def noting(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        calls[name] = []

        def function(*args: Any) -> Any:
            calls[name].append(args)
            return answer(*args)

        return function

    async def asked(question: str) -> str:
        return f"answer to {question}"

    app = {
        "models": {"Lesson": LessonSession, "Event": Event},
        "tasks": {"handle_event": None, "prepare": None},
        "payments": {
            "charge": lambda key, amount: {"charged": amount},
            "ask_model": asked,
            "draw_plan": lambda what, language: {"plan": f"{what} {language}"},
        },
        "imports": {"import_rows": lambda source: []},
    }
    monkeypatch.setitem(sys.modules, "lessons", ModuleType("lessons"))
    for name, contents in app.items():
        module = ModuleType(f"lessons.{name}")
        for word, value in contents.items():
            vars(module)[word] = (
                value if isinstance(value, type) else noting(word, value or (lambda *args: None))
            )
        monkeypatch.setitem(sys.modules, module.__name__, module)
    settings.WEBHOOK_SECRET = b"whsec"
    return calls


def example(page: Page, says: str) -> dict[str, Any]:
    """Run the one example that has a text in it, and return the names that it makes."""
    return run_example(page.block("python", says))


def run_example(code: str) -> dict[str, Any]:
    for shown, ours in ON_SHOW.items():
        code = code.replace(shown, ours)
    module = ModuleType(f"lessons.example_{uuid4().hex}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, "example", "exec"), vars(module))  # noqa: S102 - it is what we test
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(OPTIONAL):
            raise
        pytest.skip(f"needs {error.name}")
    finally:
        del sys.modules[module.__name__]
    return vars(module)


@pytest.fixture
def site(settings: Any) -> Callable[..., None]:
    """Serves views: ``site(("lessons/<str:pk>/", view))``."""

    def serve(*routes: tuple[str, Any]) -> None:
        urls = ModuleType("urls_of_docs")
        urls.urlpatterns = [path(*route) for route in routes]  # type: ignore[attr-defined]
        settings.ROOT_URLCONF = urls

    return serve


def client_of(name: str = "ann", kind: Any = Client) -> Any:
    client = kind()
    client.force_login(User.objects.get_or_create(username=name)[0])
    return client


class TestPages:
    @each_page
    def test_examples_are_python_and_use_what_there_is(self, page: Page) -> None:
        for code in page.blocks("python"):
            check_example(code)

    @pytest.mark.parametrize("page", [*PAGES.values(), README], ids=[*PAGES, "README"])
    def test_links_lead_somewhere(self, page: Page) -> None:
        for link in page.links():
            file, _, heading = link.partition("#")
            target = (page.path.parent / file).resolve() if file else page.path
            assert target.exists(), link
            heads = [line for line in target.read_text().splitlines() if line.startswith("#")]
            slugs = {head.lstrip("# ").lower().replace(" ", "-").replace(",", "") for head in heads}
            assert not heading or heading in slugs, link

    @each_page
    def test_what_is_imported_exists(self, page: Page) -> None:
        for code in page.blocks("python"):
            for line in code.splitlines():
                if line.startswith("from singleflight_django"):
                    run_example(line)

    @pytest.mark.parametrize("page", [RECIPES, TASKS], ids=["recipes", "tasks"])
    def test_every_recipe_can_be_imported(self, page: Page, calls: Lessons) -> None:
        for code in page.blocks("python"):
            try:
                run_example(code)
            except pytest.skip.Exception:
                continue


@with_rows
class TestRecipesForViews:
    @with_commits
    def test_a_signed_webhook(self, calls: Lessons, site: Any) -> None:
        site(("hook/", example(RECIPES, "def webhook")["webhook"]))
        body, now = json.dumps({"id": "evt_1"}), str(int(time.time()))
        right = hmac.new(b"whsec", f"{now}.{body}".encode(), hashlib.sha256).hexdigest()

        def deliver(signature: str) -> int:
            headers = {"Signature": f"t={now},v1={signature}"}
            request = Client().post("/hook/", body, "application/json", headers=headers)
            return request.status_code

        assert deliver("0" * 64) == 400
        with held("webhook:evt_1"):
            assert deliver(right) == 429
        assert [deliver(right), deliver(right)] == [200, 204]
        assert calls["handle_event"] == [("evt_1",)]
        assert [event.event_id for event in Event.objects.all()] == ["evt_1"]

    def test_a_form(self, calls: Lessons, site: Any, settings: Any) -> None:
        pages = {"taken.html": "taken", "lesson_form.html": "{{ form }}"}
        loader = ("django.template.loaders.locmem.Loader", pages)
        settings.TEMPLATES = [
            {**settings.TEMPLATES[0], "APP_DIRS": False, "OPTIONS": {"loaders": [loader]}}
        ]
        site(("create/", example(RECIPES, "class LessonForm")["create"]))
        ann, ben = client_of("ann"), client_of("ben")
        form = {"uuid": str(uuid4()), "course": "algebra"}

        answers = [client.post("/create/", form) for client in (ann, ann, ben)]

        assert "csrf" not in ann.get("/create/").content.decode()
        assert [answer.status_code for answer in answers] == [302, 302, 409]
        assert answers[0].url == answers[1].url == f"/lessons/{form['uuid']}/"
        assert LessonSession.objects.count() == 1

    def test_create_with_the_clients_uuid(self, calls: Lessons, site: Any) -> None:
        recipe = example(RECIPES, "def put_lesson(request):\n    lesson, created")
        site(("lessons/", recipe["put_lesson"]))
        ann, uuid = client_of("ann"), str(uuid4())

        def post(client: Client, course: str) -> int:
            return client.post("/lessons/", {"uuid": uuid, "course": course}).status_code

        assert [post(ann, "algebra"), post(ann, "algebra")] == [201, 200]
        assert [post(ann, "music"), post(client_of("ben"), "algebra")] == [409, 409]

    def test_idempotency_key(self, calls: Lessons, site: Any) -> None:
        site(("pay/", example(RECIPES, "def pay")["pay"]))
        ann = client_of("ann")

        def pay(client: Client, amount: str, **headers: str) -> Any:
            return client.post("/pay/", {"amount": amount}, headers=headers)

        first, second = (pay(ann, "5", idempotency_key="k1") for _ in range(2))

        assert (first.status_code, first.content) == (second.status_code, second.content)
        assert second.headers["Cache-Status"].startswith("singleflight; hit; ttl=")
        assert len(calls["charge"]) == 1
        assert pay(ann, "6", idempotency_key="k1").status_code == 409
        assert pay(ann, "6").status_code == 400
        assert pay(client_of("ben"), "5", idempotency_key="k1").status_code == 201

    def test_rest_framework(self, calls: Lessons, site: Any) -> None:
        pytest.importorskip("rest_framework")
        from rest_framework.routers import SimpleRouter

        recipe = example(RECIPES, "viewsets.ViewSet")
        router = SimpleRouter()
        router.register("lessons", recipe["Lessons"], basename="lesson")
        site(
            ("", include(router.urls)),
            ("plan/<int:pk>/", recipe["Plan"].as_view()),
            ("report/<int:pk>/", recipe["report"]),
        )
        ann, lesson = client_of("ann"), {"uuid": str(uuid4()), "course": "algebra"}

        def create() -> int:
            return ann.post("/lessons/", lesson, "application/json").status_code

        with held(f"lesson:{lesson['uuid']}"):
            assert create() == 429
            assert ann.delete(f"/lessons/{lesson['uuid']}/").status_code == 429
        assert [create(), create()] == [201, 409]
        with held("grade:7"):
            assert ann.post("/lessons/7/grade/").status_code == 204
        assert ann.post("/lessons/7/grade/").json() == {"graded": "7"}
        for url in ("/plan/7/", "/report/7/"):
            assert ann.get(url).headers["Cache-Status"] == "singleflight; fwd=miss; stored"
            assert Client().get(url).status_code == 403

    def test_ninja(self, calls: Lessons, site: Any) -> None:
        pytest.importorskip("ninja")
        site(("", example(RECIPES, "NinjaAPI")["api"].urls))
        ann, lesson = client_of("ann"), {"uuid": str(uuid4()), "course": "algebra"}

        def create() -> int:
            return ann.post("/lessons/", lesson, "application/json").status_code

        assert [create(), create()] == [200, 409]
        assert ann.get("/plans/7").json() == {"plan": 7}
        assert Client().get("/plans/7").status_code == 401

    @with_commits
    async def test_async_views(self, calls: Lessons, site: Any) -> None:
        recipe = example(RECIPES, "async def put_lesson")
        site(("answer/", recipe["answer"]), ("lessons/", recipe["put_lesson"]))
        ann = await sync_to_async(client_of)("ann", AsyncClient)
        lesson = {"uuid": str(uuid4()), "course": "algebra"}

        answers = [await ann.get("/answer/", {"q": "why"}) for _ in range(2)]
        codes = [(await ann.post("/lessons/", lesson)).status_code for _ in range(2)]

        assert [answer.json() for answer in answers] == [{"answer": "answer to why"}] * 2
        assert codes == [201, 200]
        await sync_to_async(connections.close_all)()

    def test_a_cascade_and_several_keys(self, calls: Lessons, site: Any) -> None:
        recipe = example(RECIPES, "def cascade")
        noted = []

        def noting(request: Any, **kwargs: Any) -> Any:
            answer = recipe["transfer"](request, **kwargs)
            noted.append(request.lease.keys)
            return answer

        site(
            ("cascade/<uuid:session_id>/<int:step>/", recipe["cascade"]),
            ("transfer/<int:giver>/<int:taker>/", noting),
        )

        answers = [
            Client().post(f"/cascade/{uuid4()}/1/", {"course": "music"}),
            Client().post("/transfer/7/3/"),
            Client().post("/transfer/3/7/"),
        ]

        assert [answer.status_code for answer in answers] == [204, 204, 204]
        assert noted == [("semaphore_lock:account:3", "semaphore_lock:account:7")] * 2


class TestRecipesForTasks:
    def test_celery(self, calls: Lessons) -> None:
        pytest.importorskip("celery")
        task = example(TASKS, "shared_task")["import_lessons"]

        assert task.apply(args=["x"]).state == "SUCCESS"
        with held("import:x"):
            assert task.apply(args=["x"], throw=False).state in ("RETRY", "FAILURE")
        assert calls["import_rows"] == [("x",)]

    def test_djangos_tasks(self, calls: Lessons) -> None:
        pytest.importorskip("django.tasks")
        task = example(TASKS, "from django.tasks")["import_lessons"]

        assert task.call("x") == "imported"
        with held("import:x"):
            assert task.call("x") == "someone is at it"

    def test_a_command(self, calls: Lessons) -> None:
        command = example(TASKS, "class Command")["Command"]
        told = StringIO()

        call_command(command(), stdout=told)
        with held("nightly import"):
            call_command(command(), stdout=told)

        assert told.getvalue() == "Another run is at it.\n"
        assert calls["import_rows"] == [("nightly",)]

    @with_commits
    def test_from_a_view_to_a_task(self, calls: Lessons, site: Any) -> None:
        site(("lessons/", example(TASKS, "partial(prepare")["create"]))

        lesson = client_of("ann").post("/lessons/", {"uuid": uuid4(), "course": "algebra"})

        assert calls["prepare"] == [(lesson.json()["id"],)]

    async def test_an_expensive_answer(self, calls: Lessons) -> None:
        recipe = example(TASKS, "plans = SingleFlight")
        plan, answer = recipe["plan"], recipe["answer"]

        def draw_twice() -> None:
            assert plan(7) == plan(7) == {"plan": "7 en"}
            assert len(calls["draw_plan"]) == 1
            recipe["drop_the_plan"](LessonSession(pk=7))
            assert plan(7) == {"plan": "7 en"}
            assert len(calls["draw_plan"]) == 2

        await asyncio.to_thread(draw_twice)
        assert await answer(1, "why") == "answer to why"

    def test_cache_warm_up(self, calls: Lessons) -> None:
        front_page = example(TASKS, "warming = ")["front_page"]

        assert front_page() == front_page() == {"plan": "front page en"}
        assert cache.get("front page") == {"plan": "front page en"}
        assert len(calls["draw_plan"]) == 1

    @with_rows
    def test_their_tests(self, calls: Lessons) -> None:
        case = example(TASKS, "class ImportTests")["ImportTests"]
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)

        result = unittest.TextTestRunner(stream=StringIO()).run(tests)

        assert result.testsRun == 2
        assert result.wasSuccessful(), result.failures + result.errors


class TestChoosing:
    def test_an_old_and_a_new_guard_can_stand_above_each_other(self, site: Any) -> None:
        @semaphore_lock(key="old:<pk>")
        @semaphore_lock(key="new:<pk>")
        def view(request: Any, pk: str) -> HttpResponse:
            return HttpResponse()

        site(("<str:pk>/", view))

        def code() -> int:
            return Client().post("/7/").status_code

        for key in ("old:7", "new:7"):
            with held(key):
                assert code() == 429
        assert code() == 200


class TestOperations:
    page = PAGES["operations"]

    def test_the_table_of_events_has_them_all_with_their_levels(self) -> None:
        shown = {name: cells[0] for name, cells in self.page.table("event").items()}

        assert shown == {
            name: logging.getLevelName(event.level("")) for name, event in signals._EVENTS.items()
        }
        assert {event.level(signals.STORE_AWAY) for event in signals._EVENTS.values()} == {
            logging.ERROR
        }

    @with_rows
    def test_the_fence_keeps_a_late_writer_out(self) -> None:
        stock = Stock.objects.create(level=1)
        late: list[int] = []
        names: dict[str, Any] = {
            "Stock": Stock,
            "ask_the_warehouse": lambda pk: late.pop()(),
            "connection": connection,
            "semaphore_lock": semaphore_lock,
            "LeaseLostError": LeaseLostError,
        }
        code = self.page.block("python", "def count(pk)")
        code = code[code.index("def count") :].replace("shop_stock", Stock._meta.db_table)
        exec(code, names)  # noqa: S102

        def successor_writes() -> int:
            Stock.objects.filter(pk=stock.pk).update(level=7, fence=time.time_ns() // 1000 + 10**6)
            return 5

        late.append(lambda: 3)
        names["count"](stock.pk)
        stock.refresh_from_db()
        assert stock.level == 3
        late.append(successor_writes)
        with pytest.raises(LeaseLostError):
            names["count"](stock.pk)
        stock.refresh_from_db()
        assert stock.level == 7

    @with_rows
    def test_and_so_in_the_orm(self) -> None:
        stock = Stock.objects.create(level=1)

        with semaphore_lock("stock") as lease:
            mine = Stock.objects.filter(pk=stock.pk, fence__lt=lease.fence)
            assert mine.update(level=2, fence=lease.fence) == 1
            assert Stock.objects.filter(pk=stock.pk, fence__lt=lease.fence).count() == 0
        with pytest.raises(ValueError, match="None"):
            Stock.objects.filter(fence__lt=None)


class TestSecurity:
    def test_a_lease_takes_no_more_memory_than_is_said(self, redis_client: redis.Redis) -> None:
        def taken() -> int:
            return sum(redis_client.memory_usage(key) for key in redis_client.keys("*"))

        with semaphore_lock(f"lesson:{uuid4()}"):
            assert 200 < taken() < 400
        assert 80 < taken() < 160

    def test_the_list_of_harmless_headers_is_where_it_is_said_to_be(self) -> None:
        assert "singleflight_django/principals.py" in PAGES["security"].text
        assert {"user-agent", "x-forwarded-host"} <= principals.HARMLESS

    def test_users_rules_about_headers_are_those_of_the_code(self) -> None:
        anonymous, known = RequestFactory().get("/"), RequestFactory().get("/")
        known.user = User(pk=1)
        for request in (anonymous, known):
            before = principals.principal(request)
            request.META["HTTP_X_TENANT"] = "b"
            vars(request).pop("headers", None)
            assert (principals.principal(request) == before) == (request is known)


class TestGuarantees:
    page = PAGES["guarantees"]

    def test_all_are_there_once(self) -> None:
        numbers = re.findall(r"^\| (\d+) \|", self.page.text, re.MULTILINE)

        assert numbers == [str(number) for number in range(1, 25)]

    def test_each_is_proved_somewhere(self) -> None:
        for line in self.page.lines:
            if re.match(r"\| \d+ \|", line):
                proofs = re.findall(r"`(\w+)`", line.rsplit(" | ", 1)[1])
                assert proofs, line
                for module in proofs:
                    text = (ROOT / "tests" / f"{module}.py").read_text()
                    assert "def test_" in text or "Contract" in text, module


def lasting(text: str) -> str:
    """What of an output is the same each time."""
    text = re.sub(r"(?m)^(Date|Server): .*", r"\1", text)
    # Durations and versions.
    return re.sub(r"[-+]?\d+(\.\d+)+", "#", text).strip()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_tutorial_can_be_walked(tmp_path: Path) -> None:
    with Walker(PAGES["tutorial"], tmp_path) as walker:
        steps = list(walker.steps())

    assert len(steps) > 10
    for command, said, printed in steps:
        assert lasting(printed) == lasting(said), command
