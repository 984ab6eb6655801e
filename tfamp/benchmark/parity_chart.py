"""What each cell learned beside what float32 learned: differences and intervals."""

import math
from collections.abc import Sequence

from tfamp.benchmark import cell_list, plot_style, records, words
from tfamp.training import plots as training_plots

_WIDE = 40.0  # Largest over smallest difference from which on the axis is symlog.
_DEEPEST = 1e-4  # Of the largest: smaller differences are drawn as if linear.
_LEGEND = 0.45  # Inches.
_MARKERS = {
    "base": "d",
    "equal": "o",
    "noise": "o",
    "explained": "s",
    "one seed": "p",
    "unexplained": "^",
    "broken": "X",
}


def draw_parity(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws the difference of each cell's loss, and of its metric, from float32's.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark.
      theme: The colors.
    """
    sheet = cell_list.lay_out(plot_style.groups(report.rows))
    plot_style.set_height(figure, sheet.inches + _LEGEND)
    ratios = (3, 2) if metric_names(report) else (1,)
    panels = figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False).flat
    width = (0.91 * ratios[0] / sum(ratios) + 0.02) * plot_style.POINTS
    for axes in panels:
        cell_list.open_axes(axes, sheet, theme)
    cell_list.write(panels[0], sheet, _loss_text, theme, width)
    _draw_panel(panels[0], sheet, _loss, theme, ticks=2)
    panels[0].set_xlabel("loss minus float32's (%)")
    if len(ratios) > 1:
        _write_metrics(panels[1], sheet, theme)
        _draw_panel(panels[1], sheet, _metric, theme, ticks=1)
        names = metric_names(report)
        label = names[0] if len(names) == 1 else "metric"
        text = panels[1].set_xlabel(f"{label} (points)", **plot_style.AS_IT_IS)
        plot_style.fit(text, 0.35 * plot_style.POINTS)
    _add_key(figure, panels[0], report.rows, theme)


def compared(report: records.Report) -> list[tuple[records.Row, records.Parity]]:
    """Returns the cells that were compared with float32, and what came of it."""
    return [
        (row, row.parity)
        for row in report.rows
        if row.parity and row.parity.verdict not in ("", "base")
    ]


def metric_names(report: records.Report) -> list[str]:
    """Returns the names of the metrics that were compared with float32's."""
    compared = [row.parity for row in report.rows if _metric(row.parity)]
    return list(dict.fromkeys(parity.metric_name for parity in compared if parity))


def _loss(parity):
    """(difference, interval) in percent; None without."""
    if parity is None or parity.verdict == "broken":
        return None
    return _hundredfold(parity.loss_difference, parity.loss_interval)


def _metric(parity):
    if parity is None:
        return None
    return _hundredfold(parity.metric_difference, parity.metric_interval)


def _hundredfold(difference, interval):
    if difference is None:
        return None
    return 100 * difference, interval and tuple(100 * end for end in interval)


def _loss_text(row):
    verdict = row.parity.verdict if row.parity else ""
    if verdict in ("", "base", "broken") or row.parity.loss_difference is None:
        return words.verdict(row.parity)[1]
    return words.difference(row.parity.loss_difference)


def _write_metrics(axes, sheet, theme):
    for place in sheet.places:
        parity = place.row.parity
        if parity and parity.metric_name:
            text = words.difference(parity.metric_difference, unit="points")
            cell_list.put(axes, 1, place.text_y, text, "right", color=theme.ink)


def _draw_panel(axes, sheet, read, theme, ticks):
    main = read is _loss
    drawn = [(place, read(place.row.parity)) for place in sheet.places]
    drawn = [(place, found) for place, found in drawn if found]
    _set_axis(axes, [found for _, found in drawn], ticks)
    cell_list.draw_grid(
        axes, sheet, theme, lambda row: read(row.parity) is not None, at=0.0
    )
    for place, (difference, interval) in drawn:
        parity = place.row.parity
        if interval:
            axes.plot(
                interval,
                [place.y] * 2,
                color=plot_style.COLORS[place.row.mode],
                linewidth=4,
                solid_capstyle="butt",
                zorder=4,
            )
        axes.plot(difference, place.y, **_marker(parity.verdict, theme))
    for place in sheet.places:
        parity = place.row.parity
        if parity and parity.verdict == "broken" and (parity.metric_name or main):
            at = {"transform": axes.get_yaxis_transform(), "clip_on": False}
            axes.plot(0.98, place.y, **_marker("broken", theme), **at)


def _marker(verdict, theme):
    fills = {
        "explained": training_plots.OKABE_ITO["yellow"],
        "unexplained": theme.alarm,
        "broken": theme.alarm,
        "base": theme.ink,
    }
    return {
        "linestyle": "",
        "marker": _MARKERS.get(verdict, "o"),
        "markersize": 8 if verdict in ("unexplained", "broken") else 6.5,
        "markerfacecolor": fills.get(verdict, theme.background),
        "markeredgecolor": theme.ink,
        "zorder": 5,
    }


def _set_axis(axes, found: Sequence, ticks: int) -> None:
    """Sets limits, scale and ticks so that small differences stay visible.

    Args:
      axes: The axes.
      found: (difference, interval) pairs.
      ticks: How many at most to each side of 0 on a symmetric logarithmic axis.
    """
    differences = [abs(difference) for difference, _ in found if difference]
    ends = [abs(end) for _, interval in found for end in interval or ()]
    largest = max([*differences, *ends], default=0.0) or 1.0
    smallest = max(min(differences, default=largest), _DEEPEST * largest)
    axes.set_xlim(-1.15 * largest, 1.15 * largest)
    if largest / smallest <= _WIDE:
        axes.locator_params(axis="x", nbins=2 * ticks + 1)
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        return
    low, high = math.floor(math.log10(smallest)), math.floor(math.log10(largest))
    axes.set_xscale("symlog", linthresh=10.0**low)
    axes.set_xlim(-1.5 * largest, 1.5 * largest)
    stride = math.ceil((high - low + 1) / ticks)
    powers = [10.0**power for power in range(high, low - 1, -stride)]
    axes.set_xticks([*(-power for power in powers), 0.0, *powers])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _add_key(figure, axes, rows, theme):
    verdicts = {row.parity.verdict for row in rows if row.parity} - {""}
    if "equal" in verdicts:  # Drawn as noise is.
        verdicts = verdicts - {"equal"} | {"noise"}
    handles = [
        axes.plot([], [], label=label, **_marker(verdict, theme))[0]
        for verdict, label in _key_labels()
        if verdict in verdicts
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3)


def _key_labels():
    for verdict in _MARKERS:
        text = words.verdict(_bare(verdict))[1]
        yield verdict, "equal or within noise" if verdict == "noise" else text


def _bare(verdict):
    return records.Parity(None, None, None, "", None, None, None, verdict, "")
