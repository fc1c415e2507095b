"""A key is shown without what a header or the session says; its lines can still be told apart."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

from singleflight_django.keys import KeySpec
from singleflight_django.parts import MAX_BYTES, qualify
from singleflight_django.redaction import Redaction
from singleflight_django.templates import parse

D = "<[0-9a-f]{8}>"


def shown(text: str, *templates: str, namespace: str = "n") -> str:
    redaction = Redaction.of(map(parse, templates))
    assert redaction is not None
    return redaction.shown(namespace, text)


def rendered(template: str, *values: str, namespace: str = "n") -> str:
    return qualify(namespace, parse(template).render(values))


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("pay:<header.Idempotency-Key>", ["s3cret"], f"n:pay:{D}"),
        ("<session>", ["s3cret"], f"n:{D}"),
        ("<header.A><session>", ["s3cret", "s3cret"], f"n:{D}!{D}"),
        ("<url.pk>:<header.A>", ["7", "s3cret"], f"n:7:{D}"),
        ("<header.A>-<url.pk>", ["s3-cret", "7-8"], f"n:{D}-7-8"),
        ("<url.pk>-<header.A>", ["7-8", "s3-cret"], f"n:7%2D8-{D}"),
        ("<header.A>/s3cretly:<pk>", ["s3cret/s3cretly:", "9"], f"n:{D}/s3cretly:9"),
        ("a%sb:<header.A>", ["s3cret é%<>"], f"n:a%25sb:{D}"),
        ("<user?>:<header.A>", ["*", "s3cret"], rf"n:%2A:{D}"),
        ("(.+)<header.A>", ["s3cret"], rf"n:%28\.\+%29{D}"),
    ],
)
def test_what_is_shown(template: str, values: list[str], expected: str) -> None:
    text = shown(rendered(template, *values), template)

    assert re.fullmatch(expected, text)
    assert "cret" not in text.replace("s3cretly", "")


def test_no_value_and_no_text_around_it_lets_a_secret_out() -> None:
    chance = random.Random(7)
    pieces = ["", "-", ":", "!", "a", "-A", "7", "%s", "(", ",", "..", "/Zq-"]
    for _ in range(2000):
        fields = chance.choices(["<url.pk>", "<header.A>", "<session>"], k=chance.randint(1, 4))
        template = "".join(chance.choice(pieces) + field for field in fields)
        template += chance.choice(pieces)
        values = [
            "".join(chance.choices("-:7Aé.", k=3)) + ("" if field == "<url.pk>" else "SECRET")
            for field in fields
        ]
        secrets = len(fields) - fields.count("<url.pk>")
        if not secrets:
            continue

        text = shown(rendered(template, *values), template)

        assert "SECRET" not in text, (template, values)
        assert len(re.findall(D, text)) == secrets, (template, values)


def test_equal_secrets_look_equal_and_others_do_not() -> None:
    template = "pay:<header.A>"
    texts = {shown(rendered(template, value), template) for value in ("a", "b", "a")}

    assert len(texts) == 2


def test_it_is_another_digest_under_another_secret_key(settings: Any) -> None:
    """Who guesses a secret can't try the guess against the log."""
    template, before = "pay:<header.A>", shown("n:pay:a", "pay:<header.A>")
    settings.SECRET_KEY = "another"

    assert shown(rendered(template, "a"), template) != before


def test_a_flights_identity_stays() -> None:
    text = shown("n:pay:s3cret#0123abcd", "pay:<header.A>")

    assert re.fullmatch(f"n:pay:{D}#0123abcd", text)


@pytest.mark.parametrize(
    "template", ["pay:<header.A>", "pay:<header.A>:<url.pk>", "pay:<url.pk>:<header.A>"]
)
@pytest.mark.parametrize("identity", ["", "#0123456789"])
def test_of_a_key_that_was_cut_the_literal_head_stays(template: str, identity: str) -> None:
    long = "s3cret" * 50
    values = [long if field.source == "header" else "7" for field in parse(template).fields]
    text = qualify("n", parse(template).render(values) + identity)
    assert len(text) == MAX_BYTES

    assert re.fullmatch(f"n:pay:(7:)?{D}#[0-9a-f]{{40}}", shown(text, template))


@pytest.mark.parametrize(
    ("templates", "values", "expected"),
    [
        (["pay:<header.A>:<url.pk>", "pay:<ref>"], ["s3cret" * 50, "7"], f"n:pay:{D}"),
        (["pay:<ref>", "pay:<header.A>:<url.pk>"], ["7" * 300], f"n:pay:{D}"),
        (["pay:<header.A>", "pay:s3cret<ref>"], ["s3cret" * 50], f"n:pay:{D}"),
        (["pay:<header.A>", "<url.pk>:<session>"], ["s3cret" * 50], f"n:{D}"),
        ([f"{'long' * 50}:<header.A>"], ["s3cret"], f"n:{('long' * 50)[:157]}"),
        (["order:<ref>", "pay:<header.A>"], ["7" * 300], f"n:order:{'7' * 151}"),
    ],
)
def test_of_a_key_that_was_cut_no_template_explains_the_rest(
    templates: list[str], values: list[str], expected: str
) -> None:
    """The end is missing that would tell which of them made it."""
    for order in itertools.permutations(templates):
        text = shown(rendered(templates[0], *values), *order)

        assert re.fullmatch(f"{expected}#[0-9a-f]{{40}}", text)


def test_of_a_flights_key_that_was_cut_in_its_identity_the_rest_is_whole() -> None:
    key = parse("pay:<url.pk>:<header.A>").render(["7", "s3cret"])
    text = qualify("n", f"{key}#{'0123456789' * 20}")

    assert re.fullmatch(
        f"n:pay:7:{D}#[0-9]+#[0-9a-f]{{40}}", shown(text, "pay:<url.pk>:<header.A>")
    )


def test_several_keys_are_each_shown() -> None:
    text = shown("n:order:7,a,n:pay:s3cret", "order:<url.pk>,a", "pay:<header.A>")

    assert re.fullmatch(f"n:order:7,a,n:pay:{D}", text)


def test_where_two_templates_fit_the_secret_one_counts() -> None:
    texts = [
        shown("n:pay:s3cret", *templates)
        for templates in itertools.permutations(["pay:<url.pk>", "pay:<header.A>"])
    ]

    assert all(re.fullmatch(f"n:pay:{D}", text) for text in texts)


@pytest.mark.parametrize("text", ["n:s3cret:?", "another:pay:s3cret:?", "n:pay:s3cret?"])
def test_a_key_that_no_template_explains_is_hidden(text: str) -> None:
    assert "s3cret" not in shown(text, "pay:<header.A>")


def test_no_key_is_no_key() -> None:
    assert shown("", "pay:<header.A>") == ""


def test_keys_without_secrets_have_nothing_to_hide() -> None:
    assert KeySpec("lesson:<uuid>:<user>:<body.a>").redaction is None
    assert KeySpec(lambda request: "a").redaction is None
    assert KeySpec(["a", "<session>"]).redaction is not None
