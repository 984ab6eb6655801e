"""Tables and plain data of what the numerics tools found."""

import math
from collections.abc import Sequence
from typing import Any


def number(value: float | None) -> str:
    """Returns an error in three digits; a dash for None."""
    return "-" if value is None else f"{value:.2e}" if value else "0"


def share(count: int, of: int) -> str:
    """Returns a share in percent; empty for none."""
    if not count:
        return ""
    return f"{count / of:.2%}" if count / of >= 1e-4 else "< 0.01%"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in (header, *rows)
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


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
