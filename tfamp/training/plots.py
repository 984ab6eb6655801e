"""Figures of training runs. Each function takes plain data and returns a `Figure`."""

try:
    from matplotlib.figure import Figure
except ImportError as e:
    raise ImportError('Install matplotlib: pip install "tfamp[plot]".') from e

# Blue and orange of Okabe and Ito's palette: told apart with any color vision.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_WINDOW = 9  # Points of the loss curve that the bold line averages over.


def comparison_figure(name: str, curves: dict) -> Figure:
    """Draws the loss curves of several runs and the timeline of their loss scale.

    Args:
      name: Title.
      curves: Dict from (mode, seed) to the "step" lines of `metrics.jsonl`.

    Returns:
      A `Figure` of two panels.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(f"{name}: the same run in each precision")
    loss_axes, scale_axes = figure.subplots(1, 2)
    modes = list(dict.fromkeys(mode for mode, _ in curves))
    colors = dict(zip(modes, _COLORS, strict=False))
    _draw_losses(loss_axes, curves, colors)
    _draw_scales(scale_axes, curves, colors)
    return figure


def _draw_losses(axes, curves, colors):
    labelled = set()
    for (mode, _), rows in curves.items():
        rows = [row for row in rows if row["loss"] is not None]
        steps = [row["step"] for row in rows]
        losses = [row["loss"] for row in rows]
        axes.plot(steps, losses, color=colors[mode], alpha=0.15, linewidth=0.8)
        axes.plot(
            steps,
            _smooth(losses),
            color=colors[mode],
            linewidth=1.4,
            linestyle="-" if mode == "float32" else "--",
            label=None if mode in labelled else mode,
        )
        labelled.add(mode)
    title = f"Training loss (bold: mean of {_WINDOW} points)"
    axes.set(xlabel="step", ylabel="training loss", title=title)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


def _smooth(values):
    """Mean of the points around each one; fewer at the ends."""
    half = _WINDOW // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _draw_scales(axes, curves, colors):
    axes.set(xlabel="step", ylabel="loss scale", title="Loss scale")
    scaled = {key: rows for key, rows in curves.items() if _is_scaled(rows)}
    if not scaled:
        modes = " and ".join(dict.fromkeys(mode for mode, _ in curves))
        text = f"no loss scaling:\n{modes} need none"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for (mode, seed), rows in scaled.items():
        steps = [row["step"] for row in rows]
        scales = [row["loss_scale"] for row in rows]
        axes.step(
            steps,
            scales,
            where="post",
            color=colors[mode],
            label=f"{mode}, seed {seed}",
        )
        _mark_skips(axes, rows, colors[mode])
    axes.set_yscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()


def _is_scaled(rows):
    return any("loss_scale" in row for row in rows)


def _mark_skips(axes, rows, color):
    """Marks where steps were skipped since the row before."""
    before = 0
    for row in rows:
        if row["skipped_steps"] > before:
            axes.plot(row["step"], row["loss_scale"], "x", color=color, markersize=7)
        before = row["skipped_steps"]
