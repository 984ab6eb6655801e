"""How results are printed, and written as plain data."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WIDEST = 60  # Wider columns are not padded in Markdown, nor at the end of a line.


def number(value: float | None) -> str:
    """Returns an error in three digits; a dash for None."""
    return "-" if value is None else f"{value:.2e}" if value else "0"


def share(count: int, of: int) -> str:
    """Returns a share in percent; empty for none."""
    if not count:
        return ""
    return f"{count / of:.2%}" if count / of >= 1e-4 else "< 0.01%"


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool = False
) -> str:
    """Returns a table in columns of equal width, readable as plain text.

    Args:
      header: Names of the columns.
      rows: Their texts.
      markdown: Whether it is one in Markdown.
    """
    lines = [[*header], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    widths = [
        width if width <= _WIDEST or index < last and not markdown else 3
        for index, width in enumerate(widths)
    ]
    lines.insert(1, ["-" * width for width in widths])
    between, ends = (" | ", ("| ", " |")) if markdown else ("  ", ("", ""))
    padded = (between.join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(f"{ends[0]}{line}{ends[1]}".rstrip() for line in padded)


def report(
    lines: Iterable[str],
    tables: Iterable[tuple[Sequence[str], Iterable[Sequence[str]]]],
    title: str = "",
) -> str:
    """Returns lines, and tables below them.

    Args:
      lines: Lines above the tables.
      tables: (header, rows) of each.
      title: For Markdown; without one it is for a terminal.
    """
    below = [table(*each, markdown=bool(title)) for each in tables]
    if not title:
        return "\n\n".join(["\n".join(lines), *below])
    listed = "\n".join(f"- {line}" for line in lines)
    return "\n\n".join([f"# {title}", listed, *below]) + "\n"


def largest(rows: Sequence[Any], what: str, most: int = 8) -> tuple[list, list[str]]:
    """Returns the rows with the largest errors, in order, and a line on them.

    Args:
      rows: Objects with an `error`; one that is NaN is above all others.
      what: A name for the rows that are shown.
      most: How many are shown.

    Returns:
      (the rows, the lines: none where all rows are shown).
    """

    def size(index):
        error = rows[index].error
        return math.inf if math.isnan(error) else error

    first = sorted(range(len(rows)), key=size, reverse=True)[:most]
    shown = [rows[index] for index in sorted(first)]
    line = f"the {len(shown)} of {len(rows)} {what}; print() shows all"
    return shown, [line] if len(shown) < len(rows) else []


def of_dicts(rows: Sequence[Mapping[str, str]], markdown: bool = True) -> str:
    """Returns a `table` of texts by column; all rows have the same columns."""
    return table(list(rows[0]), (list(row.values()) for row in rows), markdown)


def plain(value: Any) -> Any:
    """Returns named tuples as dicts, other sequences as lists, for JSON."""
    if hasattr(value, "_asdict"):
        return {key: plain(each) for key, each in value._asdict().items()}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
