"""The three figures of a benchmark, each as SVG text for the page."""

import io
from typing import Any

from tfamp import extras

_GRAY, _GREEN, _RED = "#6b7280", "#0f766e", "#b91c1c"
_LINES = ((_GRAY, "-"), (_GREEN, "--"), (_RED, ":"))  # Of modes over time.
# Inches: narrow, so that texts can be read on a phone.
_WIDTH, _LINE = 4.4, 0.36
# A bar beyond that would hide the others: it ends there, and the number says it.
_FAR = 4.0


def draw(report: Any) -> dict[str, str]:
    """Returns {title: SVG} of what the report has: up to three figures.

    Args:
      report: A `report.Report`.
    """
    matplotlib = extras.require("matplotlib")
    style = {"svg.fonttype": "none", "font.size": 8}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figures = {
            f"Speed-up over {report.base}, with its 95 % interval": _intervals(
                report, "speed_up", 1.0, "x"
            ),
            f"Loss relative to {report.base}'s, with its 95 % interval": _intervals(
                report, "loss_difference", 0.0, "%"
            ),
            "Score over time": _accuracy(report),
        }
        return {title: _svg(each) for title, each in figures.items() if each}


def _svg(figure):
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _figure(height):
    figure = extras.require("matplotlib.figure")
    fig = figure.Figure(figsize=(_WIDTH, height), layout="constrained")
    return fig, fig.subplots()


def _label(report, row):
    """The column; below it the task, or the shape, where there are several."""
    shapes = {r.cell.shape for r in report.rows if r.cell.task == row.cell.task}
    below = [row.cell.task] if len(report.tasks) > 1 else []
    below += [row.cell.shape] if len(shapes) > 1 else []
    return "\n".join(filter(None, [row.cell.column, ", ".join(below)]))


def _intervals(report, field, at, unit):
    """A line for each row: a point, its interval, and the number beside it."""
    rows = [row for row in report.rows if getattr(row, field) and not row.is_base]
    if not rows:
        return None
    factor, form = (1, "{:.2f}x") if unit == "x" else (100, "{:+.2f} %")
    values = [[x and factor * x for x in getattr(row, field)[:3]] for row in rows]
    figure, axes = _figure(0.8 + _LINE * len(rows))
    limit = _FAR * max(1.0, sorted(map(abs, (v[0] for v in values)))[len(values) // 2])
    for y, (mean, low, high) in enumerate(values):
        surely = low is not None and (low > at or high < at)
        better = (mean > at) == (unit == "x")
        color = (_GREEN if better else _RED) if surely else _GRAY
        shown = max(-limit, min(mean, limit))
        if low is not None:
            ends = [max(-limit, min(each, limit)) for each in (low, high)]
            axes.hlines(y, *ends, color=color, linewidth=2)
        face = {"markerfacecolor": color if surely else "white"}
        axes.plot([shown], [y], "o", color=color, markersize=5, **face)
        axes.annotate(
            form.format(mean),
            (1.0, y),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            xytext=(6, 0),
            textcoords="offset points",
        )
    axes.axvline(at, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_label(report, row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.locator_params("x", nbins=4)  # Their labels are not to touch.
    axes.set_xlabel(f"{unit} (open: within noise)")
    return figure


def _accuracy(report):
    rows = [row for row in report.accuracy if any(row.points.values())]
    if not rows:
        return None
    figure, axes = _figure(3.2)
    modes = dict.fromkeys(row.mode for row in rows)
    looks = dict(zip(modes, _LINES, strict=False))
    for row in rows:
        color, line = looks.get(row.mode, ("black", "-."))
        for number, points in enumerate(row.points.values()):
            name = None if number else f"{row.task}, {row.mode}"
            style = {"color": color, "linestyle": line, "label": name}
            axes.plot(*zip(*points, strict=True), alpha=0.7, **style)
        axes.axhline(row.target, color="black", linewidth=0.8)
    axes.set(xlabel="seconds of training", ylabel="validation score")
    axes.legend(frameon=False)
    return figure
