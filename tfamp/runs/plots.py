"""Figures of runs: from plain data to a `Figure`, and into the runs' folders."""

import math
import os
import pathlib
from collections.abc import Callable, Mapping

from absl import logging

from tfamp import extras
from tfamp.runs import run_files

TIMELINE = "timeline.png"
COMPARISON = "comparison.png"
# Okabe and Ito's colors, apart with any color vision: one for each mode that there is.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
_MARKERS = "os^DvP"  # And without color.
_WINDOW = 9  # Points of the loss curve that the bold line averages over.
_ROOM = 1.6  # Above and below the curves of the loss scale: at least one power of 2.


# ---- Files ----


def can_draw() -> bool:
    """Whether matplotlib can be imported."""
    try:
        extras.require("matplotlib.figure")
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
        write_runs(path, f"{name}: {mode}, seed {seed}", {(mode, seed): path.parent})


def write_runs(
    path: pathlib.Path, title: str, runs: Mapping[tuple[str, int], pathlib.Path]
) -> None:
    """Writes the figure of one run or several.

    Args:
      path: The file.
      title: Title.
      runs: Dict from (mode, seed) to the run's folder.
    """
    curves, epochs = (
        {key: run_files.read_metrics(run, kind) for key, run in runs.items()}
        for kind in ("step", "epoch")
    )
    write(path, runs_figure, title, curves, epochs)


def write(path: pathlib.Path, draw: Callable, *arguments) -> None:
    """Writes the figure that `draw(*arguments)` returns; a warning without matplotlib.

    A kill leaves a whole file or none.
    """
    if not can_draw():
        logging.warning('No figure: pip install "tfamp[plot]".')
        return
    with run_files.replaced(path) as new:
        draw(*arguments).savefig(new, dpi=120)


def empty_figure(title: str, size: tuple[float, float]):
    """Returns an empty `Figure` of a size in inches."""
    Figure = extras.require("matplotlib.figure").Figure
    figure = Figure(figsize=size, layout="constrained")
    # Names of files and columns may have dollar signs.
    figure.suptitle(title, parse_math=False)
    return figure


# ---- Losses and loss scales ----


def runs_figure(title: str, curves: dict, epochs: dict):
    """Draws one run, or several, over their steps.

    Args:
      title: Title.
      curves: Dict from (mode, seed) to the "step" lines of `metrics.jsonl`.
      epochs: The same of the "epoch" lines: `val_loss` is drawn beside the loss. With a
        `val_perplexity` there, perplexities are drawn in the losses' place.

    Returns:
      A `Figure`: the loss, and where it is no longer finite. Below it, where a run
      scales its loss, the loss scale with the skipped steps and the growth interval.
    """
    scaled = {
        key: rows
        for key, rows in curves.items()
        if any("loss_scale" in row for row in rows)
    }
    heights = (5, 5, 3) if scaled else (5,)
    figure = empty_figure(title, (8, 1.2 + 0.5 * sum(heights)))
    grid = figure.subplots(
        len(heights), 1, height_ratios=heights, sharex=True, squeeze=False
    )
    losses, *scales = grid.flat
    modes = dict.fromkeys(mode for mode, _ in curves)
    colors = dict(zip(modes, COLORS, strict=False))
    _draw_losses(losses, curves, epochs, colors)
    if scaled:
        _draw_scaling(*scales, scaled, colors)
    else:
        need = "need" if len(modes) > 1 else "needs"
        figure.supxlabel(f"no loss scaling: {' and '.join(modes)} {need} none")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[-1, 0].set_xlabel("training step")
    return figure


def _draw_losses(axes, curves, epochs, colors):
    """Draws losses, smoothed, and where they are no longer finite; or perplexities."""
    every_epoch = [row for rows in epochs.values() for row in rows]
    perplexity = any("val_perplexity" in row for row in every_epoch)
    what = "perplexity" if perplexity else "loss"
    half, ends = _WINDOW // 2, []

    def shown(loss):
        # An axis needs numbers beyond the curve's, too.
        return math.exp(min(loss, 100.0)) if perplexity else loss

    for (mode, seed), every in curves.items():
        rows = [row for row in every if row["loss"] is not None]
        steps, losses = ([row[name] for row in rows] for name in ("step", "loss"))
        windows = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
        values = [shown(loss) for loss in losses]
        bold = [shown(sum(window) / len(window)) for window in windows]
        color, place = colors[mode], [*colors].index(mode)
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        style = {"color": color, "linestyle": STYLES[place], "label": mode}
        axes.plot(steps, bold, linewidth=1.4, **style)
        if rows and every[-1]["loss"] is None:
            ends.append((steps[-1], values[-1]))
        style |= {"marker": _MARKERS[place], "label": "validation split"}
        _draw_epochs(axes, every, epochs.get((mode, seed), ()), f"val_{what}", style)
    if ends:
        style = {"markersize": 9, "color": "black", "label": "not finite from here on"}
        axes.plot(*zip(*ends, strict=True), "X", **style)
    title = f"Training {what} (bold: mean loss of {_WINDOW} points)"
    axes.set(ylabel=what, title=title, yscale="log")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))  # A mode has several seeds.
    axes.legend(once.values(), once.keys())


def _draw_epochs(axes, rows, epochs, name, style):
    """Draws a validation loss or perplexity of each epoch, where it is finite."""
    # To within the distance of two points: the lines of epochs have no step.
    length = rows[-1]["step"] / len(epochs) if rows and epochs else 0
    finite = [row for row in epochs if row.get(name) is not None]
    if finite:
        steps = [length * row["epoch"] for row in finite]
        style = {**style, "linewidth": 1, "markersize": 5, "markeredgecolor": "k"}
        axes.plot(steps, [row[name] for row in finite], **style)


def _draw_scaling(scale, interval, curves, colors):
    """Draws loss scales on the first axes, growth intervals on the second."""
    skips = []
    for number, ((mode, seed), rows) in enumerate(curves.items()):
        style = {"where": "post", "linewidth": 1.6, "color": colors[mode]}
        style["linestyle"] = STYLES[number % len(STYLES)]
        label = f"{mode}, seed {seed}; skipped steps: {int(rows[-1]['skipped_steps'])}"
        steps = [row["step"] for row in rows]
        scale.step(steps, [row["loss_scale"] for row in rows], label=label, **style)
        interval.step(steps, [row["growth_interval"] for row in rows], **style)
        before = [0, *(row["skipped_steps"] for row in rows)]
        skips += [
            (row["step"], row["loss_scale"])
            for row, count in zip(rows, before, strict=False)
            if row["skipped_steps"] > count
        ]
    if skips:
        style = {"color": "black", "markersize": 7, "label": "skipped step"}
        scale.plot(*zip(*skips, strict=True), "x", **style)
    scale.set(ylabel="loss scale", title="Loss scale and skipped steps")
    interval.set(ylabel="finite steps", title="Growth interval in force")
    for axes in (scale, interval):
        axes.set_yscale("log", base=2)
        # A constant value leaves a logarithmic axis without height.
        values = [value for line in axes.get_lines() for value in line.get_ydata()]
        axes.set_ylim(min(values) / _ROOM, max(values) * _ROOM)
    interval.yaxis.set_major_formatter("{x:,.0f}")
    # Outside: no corner is free in every run.
    handles = scale.get_legend_handles_labels()
    scale.figure.legend(*handles, loc="outside lower center", ncols=2)
