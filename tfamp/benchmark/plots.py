"""The figures of a benchmark: each takes a `records.Report` and returns a `Figure`."""

import contextlib
import functools
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from tfamp.benchmark import (
    accuracy_chart,
    bar_charts,
    figure_words,
    loss_chart,
    parity_chart,
    plot_style,
    records,
    roofline_chart,
    scale_chart,
)

try:
    from matplotlib import font_manager, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as e:
    raise ImportError('Install matplotlib: pip install "tfamp[plot]".') from e

ThemeName = Literal["light", "dark"]
_DPI = 144
_SETTINGS = {
    "font.family": "DejaVu Sans",  # Comes with Matplotlib: the same everywhere.
    "font.size": 9,
    "text.hinting": "none",  # Texts are as wide at every resolution.
    "svg.fonttype": "path",
    "svg.hashsalt": "tfamp",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.9,
    "legend.fontsize": "small",
    "legend.frameon": False,
}
# Ids, and what refers to them.
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_PATH = re.compile(r' d="[^"]*"')
_LONG_DECIMALS = re.compile(r"(\.\d\d)\d+")


class Entry(NamedTuple):
    """One figure.

    Attributes:
      name: What its files are called.
      title: A heading.
      caption: How to read it, in a sentence.
      paint: Draws it on an empty figure: (figure, report, theme's colors).
      alternative_text: Says what it shows of a report that it is drawn of.
      has_data: Whether a report has anything to draw.
    """

    name: str
    title: str
    caption: str
    paint: Callable[[Figure, records.Report, plot_style.Theme], None]
    alternative_text: Callable[[records.Report], str]
    has_data: Callable[[records.Report], bool]

    def draw(self, report: records.Report, theme: ThemeName = "light") -> Figure:
        """Returns the figure of a report; nothing global is changed.

        Args:
          report: The benchmark; `has_data` is true of it.
          theme: "light" or "dark": what it will be seen on.

        Raises:
          ValueError: If the report has nothing to draw.
        """
        if not self.has_data(report):
            raise ValueError(
                f"The report {report.name!r} has nothing to draw as {self.name!r}. "
                "Draw what `applicable(report)` returns."
            )
        colors = plot_style.THEMES[theme]
        with _settings(colors):
            figure = Figure(layout="constrained", facecolor="none")
            FigureCanvasAgg(figure)
            self.paint(figure, _drawable(report, _known_characters()), colors)
        return figure


FIGURES = {
    entry.name: entry
    for entry in (
        Entry(
            "speed_up",
            "Speed-up over float32",
            "Longer bars are faster, the whisker spans the repeats, and beside each "
            "speed-up stands how far its loss is from float32's.",
            bar_charts.draw_speed_up,
            figure_words.speed_up,
            lambda report: any(row.speed_up for row in report.rows),
        ),
        Entry(
            "memory",
            "Peak memory",
            "Shorter bars leave more memory for larger batches.",
            bar_charts.draw_memory,
            figure_words.memory,
            lambda report: any(row.memory is not None for row in report.rows),
        ),
        Entry(
            "parity",
            "Distance from float32's results",
            "A mark at the line learned as float32 did; a bar that crosses the line "
            "could be the noise of the seeds.",
            parity_chart.draw_parity,
            figure_words.parity,
            lambda report: bool(parity_chart.compared(report)),
        ),
        Entry(
            "loss_curves",
            "Training loss",
            "Lines that lie upon each other learn alike; the band spans the seeds.",
            loss_chart.draw_loss_curves,
            figure_words.loss_curves,
            loss_chart.has_losses,
        ),
        Entry(
            "loss_scale",
            "Loss scale and skipped steps",
            "The loss scale doubles after steps without an overflow and drops at each "
            "overflow, whose step is skipped.",
            scale_chart.draw_loss_scale,
            figure_words.loss_scale,
            lambda report: any(not row.failed for row in report.rows),
        ),
        Entry(
            "roofline",
            "Roofline",
            "The lines are this machine's limits: left of the bend memory, right of it "
            "arithmetic; the further a mark is below, the more is left to gain.",
            roofline_chart.draw_roofline,
            figure_words.roofline,
            lambda report: bool(roofline_chart.placed_rows(report)),
        ),
        Entry(
            "step_parts",
            "Where the time of a step goes",
            "The strongest part is all that a step would take if it were matrix work "
            "at the machine's peak rate; the rest is what other limits cost.",
            bar_charts.draw_step_parts,
            figure_words.step_parts,
            lambda report: any(row.step_ms and row.distance for row in report.rows),
        ),
        Entry(
            "time_to_accuracy",
            "Time to accuracy",
            "A line is one training run; the sooner it meets the target, the better; "
            "a ratio is float32's time over that of the mode.",
            accuracy_chart.draw_time_to_accuracy,
            figure_words.time_to_accuracy,
            lambda report: bool(accuracy_chart.timed_tasks(report)),
        ),
    )
}


def applicable(report: records.Report) -> list[Entry]:
    """Returns the figures that a report has data for."""
    return [entry for entry in FIGURES.values() if entry.has_data(report)]


def to_svg(figure: Figure) -> str:
    """Returns a figure as an `<svg>` element without background, texts as paths.

    Equal figures give equal texts. All ids begin with a hash of the content, so that
    several can stand in one page.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _settings():
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = _PATH.sub(lambda path: _LONG_DECIMALS.sub(r"\1", path[0]), text)
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:8]
    return _ID.sub(rf"\g<1>{prefix}-", text)


def to_png(figure: Figure, theme: ThemeName) -> bytes:
    """Returns a figure as PNG of 144 dots an inch on its theme's background.

    Args:
      figure: What `Entry.draw` returned.
      theme: The theme that it was drawn in.
    """
    file = io.BytesIO()
    background = plot_style.THEMES[theme].background
    with _settings():
        figure.savefig(file, format="png", dpi=_DPI, facecolor=background)
    return file.getvalue()


@contextlib.contextmanager
def _settings(colors: plot_style.Theme | None = None) -> Iterator[None]:
    """Matplotlib's own settings and ours, whatever a `matplotlibrc` says."""
    ours = dict(_SETTINGS)
    if colors:
        names = ("text.color", "axes.labelcolor", "axes.edgecolor")
        ours |= dict.fromkeys(names, colors.ink)
    with style.context(["default", ours]):
        yield


def _drawable(value, known: frozenset[str]):
    """A report's texts in one line each, with the code of what the font lacks."""
    if isinstance(value, str):
        line = " ".join(value.split())
        return "".join(c if c in known else f"[U+{ord(c):04X}]" for c in line)
    if hasattr(value, "_make"):
        return value._make(_drawable(part, known) for part in value)
    if isinstance(value, tuple):
        return tuple(_drawable(part, known) for part in value)
    return value


@functools.cache
def _known_characters() -> frozenset[str]:
    font = font_manager.get_font(font_manager.findfont(_SETTINGS["font.family"]))
    return frozenset(map(chr, font.get_charmap()))
