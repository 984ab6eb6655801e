"""The loss scale of a benchmark's cells over the steps, skipped steps marked."""

import itertools
import math
import textwrap
from collections.abc import Sequence

from tfamp.benchmark import plot_style, records, words

_PANEL = 0.95  # Inches.
_TICKS = 4  # At most.


def draw_loss_scale(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws the loss scale of each cell that has one.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark.
      theme: The colors.
    """
    rows = scaled_rows(report)
    if not rows:
        _say(figure, unscaled_text(report), theme)
        return
    panels = _panels(figure, len(rows), theme)
    for axes, row in zip(panels, rows, strict=True):
        for series in row.loss_scales.values():
            _draw_scale(axes, series, plot_style.COLORS[row.mode], theme)
        place = f"{row.task}, batch {row.batch_size:,}"
        _write_title(axes, f"{plot_style.name(row)}: {skipped_text(row)} ({place})")
    _share_scale_axis(panels, rows, theme)
    panels[-1].set_xlabel("training step (x: a skipped step, the loss scale drops)")


def scaled_rows(report: records.Report) -> list[records.Row]:
    """Returns the cells whose loss scale was recorded."""
    return [
        row
        for row in report.rows
        if any(value > 0 for series in row.loss_scales.values() for value in series)
    ]


def unscaled_text(report: records.Report) -> str:
    """Returns why no cell has a loss scale."""
    modes = dict.fromkeys(row.mode for row in report.rows if not row.failed)
    by_need = {True: [], False: []}
    for mode in modes:
        by_need[records.format_of(mode) == "float16"].append(mode)
    text = "No cell has a loss scale."
    if by_need[False]:
        text += f" Without float16 none is needed: {', '.join(by_need[False])}."
    if by_need[True]:
        text += f" None was recorded of {', '.join(by_need[True])}."
    return text


def drops(series: Sequence[float]) -> list[tuple[int, float]]:
    """Returns (step, loss scale) after each drop of it: a skipped step."""
    pairs = enumerate(itertools.pairwise(series), 2)
    return [(step, after) for step, (before, after) in pairs if after < before]


def skipped_text(row: records.Row) -> str:
    """Returns how many steps a cell skipped: "1 skipped step"."""
    count = row.skipped_steps
    if count is None:
        return "skipped steps not known"
    return f"{words.count(count)} skipped step{'' if count == 1 else 's'}"


def _draw_scale(axes, series, color, theme):
    """Draws the steps at which the scale changes; between them it holds."""
    steps = list(enumerate(series, 1))
    kept = [
        point
        for number, point in enumerate(steps)
        if number in (0, len(steps) - 1) or point[1] != series[number - 1]
    ]
    values = [value if value > 0 else math.nan for _, value in kept]
    places = [step for step, _ in kept]
    axes.step(places, values, where="post", color=color, linewidth=1.6, alpha=0.8)
    marks = [mark for mark in drops(series) if mark[1] > 0]
    if marks:
        style = {"linestyle": "", "marker": "x", "markersize": 6, "color": theme.ink}
        axes.plot(*zip(*marks, strict=True), **style)


def _share_scale_axis(panels, rows, theme):
    """One range for all, so that panels compare; few ticks, at powers of two."""
    scales = [
        math.log2(value)
        for row in rows
        for series in row.loss_scales.values()
        for value in series
        if value > 0
    ]
    low, high = math.floor(min(scales)), math.ceil(max(scales))
    powers = range(low, high + 1, math.ceil((high - low + 1) / _TICKS))
    for axes in panels:
        axes.set_yscale("log", base=2)
        axes.set_ylim(2.0 ** (low - 1), 2.0 ** (high + 1))
        labels = [f"$2^{{{power}}}$" for power in powers]
        axes.set_yticks([2.0**power for power in powers], labels)
        axes.set_ylabel("loss scale")
        axes.grid(color=theme.line, linewidth=0.6)


def _panels(figure, count, theme):
    height = _PANEL + 1.3 * plot_style.LINE
    plot_style.set_height(figure, count * height + 0.4)
    panels = list(figure.subplots(count, 1, squeeze=False, sharex=True).flat)
    for axes in panels:
        plot_style.dress(axes, theme)
    return panels


def _write_title(axes, text):
    style = {"loc": "left", "fontsize": "small", **plot_style.AS_IT_IS}
    title = axes.set_title(text, **style)
    plot_style.fit(title, 0.82 * plot_style.POINTS)


def _say(figure, text, theme):
    lines = textwrap.wrap(text, 58)
    plot_style.set_height(figure, (len(lines) + 2) * plot_style.LINE)
    axes = figure.subplots()
    axes.set_axis_off()
    style = {"ha": "left", "va": "center", "color": theme.ink}
    at = {"transform": axes.transAxes}
    axes.text(0, 0.5, "\n".join(lines), **at, **style, **plot_style.AS_IT_IS)
