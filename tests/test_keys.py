"""``key=`` of the decorators: what it may be, and the keys that one request gets."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import date
from typing import Any
from uuid import UUID

import pytest
from django.http import HttpRequest
from django.test import RequestFactory
from django.urls import ResolverMatch, register_converter
from django.utils.asyncio import async_unsafe
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from singleflight_django.exceptions import KeyFieldError
from singleflight_django.keys import KeySpec

ID = "12345678-1234-5678-1234-56781234abcd"
SPELLINGS = [
    ID,
    ID.upper(),
    ID.replace("-", ""),
    f"{{{ID}}}",
    f"urn:uuid:{ID}",
    "1234-56781234567812345678-1234abcd",
]


class Fortnight:
    """A converter of a project's own: 2026-03 and 26-3 are the same to it."""

    regex = r"[0-9]{2,4}-[0-9]{1,2}"

    def to_python(self, value: str) -> date:
        year, _, month = value.partition("-")
        return date(int(year) % 100 + 2000, int(month), 1)

    def to_url(self, value: date) -> str:
        return value.strftime("%Y-%m")


register_converter(Fortnight, "fortnight")


def requested(
    query: str = "", body: Any = None, kwargs: dict[str, object] | None = None
) -> HttpRequest:
    """A POST with a JSON body, at a URL with these arguments."""
    body = {"content_type": "application/json", "data": body} if body is not None else {}
    request = RequestFactory().post(f"/lessons/?{query}", **body)
    request.resolver_match = ResolverMatch(requested, (), kwargs or {})
    return request


def keys(key: object, request: HttpRequest, *args: object, **kwargs: object) -> tuple[str, ...]:
    return KeySpec(key).keys(request, args, kwargs)


class TestOneField:
    @pytest.mark.parametrize("spelling", SPELLINGS)
    @pytest.mark.parametrize("field", ["uuid", "body.uuid", "query.uuid", "header.uuid"])
    def test_every_spelling_of_a_uuid_is_one_key(self, spelling: str, field: str) -> None:
        request = requested(f"uuid={spelling}", {"uuid": spelling})
        request.META["HTTP_UUID"] = spelling
        assert keys(f"lesson:<{field}>", request) == (f"lesson:{ID}",)

    def test_a_uuid_may_be_spelt_differently_in_the_url_and_the_body(self) -> None:
        request = requested(f"uuid={SPELLINGS[4]}", {"uuid": ID.upper()}, {"uuid": UUID(ID)})
        assert keys("<uuid>", request) == (ID,)

    @pytest.mark.parametrize(
        ("field", "value", "part"),
        [
            ("int:n", "007", "7"),
            ("int:n", "7", "7"),
            ("int:n", 7, "7"),
            ("n", 7, "7"),
            ("n", -7, "-7"),
            ("n", "007", "007"),
            ("str:n", 7, "7"),
            ("str:n", ID.upper(), ID.upper()),
            ("n", " a b ", "%20a%20b%20"),
            ("n", "a/b", "a%2Fb"),
            ("n", "\x00\n", "%00%0A"),
            ("n", "\ud800", "%ED%A0%80"),
            ("path:n", "a/b", "a%2Fb"),
            ("slug:n", "a-b_1", "a-b_1"),
            ("uuid:n", ID.upper(), ID),
            ("fortnight:n", "26-3", "2026-03"),
        ],
    )
    def test_a_value_goes_through_the_converter(self, field: str, value: object, part: str) -> None:
        assert keys(f"k:<{field}>", requested(body={"n": value})) == (f"k:{part}",)

    def test_a_bare_uuid_field_opts_out_with_str(self) -> None:
        assert keys("<str:uuid>", requested(body={"uuid": ID.upper()})) == (ID.upper(),)
        assert keys("<str:uuid>", requested(body={"uuid": "none at all"})) == ("none%20at%20all",)

    @pytest.mark.parametrize(
        ("field", "value", "reason"),
        [
            ("n", "", "is empty"),
            ("n", " \t", "is empty"),
            ("n", None, "is null"),
            ("n", True, "is a boolean"),
            ("n", 1.5, "is a float"),
            ("n", 7.0, "is a float"),
            ("n", ["a"], "is a list"),
            ("n", [], "is a list"),
            ("n", {"a": 1}, "is an object"),
            ("int:n", True, "is a boolean"),
            ("int:n", "seven", "is not a valid int"),
            ("int:n", "-7", "is not a valid int"),
            ("int:n", -7, "is not a valid int"),
            ("int:n", "7 ", "is not a valid int"),
            ("int:n", "7\n", "is not a valid int"),
            ("int:n", "\u0667", "is not a valid int"),
            ("int:n", "7" * 5000, "is not a valid int"),
            ("str:n", "a/b", "is not a valid str"),
            ("slug:n", "a b", "is not a valid slug"),
            ("uuid:n", "lesson", "is not a valid uuid"),
            ("uuid:n", ID[:-1], "is not a valid uuid"),
            ("uuid:n", 7, "is not a valid uuid"),
            ("fortnight:n", "2026-13", "is not a valid fortnight"),
            ("fortnight:n", "x2026-03", "is not a valid fortnight"),
        ],
    )
    @pytest.mark.parametrize("source", ["", "body."])
    def test_a_value_that_makes_no_key_is_refused(
        self, source: str, field: str, value: object, reason: str
    ) -> None:
        converter, _, name = field.rpartition(":")
        written = f"{converter}:{source}{name}".removeprefix(":")
        with pytest.raises(KeyFieldError, match=r"^<") as refused:
            keys(f"k:<{written}>", requested(body={"n": value}))
        assert str(refused.value).startswith(f"<{written}> in the body {reason}")
        assert refused.value.field == written
        assert not refused.value.too_large

    @pytest.mark.parametrize("field", ["n", "body.n", "query.n", "url.n", "header.n", "body.n.m"])
    def test_a_missing_field_is_refused(self, field: str) -> None:
        with pytest.raises(KeyFieldError, match=f"<{field}> is missing") as refused:
            keys(f"k:<{field}>", requested("m=1", {"m": 1}, {"m": 1}))
        assert refused.value.field == field

    @pytest.mark.parametrize("query", ["n=1&n=2", "n=1&n=1", "n=&n=1"])
    @pytest.mark.parametrize("field", ["n", "query.n"])
    def test_a_repeated_field_is_refused(self, query: str, field: str) -> None:
        with pytest.raises(KeyFieldError, match="query string is given more than once"):
            keys(f"<{field}>", requested(query))

    @pytest.mark.parametrize(
        "body", ['{"n": 1, "n": 2}', '{"n": 1, "n": 1}', '{"n": 1, "o": {}, "\\u006e": 1}']
    )
    def test_a_name_repeated_in_a_json_object_is_refused(self, body: str) -> None:
        with pytest.raises(KeyFieldError, match="body is given more than once"):
            keys("<n>", requested(body=body))

    def test_a_repeated_name_elsewhere_in_the_body_does_not_matter(self) -> None:
        body = '{"n": 1, "o": {"n": 2, "n": 3}, "p": 4, "p": 5}'
        assert keys("<n>", requested(body=body)) == ("1",)
        with pytest.raises(KeyFieldError, match="more than once"):
            keys("<body.o.n>", requested(body=body))
        with pytest.raises(KeyFieldError, match="more than once"):
            keys("<body.p.q>", requested(body=body))


class TestManySources:
    @pytest.mark.parametrize(
        ("query", "body", "kwargs"),
        [
            ("n=7", None, {}),
            ("", {"n": 7}, {}),
            ("", {"n": "7"}, {}),
            ("", None, {"n": 7}),
            ("n=7", {"n": 7}, {"n": "7"}),
        ],
    )
    def test_a_bare_field_is_found_wherever_it_is(
        self, query: str, body: object, kwargs: dict[str, object]
    ) -> None:
        assert keys("k:<n>", requested(query, body, kwargs)) == ("k:7",)
        assert keys("k:<int:n>", requested(query, body, kwargs)) == ("k:7",)

    @pytest.mark.parametrize(
        ("query", "body", "kwargs", "places"),
        [
            ("n=8", {"n": 7}, {}, "query string and the body"),
            ("n=8", None, {"n": 7}, "URL and the query string"),
            ("", {"n": 8}, {"n": 7}, "URL and the body"),
            ("n=7", {"n": 8}, {"n": 7}, "query string and the body"),
            ("n=007", {"n": 7}, {}, "query string and the body"),
        ],
    )
    def test_different_values_in_two_places_are_refused(
        self, query: str, body: object, kwargs: dict[str, object], places: str
    ) -> None:
        """A client must not be able to choose another key than the view reads."""
        with pytest.raises(KeyFieldError, match=f"different values in the {places}"):
            keys("k:<n>", requested(query, body, kwargs))

    def test_values_that_differ_are_compared_after_conversion(self) -> None:
        assert keys("k:<int:n>", requested("n=007", {"n": 7})) == ("k:7",)

    @pytest.mark.parametrize(("query", "body"), [("n=", {"n": 7}), ("n=7", {"n": None})])
    def test_an_unusable_value_in_one_place_is_refused(self, query: str, body: object) -> None:
        with pytest.raises(KeyFieldError, match=r"is empty|is null"):
            keys("<n>", requested(query, body))

    def test_an_explicit_source_looks_nowhere_else(self) -> None:
        request = requested("n=1", {"n": 2}, {"n": 3})
        request.META["HTTP_N"] = "4"
        key = "<query.n>:<body.n>:<url.n>:<header.n>"
        assert keys(key, request) == ("1:2:3:4",)

    def test_a_dotted_path_goes_into_the_body(self) -> None:
        request = requested(body={"order": {"id": 7, "lines": [{"id": 8}]}})
        assert keys("<body.order.id>", request) == ("7",)
        for path in ("body.order.lines.id", "body.order.id.x", "body.id", "body.order.x"):
            with pytest.raises(KeyFieldError, match="is missing"):
                keys(f"<{path}>", request)

    def test_a_dotted_path_is_one_name_of_a_form_and_of_the_query_string(self) -> None:
        request = RequestFactory().post("/?order.id=8", {"order.id": "7"})
        assert keys("<body.order.id>:<query.order.id>", request) == ("7:8",)


class TestTheUrl:
    def test_without_a_resolver_match_the_calls_own_arguments_are_the_urls(self) -> None:
        assert keys("<n>:<url.n>", RequestFactory().get("/"), n=7) == ("7:7",)

    def test_an_argument_that_is_not_of_the_url_is_not_the_urls(self) -> None:
        """Ninja gives its handlers the query's and the body's values as arguments, too."""
        with pytest.raises(KeyFieldError, match="is missing"):
            keys("<url.n>", requested(kwargs={"m": 1}), n=7)

    def test_the_views_own_argument_counts_where_it_differs(self) -> None:
        """Ninja has parsed it; or another view has called this one with a pk of its choice."""
        assert keys("<n>", requested(kwargs={"n": "007"}), n=7) == ("7",)

    @pytest.mark.parametrize(
        ("field", "value", "part"),
        [
            ("n", UUID(ID), ID),
            ("uuid:n", UUID(ID), ID),
            ("str:n", UUID(ID), ID),
            ("n", date(2026, 3, 1), "2026-03-01"),
            ("fortnight:n", date(2026, 3, 1), "2026-03"),
        ],
    )
    def test_an_argument_may_be_what_the_urls_converter_made(
        self, field: str, value: object, part: str
    ) -> None:
        assert keys(f"<{field}>", requested(kwargs={"n": value})) == (part,)

    @pytest.mark.parametrize("value", [None, 1.5, True])
    def test_an_argument_without_a_text_is_refused(self, value: object) -> None:
        with pytest.raises(KeyFieldError, match="in the URL is"):
            keys("<n>", requested(kwargs={"n": value}))

    def test_an_object_in_the_url_is_a_fault_of_the_code(self) -> None:
        with pytest.raises(TypeError, match="of a model instance the pk"):
            keys("<n>", requested(kwargs={"n": object()}))


class TestWhatAKeyMayBe:
    @pytest.mark.parametrize(
        ("key", "made"),
        [
            (lambda request, **kwargs: "lesson:1", ("lesson:1",)),
            (lambda request, **kwargs: "a b:%", ("a%20b:%25",)),
            (lambda request, **kwargs: ("lesson", 1, UUID(ID)), (f"lesson:1:{ID}",)),
            (lambda request, **kwargs: ["b", ("a", 1), "b"], ("a:1", "b")),
            (lambda request, pk: f"{request.method}:{pk}", ("POST:7",)),
            (functools.partial(lambda x, request, pk: f"{x}:{pk}", "x"), ("x:7",)),
            ("lesson:<pk>", ("lesson:7",)),
            (["lesson:<pk>", "course:<pk>"], ("course:7", "lesson:7")),
            (["lesson:<pk>", "lesson:7", lambda request, pk: "lesson:7"], ("lesson:7",)),
            (["z", lambda request, pk: ["y", "x"]], ("x", "y", "z")),
            ("everything", ("everything",)),
        ],
    )
    def test_a_template_a_callable_or_a_list(self, key: object, made: tuple[str, ...]) -> None:
        """Several keys come sorted, each once."""
        assert keys(key, requested(kwargs={"pk": 7}), pk=7) == made

    def test_a_callable_gets_what_the_view_gets(self) -> None:
        def key(request: HttpRequest, *args: object, **kwargs: object) -> tuple[object, ...]:
            return (*args, *kwargs, *kwargs.values())  # type: ignore[arg-type]

        assert KeySpec(key).keys(requested(), ("a", 1), {"b": 2}) == ("a:1:b:2",)

    @pytest.mark.parametrize(
        ("key", "error", "cure"),
        [
            ("", ValueError, "Name what two calls share"),
            ([], ValueError, "Name what two calls share"),
            ([""], ValueError, "Name what two calls share"),
            ("<order.id>", ValueError, "is not a source"),
            (["fine", "<order.id>"], ValueError, "is not a source"),
            ("<yyyy:n>", ValueError, "int, path, slug, str, uuid"),
            (None, TypeError, "a key is a template"),
            (7, TypeError, "a key is a template"),
            (b"key", TypeError, "a key is a template"),
            (("a", "b"), TypeError, "A tuple is one key where a callable returns it"),
            ([["a"]], TypeError, "a key is a template"),
        ],
    )
    def test_anything_else_is_refused_at_once(
        self, key: object, error: type[Exception], cure: str
    ) -> None:
        with pytest.raises(error, match=re.escape(cure)):
            KeySpec(key)

    def test_an_async_callable_is_refused_at_once(self) -> None:
        async def key(request: HttpRequest) -> str:
            return "lesson"

        class Key:
            async def __call__(self, request: HttpRequest) -> str:
                return "lesson"

        for coroutine in (key, functools.partial(key), Key(), [key]):
            with pytest.raises(TypeError, match="is async"):
                KeySpec(coroutine)

    @pytest.mark.parametrize(
        ("result", "error", "reason"),
        [
            (None, TypeError, "NoneType"),
            ("", ValueError, "empty"),
            ("  ", ValueError, "blank"),
            ((), ValueError, "empty tuple"),
            ([], ValueError, "empty list"),
            (("a", None), TypeError, "NoneType"),
            (("a", ""), ValueError, "is empty"),
            (["a", None], TypeError, "NoneType"),
            ([["a"]], TypeError, "list"),
            (7, TypeError, "int"),
            (True, TypeError, "bool"),
            (b"a", TypeError, "bytes"),
            ({"a"}, TypeError, "set"),
            (gettext_lazy("lesson"), TypeError, "proxy"),
            (("a", gettext_lazy("lesson")), TypeError, "proxy"),
        ],
    )
    def test_a_callable_without_a_usable_result_is_a_fault_of_the_code(
        self, result: object, error: type[Exception], reason: str
    ) -> None:
        """None never becomes the text "None", and nobody shares a key by accident."""

        def lesson_key(request: HttpRequest) -> object:
            return result

        with pytest.raises(error, match="lesson_key returned no usable key") as refused:
            keys(lesson_key, requested())
        assert reason in str(refused.value)

    def test_a_callable_that_returns_a_coroutine_is_a_fault_of_the_code(self) -> None:
        async def key(request: HttpRequest) -> str:
            return "lesson"

        with pytest.raises(TypeError, match="coroutine"):
            keys(lambda request: key(request), requested())

    def test_what_a_callable_raises_is_left_alone(self) -> None:
        def key(request: HttpRequest) -> str:
            raise ValueError("mine")

        with pytest.raises(ValueError, match=r"^mine$"):
            keys(key, requested())


class TestWithoutARequest:
    @pytest.mark.parametrize(
        ("key", "made"), [("import:7", ("import:7",)), (["b", "a", "b"], ("a", "b"))]
    )
    def test_keys_without_fields_need_no_request(self, key: object, made: tuple[str, ...]) -> None:
        spec = KeySpec(key)
        assert spec.static
        assert spec.fields == ()
        assert spec.static_keys() == made == spec.keys(None, (), {})

    @pytest.mark.parametrize("key", ["a:<pk>", ["a", "<user>"], lambda request: "a"])
    def test_other_keys_say_how_to_write_the_value(self, key: object) -> None:
        spec = KeySpec(key)
        assert not spec.static
        with pytest.raises(ValueError, match=r'semaphore_lock\(f"import:\{pk\}"\)'):
            spec.static_keys()

    def test_the_fields_of_all_templates_are_known(self) -> None:
        spec = KeySpec(["<a>:<url.b>", "c", "<user>", lambda request: "d"])
        assert [field.text for field in spec.fields] == ["a", "url.b", "user"]


class LazyUser:
    is_authenticated = True
    pk = 7


@async_unsafe("queries the database")
def load_user() -> LazyUser:
    return LazyUser()


@pytest.mark.parametrize(
    "key", ["lesson:<user>", lambda request: ("lesson", request.user.pk), "lesson:<n>", "lesson:7"]
)
async def test_in_an_async_view_a_user_or_a_callable_may_query(
    key: str | Callable[[Any], object],
) -> None:
    request = requested("n=7")
    request.user = SimpleLazyObject(load_user)
    assert await KeySpec(key).akeys(request, (), {}) == ("lesson:7",)
