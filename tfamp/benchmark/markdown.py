"""The report as Markdown: the tables of the page, without its figures' data."""

import re
from collections.abc import Iterator

from tfamp.benchmark import published, records, side_by_side, words
from tfamp.training import benchmark_report

_QUIET = ("base", "equal", "noise")


def to_markdown(report: records.Report, figures: list[tuple[str, str]]) -> str:
    """Returns `report.md`.

    Args:
      report: The benchmark.
      figures: (alternative text, path) of the pictures to show.
    """
    lines = [f"# {_inline(report.name)}: benchmark on {report.machine['device']}", ""]
    lines += [f"**{report.advice.headline}**", ""]
    lines += [f"- {reason}" for reason in report.advice.reasons]
    if report.advice.others:
        lines += ["", "The other modes:", ""]
        lines += [f"- {other}" for other in report.advice.others]
    for task, about in report.tasks.items():
        lines += ["", f"## {task}", "", _inline(about), "", *main_table(report, task)]
        lines += ["", *_explanations(report, task), "", *_beside_peers(report, task)]
    lines += [*_accuracy(report), *_limits(report)]
    for alt, path in figures:
        lines += ["", f"![{alt}]({path})"]
    lines += ["", "## Published figures: not ours", "", *published_table()]
    lines += ["", "## How it was measured", ""]
    lines += [f"- {line}" for line in _method(report)]
    return "\n".join(_one_blank([*lines, ""]))


def main_table(report: records.Report, task: str) -> list[str]:
    """Returns the table of a task as lines of Markdown; docs/benchmark.md shows it.

    Args:
      report: The benchmark.
      task: Name of the task.
    """
    rows = [row for row in report.rows if row.task == task]
    head = (
        *("mode", "batch", "XLA", "speed-up", "loss - float32's", "step", "rate"),
        *("peak memory", "of the peak", "matrix work", "compile", "input"),
        *("loss scale", "skipped"),
    )
    table = [list(head), *(_cells(row) for row in rows)]
    return benchmark_report.aligned(_without_empty(table))


def _cells(row):
    first = [row.cell.column, f"{row.batch_size}", "on" if row.xla else "off"]
    if row.failed:
        return [*first, "failed", *[words.NONE] * 10]
    distance = row.distance
    return [
        *first,
        words.speed_up(row.speed_up),
        _error(row.parity),
        words.milliseconds(row.step_ms),
        f"{words.number(row.throughput.median)} {row.unit}/s",
        words.gib(row.memory),
        words.percent(distance and distance.peak_share),
        words.percent(distance and distance.matrix_share),
        words.seconds(row.compile_seconds),
        words.percent(row.pipeline_share),
        words.count(row.loss_scale),
        words.count(row.skipped_steps),
    ]


def _error(parity):
    """The error column: a difference and its verdict."""
    _, verdict = words.verdict(parity)
    if parity is None or parity.loss_difference is None or parity.verdict == "base":
        return verdict
    shown = words.difference(parity.loss_difference, parity.loss_interval)
    return f"{shown}, {verdict}"


def _without_empty(table):
    """A table without the columns that say nothing."""
    columns = [c for c in zip(*table, strict=True) if set(c[1:]) != {words.NONE}]
    return [list(line) for line in zip(*columns, strict=True)]


def _inline(text):
    """Any text in a cell of a table, or a line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text):
    """A text as code, whatever is in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def _beside_peers(report, task):
    table = side_by_side.table(report, task)
    if not table:
        return []
    title = "tfamp beside its peers: the median step, and the loss beside float32's:"
    return [title, "", *benchmark_report.aligned(table)]


def _explanations(report, task) -> Iterator[str]:
    for row in report.rows:
        if row.task == task and row.failed:
            yield f"- {_inline(row.cell.label)}: failed: {_inline(row.failed)}"
        elif row.task == task and row.parity.verdict not in _QUIET:
            yield f"- {_inline(row.cell.label)}: {row.parity.explanation}"


def _accuracy(report):
    """Time to accuracy."""
    if not report.accuracy_rows:
        return []
    head = ["mode", "reached", "time", "ratio", "without the first step", "epochs"]
    lines = ["", "## Time to accuracy", "", published.SUMMARY, ""]
    for task in dict.fromkeys(row.task for row in report.accuracy_rows):
        rows = [row for row in report.accuracy_rows if row.task == task]
        target = words.target(rows[0])
        table = [[*head, "test score"]]
        table += [
            [
                row.mode,
                f"{row.reached} of {row.seeds}",
                words.spread(row.seconds, "s"),
                words.ratio(row.ratio),
                words.ratio(row.ratio_without_first_step),
                words.number(row.epochs),
                words.score(row.test_score, row.is_error),
            ]
            for row in rows
        ]
        lines += [f"{task}, until {target} in validation:", ""]
        lines += [*benchmark_report.aligned(_without_empty(table)), ""]
        lines += [f"- {row.mode}: {_inline(row.note)}" for row in rows if row.note]
        lines.append("")
    return lines


def _limits(report):
    """What the machine gives, and what took the time."""
    found = report.calibration
    lines = ["", "## Distance from the machine's limit", ""]
    if found.failed:
        return [*lines, f"The calibration failed: {_inline(found.failed)}"]
    peaks = [f"{name} {words.flops(peak)}" for name, peak in found.peaks.items()]
    if not peaks:
        return []
    lines.append(
        f"Measured here: large matrix products {', '.join(peaks)}; memory "
        f"{words.bandwidth(found.bandwidth)}."
    )
    table = [["cell", "FLOP/s", "of the peak", "FLOP/byte", "attainable", "the rest"]]
    for row in report.rows:
        if row.distance:
            others = (f"{n} {words.percent(share)}" for n, share in row.distance.others)
            table.append(
                [
                    row.cell.label,
                    words.flops(row.distance.flops_per_second),
                    words.percent(row.distance.peak_share),
                    words.number(row.distance.intensity),
                    words.flops(row.distance.attainable),
                    ", ".join(others) or words.NONE,
                ]
            )
    if len(table) > 1:
        lines += ["", *benchmark_report.aligned(table)]
    return lines


def published_table() -> list[str]:
    """Returns the published figures as lines of Markdown; docs/ shows them, too."""
    table = [list(published.HEAD), *map(list, published.ROWS)]
    return benchmark_report.aligned(table)


def _method(report) -> Iterator[str]:
    yield f"{_code(report.command)}, {report.date}"
    yield from map(_inline, report.notes)
    facts = report.machine["facts"]
    versions = {name: facts[name] for name in ("tensorflow", "keras") if name in facts}
    versions |= report.peers
    parts = [report.machine["device"], f"{facts.get('CPU cores', '?')} CPU cores"]
    parts += [f"{name} {version}" for name, version in versions.items()]
    yield "; ".join([*parts, *filter(None, [report.clocks])])
    for row in report.rows:
        if row.note:
            tf32 = words.tensor_float_32(row, report.machine)
            yield _inline(f"{row.cell.label}: {row.note}; TF32 {tf32}")


def _one_blank(lines):
    """Lines without two empty ones after another."""
    return [
        line for i, line in enumerate(lines) if line or i == 0 or lines[i - 1] != ""
    ]
