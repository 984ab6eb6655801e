"""Pictures of what the numerics tools found."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfamp import extras

_COLORS = ("#2a6f97", "#e07a5f", "#81b29a")
_HATCHES = ("", "//", "..")  # Apart without color, too.


def errors(
    names: Sequence[str], bars: Mapping[str, Sequence[float | None]], title: str
) -> Any:
    """Draws errors of calls, the first on top, on a log scale.

    Args:
      names: The calls.
      bars: {what: an error for each call}; infinite ones reach the edge.
      title: The figure's.

    Returns:
      A matplotlib figure.
    """
    Figure = extras.require("matplotlib.figure").Figure
    height = 0.8 / len(bars)
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    finite = [x for series in bars.values() for x in series if x and np.isfinite(x)]
    low, high = min(finite, default=1e-4) / 3, max([1.0, *finite]) * 3
    for index, (what, series) in enumerate(bars.items()):
        values = [min(x or low, high) for x in series]
        places = np.arange(len(names)) + (index - (len(bars) - 1) / 2) * height
        style = {"color": _COLORS[index], "hatch": _HATCHES[index]}
        axes.barh(places, values, height, label=what, edgecolor="white", **style)
        for place, x in zip(places, series, strict=True):
            if x is not None and not np.isfinite(x):
                axes.text(high, place, "inf or NaN ", ha="right", va="center", size=7)
    axes.set(xscale="log", xlim=(low, high), xlabel="norm of the error / norm")
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=len(bars))
    return figure


def frontier(
    choices: Sequence[tuple[str, float, float | None]], tolerance: float, title: str
) -> Any:
    """Draws the error of choices against their time, over float32's.

    Args:
      choices: (label, error, time) of each; without times they stand side by side.
      tolerance: The error that was allowed.
      title: The figure's.

    Returns:
      A matplotlib figure.
    """
    Figure = extras.require("matplotlib.figure").Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    finite = [x for _, x, _ in choices if x and np.isfinite(x)]
    low = min([tolerance, *finite]) / 5
    high = max([tolerance, *finite]) * 5
    for index, (label, error, time) in enumerate(choices):
        x = index if time is None else time
        y = min(max(error, low), high)
        axes.plot(x, y, "oX"[error > tolerance], color=_COLORS[error > tolerance])
        text = label if low <= error <= high else f"{label} ({error:g})"
        axes.annotate(text, (x, y), (5, 5), textcoords="offset points", size=8)
    axes.axhline(tolerance, color="gray", linestyle="--", linewidth=1)
    axes.set(yscale="log", ylim=(low / 2, high * 2), ylabel="error")
    axes.set(xlabel="choice" if choices[0][2] is None else "time / float32's")
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    axes.set_title(title, loc="left")
    return figure
