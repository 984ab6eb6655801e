"""The figures in words, for readers who do not see them.

Each function takes a report that the figure can be drawn of, and returns two or three
sentences with the main numbers.
"""

from tfamp.benchmark import (
    accuracy_chart,
    bar_charts,
    loss_chart,
    parity_chart,
    records,
    roofline_chart,
    scale_chart,
    words,
)


def speed_up(report: records.Report) -> str:
    """Returns what the bars of the speed-up show."""
    rows = sorted((r for r in report.rows if r.speed_up), key=_speed, reverse=True)
    text = f"Bars of the speed-up over float32 of {_count(rows, 'cell')}."
    text += f" Fastest is {_speed_of(rows[0])}"
    text += f"; slowest is {_speed_of(rows[-1])}." if len(rows) > 1 else "."
    return text + _failures(report)


def memory(report: records.Report) -> str:
    """Returns what the bars of the memory show."""
    rows = [row for row in report.rows if row.memory is not None]
    rows.sort(key=lambda row: row.memory or 0)
    kinds = ", or of ".join(bar_charts.memory_kinds(report))
    least, most = (
        f"{r.cell.label}: {words.gib(r.memory)}" for r in (rows[0], rows[-1])
    )
    text = f"Bars of the peak memory of {kinds}, of {_count(rows, 'cell')}."
    text += f" Most: {most}." + (f" Least: {least}." if len(rows) > 1 else "")
    return text + _failures(report)


def parity(report: records.Report) -> str:
    """Returns what the marks of the differences from float32 show."""
    rows = parity_chart.compared(report)
    verdicts = [words.verdict(parity)[1] for _, parity in rows]
    counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)]
    text = "Marks of the loss's difference from float32's with 95 % intervals of "
    text += f"{_count(rows, 'cell')}: {', '.join(counts)}."
    differences = [
        (abs(parity.loss_difference), row.cell.label, parity)
        for row, parity in rows
        if parity.loss_difference is not None
    ]
    if differences:
        _, label, largest = max(differences, key=lambda found: found[0])
        shown = words.difference(largest.loss_difference, largest.loss_interval)
        text += f" The largest is of {label}: {shown}."
    return text


def loss_curves(report: records.Report) -> str:
    """Returns what the curves of the loss show."""
    rows = [row for row in report.rows if loss_chart.has_loss(row)]
    seeds = max(len(row.losses) for row in rows)
    steps = max(len(series) for row in rows for series in row.losses.values())
    text = f"Curves of the training loss of {_count(rows, 'cell')} over {steps:,} steps"
    text += f", mean over {_count(range(seeds), 'seed')}."
    ends = [(loss_chart.last_loss(row), row) for row in rows]
    finite = sorted((loss, row.cell.label) for loss, row in ends if loss is not None)
    (low, lowest), (high, highest) = finite[0], finite[-1]
    text += f" The last losses are {words.number(low)} ({lowest})"
    text += f" to {words.number(high)} ({highest})." if len(finite) > 1 else "."
    broken = [r.cell.label for r in rows if loss_chart.is_interrupted(r)]
    return text + (f" Not finite in places: {'; '.join(broken)}." if broken else "")


def loss_scale(report: records.Report) -> str:
    """Returns what the timelines of the loss scale show."""
    rows = scale_chart.scaled_rows(report)
    if not rows:
        return scale_chart.unscaled_text(report)
    cells = [
        f"{row.cell.label}: {scale_chart.skipped_text(row)}"
        + (f", {words.count(row.loss_scale)} at the end" if row.loss_scale else "")
        for row in rows
    ]
    return f"Timelines of the loss scale. {_join(cells)}."


def roofline(report: records.Report) -> str:
    """Returns what the roofline shows."""
    rows = roofline_chart.placed_rows(report)
    calibration = report.calibration
    peaks = [f"{name} {words.flops(peak)}" for name, peak in calibration.peaks.items()]
    text = f"{_count(rows, 'cell')} below the machine's limits: memory gives "
    text += f"{words.bandwidth(calibration.bandwidth)}, products {', '.join(peaks)}."
    best, distance = max(rows, key=lambda pair: pair[1].flops_per_second)
    share = distance.peak_share
    text += f" Most is computed by {best.cell.label}"
    text += f": {words.flops(distance.flops_per_second)}"
    return text + (f", {words.percent(share)} of its peak." if share else ".")


def step_parts(report: records.Report) -> str:
    """Returns what the parts of the steps show."""
    rows = [row for row in report.rows if row.step_ms]
    cells = [f"{row.cell.label}: {bar_charts.step_text(row)}" for row in rows]
    text = (
        "Bars of what a training step is made of: matrix work at the peak rate, what "
    )
    return f"{text}it takes beyond that, and other work. {_join(cells)}."


def time_to_accuracy(report: records.Report) -> str:
    """Returns what the curves of scores over time show."""
    cells = [
        f"{row.task}: {accuracy_chart.time_text(row)}" for row in report.accuracy_rows
    ]
    targets = dict.fromkeys(
        f"{row.metric} {words.number(row.target)}" for row in report.accuracy_rows
    )
    text = "Curves of the validation score over seconds of training"
    text += f", target {' and '.join(targets)}." if targets else "."
    return f"{text} {_join(cells)}." if cells else text


_MOST = 6  # Cells that a text lists.


def _join(cells):
    more = f"; and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
    return "; ".join(cells[:_MOST]) + more


def _count(things, name):
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _speed(row):
    return row.speed_up.median


def _speed_of(row):
    loss = bar_charts.loss_text(row.parity)
    return f"{row.cell.label}: {words.speed_up(row.speed_up)}, {loss}"


def _failures(report):
    failed = [row for row in report.rows if row.failed]
    return f" {_count(failed, 'cell')} failed." if failed else ""
