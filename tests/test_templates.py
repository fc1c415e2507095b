"""Key templates: what is a template, what is refused, and that values never run together."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from singleflight_django.parts import ANONYMOUS, literal
from singleflight_django.templates import Field, parse
from tests.test_parts import NASTY


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        ("name", Field("name", "", ("name",))),
        ("lesson-id", Field("lesson-id", "", ("lesson-id",))),
        ("année", Field("année", "", ("année",))),
        ("int:pk", Field("int:pk", "", ("pk",), "int")),
        ("uuid", Field("uuid", "", ("uuid",), "uuid")),
        ("str:uuid", Field("str:uuid", "", ("uuid",), "str")),
        ("url.pk", Field("url.pk", "url", ("pk",))),
        ("url.uuid", Field("url.uuid", "url", ("uuid",), "uuid")),
        ("url.user", Field("url.user", "url", ("user",))),
        ("body.order.id", Field("body.order.id", "body", ("order", "id"))),
        ("body.lesson.uuid", Field("body.lesson.uuid", "body", ("lesson", "uuid"), "uuid")),
        ("body.uuid.id", Field("body.uuid.id", "body", ("uuid", "id"))),
        ("uuid:body.id", Field("uuid:body.id", "body", ("id",), "uuid")),
        ("query.q", Field("query.q", "query", ("q",))),
        ("query.body", Field("query.body", "query", ("body",))),
        ("header.Idempotency-Key", Field("header.Idempotency-Key", "header", ("Idempotency-Key",))),
        ("uuid:header.X-1", Field("uuid:header.X-1", "header", ("X-1",), "uuid")),
        ("user", Field("user", "user", ())),
        ("user?", Field("user?", "user", (), optional=True)),
        ("session", Field("session", "session", ())),
        ("method", Field("method", "method", ())),
        ("path", Field("path", "path", ())),
        ("path:rest", Field("path:rest", "", ("rest",), "path")),
    ],
)
def test_a_field_is_a_source_a_path_and_a_converter(inner: str, field: Field) -> None:
    assert parse(f"lesson:<{inner}>").fields == (field,)


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("", "Name what two calls share"),
        (" \n", "Name what two calls share"),
        ("a<b", "don't pair up"),
        ("a>b", "don't pair up"),
        ("<a", "don't pair up"),
        ("<<a>>", "don't pair up"),
        ("<a><", "don't pair up"),
        ("<>", "write <name>"),
        ("<int:>", "write <name>"),
        ("<:a>", "isn't <converter:name>"),
        ("<a:b:c>", "isn't <converter:name>"),
        ("< int:a>", "isn't <converter:name>"),
        ("< a>", "use a callable"),
        ("<a b>", "use a callable"),
        ("<1a>", "use a callable"),
        ("<body.>", "use a callable"),
        ("<body.a..b>", "use a callable"),
        ("<body.items.0>", "use a callable"),
        ("<query.a[]>", "use a callable"),
        ("<url.a.b>", "use a callable"),
        ("<url.a-b>", "use a callable"),
        ("<header.>", "use a callable"),
        ("<header.X.Y>", "use a callable"),
        ("<header.X Y>", "use a callable"),
        ("<order.id>", "there are <url.name>, <body.name>, <query.name>, <header.name>"),
        ("<uuid:order.id>", "'order' is not a source"),
        ("<body>", "write <body.name>, or <query.body>"),
        ("<int:query>", "write <query.name>"),
        ("<pk?>", "only <user?>"),
        ("<body.id?>", "only <user?>"),
        ("<session?>", "only <user?>"),
        ("<int:user>", "takes neither a converter nor a path; <url.user>"),
        ("<str:user?>", "takes neither a converter nor a path"),
        ("<user.pk>", "takes neither a converter nor a path"),
        ("<user?.pk>", "takes neither a converter nor a path"),
        ("<str:method>", "takes neither a converter nor a path"),
        ("<uuid:session>", "takes neither a converter nor a path"),
        ("<path.x>", "takes neither a converter nor a path"),
    ],
)
def test_what_is_no_template_is_refused_with_the_cure(text: str, cure: str) -> None:
    with pytest.raises(ValueError, match="template") as refused:
        parse(text)
    assert cure in str(refused.value)


def test_a_template_is_text() -> None:
    with pytest.raises(TypeError, match="is a str, not bytes"):
        parse(b"lesson")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "values", "key"),
    [
        ("import:<int:pk>", ["7"], "import:7"),
        ("import:7", [], "import:7"),
        ("100% <a> sure%", ["5%"], "100%25%205%25%20sure%25"),
        ("100%", [], "100%25"),
        ("a/<b>@<c>,d", ["x:y", "é"], "a/x%3Ay@%C3%A9,d"),
        ("<user?>", [ANONYMOUS], "*"),
        ("<user?>", ["*"], "%2A"),
        ("lesson:<a>-<b>", ["x-y", "z-z"], "lesson:x%2Dy-z-z"),
        ("<a><b>", ["x", "y"], "x!y"),
        ("<a> <b>", ["x", "y"], "x!%20y"),
    ],
)
def test_a_template_is_rendered(text: str, values: list[str], key: str) -> None:
    assert parse(text).render(values) == key


def test_a_rendered_template_and_the_literal_text_are_one_key() -> None:
    assert parse("import:<int:pk>").render(["7"]) == literal("import:7") == "import:7"
    assert parse("import:7").render([]) == literal("import:7")
    assert parse("pair:<a>-<b>").render(["7", "8"]) == literal("pair:7-8")


@pytest.mark.parametrize("values", [[], ["a", "b"], [""]])
def test_each_field_needs_one_value_that_is_not_empty(values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"needs 1 values|is empty"):
        parse("lesson:<a>").render(values)


@pytest.mark.parametrize(
    "between",
    [
        "",
        ":",
        "-",
        ".",
        "s",
        "2",
        "D",
        "2D",
        "%",
        " ",
        "%2",
        "-:",
        "as",
        "2s",
        "é",
        "!",
        "*",
        "AB-",
    ],
)
def test_the_values_of_two_fields_never_run_together(between: str) -> None:
    """Whatever stands between them, ("x-y", "z") and ("x", "y-z") are two keys."""
    alphabet = [*NASTY, *between]
    texts = sorted({*alphabet, *("".join(pair) for pair in product(alphabet[:7], repeat=2))})
    template = parse(f"x<a>{between}<b>")
    pairs = list(product([*texts, f"a{between}a"], repeat=2))
    assert len({template.render(pair) for pair in pairs}) == len(set(pairs))


def test_random_templates_never_give_one_key_for_different_values() -> None:
    random = Random(7)
    for _ in range(60):
        separators = ["".join(random.choices(NASTY, k=random.randrange(3))) for _ in range(4)]
        template = parse("<a>".join(separators))
        alphabet = [*NASTY, *filter(None, separators)]
        tuples = {
            tuple("".join(random.choices(alphabet, k=random.randint(1, 3))) for _ in range(3))
            for _ in range(300)
        }
        assert len({template.render(values) for values in tuples}) == len(tuples)
