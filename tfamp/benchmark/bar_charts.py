"""Bars of a benchmark's cells: speed-up, memory, and what a step is made of."""

import math

from tfamp.benchmark import cell_list, plot_style, records, words

_GIB = 2**30
_TICKS = 7  # At most.
_WIDE = 30.0  # Largest over smallest speed-up from which on the axis is logarithmic.
# Parts of a step -> (strength of the color, what it is).
PARTS = {
    "peak": (1.0, "matrix work, as if at this machine's peak rate"),
    "slower": (0.6, "matrix work: the time that it takes beyond that"),
    "matrix": (0.8, "matrix work; the peak rate is not known"),
    "other": (0.25, "not matrix work"),
    "rest": (0.4, "the rest; how much of it is matrix work is not known"),
}


def draw_speed_up(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws the speed-up of each cell over float32, with its error beside it.

    Args:
      figure: An empty `Figure` with an Agg canvas.
      report: The benchmark.
      theme: The colors.
    """
    axes, sheet = _list_axes(figure, report.rows, theme)
    speeds = [row.speed_up for row in report.rows if row.speed_up]
    logarithmic = _set_speed_axis(axes, speeds)
    cell_list.write(axes, sheet, speed_up_text, theme)
    for place in sheet.places:
        speed = place.row.speed_up
        if speed is None:
            if not place.row.failed:
                text = "no float32 of this batch size to compare with"
                cell_list.say(axes, place, text, theme)
            continue
        start = 1.0 if logarithmic else 0.0
        _draw_bar(axes, place, speed.median - start, theme, left=start)
        reach = [max(speed.median - speed.low, 0)], [max(speed.high - speed.median, 0)]
        axes.errorbar(
            *(speed.median, place.y),
            xerr=reach,
            fmt="none",
            ecolor=theme.ink,
            elinewidth=1.2,
            capsize=3,
        )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("throughput over that of float32 without XLA")
    cell_list.draw_grid(axes, sheet, theme, lambda row: bool(row.speed_up), at=1.0)


def speed_up_text(row: records.Row) -> str:
    """Returns a cell's speed-up with its error: "1.70x, loss +1.0 %"."""
    speed = "no speed-up" if row.speed_up is None else words.ratio(_only(row.speed_up))
    return f"{speed}, {loss_text(row.parity)}"


def loss_text(parity: records.Parity | None) -> str:
    """Returns a loss beside float32's: "loss +1.0 %, unexplained"."""
    verdict = parity.verdict if parity else ""
    if verdict in ("base", "broken"):
        return f"loss {words.verdict(parity)[1]}".replace("loss the", "the")
    if parity is None or parity.loss_difference is None:
        return "loss not compared"
    text = f"loss {words.difference(parity.loss_difference)}"
    return f"{text}, unexplained" if verdict == "unexplained" else text


def draw_memory(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws the peak memory of each cell; arguments as `draw_speed_up`."""
    axes, sheet = _list_axes(figure, report.rows, theme)
    mixed = len(memory_kinds(report)) > 1
    largest = max(row.memory or 0 for row in report.rows) / _GIB
    axes.set_xlim(0, 1.04 * largest or 1.0)
    axes.locator_params(axis="x", nbins=6)

    def value(row):
        host = mixed and row.device_bytes is None and row.memory is not None
        return words.gib(row.memory) + (" (host)" if host else "")

    cell_list.write(axes, sheet, value, theme)
    for place in sheet.places:
        if place.row.memory is not None:
            _draw_bar(axes, place, place.row.memory / _GIB, theme)
        elif not place.row.failed:
            cell_list.say(axes, place, "not known", theme)
    axes.set_xlabel(f"peak memory of {', or of '.join(memory_kinds(report))} (GiB)")
    cell_list.draw_grid(axes, sheet, theme, lambda row: row.memory is not None)


def memory_kinds(report: records.Report) -> list[str]:
    """Returns whose memory a report gives: the device's, the process's or both."""
    rows = [row for row in report.rows if row.memory is not None]
    on_device = [row.device_bytes is not None for row in rows]
    kinds = ["the device"] if any(on_device) else []
    return kinds if all(on_device) else [*kinds, "the process on the host"]


def draw_step_parts(figure, report: records.Report, theme: plot_style.Theme) -> None:
    """Draws what each cell's step is made of; arguments as `draw_speed_up`."""
    groups = plot_style.groups(report.rows)
    groups = [group for group in groups if any(row.step_ms for row in group.rows)]
    sheets = [cell_list.lay_out([group]) for group in groups]
    kinds = {kind for row in report.rows for kind, _ in step_parts(row)}
    key = [kind for kind in PARTS if kind in kinds]
    heights = [sheet.inches for sheet in sheets]
    plot_style.set_height(
        figure, sum(heights) + (len(key) + 0.5) * 1.15 * plot_style.LINE
    )
    panels = figure.subplots(len(sheets), 1, height_ratios=heights, squeeze=False)
    for axes, sheet in zip(panels.flat, sheets, strict=True):
        cell_list.open_axes(axes, sheet, theme)
        steps = [place.row.step_ms for place in sheet.places if place.row.step_ms]
        axes.set_xlim(0, 1.02 * max(step.median for step in steps))
        axes.locator_params(axis="x", nbins=6)
        cell_list.write(axes, sheet, step_text, theme)
        for place in sheet.places:
            _draw_parts(axes, place, theme)
        axes.set_xlabel("milliseconds of a training step")
        cell_list.draw_grid(axes, sheet, theme, lambda row: bool(row.step_ms))
    handles = [
        panels.flat[0].bar(
            *(0, 0),
            facecolor=plot_style.pale(theme.muted, strength, theme),
            label=label,
        )
        for strength, label in (PARTS[kind] for kind in key)
    ]
    figure.legend(handles=handles, loc="outside lower left")


def step_parts(row: records.Row) -> list[tuple[str, float]]:
    """Returns the parts of a step as (key of `PARTS`, milliseconds) pairs.

    ```
    matrix work at peak | flops / peak, at most all of the matrix work
    slower              | matrix_share * step minus that
    other               | the step minus matrix_share * step
    ```
    """
    if row.step_ms is None:
        return []
    step, distance = row.step_ms.median, row.distance
    share = distance.matrix_share if distance else None
    matrix = step if share is None else min(share, 1.0) * step
    parts = []
    if distance and distance.peak:
        at_peak = min(1e3 * distance.flops / distance.peak, matrix)
        parts.append(("peak", at_peak))
        if share is not None:
            parts.append(("slower", matrix - at_peak))
    elif share is not None:
        parts.append(("matrix", matrix))
    left = step - math.fsum(length for _, length in parts)
    return [*parts, ("rest" if share is None else "other", max(left, 0.0))]


def step_text(row: records.Row) -> str:
    """Returns a step's time, and how much of it the peak rate would take."""
    if row.step_ms is None:
        return words.NONE
    text = f"{words.number(row.step_ms.median)} ms"
    at_peak = dict(step_parts(row)).get("peak")
    if at_peak is None:
        return text
    share = at_peak / row.step_ms.median
    return f"{text}, {words.percent(share)} at peak rate"


def _draw_parts(axes, place, theme):
    left = 0.0
    style = plot_style.bar_style(place.row, theme)
    color = style.pop("edgecolor")
    for kind, length in step_parts(place.row):
        pale = plot_style.pale(color, PARTS[kind][0], theme)
        style.update(facecolor=pale, linewidth=0)
        axes.barh(place.y, length, cell_list.BAR, left=left, **style)
        left += length


def _list_axes(figure, rows, theme):
    sheet = cell_list.lay_out(plot_style.groups(rows))
    plot_style.set_height(figure, sheet.inches)
    axes = figure.subplots()
    cell_list.open_axes(axes, sheet, theme)
    return axes, sheet


def _draw_bar(axes, place, length, theme, left=0.0):
    style = plot_style.bar_style(place.row, theme)
    axes.barh(place.y, length, cell_list.BAR, left=left, **style)


def _set_speed_axis(axes, speeds):
    """Whether the axis of speed-ups is logarithmic: one bar would hide the others."""
    ends = [end for speed in speeds for end in speed]
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    if low > 0 and high / low > _WIDE:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.3, high * 1.3)
        axes.set_xticks(_round_numbers(low / 1.3, high * 1.3))
        return True
    axes.set_xlim(0, max(1.04 * high, 1.1))
    axes.locator_params(axis="x", nbins=7)
    return False


def _round_numbers(low, high):
    """At most seven of 1, 2, 5, 10, ... or fewer digits."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        numbers = [digit * 10.0**power for power in powers for digit in digits]
        numbers = [number for number in numbers if low <= number <= high]
        if len(numbers) <= _TICKS:
            break
    return numbers[:: math.ceil(len(numbers) / _TICKS)]


def _only(spread):
    """A spread's median alone: its ends are drawn."""
    return spread.median, None, None
