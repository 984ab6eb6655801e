"""Figures of training runs. Each function takes plain data and returns a `Figure`."""

import math

from tfamp.training import loss_curves

try:
    from matplotlib import ticker
    from matplotlib.figure import Figure
except ImportError as e:
    raise ImportError('Install matplotlib: pip install "tfamp[plot]".') from e

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
_LAST_ROWS = 336  # Of a test split, drawn over time; two weeks of hours.
_SCALE_RATIOS = (5, 3)  # Heights: loss scale, growth interval.
_FAR = 1e100  # Amounts from here on are not drawn: Matplotlib's axes overflow.
_AS_IT_IS = {"parse_math": False}  # Names of files and columns may have dollar signs.


def comparison_figure(name: str, curves: dict, epochs: dict | None = None) -> Figure:
    """Draws the loss curves of several runs and the timeline of their loss scale.

    Args:
      name: Title.
      curves: Dict from (mode, seed) to the "step" lines of `metrics.jsonl`.
      epochs: The same of the "epoch" lines. With a `val_perplexity` there, perplexities
        are drawn in the loss's place.

    Returns:
      A `Figure`: the loss, and where it is no longer finite; the loss scale with the
      skipped steps, above the growth interval in force where that was recorded.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(f"{name}: the same run in each precision", **_AS_IT_IS)
    left, right = figure.subfigures(1, 2, squeeze=False).flat
    modes = list(dict.fromkeys(mode for mode, _ in curves))
    colors = dict(zip(modes, _COLORS, strict=False))
    loss_axes = left.subplots()
    loss_curves.draw_losses(loss_axes, curves, colors, epochs)
    loss_axes.set_xlabel(_STEP_LABEL)
    loss_axes.legend()
    scaled = {key: rows for key, rows in curves.items() if _is_scaled(rows)}
    if not scaled:
        _say_unscaled(right.subplots(), " and ".join(modes))
        return figure
    ratios = _SCALE_RATIOS if _has_intervals(scaled) else _SCALE_RATIOS[:1]
    axes = right.subplots(len(ratios), 1, height_ratios=ratios, sharex=True)
    _draw_scaling(right, _as_list(axes), scaled, colors)
    return figure


def timeline_figure(title: str, mode: str, rows: list[dict]) -> Figure:
    """Draws one run over its steps: loss, loss scale, skipped steps, growth interval.

    Args:
      title: Title.
      mode: The run's mode.
      rows: The "step" lines of `metrics.jsonl`.

    Returns:
      A `Figure` of panels one above the other; only the loss without loss scaling.
    """
    curves = {(mode, None): rows}
    colors = {mode: _COLORS[1] if _is_scaled(rows) else _COLORS[0]}
    ratios = [5]
    if _is_scaled(rows):
        ratios += _SCALE_RATIOS if _has_intervals(curves) else _SCALE_RATIOS[:1]
    figure = Figure(figsize=(8, 1.2 + 0.5 * sum(ratios)), layout="constrained")
    figure.suptitle(title, **_AS_IT_IS)
    axes = figure.subplots(len(ratios), 1, height_ratios=ratios, sharex=True)
    loss_axes, *scale_axes = _as_list(axes)
    loss_curves.draw_losses(loss_axes, curves, colors)
    if scale_axes:
        _draw_scaling(figure, scale_axes, curves, colors)
    else:
        loss_axes.set_xlabel(_STEP_LABEL)
    return figure


def masks_figure(name: str, images, truths, predictions, classes: int) -> Figure:
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
    figure = Figure(figsize=(6.6, 2.2 * len(images) + 0.6), layout="constrained")
    figure.suptitle(f"{name}: test images", **_AS_IT_IS)
    rows = figure.subplots(len(images), 3, squeeze=False)
    titles = ("input (contrast stretched)", "truth", "prediction")
    for axes, title in zip(rows[0], titles, strict=True):
        axes.set_title(title, fontsize="medium")
    style = {"cmap": "gray" if classes == 2 else "viridis", "interpolation": "nearest"}
    for axes, image, *masks in zip(rows, images, truths, predictions, strict=True):
        low, high = int(image.min()), int(image.max())
        axes[0].imshow((image - float(low)) / max(high - low, 1))
        for each, mask in zip(axes[1:], masks, strict=True):
            each.imshow(mask, vmin=0, vmax=classes - 1, **style)
        for each in axes:
            each.set_axis_off()
    return figure


def regression_figure(
    title: str, name: str, target, predicted, ordered: bool
) -> Figure:
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
    figure = Figure(figsize=(11 if ordered else 5, 4.8), layout="constrained")
    figure.suptitle(title, **_AS_IT_IS)
    points, *lines = _as_list(figure.subplots(1, 2 if ordered else 1))
    points.scatter(target, predicted, s=6, alpha=0.3, color=_COLORS[0], linewidths=0)
    ends = [min(near, default=0.0), max(near, default=0.0)]
    points.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    points.set_xscale("symlog", linthresh=1)
    points.set_yscale("symlog", linthresh=1)
    limits = ends[0] * 0.8, ends[1] * 1.25 or 1.0
    points.set(xlim=limits, ylim=limits)
    points.set_xlabel(f"true {name}", **_AS_IT_IS)
    points.set_ylabel(f"predicted {name}", **_AS_IT_IS)
    points.legend()
    points.grid(alpha=0.3)
    for axes in lines:
        places = range(len(target))[-_LAST_ROWS:]
        axes.plot(places, target[-_LAST_ROWS:], color="black", label="true")
        axes.plot(places, predicted[-_LAST_ROWS:], color=_COLORS[1], label="predicted")
        axes.set(xlabel="test row", title=f"The last {len(places)} rows")
        axes.set_ylabel(name, **_AS_IT_IS)
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def _as_list(axes):
    """What `subplots` returns of several rows, or of one."""
    return list(getattr(axes, "flat", [axes]))


def _has_intervals(curves):
    return any("growth_interval" in row for rows in curves.values() for row in rows)


def _say_unscaled(axes, modes):
    axes.set_title("Loss scale")
    text = f"no loss scaling:\n{modes} need none"
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_scaling(figure, axes, curves, colors):
    """Draws the loss scale on the first axes, the growth interval on any second."""
    for number, (key, rows) in enumerate(curves.items()):
        mode, seed = key
        style = {
            "color": colors[mode],
            "linestyle": _SEED_STYLES[number % len(_SEED_STYLES)],
        }
        name = mode if seed is None else f"{mode}, seed {seed}"
        label = f"{name}; skipped steps: {int(rows[-1]['skipped_steps'])}"
        _draw_steps(axes[0], rows, "loss_scale", label, style)
        for each in axes[1:]:
            _draw_steps(each, rows, "growth_interval", None, style)
    _mark_skips(axes[0], curves)
    _finish_scale(axes[0])
    for each in axes[1:]:
        _finish_interval(each)
    axes[-1].set_xlabel(_STEP_LABEL)
    # Outside: no corner is free in every run.
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
    )


def _mark_skips(axes, curves):
    """Marks the rows with steps skipped since the row before."""
    skips = []
    for rows in curves.values():
        before = 0
        for row in rows:
            if row["skipped_steps"] > before:
                skips.append((row["step"], row["loss_scale"]))
            before = row["skipped_steps"]
    if not skips:
        return
    axes.plot(
        *zip(*skips, strict=True),
        linestyle="",
        marker="x",
        markersize=7,
        markeredgewidth=1.6,
        color="black",
        label="skipped step",
    )


def _draw_steps(axes, rows, field, label, style):
    """A value holds from the step that it was read after until the next one."""
    rows = [row for row in rows if row.get(field) is not None]
    steps = [row["step"] for row in rows]
    values = [row[field] for row in rows]
    axes.step(steps, values, where="post", linewidth=1.6, label=label, **style)


def _is_scaled(rows):
    return any("loss_scale" in row for row in rows)


def _finish_scale(axes):
    axes.set(ylabel="loss scale", title="Loss scale and skipped steps")
    axes.set_yscale("log", base=2)
    _give_room(axes, 2)
    axes.grid(alpha=0.3)


def _finish_interval(axes):
    axes.set(ylabel="finite steps", title="Growth interval in force")
    axes.set_yscale("log")
    low, high = _give_room(axes, 1.6)
    axes.yaxis.set_major_locator(ticker.FixedLocator(_round_numbers(low, high)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.3)


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
