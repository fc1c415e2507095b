"""Pages whose examples and tables are tested: the README and what is in docs/."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import singleflight_django

ROOT = Path(__file__).parent.parent


class Page:
    """A Markdown file of the project."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.lines = self.text.splitlines()

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks in a language."""
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)

    def block(self, language: str, says: str) -> str:
        """The one block that has a text in it."""
        found = [block for block in self.blocks(language) if says in block]
        assert len(found) == 1, f"{len(found)} blocks of {self.path.name} say {says!r}"
        return found[0]

    def table(self, title: str) -> dict[str, list[str]]:
        """The rows of the table whose first head is ``title``, by the first cell's code."""
        start = next(n for n, line in enumerate(self.lines) if line.startswith(f"| {title} |"))
        rows = {}
        for line in self.lines[start + 2 :]:
            if not line.startswith("|"):
                break
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            for name in re.findall(r"`([^`]+)`", cells[0]):
                rows[name] = cells[1:]
        return rows

    def links(self) -> list[str]:
        """Where its links point, within the project."""
        return [to for to in re.findall(r"\]\(([^)\s]+)\)", self.text) if "://" not in to]


def check_example(code: str) -> None:
    """Assert that ``code`` is Python, and calls what there is with arguments that there are."""
    for node in ast.walk(_parsed(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "singleflight_django":
            assert all(hasattr(singleflight_django, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function: Any = getattr(singleflight_django, node.func.id, None)
            if function is not None:
                keywords = {keyword.arg for keyword in node.keywords}
                parameters = inspect.signature(function).parameters
                any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
                assert any_name or keywords <= set(parameters)


def _parsed(code: str) -> ast.Module:
    code = dedent(code)
    with suppress(SyntaxError):
        return ast.parse(code)
    lines = code.splitlines()
    # A decorator on show stands for any view.
    shown = "\n".join(
        f"{line}\ndef view(request): ..."
        if line.startswith("@") and not follow.startswith("def ")
        else line + ("\n    pass" if line.startswith("with ") and not follow[:1].isspace() else "")
        for line, follow in zip(lines, [*lines[1:], ""], strict=True)
    )
    return ast.parse(shown)
