"""The roofline: what each cell computes a second beside what the machine gives."""

import math

from tfamp.benchmark import plot_style, records, words

_HEIGHT = 3.6  # Inches, without the legend.
_SHAPES = ("o", "s", "^", "D", "v", "P", "*", "h")
_FILLS = {"tfamp": "full", "keras": "none", "torch": "left"}
# Formats of products are drawn as the mode that is named after them.
_MODES = {
    "float32": "float32",
    "tf32": "tf32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
_LABELS_FROM = 0.66  # Share of the axis that the roofs' labels stand to the right of.
_APART = 0.065  # Share of the axis between two labels.
_NOTHING = {"linestyle": ""}  # Fills the shorter column of the legend.


def draw_roofline(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws FLOP/s over FLOP/byte of each cell below the machine's limits.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark; its calibration has a bandwidth and peaks.
      theme: The colors.

    References:
      Williams, Waterman and Patterson, "Roofline: an insightful visual performance
      model for multicore architectures", Communications of the ACM 52 (2009),
      https://doi.org/10.1145/1498765.1498785.
    """
    rows = placed_rows(report)
    axes = figure.subplots()
    plot_style.dress(axes, theme)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("FLOP for each byte of operands and results")
    axes.set_ylabel("FLOP/s of matrix work")
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(color=theme.line, linewidth=0.6)
    _set_limits(axes, rows, report.calibration)
    tasks = list(dict.fromkeys(row.task for row, _ in rows))
    for row, distance in rows:
        place = distance.intensity, distance.flops_per_second
        axes.plot(*place, **_marker(row, tasks, theme))
        if row.xla:
            axes.plot(*place, **_ring(theme))
    _add_key(figure, axes, [row for row, _ in rows], tasks, theme)
    _draw_roofs(axes, report.calibration, theme)


def placed_rows(
    report: records.Report,
) -> list[tuple[records.Row, records.Distance]]:
    """Returns the cells that have a place on a roofline, and where."""
    calibration = report.calibration
    if not calibration.bandwidth or not calibration.peaks:
        return []
    return [
        (row, row.distance)
        for row in report.rows
        if row.distance and row.distance.intensity and row.distance.flops_per_second
    ]


def _set_limits(axes, rows, calibration):
    """Leaves room for the slope's label at the left, for the roofs' at the right."""
    peaks = calibration.peaks.values()
    ridges = [peak / calibration.bandwidth for peak in peaks]
    intensities = [distance.intensity for _, distance in rows]
    left = min(*ridges, *intensities) / 8
    decades = math.log10(1.5 * max(*ridges, *intensities) / left)
    axes.set_xlim(left, left * 10 ** (decades / (_LABELS_FROM - 0.04)))
    rates = [distance.flops_per_second for _, distance in rows]
    bottom = min(min(rates) / 2, min(peaks) / 20)
    decades = math.log10(max(*peaks, *rates) / bottom)
    axes.set_ylim(bottom, bottom * 10 ** (decades * (1.1 + 0.5 * _APART * len(peaks))))


def _draw_roofs(axes, calibration, theme):
    left, _ = axes.get_xlim()
    bottom, _ = axes.get_ylim()
    bandwidth, peaks = calibration.bandwidth, calibration.peaks
    start = max(left, bottom / bandwidth)
    top = max(peaks.values())
    slope = {"color": theme.ink, "linewidth": 1.4, "zorder": 2}
    axes.plot([start, top / bandwidth], [start * bandwidth, top], **slope)
    _label_slope(axes, start, calibration)
    end, label_x = _from_share(axes, "x", _LABELS_FROM - 0.03, _LABELS_FROM)
    names = sorted(peaks, key=peaks.get)
    for name, y in zip(
        names, _label_heights(axes, sorted(peaks.values())), strict=True
    ):
        peak = peaks[name]
        color = plot_style.COLORS[_MODES[name]]
        places = [peak / bandwidth, end, label_x], [peak, peak, y]
        axes.plot(*places, color=color, linewidth=1.6, zorder=2)
        text = f" {name} {words.flops(peak)}"
        axes.text(label_x, y, text, va="center", fontsize="small", clip_on=False)


def _label_slope(axes, start, calibration):
    """Writes the bandwidth along the slope, whose angle the layout decides."""
    bandwidth = calibration.bandwidth
    axes.figure.draw_without_rendering()
    ends = [(x, x * bandwidth) for x in (start, 10 * start)]
    (x0, y0), (x1, y1) = axes.transData.transform(ends)
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    axes.text(
        *(
            1.25 * start,
            1.45 * start * bandwidth,
            f"memory {words.bandwidth(bandwidth)}",
        ),
        rotation=angle,
        rotation_mode="anchor",
        fontsize="small",
    )


def _label_heights(axes, peaks):
    """Heights of the labels: those of the peaks, moved up where two would meet."""
    low, high = map(math.log10, axes.get_ylim())
    shares = []
    for peak in peaks:
        share = (math.log10(peak) - low) / (high - low)
        shares.append(max(share, shares[-1] + _APART) if shares else share)
    return _from_share(axes, "y", *shares)


def _from_share(axes, name, *shares):
    """Where some shares of a logarithmic axis are."""
    low, high = map(math.log10, getattr(axes, f"get_{name}lim")())
    return [10 ** (low + share * (high - low)) for share in shares]


def _marker(row, tasks, theme):
    color = plot_style.COLORS[row.mode]
    return {
        "linestyle": "",
        "marker": _SHAPES[tasks.index(row.task) % len(_SHAPES)],
        "markersize": 7,
        "color": color,
        "fillstyle": _FILLS[row.framework],
        "markerfacecoloralt": theme.background,
        "markeredgecolor": color,
        "markeredgewidth": 1.3,
        "zorder": 4,
    }


def _ring(theme):
    """What surrounds the markers of cells with XLA."""
    ring = {"marker": "o", "markersize": 12, "fillstyle": "none", "linestyle": ""}
    return {**ring, "color": theme.ink, "markeredgewidth": 0.8, "zorder": 3}


def _add_key(figure, axes, rows, tasks, theme):
    """Colors are modes, shapes are tasks, fills are frameworks."""
    modes, others = {}, {}
    plain = {"linestyle": "", "marker": "o", "markersize": 7, "color": theme.muted}
    half = {"markerfacecoloralt": theme.background}
    for mode in dict.fromkeys(row.mode for row in rows):
        modes[mode] = {**plain, "color": plot_style.COLORS[mode]}
    for number, task in enumerate(tasks):
        others[task] = {**plain, "marker": _SHAPES[number % len(_SHAPES)]}
    for framework in dict.fromkeys(row.framework for row in rows):
        if framework in words.PEERS:
            fill = {"fillstyle": _FILLS[framework], **half}
            others[words.PEERS[framework]] = {**plain, **fill}
    if any(row.xla for row in rows):
        others["with XLA"] = _ring(theme)
    lines = max(len(modes), len(others))
    handles = [
        axes.plot([], [], label=name, **style)[0]
        for column in (modes, others)
        for name, style in [*column.items(), *[(" ", _NOTHING)] * (lines - len(column))]
    ]
    legend = figure.legend(handles=handles, loc="outside lower left", ncols=2)
    for text in legend.get_texts():
        text.set(**plot_style.AS_IT_IS)
        plot_style.fit(text, 0.4 * plot_style.POINTS)
    plot_style.set_height(figure, _HEIGHT + 1.15 * plot_style.LINE * lines)


def _short(value):
    """A tick's FLOP/s: "10 G"."""
    number, prefix = words.flops(value).removesuffix("FLOP/s").split(" ")
    return f"{float(number.replace(',', '')):g} {prefix}"
