"""What `plots` draws of losses on axes that it made: of steps, and of epochs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WINDOW = 9  # Points of the loss curve that the bold line averages over.

Rows = Sequence[dict[str, Any]]
Key = tuple[str, int | None]


def draw_losses(
    axes,
    curves: Mapping[Key, Rows],
    colors: Mapping[str, str],
    epochs: Mapping[Key, Rows] | None = None,
) -> None:
    """Draws the losses of runs, smoothed, and where they are no longer finite.

    Args:
      axes: Matplotlib axes.
      curves: Dict from (mode, seed) to the "step" lines of `metrics.jsonl`.
      colors: Dict from mode to color; the first mode's lines are whole.
      epochs: The same as `curves` of the "epoch" lines. Where some have a
        `val_perplexity`, that is drawn at each epoch, and exp(loss) in the loss's
        place.
    """
    validated = {key: _perplexities(rows) for key, rows in (epochs or {}).items()}
    if any(validated.values()):
        _draw_steps(axes, curves, colors, _perplexity)
        _draw_epochs(axes, curves, validated, colors)
        title = f"Training perplexity (bold: mean loss of {_WINDOW} points)"
        axes.set(ylabel="perplexity", title=title)
    else:
        _draw_steps(axes, curves, colors, float)
        title = f"Training loss (bold: mean of {_WINDOW} points)"
        axes.set(ylabel="training loss", title=title)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _perplexity(loss):
    return math.exp(min(loss, 100.0))  # An axis needs numbers beyond the curve's, too.


def _perplexities(rows):
    """The validation perplexity by the share of the run; None where not finite."""
    values = [row.get("val_perplexity") for row in rows]
    shares = [row["epoch"] / len(rows) for row in rows]
    pairs = zip(shares, values, strict=True)
    return {share: value for share, value in pairs if value is not None}


def _draw_steps(axes, curves, colors, shown: Callable[[float], float]):
    first, labelled, ends = next(iter(colors)), set(), []
    for (mode, _), every in curves.items():
        rows = [row for row in every if row["loss"] is not None]
        steps, losses = ([row[name] for row in rows] for name in ("step", "loss"))
        values = [shown(loss) for loss in losses]
        if rows and every[-1]["loss"] is None:
            ends.append((steps[-1], values[-1]))
        axes.plot(steps, values, color=colors[mode], alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            [shown(loss) for loss in _smooth(losses)],
            color=colors[mode],
            linewidth=1.4,
            linestyle="-" if mode == first else "--",
            label=None if mode in labelled else mode,
        )
        labelled.add(mode)
    if ends:
        label = "not finite from here on"
        style = {"linestyle": "", "marker": "X", "markersize": 9, "color": "black"}
        axes.plot(*zip(*ends, strict=True), label=label, **style)


def _draw_epochs(axes, curves, validated, colors):
    label = "validation split"
    for (mode, seed), values in validated.items():
        rows = curves[mode, seed]
        # To within the distance of two points: the lines of epochs have no step.
        last = rows[-1]["step"] if rows else 0
        axes.plot(
            [last * share for share in values],
            list(values.values()),
            color=colors[mode],
            linestyle=":",
            linewidth=1,
            marker="o",
            markersize=5,
            markeredgecolor="black",
            label=label,
        )
        label = None


def _smooth(values):
    """Mean of the points around each one; fewer at the ends."""
    half = _WINDOW // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
