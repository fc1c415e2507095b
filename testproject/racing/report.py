"""The result of a race, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from testproject.racing.verdict import Result, Tally

HEADINGS = ("form", "requests", "answers", "rows", "verdict", "different UUIDs", "")
RIGHT_ALIGNED = {"requests", "rows"}
LEGEND = """\
201 created; 204 nothing to do: it is there already or, with skip, about to be; 429 another call
is creating it, try again; 500 crashed. Different UUIDs: as many calls again at the same instant,
each for a lesson of its own; none of them may be turned away."""


def table(results: Mapping[str, Result]) -> str:
    """Return an aligned table with a line for each form, and what its numbers mean."""
    lines = [HEADINGS, *(_line(name, result) for name, result in results.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join([*(_aligned(line, widths) for line in lines), "", LEGEND])


def as_json(results: Mapping[str, Result], **facts: Any) -> str:
    """Return the results, ``facts`` about the run first, as one JSON object."""
    forms = {
        name: {
            "identical": _numbers(result.identical, result.identical_verdict),
            "different": _numbers(result.different, result.different_verdict),
            "held": result.held,
        }
        for name, result in results.items()
    }
    held = all(result.held for result in results.values())
    return json.dumps({**facts, "forms": forms, "held": held}, indent=2)


def _line(name: str, result: Result) -> tuple[str, ...]:
    tally = result.identical
    return (
        name,
        str(tally.statuses.total()),
        _answers(tally.statuses),
        str(sum(tally.rows)),
        result.identical_verdict,
        result.different_verdict,
        "ok" if result.held else "FAILED",
    )


def _answers(statuses: Counter[int]) -> str:
    return ", ".join(f"{count} x {status or '---'}" for status, count in sorted(statuses.items()))


def _numbers(tally: Tally, verdict: str) -> dict[str, Any]:
    return {
        "requests": tally.statuses.total(),
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "rows": sum(tally.rows),
        "verdict": verdict,
    }


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if heading in RIGHT_ALIGNED else cell.ljust(width)
        for heading, cell, width in zip(HEADINGS, line, widths, strict=True)
    ]
    return "  ".join(cells).rstrip()
