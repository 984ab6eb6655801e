"""What every figure of a benchmark shares: colors, names of cells, texts that fit."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfamp.benchmark import records
from tfamp.training import plots as training_plots

WIDTH = 5.0  # Inches; a phone shows these figures without making them smaller by much.
POINTS = 72 * WIDTH
LINE = 0.165  # Inches from one line of text to the next.
AS_IT_IS = {"parse_math": False}  # Texts from configurations may have dollar signs.

_PALETTE = training_plots.OKABE_ITO
# Relatives have related colors: float32's are blue, bfloat16's warm.
COLORS = {
    "float32": _PALETTE["blue"],
    "tf32": _PALETTE["sky blue"],
    "mixed_bfloat16": _PALETTE["vermilion"],
    "rewrite_bfloat16": _PALETTE["orange"],
    "mixed_float16": _PALETTE["green"],
    "rewrite_float16": _PALETTE["purple"],
}
HATCHES = {"tfamp": "", "keras": "///", "torch": "\\\\\\\\"}
DASHES = {"tfamp": "-", "keras": "--", "torch": ":"}
_LIGHTER = 0.45  # Strength of the color of a bar with XLA.


class Theme(NamedTuple):
    """Colors of all that is not data.

    Attributes:
      ink: Of text and axes.
      muted: Of what is not measured.
      line: Of the grid.
      background: Behind a PNG; an SVG has none.
      alarm: Of what needs a look.
    """

    ink: str
    muted: str
    line: str
    background: str
    alarm: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#ffffff", "#c1121f"),
    "dark": Theme("#e6edf3", "#9da7b1", "#3d444d", "#14171c", "#ff6b6b"),
}


class Group(NamedTuple):
    """Cells that are compared with each other.

    Attributes:
      heading: Task and batch size.
      rows: They, in the report's order.
    """

    heading: str
    rows: tuple[records.Row, ...]


def groups(rows: Sequence[records.Row]) -> list[Group]:
    """Returns the cells by task and batch size; tasks keep their order."""
    tasks = list(dict.fromkeys(row.task for row in rows))

    def place(row):
        return tasks.index(row.task), row.batch_size

    return [
        Group(f"{tasks[number]}, batch {batch:,}", tuple(members))
        for (number, batch), members in itertools.groupby(
            sorted(rows, key=place), key=place
        )
    ]


def name(row: records.Row) -> str:
    """Returns what tells a cell from the others of its group: "keras tf32, XLA"."""
    return f"{row.cell.column}, XLA" if row.xla else row.cell.column


def bar_style(row: records.Row, theme: Theme) -> dict[str, Any]:
    """Returns keywords of `barh`: color by mode, hatch by framework, XLA lighter."""
    color = COLORS[row.mode]
    return {
        "facecolor": pale(color, _LIGHTER, theme) if row.xla else color,
        "edgecolor": color,
        "hatch": HATCHES[row.framework],
        "hatchcolor": theme.background,
        "linewidth": 1.0,
    }


def pale(color: str, strength: float, theme: Theme) -> str:
    """Returns a color mixed with the background: 1 is the color itself.

    Opaque, so that no grid line shows through.
    """
    pairs = zip(_channels(color), _channels(theme.background), strict=True)
    mixed = (round(strength * own + (1 - strength) * behind) for own, behind in pairs)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(color):
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def dress(axes, theme: Theme) -> None:
    """Colors an axes' ticks, also those that are made when it is drawn."""
    axes.tick_params(which="both", colors=theme.ink, labelsize="small")
    axes.tick_params(which="minor", length=0, labelsize=0)


def fit(text, points: float) -> None:
    """Shortens a drawn text in its middle until it is no wider.

    Args:
      text: Matplotlib's `Text`, on a figure with an Agg canvas.
      points: Width in points.
    """
    whole = text.get_text()
    kept = len(whole)
    while (width := width_of(text)) > points and kept > 2:
        kept = min(kept - 1, math.ceil(kept * points / width))
        tail = kept // 2
        text.set_text(f"{whole[: kept - tail].rstrip()}…{whole[-tail:].lstrip()}")


def width_of(text) -> float:
    """Returns the length of a drawn line of text in points, also of an upright one."""
    figure = text.get_figure(root=True)
    box = text.get_window_extent(figure.canvas.get_renderer())
    return max(box.width, box.height) * 72 / figure.dpi


def set_height(figure, inches: float) -> None:
    """Makes a figure as tall as its content, and its margins narrow."""
    figure.set_size_inches(WIDTH, inches)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.05, hspace=0.03, wspace=0.02)


def key_above(axes, heading: str, columns: int = 2) -> None:
    """Writes a heading and the legend above a panel, where no curve is."""
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        alignment="left",
        borderaxespad=0.3,
        borderpad=0,
        columnspacing=1.2,
        handlelength=1.8,
        title=heading,
        title_fontproperties={"weight": "bold"},
    )
    legend.get_title().set(**AS_IT_IS)
    fit(legend.get_title(), 0.85 * POINTS)
    for text in legend.get_texts():
        text.set(**AS_IT_IS)
        fit(text, (0.85 * POINTS - 45) / columns)


def key_lines(entries: int, columns: int = 2) -> int:
    """Returns how many lines `key_above` takes."""
    return 1 + math.ceil(entries / columns)
