"""Losses of a benchmark's cells over the steps, and how far they are from float32's."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfamp.benchmark import plot_style, records

_POINTS = 100  # Of a curve at most.
_WIDE = 15.0  # Largest over smallest loss from which on the axis is logarithmic.
_FAR = 20.0  # Percent from float32 from which on their axis is, beyond 1 %.
_PANEL = 2.0  # Inches of the losses.
_LOWER_PANEL = 1.15  # Inches of the differences.
_NOT_FINITE = "not finite from here on"


class Point(NamedTuple):
    """A loss over the seeds.

    Attributes:
      step: From 1; of several steps their mean.
      mean, low, high: Over the seeds; NaN if not finite with one of them.
    """

    step: float
    mean: float
    low: float
    high: float


def draw_loss_curves(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws the loss of each cell over the steps, a panel for each task.

    Below it, where there is a float32 to compare with, the difference from that: the
    curves themselves often lie upon each other.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark.
      theme: The colors.
    """
    groups = plot_style.groups([row for row in report.rows if has_loss(row)])
    heights = [height for group in groups for height in _heights(group)]
    plot_style.set_height(figure, sum(heights))
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)
    free = iter(panels.flat)
    for group in groups:
        axes = next(free)
        _draw_group(axes, group, theme)
        if _others(group):
            lower = next(free)
            lower.sharex(axes)
            axes.tick_params(labelbottom=False)
            _draw_differences(lower, group, _base(group), theme)


def has_loss(row: records.Row) -> bool:
    """Whether any loss of a cell was recorded, finite or not."""
    return any(row.losses.values())


def mean_losses(losses: Mapping[str, Sequence[float | None]]) -> list[Point]:
    """Returns a cell's loss over its seeds, step by step.

    Args:
      losses: {seed: loss after each step}, None if not finite.
    """
    steps = itertools.zip_longest(*losses.values(), fillvalue=math.nan)
    return [_point(number, values) for number, values in enumerate(steps, 1)]


def last_loss(row: records.Row) -> float | None:
    """Returns the last finite loss of a cell, mean over its seeds; None without."""
    means = [point.mean for point in mean_losses(row.losses)]
    return next((mean for mean in reversed(means) if not math.isnan(mean)), None)


def has_losses(report: records.Report) -> bool:
    """Whether any loss of a report is finite."""
    return any(last_loss(row) is not None for row in report.rows)


def is_interrupted(row: records.Row) -> bool:
    """Whether a loss was not finite."""
    return any(loss is None for series in row.losses.values() for loss in series)


def thin(points: Sequence[Point]) -> list[Point]:
    """Returns at most some 100 points: means of neighbors, and their farthest ends."""
    size = math.ceil(len(points) / _POINTS) or 1
    return [_merge(points[i : i + size]) for i in range(0, len(points), size)]


def _point(step, values):
    """A seed that ended before is NaN here, and not counted."""
    if any(value is None for value in values):
        return Point(step, *[math.nan] * 3)
    there = [value for value in values if not math.isnan(value)]
    return Point(step, math.fsum(there) / len(there), min(there), max(there))


def _merge(points):
    finite = [point for point in points if not math.isnan(point.mean)]
    step = math.fsum(point.step for point in points) / len(points)
    if not finite:
        return Point(step, *[math.nan] * 3)
    mean = math.fsum(point.mean for point in finite) / len(finite)
    low, high = min(point.low for point in finite), max(point.high for point in finite)
    return Point(step, mean, low, high)


def _base(group):
    """The cell that the others are compared with; None if it is not there."""
    for row in group.rows:
        if (row.framework, row.mode, row.xla) == ("tfamp", "float32", False):
            return row
    return None


def _others(group):
    base = _base(group)
    return [row for row in group.rows if row is not base] if base else []


def _heights(group):
    lines = plot_style.key_lines(1 + len(group.rows))
    upper = _PANEL + 1.1 * plot_style.LINE * lines
    return [upper, _LOWER_PANEL] if _others(group) else [upper]


def _line_style(group, row):
    """Curves lie upon each other: the later ones are thinner."""
    width = 1.0 + 2.2 * (1 - group.rows.index(row) / len(group.rows))
    return {
        "color": plot_style.COLORS[row.mode],
        "linestyle": plot_style.DASHES[row.framework],
        "linewidth": width,
    }


def _draw_group(axes, group, theme):
    plot_style.dress(axes, theme)
    for row in group.rows:
        _draw_losses(axes, row, _line_style(group, row))
    marks = [mark for row in group.rows for mark in _ends(mean_losses(row.losses))]
    if marks:
        axes.plot(*zip(*marks, strict=True), **_end_style(theme))
    values = [value for line in axes.get_lines() for value in line.get_ydata()]
    values = [value for value in values if not math.isnan(value)]
    if values and min(values) > 0 and max(values) / min(values) > _WIDE:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("training loss")
    if not _others(group):
        axes.set_xlabel("training step")
    axes.grid(color=theme.line, linewidth=0.6)
    plot_style.key_above(axes, group.heading)


def _draw_losses(axes, row, style):
    points = thin(mean_losses(row.losses))
    steps, means, lows, highs = zip(*points, strict=True)
    label = plot_style.name(row)
    if all(map(math.isnan, means)):
        label += ": never finite"
    axes.plot(steps, means, label=label, **style)
    if len(row.losses) > 1:
        band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(steps, lows, highs, **band)


def _ends(points):
    """(step, loss) of the last finite points before others."""
    return [
        (before.step, before.mean)
        for before, after in itertools.pairwise(points)
        if math.isnan(after.mean) and not math.isnan(before.mean)
    ]


def _end_style(theme):
    return {
        "linestyle": "",
        "marker": "X",
        "markersize": 7,
        "markerfacecolor": theme.alarm,
        "markeredgecolor": theme.ink,
        "label": _NOT_FINITE,
        "zorder": 5,
    }


def _draw_differences(axes, group, base, theme):
    plot_style.dress(axes, theme)
    base = mean_losses(base.losses)
    largest = 0.0
    for row in group.rows:
        points = _relative(mean_losses(row.losses), base)
        if points:
            steps, percents, _, _ = zip(*points, strict=True)
            style = _line_style(group, row)
            style["linewidth"] *= 0.6
            axes.plot(steps, percents, **style)
            finite = [abs(value) for value in percents if not math.isnan(value)]
            largest = max([largest, *finite])
    _set_difference_axis(axes, largest)
    axes.set_xlabel("training step")
    axes.set_ylabel("from\nfloat32 (%)", fontsize="small")
    axes.grid(color=theme.line, linewidth=0.6)


def _set_difference_axis(axes, largest):
    """Keeps what is below 1 % visible beside what is far from float32."""
    if largest <= _FAR:
        axes.locator_params(axis="y", nbins=4)
        return
    axes.set_yscale("symlog", linthresh=1.0, linscale=1.6)
    axes.set_ylim(-1.5 * largest, 1.5 * largest)
    top = 10.0 ** math.floor(math.log10(largest))
    near = [-1.0, 0.0, 1.0] if top <= 100 else [0.0]
    axes.set_yticks([-top, *near, top])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _relative(points, base):
    """Differences in percent of the base's losses, thinned."""
    pairs = zip(points, base, strict=False)
    return thin(
        [
            Point(mine.step, 100 * (mine.mean - other.mean) / abs(other.mean), 0, 0)
            for mine, other in pairs
            if other.mean != 0
        ]
    )
