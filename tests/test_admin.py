"""The admin's page of live leases and flights, as its users see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape
from io import StringIO
from typing import Any
from urllib.parse import quote

import pytest
import redis
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils.translation import override

from singleflight_django import semaphore_lock, single_flight
from singleflight_django.admin import MOST, LiveLeaseAdmin
from singleflight_django.models import LiveLease
from singleflight_django.parts import qualify
from singleflight_django.stores.base import Conflict, Grant, Joining, Landing, Led, Status, Store
from singleflight_django.stores.database.store import DatabaseStore
from singleflight_django.stores.listing import Holding
from singleflight_django.stores.redis.links import Link
from singleflight_django.stores.redis.store import RedisStore
from singleflight_django.stores.registry import get_store
from tests.servers import Valkey
from tests.test_stores_listing import commands_of, plant

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

LONG = 60.0
KEY = "semaphore_lock:import:7"
PAGE = "/admin/singleflight_django/livelease/"
VIEW, RELEASE = "view_livelease", "release_livelease"
CacheAt = Callable[..., str]


@semaphore_lock(key="pay:<header.Idempotency-Key>")
def pay(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@single_flight(key="<session>", namespace="site: s")
def basket(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


ops = admin.AdminSite("ops")
ops.register(LiveLease, LiveLeaseAdmin)
urlpatterns = [
    path("admin/", admin.site.urls),
    path("ops/", ops.urls),
    path("pay/", pay),
    path("basket/", basket),
]


@pytest.fixture
def staff() -> Callable[..., Client]:
    """``staff("codename", …)`` is somebody with these permissions, logged in."""

    def client(*codenames: str, **options: Any) -> Client:
        user = User.objects.create_user("ann", is_staff=True)
        found = Permission.objects.filter(codename__in=codenames)
        assert len(found) == len(codenames)
        user.user_permissions.set(found)
        client = Client(**options)
        client.force_login(user)
        return client

    return client


@pytest.fixture
def ann(staff: Callable[..., Client]) -> Client:
    """She may do everything here."""
    return staff(VIEW, RELEASE)


@pytest.fixture
def store(redis_client: redis.Redis) -> Store:
    """With a lease in it that was taken five seconds ago, by the server's clock."""
    store = get_store()
    store.acquire(KEY, "secret1@web-1:11", LONG, 1, 0.0)
    redis_client.decrby(f"singleflight:{{{KEY}}}:fence", 5_000_000)
    return store


def read(client: Client, query: str = "", page: str = PAGE) -> str:
    response = client.get(f"{page}?{query}" if query else page)
    assert response.status_code == 200
    return response.content.decode()


def rows(text: str) -> list[list[str]]:
    """The cells of the table, as they are read."""
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in re.split(r"</t[hd]>", row)[:-1]]
        for row in re.split(r"</tr>", body)[:-1]
    ]


def link(text: str, key: str = KEY) -> str:
    """Where the first release button of a key leads."""
    for found in re.finditer(r'href="([^"]*)" aria-label="Release ([^"]*) of ', text):
        if unescape(found[2]) == key:
            return unescape(found[1])
    raise AssertionError(f"no button for {key}")


def told(response: Any) -> list[str]:
    """The messages after a POST that was followed."""
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


def is_free(store: Store, key: str = KEY) -> bool:
    return isinstance(store.acquire(key, "probe", LONG, 1, 0.0), Grant)


class TestList:
    def test_nothing_is_held(self, ann: Client) -> None:
        assert "Nothing is held." in read(ann)
        assert "No key with “import” in it is held." in read(ann, "q=import")

    def test_it_says_who_holds_what(self, ann: Client, store: Store) -> None:
        led = store.join("answers:s1", Joining("secret2@web-2:22", LONG, LONG))
        assert isinstance(led, Led)
        for follower in ("f1", "f2"):
            store.join("answers:s1", Joining(follower, LONG, LONG))
        for n in (1, 2):
            store.acquire("semaphore_lock:pool", f"p{n}@web-3:{n}", LONG, 2, 0.0)

        text = read(ann)

        first, second, *others = rows(text)
        assert first[:3] == [KEY, "lease", "web-1:11"]
        assert re.fullmatch(r"[5-9]\.\d s", first[3])
        assert re.fullmatch(r"5\d s|1 min 0 s", first[4])
        assert first[5] == "\N{EN DASH}"
        assert re.fullmatch(r"\d{16}", first[6])
        assert second[:3] == ["answers:s1", "flight", "web-2:22"]
        assert second[5:7] == ["2", str(led.flight)]
        # Of a semaphore with several holders it isn't known when each of them came.
        assert {tuple(row[2:4]) for row in others} == {("web-3:1", "?"), ("web-3:2", "?")}
        assert text.count("<meter ") == 3
        assert '<meter max="2" value="2" aria-label="Followers' in text
        assert "4 held" in text

    def test_the_oldest_comes_first_with_the_longest_bar(self, ann: Client, store: Store) -> None:
        store.acquire("semaphore_lock:a", "t@web:2", LONG, 1, 0.0)
        text = read(ann)
        assert [row[0] for row in rows(text)] == [KEY, "semaphore_lock:a"]
        bars = [
            (float(most), float(value))
            for most, value in re.findall(r'<meter max="([\d.]+)" value="([\d.]+)"', text)
        ]
        assert bars[0][0] == bars[0][1] == bars[1][0] > bars[1][1]

    def test_a_flight_without_followers_has_an_empty_bar(self, ann: Client) -> None:
        get_store().join("answers:s1", Joining("t@web:2", LONG, LONG))
        assert '<meter max="1" value="0" aria-label="Followers' in read(ann)

    def test_search_shows_the_keys_that_contain_a_text(self, ann: Client, store: Store) -> None:
        store.acquire("semaphore_lock:other", "t@web:2", LONG, 1, 0.0)
        text = read(ann, "q=+import+")
        assert [row[0] for row in rows(text)] == [KEY]
        assert 'value="import"' in text
        assert rows(read(ann, "q=*")) == []

    def test_no_token_is_shown(self, ann: Client, store: Store) -> None:
        text = read(ann)
        assert "secret1" not in text
        assert "secret1" not in read(ann, page=link(text))

    def test_a_hostile_key_is_only_text(self, ann: Client, store: Store) -> None:
        key = 'semaphore_lock:"><script>alert(1)</script>&{{ x }}'
        store.acquire(key, 't@"><i>:1', LONG, 1, 0.0)
        text = read(ann)
        asked = read(ann, page=link(text, key))
        done = ann.post(link(text, key), follow=True)
        assert key in rows(text)[1]
        assert key in unescape(asked)
        assert is_free(store, key)
        assert key in told(done)[0]
        for page in (text, asked, done.content.decode(), ann.get("/admin/").content.decode()):
            assert "<script>alert" not in page
            assert '"><i>' not in page

    def test_numbers_of_bars_have_no_locale(self, ann: Client, store: Store, settings: Any) -> None:
        settings.USE_THOUSAND_SEPARATOR = True
        with override("de"):
            text = read(ann)
        (bar,) = re.findall(r"<meter [^>]*>", text)
        assert re.search(r'max="\d\.\d{3}" value="\d\.\d{3}"', bar)
        assert re.fullmatch(r"\d{16}", rows(text)[0][6])

    def test_there_is_neither_a_script_nor_a_style_in_it(self, ann: Client, store: Store) -> None:
        """A strict Content-Security-Policy lets it be."""
        for text in (read(ann), read(ann, page=link(read(ann)))):
            content = text.partition('<div id="content"')[2].partition("<footer")[0]
            assert content
            assert not re.search(r"<script|<style|\bstyle=|\bon[a-z]+=|javascript:", content)

    def test_of_many_the_first_are_read(
        self, ann: Client, redis_server: Valkey, cache_at: CacheAt
    ) -> None:
        alias = cache_at(redis_server.url())
        with redis_server.client() as client:
            plant(client, 20_000, "singleflight")
            client.config_resetstat()
            text = read(ann, f"cache={alias}")
            assert commands_of(client)["zrangebyscore"]["calls"] < 2 * MOST
        assert len({row[0] for row in rows(text)}) == len(rows(text)) == MOST
        assert f"These are {MOST}, and there are more" in text
        assert "there are more" not in read(ann, f"cache={alias}&q=bulk:1999")

    def test_exactly_as_many_as_fit_are_all(
        self, ann: Client, redis_server: Valkey, cache_at: CacheAt
    ) -> None:
        alias = cache_at(redis_server.url())
        with redis_server.client() as client:
            plant(client, MOST, "singleflight")
        assert f"{MOST} held" in read(ann, f"cache={alias}")


class TestStores:
    def test_the_caches_that_can_list_are_to_choose_from(
        self, ann: Client, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken = {"BACKEND": "nowhere.Cache"}
        settings.CACHES = {**settings.CACHES, "broken": broken}
        text = read(ann, "cache=core")
        assert "<option selected>core</option>" in text
        offered = set(re.findall(r"<option[^>]*>(.*?)</option>", text))
        assert {"default", "core", "dead"} <= offered
        assert not offered & {"locmem", "dummy", "broken"}
        # Nobody asked for those: no word of them in the log either.
        assert caplog.records == []

    def test_where_there_is_one_there_is_nothing_to_choose(
        self, ann: Client, settings: Any
    ) -> None:
        settings.SINGLEFLIGHT_STORE = "database"
        assert "<select" not in read(ann)

    def test_another_cache_is_another_list(
        self, ann: Client, store: Store, redis_server: Valkey, cache_at: CacheAt
    ) -> None:
        alias = cache_at(redis_server.url())
        get_store(alias).acquire("semaphore_lock:there", "t@web:2", LONG, 1, 0.0)
        text = read(ann, f"cache={alias}")
        assert [row[0] for row in rows(text)] == ["semaphore_lock:there"]
        response = ann.post(link(text, "semaphore_lock:there"), follow=True)
        assert response.redirect_chain == [(f"{PAGE}?cache={alias}", 302)]
        assert is_free(get_store(alias), "semaphore_lock:there")
        assert not is_free(store)

    @pytest.mark.parametrize(
        ("alias", "says"),
        [
            ("dead", "did not answer"),
            ("dead_core", "did not answer"),
            ("locmem", "CacheStore can't list its leases"),
            ("nowhere", "CACHES has no 'nowhere'"),
            ("broken", "Could not find backend"),
        ],
    )
    def test_a_store_that_can_not_be_read_says_so(
        self, ann: Client, settings: Any, alias: str, says: str
    ) -> None:
        settings.CACHES = {**settings.CACHES, "broken": {"BACKEND": "nowhere.Cache"}}
        text = unescape(read(ann, f"cache={alias}"))
        assert says in re.findall(r'class="errornote">(.*?)</p>', text)[0]
        assert "Nothing is held" not in text
        for answer in (
            ann.get(f"{PAGE}release/?cache={alias}&key=k&id=i", follow=True),
            ann.post(f"{PAGE}release/?cache={alias}&key=k&id=i", follow=True),
        ):
            assert says in told(answer)[0]

    def test_a_store_that_fails_otherwise_is_logged(
        self, ann: Client, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings.SINGLEFLIGHT_STORE = f"{__name__}.Broken"
        assert "The store failed: ZeroDivisionError. Ask manage.py" in read(ann)
        assert caplog.records[-1].exc_info

    def test_the_tables_are_not_read(self, ann: Client, store: Store) -> None:
        with CaptureQueriesContext(connection) as queries:
            ann.get("/admin/")
            ann.post(link(read(ann)), follow=True)
        assert is_free(store)
        assert len(queries) > 3
        assert not [query for query in queries if "singleflight_django_lease" in query["sql"]]

    def test_what_is_in_the_database_is_listed_and_released_on_demand(
        self, ann: Client, store: Store
    ) -> None:
        second = DatabaseStore("singleflight")
        second.acquire("semaphore_lock:there", "t@web-9:9", LONG, 1, 0.0)
        assert len(rows(read(ann))) == 1
        text = read(ann, "database=1")
        assert {row[2] for row in rows(text)} == {"web-1:11", "web-9:9"}
        response = ann.post(link(text, "semaphore_lock:there"), follow=True)
        assert "it was web-9:9's" in told(response)[0]
        assert {row[2] for row in rows(response.content.decode())} == {"web-1:11"}

    def test_what_went_to_the_database_in_an_outage_can_be_released_in_it(
        self, ann: Client
    ) -> None:
        second = DatabaseStore("singleflight")
        second.acquire(KEY, "t@web-9:9", LONG, 1, 0.0)
        text = read(ann, "cache=dead&database=1")
        assert [row[2] for row in rows(text)] == ["web-9:9"]
        assert "did not answer" in text
        response = ann.post(link(text), follow=True)
        assert "it was web-9:9's" in told(response)[0]
        assert list(second.holdings()) == []

    @pytest.mark.django_db(transaction=True)
    def test_atomic_requests_are_not_in_the_way_of_the_database_store(
        self, ann: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        settings.SINGLEFLIGHT_STORE = "database"
        get_store().acquire(KEY, "t@web-9:9", LONG, 1, 0.0)
        assert "it was web-9:9's" in told(ann.post(link(read(ann)), follow=True))[0]
        assert list(get_store().holdings()) == []

    def test_a_dump_of_the_database_does_not_miss_a_table(self) -> None:
        call_command("dumpdata", "singleflight_django", stdout=StringIO())


class TestPermissions:
    @pytest.mark.parametrize("page", [PAGE, f"{PAGE}release/"])
    def test_who_is_not_staff_has_to_log_in(self, page: str) -> None:
        client = Client()
        for _ in range(2):
            assert client.get(page).headers["Location"].startswith("/admin/login/")
            client.force_login(User.objects.get_or_create(username="bob")[0])

    @pytest.mark.parametrize("codenames", [(), ("view_lease",), (RELEASE,)])
    def test_who_may_not_see_it_does_not(
        self, staff: Callable[..., Client], codenames: tuple[str, ...]
    ) -> None:
        client = staff(*codenames)
        assert client.get(PAGE).status_code == 403
        assert client.post(f"{PAGE}release/").status_code == 403
        assert PAGE not in client.get("/admin/").content.decode()

    def test_who_may_see_it_may_not_release(
        self, staff: Callable[..., Client], ann: Client, store: Store
    ) -> None:
        where = link(read(ann))
        User.objects.get(username="ann").user_permissions.set(
            Permission.objects.filter(codename=VIEW)
        )
        assert PAGE in ann.get("/admin/").content.decode()
        text = read(ann)
        assert len(rows(text)) == 1
        assert "release" not in text.partition("<tbody>")[2].lower()
        assert ann.get(where).status_code == ann.post(where).status_code == 403
        assert not is_free(store)

    def test_the_token_against_forgery_is_asked_for(
        self, staff: Callable[..., Client], store: Store
    ) -> None:
        client = staff(VIEW, RELEASE, enforce_csrf_checks=True)
        where = link(read(client))
        assert client.post(where).status_code == 403
        assert not is_free(store)
        # The form to log out has one, too.
        form = read(client, page=where).partition('<div id="content"')[2]
        (token,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
        client.post(where, {"csrfmiddlewaretoken": token})
        assert is_free(store)

    def test_nothing_can_be_added_changed_or_deleted(self, staff: Callable[..., Client]) -> None:
        root = Client()
        root.force_login(User.objects.create_superuser("root"))
        for page in ("add/", "1/", "1/change/", "1/delete/", "1/history/"):
            assert root.get(f"{PAGE}{page}").status_code == 404
        assert f"{PAGE}add" not in root.get("/admin/").content.decode()


class TestRelease:
    def test_it_asks_and_says_whose_it_is_and_what_will_happen(
        self, ann: Client, store: Store
    ) -> None:
        text = re.sub(r"<[^>]*>", "", read(ann, page=link(read(ann))))
        assert re.search(rf"{KEY} is held by web-1:11 for \d\.\d s \(lease; .* left\)\.", text)
        assert "The next caller gets in at once." in text
        assert "What web-1:11 is doing is not stopped." in text
        assert not is_free(store)

    def test_it_releases_tells_and_keeps_a_record(self, ann: Client, store: Store) -> None:
        response = ann.post(link(read(ann, "q=import")), follow=True)
        assert response.redirect_chain == [(f"{PAGE}?cache=default&q=import", 302)]
        (text,) = told(response)
        assert text.startswith(f"{KEY}: Released: it was web-1:11's.")
        assert is_free(store)
        assert store.release(KEY, "secret1@web-1:11") is False
        entry = LogEntry.objects.get()
        assert (entry.user.get_username(), entry.object_repr) == ("ann", KEY)
        assert entry.get_change_message() in text
        assert entry.content_type.model == "livelease"
        assert KEY in ann.get("/admin/").content.decode()

    def test_a_follower_takes_over_a_flight(self, ann: Client, store: Store) -> None:
        led = store.join("answers:s1", Joining("leader@web-3:33", LONG, LONG))
        assert isinstance(led, Led)
        store.join("answers:s1", Joining("follower", LONG, LONG))
        where = link(read(ann), "answers:s1")
        text = read(ann, page=where)
        assert "(flight, 1 follower;" in text
        assert "One of its followers takes it over" in text
        assert "A follower takes it over" in told(ann.post(where, follow=True))[0]
        landing = store.wait_landing("answers:s1", led.flight, "0", 1.0)
        assert isinstance(landing, Landing)
        assert landing.status == Status.VACANT

    def test_of_a_semaphore_one_holder_goes(self, ann: Client, store: Store) -> None:
        for n in (1, 2):
            store.acquire("semaphore_lock:pool", f"p{n}@web:{n}", LONG, 2, 0.0)
        ann.post(link(read(ann), "semaphore_lock:pool"))
        assert len(list(store.holdings("pool"))) == 1

    @pytest.mark.parametrize("method", ["get", "post"])
    def test_what_has_changed_hands_is_left_alone(
        self, ann: Client, store: Store, method: str
    ) -> None:
        where = link(read(ann))
        store.release(KEY, "secret1@web-1:11")
        store.acquire(KEY, "successor@web-2:22", LONG, 1, 0.0)
        response = getattr(ann, method)(where, follow=True)
        (text,) = told(response)
        assert "has ended meanwhile. It is held by web-2:22 for" in text
        assert "Nothing was released." in text
        assert isinstance(store.acquire(KEY, "third", LONG, 1, 0.0), Conflict)
        assert not LogEntry.objects.exists()

    def test_the_same_holder_that_has_come_again_is_left_alone(
        self, ann: Client, store: Store
    ) -> None:
        where = link(read(ann))
        store.release(KEY, "secret1@web-1:11")
        store.acquire(KEY, "again@web-1:11", LONG, 1, 0.0)
        assert "Nothing was released." in told(ann.post(where, follow=True))[0]
        assert not is_free(store)

    def test_what_has_ended_is_told(self, ann: Client, store: Store) -> None:
        where = link(read(ann))
        store.release(KEY, "secret1@web-1:11")
        assert "Nobody holds it now. Nothing was released." in told(ann.get(where, follow=True))[0]

    def test_who_names_nothing_is_sent_back(self, ann: Client, store: Store) -> None:
        response = ann.post(f"{PAGE}release/", follow=True)
        assert response.redirect_chain == [(f"{PAGE}?cache=default", 302)]
        assert told(response) == []
        assert not is_free(store)

    def test_what_ends_at_the_last_moment_is_told(self, ann: Client, settings: Any) -> None:
        settings.SINGLEFLIGHT_STORE = f"{__name__}.Late"
        get_store().acquire(KEY, "t@web-1:11", LONG, 1, 0.0)
        (text,) = told(ann.post(link(read(ann)), follow=True))
        assert "It has ended by itself: web-1:11 gave it back" in text
        assert not LogEntry.objects.exists()


class Broken(RedisStore):
    """A store of somebody else's, with a mistake in it."""

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(Link(alias), prefix)

    def holdings(self, contains: str = "") -> Iterator[Holding]:
        raise ZeroDivisionError


class Late(RedisStore):
    """Its holders always give back what is about to be taken from them."""

    def __init__(self, alias: str, prefix: str) -> None:
        super().__init__(Link(alias), prefix)

    def evict(self, holding: Holding) -> bool:
        self.release(holding.key, holding.token)
        return super().evict(holding)


class TestSecrets:
    PAY = qualify("semaphore_lock", "pay:s3cret")

    def test_parts_from_headers_and_the_session_are_short_digests(
        self, ann: Client, store: Store
    ) -> None:
        store.acquire(self.PAY, "t@web:2", LONG, 1, 0.0)
        store.join(qualify("site: s", "s3cret") + "#abc", Joining("t@web:3", LONG, LONG))
        text = read(ann)
        assert "s3cret" not in text
        lock, flight = sorted(row[0] for row in rows(text)[1:])
        assert re.fullmatch(r"semaphore_lock:pay:<[0-9a-f]{8}>", lock)
        assert re.fullmatch(r"site%3A%20s:<[0-9a-f]{8}>#abc", flight)
        for key in (lock, flight):
            assert [row[0] for row in rows(read(ann, f"q={quote(key)}"))] == [key]
            where = link(text, key)
            assert "s3cret" not in read(ann, page=where)
            assert told(ann.post(where, follow=True))[0].startswith(f"{key}: Released")
        assert [holding.key for holding in store.holdings()] == [KEY]

    def test_they_can_not_be_found_by_guessing(self, ann: Client, store: Store) -> None:
        store.acquire(self.PAY, "t@web:2", LONG, 1, 0.0)
        assert rows(read(ann, "q=pay:s")) == []
        assert len(rows(read(ann, "q=pay:"))) == 1

    def test_a_secret_in_a_key_that_was_cut_is_hidden(self, ann: Client, store: Store) -> None:
        store.acquire(qualify("semaphore_lock", "pay:" + "s3cret" * 50), "t@web:2", LONG, 1, 0.0)
        text = read(ann, "q=pay:")
        assert len(rows(text)) == 1
        assert "s3cret" not in text

    def test_a_template_without_secrets_hides_nothing(self, ann: Client, store: Store) -> None:
        assert rows(read(ann))[0][0] == KEY


def test_another_admin_site_has_its_own_page(ann: Client, store: Store) -> None:
    page = PAGE.replace("/admin/", "/ops/")
    text = read(ann, page=page)
    assert link(text).startswith(f"{page}release/")
    assert f'href="{page}' in read(ann, page=link(text))
    response = ann.post(link(text), follow=True)
    assert response.redirect_chain == [(f"{page}?cache=default", 302)]
    assert is_free(store)
