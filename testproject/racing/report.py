"""The result of a race, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any

from testproject.racing.tally import Tally
from testproject.racing.verdict import Result

# Columns of numbers.
RIGHT_ALIGNED = {1, 3}
LEGEND = """\
201 created; 200 done, or here is the one that exists; 204 nothing to do: it is there already or,
with skip, about to be; 409 it is there already; 429 another call is at it, try again; 500 crashed;
504 waited in vain. Different UUIDs, messages, steps: calls at the same instant again, each for a
thing of its own; none of them may be turned away, or get the answer of another."""


def table(results: Mapping[str, Result]) -> str:
    """Return an aligned table, with a section for each variant, and what its numbers mean."""
    sections = [
        [_headings(section[0][1]), *(_line(name, result) for name, result in section)]
        for section in _by_variant(results)
    ]
    widths = [max(map(len, column)) for column in zip(*chain(*sections), strict=True)]
    rule = tuple("-" * width for width in widths)
    texts = [
        "\n".join(_aligned(line, widths) for line in (headings, rule, *lines))
        for headings, *lines in sections
    ]
    return "\n\n".join([*texts, LEGEND])


def as_json(results: Mapping[str, Result], **facts: Any) -> str:
    """Return the results, ``facts`` about the run first, as one JSON object."""
    forms = {
        name: {
            "variant": result.variant,
            "identical": _numbers(result, result.identical, result.identical_verdict),
            "different": _numbers(result, result.different, result.different_verdict),
            "held": result.held,
        }
        for name, result in results.items()
    }
    held = all(result.held for result in results.values())
    return json.dumps({**facts, "forms": forms, "held": held}, indent=2)


def _by_variant(results: Mapping[str, Result]) -> list[list[tuple[str, Result]]]:
    groups = groupby(results.items(), key=lambda item: item[1].variant)
    return [list(group) for _, group in groups]


def _headings(result: Result) -> tuple[str, ...]:
    subject = result.subject
    return (result.variant, "requests", "answers", subject.counted, "verdict", subject.others, "")


def _line(name: str, result: Result) -> tuple[str, ...]:
    tally = result.identical
    return (
        name,
        str(tally.statuses.total()),
        _answers(tally.statuses),
        str(tally.total),
        result.identical_verdict,
        result.different_verdict,
        "ok" if result.held else "FAILED",
    )


def _answers(statuses: Counter[int]) -> str:
    return ", ".join(f"{count} x {status or '---'}" for status, count in sorted(statuses.items()))


def _numbers(result: Result, tally: Tally, verdict: str) -> dict[str, Any]:
    return {
        "requests": tally.statuses.total(),
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        result.subject.name: tally.total,
        "verdict": verdict,
    }


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if column in RIGHT_ALIGNED else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
