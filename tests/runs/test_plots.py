"""Figures of runs: what is drawn where, and that it can be read."""

import itertools
import math
import sys

import numpy as np
import pytest
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from tfamp.measuring import rehearsal
from tfamp.numerics import plots as numerics_plots
from tfamp.recipes import figures
from tfamp.runs import plots
from tfamp.storage import step_memory

# Step, loss scale, growth interval, steps skipped so far.
POINTS = [
    (2, 2.0**15, 100, 0),
    (4, 2.0**16, 75, 0),
    (6, 2.0**15, 150, 1),
    (8, 2.0**15, 150, 1),
    (10, 2.0**13, 600, 3),
]
SCALE, INTERVAL = "Loss scale and skipped steps", "Growth interval in force"
RUN = ("mixed_float16", 0)


def make_rows(points=POINTS, loss: float | None = 2.0):
    return [
        dict(step=s, loss=loss, loss_scale=c, growth_interval=i, skipped_steps=k)
        for s, c, i, k in points
    ]


def unscaled(losses):
    return [{"step": 2 * place, "loss": loss} for place, loss in enumerate(losses, 1)]


def draw(curves, epochs=None):
    """Returns the axes by their titles."""
    figure = plots.runs_figure("digits", curves, epochs or {})
    return {axes.get_title(): axes for axes in figure.axes}


def lines(axes):
    """Returns the data of each line by its label, matplotlib's own names aside."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_run_shows_scale_skips_and_interval_over_the_same_steps():
    loss, scale, interval = draw({RUN: make_rows()}).values()
    assert loss.get_title().startswith("Training loss")
    assert [scale.get_title(), interval.get_title()] == [SCALE, INTERVAL]
    assert scale.get_xlim() == interval.get_xlim() == loss.get_xlim()
    assert interval.get_xlabel() == "training step"
    assert (scale.get_ylabel(), interval.get_ylabel()) == ("loss scale", "finite steps")
    assert scale.get_yscale() == interval.get_yscale() == "log"
    steps, scales = [2, 4, 6, 8, 10], [2.0**15, 2.0**16, 2.0**15, 2.0**15, 2.0**13]
    assert lines(scale) == {
        "mixed_float16, seed 0; skipped steps: 3": (steps, scales),
        # At the points with skips since the one before.
        "skipped step": ([6, 10], [2.0**15, 2.0**13]),
    }
    ((_, intervals),) = lines(interval).values()
    assert intervals == [100, 75, 150, 150, 600]
    scale = draw({RUN: make_rows(POINTS[:2])})[SCALE]
    assert list(lines(scale)) == ["mixed_float16, seed 0; skipped steps: 0"]


def test_runs_tell_modes_by_color_and_seeds_by_line():
    curves = {("float32", seed): unscaled([3.0, 2.0]) for seed in (0, 1)}
    curves |= {("mixed_float16", seed): make_rows() for seed in (0, 1)}
    loss, scale, interval = draw(curves).values()
    first, second, marks = scale.get_lines()
    assert first.get_color() == second.get_color() != marks.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert len(interval.get_lines()) == 2
    texts = [text.get_text() for text in loss.get_legend().get_texts()]
    assert texts == ["float32", "mixed_float16"]
    colors = {line.get_label(): line.get_color() for line in loss.get_lines()}
    assert colors["mixed_float16"] == first.get_color() != colors["float32"]


def test_runs_without_a_loss_scale_say_so():
    modes = ("float32", "mixed_bfloat16")
    figure = plots.runs_figure("a", {(m, 0): unscaled([3.0, 2.0]) for m in modes}, {})
    assert "float32 and mixed_bfloat16 need none" in figure.get_supxlabel()
    (axes,) = figure.axes
    assert axes.get_xlabel() == "training step"
    figure = plots.runs_figure("a", {("tf32", 0): unscaled([3.0])}, {})
    assert figure.get_supxlabel() == "no loss scaling: tf32 needs none"


def test_validation_losses_are_drawn_where_there_are_any():
    key = ("mixed_float16", 0)
    epochs = [{"epoch": 1, "val_loss": 2.5}, {"epoch": 2, "val_loss": 1.5}]
    loss, *_ = draw({key: make_rows()}, {key: epochs}).values()
    assert lines(loss)["validation split"] == ([5, 10], [2.5, 1.5])
    loss, *_ = draw({key: make_rows()}, {key: [{"epoch": 1, "loss": 2.0}]}).values()
    assert "validation split" not in lines(loss)


def growth(intervals):
    return make_rows([(i + 1, 2.0**15, value, 0) for i, value in enumerate(intervals)])


ROWS = {
    "usual": make_rows(),
    "constant_at_7": growth([7] * 5),
    "wide": growth([1, 10, 2**14, 2**53]),
    "one_point": make_rows(POINTS[:1]),
    "diverged": make_rows(loss=None),
    "down_to_the_floor": make_rows([(i, 2.0 ** (24 - i), 9, i) for i in range(39)]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_tick_labels_exist_and_do_not_overlap(rows):
    figure = plots.runs_figure("digits", {RUN: rows}, {})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes[1:]:
        low, high = axes.get_ylim()
        boxes = [
            tick.label1.get_window_extent(canvas.get_renderer())
            for tick in axes.yaxis.get_major_ticks()
            if low <= tick.get_loc() <= high
        ]
        assert boxes, axes.get_title()
        for lower, upper in itertools.pairwise(sorted(boxes, key=lambda b: b.y0)):
            assert lower.y1 <= upper.y0, axes.get_title()


def test_perplexities_are_drawn_in_the_place_of_losses_and_where_a_curve_ends():
    good, bad = ("float32", 0), ("mixed_float16, no loss scaling", 0)
    curves = {
        good: unscaled([3.0, 2.0, 1.0, 1.0]),
        bad: unscaled([3.0, 2.5, None, None]),
    }
    epochs = {
        good: [{"epoch": 1, "val_perplexity": 9.0}, {"epoch": 2, "val_perplexity": 4}],
        bad: [{"epoch": 1, "val_perplexity": 11}, {"epoch": 2, "val_perplexity": None}],
    }
    (axes,) = draw(curves, epochs).values()
    assert axes.get_ylabel() == "perplexity" and axes.get_yscale() == "log"
    drawn = [(list(x.get_xdata()), list(x.get_ydata())) for x in axes.get_lines()]
    assert ([4], [math.exp(2.5)]) in drawn
    assert ([4, 8], [9.0, 4]) in drawn and ([4], [11]) in drawn
    # Where the smoothed losses of all points are, not the mean of perplexities.
    assert lines(axes)["float32"] == ([2, 4, 6, 8], [math.exp(1.75)] * 4)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(texts) == len(set(texts)) == 4
    # Beyond any float.
    (axes,) = draw({good: unscaled([3.0, 2000.0])}, {good: epochs[good]}).values()
    assert all(math.isfinite(y) for _, ys in lines(axes).values() for y in ys)
    # Other tasks have none.
    epochs = {good: [{"epoch": 1, "val_accuracy": 0.5}]}
    (axes,) = draw({good: unscaled([3.0, None])}, epochs).values()
    assert axes.get_ylabel() == "loss"
    assert lines(axes)["not finite from here on"] == ([2], [3.0])


# ---- Without color ----

MODES = ("float32", "tf32", "mixed_bfloat16", "mixed_float16", "float8")
FIGURES = {
    "runs": lambda: plots.runs_figure(
        "a",
        {(mode, 0): make_rows() for mode in MODES},
        {(mode, 0): [{"epoch": 1, "val_perplexity": 9.0}] for mode in MODES},
    ),
    "regression": lambda: figures.regression_figure("a", "b", [1.0, 2], [2.0, 1], True),
    "errors": lambda: numerics_plots.errors(
        ["x", "y"], {what: [0.1, 0.2] for what in "abc"}, "a"
    ),
    "memory": lambda: step_memory.MemoryReport("a", 8, *range(1, 7), {"x": 5}).figure(),
    "rehearsal": lambda: rehearsal.Rehearsal(
        *("a", "b", 8, 2),
        tuple(
            {
                **{"mode": mode, "how": "measured", "losses": [2.0, 1.0]},
                **{"memory": dict.fromkeys(step_memory.KINDS, 1)},
                **{"formats": {"float32": 0.5, "bfloat16": 0.5}},
            }
            for mode in MODES
        ),
        (),
    ).figure(),
}


def looks(axes):
    """Yields gray and style of each labeled line and of each series of bars."""
    for line in axes.get_lines():
        if not line.get_label().startswith("_"):
            yield line.get_color(), line.get_linestyle(), line.get_marker()
    for bars in axes.containers:
        yield bars[0].get_facecolor(), bars[0].get_hatch()


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_series_can_be_told_apart_in_grayscale(make):
    for axes in make().axes:
        for (color, *style), (other, *another) in itertools.combinations(
            looks(axes), 2
        ):
            grays = [
                np.dot(colors.to_rgb(x), (0.299, 0.587, 0.114)) for x in (color, other)
            ]
            assert style != another or abs(np.subtract(*grays)) > 0.08


@pytest.mark.parametrize("what", ["runs", "rehearsal"])
def test_every_mode_is_drawn(what):
    labels = [line.get_label() for line in FIGURES[what]().axes[0].get_lines()]
    assert all(any(label.startswith(mode) for label in labels) for mode in MODES)


NO_MATH = "cost_$_per_$"  # Not to be parsed, which would fail.


@pytest.mark.parametrize(
    "make",
    [
        lambda: plots.runs_figure(NO_MATH, {RUN: make_rows()}, {}),
        lambda: figures.masks_figure(
            NO_MATH, np.zeros((1, 4, 4, 3), "uint8"), *np.zeros((2, 1, 4, 4), int), 2
        ),
        lambda: figures.regression_figure(NO_MATH, NO_MATH, [1.0], [2.0], True),
    ],
    ids=["runs", "masks", "regression"],
)
def test_names_are_drawn_as_they_are(make):
    figure = make()
    FigureCanvasAgg(figure).draw()
    assert NO_MATH in figure.get_suptitle()


@pytest.mark.parametrize("far", [np.inf, np.nan, 1e308])
def test_predictions_out_of_sight_leave_the_others_visible(far):
    target, predicted = np.arange(1.0, 5.0), np.array([2.0, far, 3.0, 8.0])
    figure = figures.regression_figure("sold", "sold", target, predicted, True)
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_ylim() == pytest.approx((0.8, 10.0))


# ---- Files ----


def test_timeline_of_a_run_is_written_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": 2.0, "loss_scale": 4.0, '
        '"growth_interval": 3.0, "skipped_steps": 0.0}\n'
    )
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        plots.write_timeline(tmp_path, "digits", *RUN)
    assert "tfamp[plot]" in caplog.text  # Without matplotlib no figure.
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    plots.write_timeline(tmp_path, "digits", *RUN)
    picture = tmp_path / "timeline.png"
    assert imread(picture).std() > 0.05  # Not blank.
    stamp = picture.stat().st_mtime_ns
    plots.write_timeline(tmp_path, "digits", *RUN)
    assert picture.stat().st_mtime_ns == stamp
    before = imread(picture)
    picture.unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 1, "val_loss": 1.0}\n')
    plots.write_timeline(tmp_path, "digits", *RUN)
    assert not np.array_equal(imread(picture), before)  # The validation, too.
    assert {path.name for path in tmp_path.iterdir()} == {
        *("metrics.jsonl", "timeline.png")
    }
