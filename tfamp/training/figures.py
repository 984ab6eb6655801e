"""Writes the figures of runs into their folders, where matplotlib is installed."""

import io
import os
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging

from tfamp.training import run_records

TIMELINE = "timeline.png"
COMPARISON = "comparison.png"
PREDICTIONS = "predictions.png"
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
    rows = run_records.read_metrics(path.parent, "step")
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
    curves, epochs = (
        {key: run_records.read_metrics(run, kind) for key, run in runs.items()}
        for kind in ("step", "epoch")
    )
    _write(
        folder / COMPARISON,
        lambda plots: plots.comparison_figure(name, curves, epochs),
    )


def write_predictions(
    folder: pathlib.Path,
    name: str,
    images: np.ndarray,
    truths: np.ndarray,
    predictions: np.ndarray,
    classes: int,
) -> None:
    """Writes `predictions.png` of a segmentation.

    Args:
      folder: The run's folder.
      name: Name of the configuration.
      images: uint8 [examples, height, width, 3].
      truths: Classes, integers [examples, height, width].
      predictions: The same.
      classes: Number of classes.
    """
    _write(
        folder / PREDICTIONS,
        lambda plots: plots.masks_figure(name, images, truths, predictions, classes),
    )


def write_regression(
    folder: pathlib.Path,
    title: str,
    name: str,
    target: np.ndarray,
    predicted: np.ndarray,
    ordered: bool,
) -> None:
    """Writes `predictions.png` of a regression.

    Args:
      folder: The run's folder.
      title: Title.
      name: What the amounts are.
      target: Amounts of at least 0, floats [rows].
      predicted: The same.
      ordered: Whether the rows are in the order of time.
    """
    _write(
        folder / PREDICTIONS,
        lambda plots: plots.regression_figure(title, name, target, predicted, ordered),
    )


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
