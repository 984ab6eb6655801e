"""A list of cells in a figure: a line of text for each, and a bar's room below it.

Names and numbers stand above the bars and not beside them: on a phone's width nothing
else leaves both of them room.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfamp.benchmark import plot_style, records

BAR = 0.75  # All heights are in lines of text.
_TEXT = 1.1
_GAP = 0.55
_HEADING = 1.5
_BETWEEN_GROUPS = 0.5
_FOOT = 0.55  # Inches of tick labels and axis label.
_MANY = 12  # From here on a list has its ticks at both ends.
WIDTH = 0.94 * plot_style.POINTS
_APART = 8.0  # Points between a name and its value.


class Place(NamedTuple):
    """Where a cell is drawn.

    Attributes:
      row: The cell.
      y: Middle of its bar.
    """

    row: records.Row
    y: float

    @property
    def text_y(self) -> float:
        """Middle of its line of text."""
        return self.y - (BAR + _TEXT) / 2


class Sheet(NamedTuple):
    """Where everything of a list is, in lines from the top.

    Attributes:
      headings: (text, middle) pairs.
      places: The cells.
      height: Of the whole.
    """

    headings: tuple[tuple[str, float], ...]
    places: tuple[Place, ...]
    height: float

    @property
    def inches(self) -> float:
        """Height of the list with its axis."""
        ends = 1.5 if len(self.places) >= _MANY else 1
        return self.height * plot_style.LINE + ends * _FOOT


def lay_out(groups: Sequence[plot_style.Group]) -> Sheet:
    """Returns where the cells of some groups go."""
    headings, places, top = [], [], 0.0
    for group in groups:
        headings.append((group.heading, top + _HEADING / 2))
        top += _HEADING
        for row in group.rows:
            places.append(Place(row, top + _TEXT + BAR / 2))
            top += _TEXT + BAR + _GAP
        top += _BETWEEN_GROUPS
    return Sheet(tuple(headings), tuple(places), top - _BETWEEN_GROUPS)


def open_axes(axes, sheet: Sheet, theme: plot_style.Theme) -> None:
    """Makes empty axes the height of a list, without an axis at its side."""
    plot_style.dress(axes, theme)
    axes.set_ylim(sheet.height, 0)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    many = len(sheet.places) >= _MANY
    axes.tick_params(axis="x", which="major", top=many, labeltop=many)
    axes.spines["top"].set_visible(many)


def write(
    axes,
    sheet: Sheet,
    value_of: Callable[[records.Row], str],
    theme: plot_style.Theme,
    width: float = WIDTH,
) -> None:
    """Writes the headings, and above each bar the cell's name and its value.

    Args:
      axes: The axes.
      sheet: Where to write.
      value_of: A cell's value as text; not called for cells that failed.
      theme: The colors.
      width: Points between the two ends of a line.
    """
    for heading, y in sheet.headings:
        style = {"weight": "bold", "color": theme.ink}
        plot_style.fit(put(axes, 0, y, heading, "left", **style), width)
    for place in sheet.places:
        row = place.row
        value = "failed" if row.failed else value_of(row)
        color = theme.muted if row.failed else theme.ink
        right = put(axes, 1, place.text_y, value, "right", color=color)
        room = width - plot_style.width_of(right) - _APART
        name = plot_style.name(row)
        left = put(axes, 0, place.text_y, name, "left", color=color)
        plot_style.fit(left, room)
        if row.failed:
            say(axes, place, row.failed, theme)


def say(axes, place: Place, text: str, theme: plot_style.Theme) -> None:
    """Writes a line in a bar's place."""
    style = {"color": theme.muted, "style": "italic", "fontsize": "small"}
    plot_style.fit(put(axes, 0, place.y, text, "left", **style), WIDTH)


def put(axes, x: float, y: float, text: str, side: str, **style):
    """Writes a text at a share of the width, and returns it."""
    at = {"transform": axes.get_yaxis_transform(), "ha": side, "va": "center"}
    written = axes.text(x, y, text, **at, **style, **plot_style.AS_IT_IS)
    written.set_in_layout(False)  # The axes are as wide as the figure without it, too.
    return written


def draw_grid(
    axes,
    sheet: Sheet,
    theme: plot_style.Theme,
    drawn: Callable[[records.Row], bool],
    at: float | None = None,
) -> None:
    """Draws the grid behind the bars only, so that no line crosses a text.

    Args:
      axes: The axes, their limits and ticks final.
      sheet: Where the bars are.
      theme: The colors.
      drawn: Whether a cell has a bar.
      at: Where to draw a stronger line.
    """
    low, high = sorted(axes.get_xlim())
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xlim(axes.get_xlim())
    middles = [place.y for place in sheet.places if drawn(place.row)]
    _draw_upright(axes, ticks, middles, color=theme.line, linewidth=0.6, zorder=0)
    if at is not None:
        _draw_upright(axes, [at], middles, color=theme.ink, linewidth=1.1, zorder=3)


def _draw_upright(axes, xs, middles, **style):
    """Draws a line at each x behind each bar, all in one collection."""
    reach = BAR / 2 + 0.05
    pairs = list(itertools.product(xs, middles))
    ends = ([y + side for _, y in pairs] for side in (-reach, reach))
    axes.vlines([x for x, _ in pairs], *ends, **style)
