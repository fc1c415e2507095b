"""The figures as a picture: bars of a cycle's cost, and the time line of a burst, a bar per caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management import CommandError

from testproject.benching.bursts import WORK, Burst

# More bars can't be told apart.
MOST_SHOWN = 5


def draw(path: str, cycles: Mapping[str, Any], bursts: Mapping[str, Sequence[Burst]]) -> None:
    """Write a PNG to ``path``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError('--plot needs matplotlib: pip install -e ".[bench]"') from error
    # The burst of each peer that is the median of its bursts.
    typical = {
        name: sorted(some, key=lambda burst: burst.last)[len(some) // 2]
        for name, some in bursts.items()
    }
    shown = sorted(typical, key=lambda name: typical[name].last)[:MOST_SHOWN]
    figure = Figure(figsize=(11, 4 + 1.6 * len(shown)), layout="constrained")
    axes = figure.subplots(1 + len(shown), 1, height_ratios=[3] + [1.4] * len(shown))
    _bars(axes[0], cycles)
    for axis, name in zip(axes[1:], shown, strict=True):
        _time_line(axis, name, typical[name], max(typical[one].last for one in shown))
    axes[-1].set_xlabel("ms after the callers began")
    figure.savefig(path, dpi=110)


def _bars(axis: Any, cycles: Mapping[str, Any]) -> None:
    names = sorted(cycles, key=lambda name: -cycles[name]["median"])
    bars = axis.barh(names, [cycles[name]["median"] for name in names], color="#4878a8")
    axis.bar_label(bars, [f"{cycles[name]['ratio']:.2f}" for name in names], padding=4)
    axis.set_title("A lock taken and given back: µs, and how many times the floor")


def _time_line(axis: Any, name: str, burst: Burst, longest: float) -> None:
    for number, (begin, end) in enumerate(sorted(burst.returns, key=lambda times: times[1])):
        axis.barh(number, (end - begin) * 1000, left=begin * 1000, height=1.0, color="#a8c8e8")
    for begin, end in burst.executions:
        axis.axvspan(begin * 1000, end * 1000, color="#e8a040", alpha=0.35)
    axis.set_xlim(0, WORK * 1000 + longest * 1.05)
    axis.set_yticks([])
    executions = f"{len(burst.executions)} execution{'s' * (len(burst.executions) != 1)}"
    axis.set_title(f"{name}: {executions}, the last {burst.last:.1f} ms after", fontsize=10)
