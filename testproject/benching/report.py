"""What was measured, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]

_CYCLE = (
    ("median µs", "median", ".0f"),
    ("p99 µs", "p99", ".0f"),
    ("of the floor", "ratio", ".2f"),
    ("CPU µs", "cpu", ".0f"),
    ("requests", "requests", ".1f"),
)
_VIEW = (
    ("median µs", "median", ".0f"),
    ("p99 µs", "p99", ".0f"),
    ("CPU µs", "cpu", ".0f"),
    ("requests", "requests", ".1f"),
)
_BURST = (
    ("last ms", "last", ".1f"),
    ("worst ms", "worst", ".1f"),
    ("executions", "executions", "d"),
    ("requests", "requests", ".0f"),
)
TITLES = {
    "cycle": "A lock, taken and given back",
    "conflict": "A conflict: the lock is held",
    "view": "A whole view, called without a server",
}


def tables(told: Mapping[str, Any]) -> str:
    """Return everything that was measured."""
    texts = []
    for name, title in TITLES.items():
        columns = _VIEW if name == "view" else _CYCLE
        texts.append(_table(title, told[name], columns, "median"))
    for callers, figures in told["bursts"].items():
        title = f"{callers} callers of one key in 2 processes, 50 ms of work: after its end"
        texts.append(_table(title, figures, _BURST, "last"))
    return "\n\n".join(texts)


def _table(title: str, figures: Figures, columns: Sequence[tuple[str, str, str]], by: str) -> str:
    lines = [(title, *(heading for heading, _, _ in columns))]
    for name in sorted(figures, key=lambda name: float(figures[name][by])):
        lines.append((name, *(format(figures[name][key], how) for _, key, how in columns)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: tuple[str, ...], widths: Sequence[int]) -> str:
    first, *numbers = line
    cells = [first.ljust(widths[0])]
    cells += [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join(cells).rstrip()
