"""Writes the figures of runs into their folders, where matplotlib is installed."""

import io
import os
import pathlib
from collections.abc import Callable, Mapping

from absl import logging

from tfamp.training import run_files

TIMELINE = "timeline.png"
COMPARISON = "comparison.png"
_DPI = 120


def can_draw() -> bool:
    """Whether matplotlib can be imported."""
    return _import_plots() is not None


def _import_plots():
    try:
        from tfamp.training import plots
    except ImportError:
        return None
    return plots


def write_timeline(folder: str | os.PathLike, name: str, mode: str, seed: int) -> None:
    """Writes `timeline.png` of a finished run, unless it is there.

    Args:
      folder: The run's folder.
      name: Name of the configuration.
      mode: The run's mode.
      seed: The run's seed.
    """
    path = pathlib.Path(folder, TIMELINE)
    if path.exists():
        return
    rows = run_files.read_metrics(path.parent, "step")
    title = f"{name}: {mode}, seed {seed}"
    _write(path, lambda plots: plots.timeline_figure(title, mode, rows))


def write_comparison(
    folder: pathlib.Path,
    name: str,
    runs: Mapping[tuple[str, int], pathlib.Path],
) -> None:
    """Writes `comparison.png`.

    Args:
      folder: The comparison's folder.
      name: Name of the configuration.
      runs: Dict from (mode, seed) to the run's folder.
    """
    curves = {key: run_files.read_metrics(run, "step") for key, run in runs.items()}
    _write(folder / COMPARISON, lambda plots: plots.comparison_figure(name, curves))


def _write(path: pathlib.Path, draw: Callable) -> None:
    """Writes a figure so that a kill leaves a whole file or none."""
    plots = _import_plots()
    if plots is None:
        logging.warning('No figure: pip install "tfamp[plot]".')
        return
    image = io.BytesIO()
    draw(plots).savefig(image, dpi=_DPI, format="png")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(image.getvalue())
    os.replace(temporary, path)
