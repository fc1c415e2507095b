"""The README says what the code does."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import singleflight_django
from singleflight_django import checks
from singleflight_django.conf import SETTING_NAMES, Settings, conf
from tests.markdown import ROOT, Page, check_example

README = Page(ROOT / "README.md")


def default(cell: str) -> Any:
    """What a cell with a literal in it stands for; the cell itself where it has words."""
    code = re.fullmatch(r"`([^`]+)`", cell)
    if code is None or code[1].startswith("SINGLEFLIGHT_"):
        return cell
    return ast.literal_eval(code[1])


def test_the_first_decorator_stands_before_line_25() -> None:
    assert any("@semaphore_lock(" in line for line in README.lines[:24])


def test_the_two_commands_come_first() -> None:
    assert README.blocks("console")[0].splitlines() == [
        'pip install -e ".[demo]" && python manage.py race    '
        "# see it happen, and every cure, on real servers",
        'pip install -e ".[test]" && pytest                   # the tests',
    ]


@pytest.mark.parametrize("code", README.blocks("python"))
def test_the_examples_are_python_and_use_what_there_is(code: str) -> None:
    check_example(code)


def test_the_table_of_settings_has_them_all_with_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POLL_MAX_WAIT_SEC", raising=False)

    rows = {name: cells for name, cells in README.table("setting").items() if name in SETTING_NAMES}

    assert list(rows) == list(SETTING_NAMES)
    assert all(name in vars(Settings) for name in rows)
    assert {n: default(cells[0]) for n, cells in rows.items()} == {
        name: getattr(conf, name) for name in SETTING_NAMES
    }


@pytest.mark.parametrize(
    ("title", "function"),
    [
        ("option", singleflight_django.semaphore_lock),
        ("option of `single_flight`", singleflight_django.single_flight),
    ],
)
def test_the_tables_of_options_have_them_all_with_their_defaults(title: str, function: Any) -> None:
    parameters = inspect.signature(function).parameters
    rows = README.table(title)

    assert set(parameters) <= set(rows)
    for name, parameter in parameters.items():
        shown = default(rows[name][0])
        if not isinstance(shown, str) or shown == parameter.default:
            assert shown == parameter.default, name


def test_the_table_of_checks_has_them_all() -> None:
    source = "".join(path.read_text() for path in sorted(Path(checks.__file__).parent.glob("*.py")))
    ids = set(re.findall(r"\b([EW]\d{3})\b", source))

    assert set(README.table("id")) == ids
