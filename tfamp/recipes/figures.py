"""Figures of what a recipe's model predicts: masks beside images, amounts over rows."""

import math

from tfamp.runs import plots

PREDICTIONS = "predictions.png"
_LAST_ROWS = 336  # Of a test split, drawn over time; two weeks of hours.
_FAR = 1e100  # Amounts from here on are not drawn: Matplotlib's axes overflow.


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
    figure = plots.empty_figure(f"{name}: test images", (6.6, 2.2 * len(images) + 0.6))
    grid = figure.subplots(len(images), 3, squeeze=False)
    titles = ("input (contrast stretched)", "truth", "prediction")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize="medium")
    style = {"cmap": "gray" if classes == 2 else "viridis", "interpolation": "nearest"}
    for axes, image, *masks in zip(grid, images, truths, predictions, strict=True):
        low, high = float(image.min()), float(image.max())
        axes[0].imshow((image - low) / max(high - low, 1))
        for each, mask in zip(axes[1:], masks, strict=True):
            each.imshow(mask, vmin=0, vmax=classes - 1, **style)
    for axes in grid.flat:
        axes.set_axis_off()
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
    figure = plots.empty_figure(title, (11 if ordered else 5, 4.8))
    points, *lines = figure.subplots(1, 2 if ordered else 1, squeeze=False).flat
    first, second, *_ = plots.COLORS
    points.scatter(target, predicted, s=6, alpha=0.3, color=first, linewidths=0)
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
        axes.plot(places, predicted[-_LAST_ROWS:], color=second, label="predicted")
        axes.set(xlabel="test row", title=f"The last {len(places)} rows")
        axes.set_ylabel(name, parse_math=False)
    for axes in (points, *lines):
        axes.legend()
        axes.grid(alpha=0.3)
    return figure
