"""Figures of runs: from plain data to a `Figure`, and into the runs' folders."""

import io
import math
import os
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging

from tfamp.training import run_files

TIMELINE = "timeline.png"
COMPARISON = "comparison.png"
PREDICTIONS = "predictions.png"
# Okabe and Ito's palette: told apart with any color vision.
OKABE_ITO = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "sky blue": "#56B4E9",
    "orange": "#E69F00",
    "yellow": "#F0E442",
}
_COLORS = tuple(OKABE_ITO.values())[:4]
_SEED_STYLES = ("-", "--", ":", "-.")
_STEP_LABEL = "training step"
_WINDOW = 9  # Points of the loss curve that the bold line averages over.
_LAST_ROWS = 336  # Of a test split, drawn over time; two weeks of hours.
_HEIGHTS = (5, 3)  # Of the loss scale and the growth interval.
_FAR = 1e100  # Amounts from here on are not drawn: Matplotlib's axes overflow.


# ---- Files ----


def can_draw() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def write_timeline(folder: str | os.PathLike, name: str, mode: str, seed: int) -> None:
    """Writes `timeline.png` of a finished run, unless it is there.

    Args:
      folder: The run's folder.
      name: Name of the configuration.
      mode: The run's mode.
      seed: The run's seed.
    """
    path = pathlib.Path(folder, TIMELINE)
    if not path.exists():
        rows = run_files.read_metrics(path.parent, "step")
        title = f"{name}: {mode}, seed {seed}"
        _write(path, timeline_figure, title, mode, rows)


def write_comparison(
    folder: pathlib.Path, name: str, runs: Mapping[tuple[str, int], pathlib.Path]
) -> None:
    """Writes `comparison.png`.

    Args:
      folder: The comparison's folder.
      name: Name of the configuration.
      runs: Dict from (mode, seed) to the run's folder.
    """
    curves, epochs = (
        {key: run_files.read_metrics(run, kind) for key, run in runs.items()}
        for kind in ("step", "epoch")
    )
    _write(folder / COMPARISON, comparison_figure, name, curves, epochs)


def write_predictions(
    folder: pathlib.Path,
    name: str,
    images: np.ndarray,
    truths: np.ndarray,
    predictions: np.ndarray,
    classes: int,
) -> None:
    """Writes `predictions.png` of a segmentation; see `masks_figure`."""
    path = folder / PREDICTIONS
    _write(path, masks_figure, name, images, truths, predictions, classes)


def write_regression(
    folder: pathlib.Path,
    title: str,
    name: str,
    target: np.ndarray,
    predicted: np.ndarray,
    ordered: bool,
) -> None:
    """Writes `predictions.png` of a regression; see `regression_figure`."""
    path = folder / PREDICTIONS
    _write(path, regression_figure, title, name, target, predicted, ordered)


def _write(path: pathlib.Path, draw: Callable, *arguments) -> None:
    """Writes a figure so that a kill leaves a whole file or none."""
    if not can_draw():
        logging.warning('No figure: pip install "tfamp[plot]".')
        return
    image = io.BytesIO()
    draw(*arguments).savefig(image, dpi=120, format="png")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(image.getvalue())
    os.replace(temporary, path)


def _figure(title, size):
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    # Names of files and columns may have dollar signs.
    figure.suptitle(title, parse_math=False)
    return figure


# ---- Losses and loss scales ----


def comparison_figure(name: str, curves: dict, epochs: dict | None = None):
    """Draws the loss curves of several runs and the timeline of their loss scale.

    Args:
      name: Title.
      curves: Dict from (mode, seed) to the "step" lines of `metrics.jsonl`.
      epochs: The same of the "epoch" lines. With a `val_perplexity` there, perplexities
        are drawn in the loss's place.

    Returns:
      A `Figure`: the loss, and where it is no longer finite; the loss scale with the
      skipped steps, above the growth interval in force.
    """
    figure = _figure(f"{name}: the same run in each precision", (11, 4.8))
    left, right = figure.subfigures(1, 2, squeeze=False).flat
    modes = list(dict.fromkeys(mode for mode, _ in curves))
    colors = dict(zip(modes, _COLORS, strict=False))
    axes = left.subplots()
    _draw_losses(axes, curves, colors, epochs or {})
    axes.set_xlabel(_STEP_LABEL)
    axes.legend()
    scaled = {key: rows for key, rows in curves.items() if _is_scaled(rows)}
    if scaled:
        axes = right.subplots(2, 1, height_ratios=_HEIGHTS, sharex=True)
        _draw_scaling(right, axes, scaled, colors)
    else:
        text = f"no loss scaling:\n{' and '.join(modes)} need none"
        axes = right.subplots()
        axes.set(title="Loss scale", xticks=[], yticks=[])
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    return figure


def timeline_figure(title: str, mode: str, rows: list[dict]):
    """Draws one run over its steps: loss, loss scale, skipped steps, growth interval.

    Args:
      title: Title.
      mode: The run's mode.
      rows: The "step" lines of `metrics.jsonl`.

    Returns:
      A `Figure` of panels one above the other; only the loss without loss scaling.
    """
    scaled = _is_scaled(rows)
    heights = (5, *_HEIGHTS) if scaled else (5,)
    figure = _figure(title, (8, 1.2 + 0.5 * sum(heights)))
    grid = figure.subplots(
        len(heights), 1, height_ratios=heights, sharex=True, squeeze=False
    )
    losses, *scales = grid.flat
    curves, colors = {(mode, None): rows}, {mode: _COLORS[scaled]}
    _draw_losses(losses, curves, colors, {})
    if scaled:
        _draw_scaling(figure, scales, curves, colors)
    else:
        losses.set_xlabel(_STEP_LABEL)
    return figure


def _is_scaled(rows):
    return any("loss_scale" in row for row in rows)


def _draw_losses(axes, curves, colors, epochs):
    """Draws losses, smoothed, and where they are no longer finite; or perplexities."""
    validated = {key: _perplexities(rows) for key, rows in epochs.items()}
    if any(validated.values()):
        # An axis needs numbers beyond the curve's, too.
        _draw_steps(axes, curves, colors, lambda loss: math.exp(min(loss, 100.0)))
        _draw_epochs(axes, curves, validated, colors)
        title = f"Training perplexity (bold: mean loss of {_WINDOW} points)"
        axes.set(ylabel="perplexity", title=title)
    else:
        _draw_steps(axes, curves, colors, float)
        title = f"Training loss (bold: mean of {_WINDOW} points)"
        axes.set(ylabel="training loss", title=title)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _perplexities(rows):
    """The validation perplexity by the share of the run, where it is finite."""
    values = {row["epoch"] / len(rows): row.get("val_perplexity") for row in rows}
    return {share: value for share, value in values.items() if value is not None}


def _draw_steps(axes, curves, colors, shown):
    first, labels, ends = next(iter(colors)), set(), []
    half = _WINDOW // 2
    for (mode, _), every in curves.items():
        rows = [row for row in every if row["loss"] is not None]
        steps, losses = ([row[name] for row in rows] for name in ("step", "loss"))
        windows = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
        values = [shown(loss) for loss in losses]
        bold = [shown(sum(window) / len(window)) for window in windows]
        if rows and every[-1]["loss"] is None:
            ends.append((steps[-1], values[-1]))
        style = {"color": colors[mode], "linestyle": "-" if mode == first else "--"}
        axes.plot(steps, values, color=colors[mode], alpha=0.25, linewidth=0.8)
        label = None if mode in labels else mode
        axes.plot(steps, bold, linewidth=1.4, label=label, **style)
        labels.add(mode)
    if ends:
        label = "not finite from here on"
        style = {"linestyle": "", "marker": "X", "markersize": 9, "color": "black"}
        axes.plot(*zip(*ends, strict=True), label=label, **style)


def _draw_epochs(axes, curves, validated, colors):
    label = "validation split"
    style = {"linestyle": ":", "linewidth": 1, "marker": "o", "markersize": 5}
    for (mode, seed), values in validated.items():
        rows = curves[mode, seed]
        # To within the distance of two points: the lines of epochs have no step.
        last = rows[-1]["step"] if rows else 0
        steps, style["color"] = [last * share for share in values], colors[mode]
        axes.plot(steps, values.values(), label=label, markeredgecolor="k", **style)
        label = None


def _draw_scaling(figure, axes, curves, colors):
    """Draws the loss scale on the first axes, the growth interval on the second."""
    from matplotlib import ticker

    scale, interval = axes
    skips = []
    for number, ((mode, seed), rows) in enumerate(curves.items()):
        style = {"where": "post", "linewidth": 1.6, "color": colors[mode]}
        style["linestyle"] = _SEED_STYLES[number % len(_SEED_STYLES)]
        name = mode if seed is None else f"{mode}, seed {seed}"
        label = f"{name}; skipped steps: {int(rows[-1]['skipped_steps'])}"
        steps = [row["step"] for row in rows]
        scale.step(steps, [row["loss_scale"] for row in rows], label=label, **style)
        interval.step(steps, [row["growth_interval"] for row in rows], **style)
        before = 0
        for row in rows:
            if row["skipped_steps"] > before:
                skips.append((row["step"], row["loss_scale"]))
            before = row["skipped_steps"]
    if skips:
        style = {"linestyle": "", "marker": "x", "color": "black", "markersize": 7}
        scale.plot(*zip(*skips, strict=True), label="skipped step", **style)
    scale.set(ylabel="loss scale", title="Loss scale and skipped steps")
    scale.set_yscale("log", base=2)
    _give_room(scale, 2)
    interval.set(ylabel="finite steps", title="Growth interval in force")
    interval.set(xlabel=_STEP_LABEL, yscale="log")
    ticks = _round_numbers(*_give_room(interval, 1.6))
    interval.yaxis.set_major_locator(ticker.FixedLocator(ticks))
    interval.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    interval.yaxis.set_minor_locator(ticker.NullLocator())
    for each in axes:
        each.grid(alpha=0.3)
    # Outside: no corner is free in every run.
    handles = scale.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)


def _give_room(axes, factor):
    """Widens a logarithmic axis, which a constant value leaves without height."""
    values = [value for line in axes.get_lines() for value in line.get_ydata()]
    return axes.set_ylim(min(values) / factor, max(values) * factor)


def _round_numbers(low, high):
    """At most six of 1, 2, 5, 10, ... or sparser; Matplotlib's own ticks crowd."""
    for digits, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 4)):
        numbers = [d * 10**power for power in range(0, 20, stride) for d in digits]
        numbers = [number for number in numbers if low <= number <= high]
        if len(numbers) <= 6:
            break
    return numbers


# ---- Predictions ----


def masks_figure(name: str, images, truths, predictions, classes: int):
    """Draws rows of an image, its true classes and the predicted ones.

    Args:
      name: Title.
      images: uint8 [examples, height, width, 3]; each is shown with its contrast
        stretched to the full range.
      truths: Classes, integers [examples, height, width].
      predictions: The same.
      classes: Number of classes.

    Returns:
      A `Figure`.
    """
    figure = _figure(f"{name}: test images", (6.6, 2.2 * len(images) + 0.6))
    grid = figure.subplots(len(images), 3, squeeze=False)
    titles = ("input (contrast stretched)", "truth", "prediction")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize="medium")
    style = {"cmap": "gray" if classes == 2 else "viridis", "interpolation": "nearest"}
    for axes, image, *masks in zip(grid, images, truths, predictions, strict=True):
        low, high = int(image.min()), int(image.max())
        axes[0].imshow((image - float(low)) / max(high - low, 1))
        for each, mask in zip(axes[1:], masks, strict=True):
            each.imshow(mask, vmin=0, vmax=classes - 1, **style)
        for each in axes:
            each.set_axis_off()
    return figure


def regression_figure(title: str, name: str, target, predicted, ordered: bool):
    """Draws predicted amounts against the true ones.

    Args:
      title: Title.
      name: What the amounts are.
      target: Amounts of at least 0, [rows].
      predicted: The same; what is not finite is not drawn.
      ordered: Whether the rows are in the order of time.

    Returns:
      A `Figure`: a point for each row, both axes of log(1 + amount); if there is an
      order, both over the last rows beside it.
    """
    predicted = [v if abs(v) < _FAR else math.nan for v in predicted]
    near = [v for v in (*target, *predicted) if abs(v) < _FAR]
    figure = _figure(title, (11 if ordered else 5, 4.8))
    points, *lines = figure.subplots(1, 2 if ordered else 1, squeeze=False).flat
    points.scatter(target, predicted, s=6, alpha=0.3, color=_COLORS[0], linewidths=0)
    ends = [min(near, default=0.0), max(near, default=0.0)]
    points.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    points.set_xscale("symlog", linthresh=1)
    points.set_yscale("symlog", linthresh=1)
    limits = ends[0] * 0.8, ends[1] * 1.25 or 1.0
    points.set(xlim=limits, ylim=limits)
    points.set_xlabel(f"true {name}", parse_math=False)
    points.set_ylabel(f"predicted {name}", parse_math=False)
    for axes in lines:
        places = range(len(target))[-_LAST_ROWS:]
        axes.plot(places, target[-_LAST_ROWS:], color="black", label="true")
        axes.plot(places, predicted[-_LAST_ROWS:], color=_COLORS[1], label="predicted")
        axes.set(xlabel="test row", title=f"The last {len(places)} rows")
        axes.set_ylabel(name, parse_math=False)
    for axes in (points, *lines):
        axes.legend()
        axes.grid(alpha=0.3)
    return figure
