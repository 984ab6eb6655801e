"""Writes a report into a folder: JSON, Markdown, one HTML page, and its figures."""

import json
import pathlib
import shutil

from absl import logging

from tfamp.benchmark import markdown, page, published, records
from tfamp.training import run_files

JSON, MARKDOWN, PAGE = "benchmark.json", "report.md", "report.html"
SCREENSHOT = "screenshot.png"
FIGURES = "figures"
# What is in each kind of figure's name after the figure's own.
ENDINGS = (".svg", "-dark.svg", ".png")


def write(report: records.Report, folder: pathlib.Path) -> None:
    """Writes all files; `benchmark.json` last, which says that they are all there.

    Without matplotlib there are tables only, and a warning.

    Args:
      report: The benchmark.
      folder: Its folder.
    """
    (folder / JSON).unlink(missing_ok=True)
    figures = _figures(report, folder / FIGURES)
    shown = [(each.alt, f"{FIGURES}/{each.name}.png") for each in figures]
    run_files.write_text(folder / MARKDOWN, markdown.to_markdown(report, shown))
    others = (published.HEAD, *published.ROWS)
    run_files.write_text(folder / PAGE, page.to_html(report, figures, others))
    text = json.dumps(report.to_dict(), indent=1)
    run_files.write_text(folder / JSON, text + "\n")


def _figures(report, folder) -> list[page.Figure]:
    """Draws the figures that the report has data for, in both themes."""
    try:
        from tfamp.benchmark import plots
    except ImportError:
        logging.warning('No figures: pip install "tfamp[plot]".')
        return []
    shutil.rmtree(folder, ignore_errors=True)  # Of earlier figures.
    folder.mkdir()
    figures = []
    for entry in plots.applicable(report):
        light = entry.draw(report, "light")
        svg, dark = plots.to_svg(light), plots.to_svg(entry.draw(report, "dark"))
        for ending, text in zip(ENDINGS, (svg, dark), strict=False):
            run_files.write_text(folder / f"{entry.name}{ending}", text)
        (folder / f"{entry.name}.png").write_bytes(plots.to_png(light, "light"))
        alt = entry.alternative_text(report)
        figures.append(
            page.Figure(entry.name, entry.title, alt, entry.caption, svg, dark)
        )
    return figures
