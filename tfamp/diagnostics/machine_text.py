"""Shows a description of a machine on a terminal and in Markdown."""

import shutil
import textwrap
from collections.abc import Sequence

from tfamp.diagnostics import machine

_MOST_COLUMNS = 110


def to_text(report: machine.MachineReport) -> str:
    """Returns the report as aligned tables, as wide as the terminal."""
    width = min(shutil.get_terminal_size((88, 24)).columns, _MOST_COLUMNS)
    lines = [_title(report), ""]
    for device in dict.fromkeys(row[0] for row in report.formats):
        lines.append(device)
        rows = [row[1:] for row in report.formats if row[0] == device]
        lines += table(("format", "fast?", "why"), rows, width)
        lines.append("")
    lines += table(("tfamp.enable()", "would choose", "why"), _decisions(report), width)
    for head, rows in _sections(report):
        lines += ["", head, *table((), rows, width)]
    return "\n".join(lines)


def to_markdown(report: machine.MachineReport) -> str:
    """Returns the report as Markdown tables, every kernel switch included."""
    lines = [f"# {_title(report)}", ""]
    lines += _markdown(("device", "format", "fast?", "why"), report.formats)
    lines += _markdown(("tfamp.enable()", "would choose", "why"), _decisions(report))
    if report.facts:
        lines += _markdown(("fact", "value"), report.facts)
    if report.variables:
        lines += _markdown(("environment variable", "value"), report.variables)
    if report.switches:
        fields = ("name", "requested", "effective", "default", "reason")
        rows = [[str(switch[field]) for field in fields] for switch in report.switches]
        lines += _markdown(("switch", *fields[1:]), rows)
    return "\n".join(lines)


def _title(report):
    if report.simulated:
        return f"Simulated device: {report.device} (this host does not have it)"
    return f"This machine trains on: {report.device}"


def _decisions(report):
    return [
        ("mode", report.mode, report.mode_reason),
        ("graph rewrite", report.graph_rewrite, report.graph_rewrite_reason),
    ]


def _sections(report):
    if report.facts:
        yield "Software and hardware", report.facts
    if not report.simulated:
        none = (("none that matters is set", ""),)
        yield "Environment variables", report.variables or none
    if report.switches:
        changed = [switch for switch in report.switches if _is_changed(switch)]
        same = len(report.switches) - len(changed)
        rows = [
            (
                switch["name"],
                f"requested {switch['requested']}, effective {switch['effective']}, "
                f"default {switch['default']}: {switch['reason']}",
            )
            for switch in changed
        ]
        rest = f"{same} more" if changed else f"all {same}"
        rows.append((rest, "as TensorFlow has them by default"))
        yield "Kernel switches", rows


def _is_changed(switch):
    return (
        switch["value"] is not None
        or switch["requested"] != switch["default"]
        and (not str(switch["default"]).startswith(switch["requested"]))
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns lines of a table whose last column is wrapped to the width."""
    rows = [list(map(str, row)) for row in ([head] if head else []) + list(rows)]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=False)]
        start = "  " + "  ".join(cells) + "  "
        wrapped = textwrap.wrap(
            row[-1], max(width - len(start), 30), break_on_hyphens=False
        )
        lines.append((start + (wrapped[0] if wrapped else "")).rstrip())
        lines += [" " * len(start) + part for part in wrapped[1:]]
    return lines


def _markdown(head, rows):
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]
