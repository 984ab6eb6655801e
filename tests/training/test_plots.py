"""Figures of runs: what is drawn where, and that it can be read."""

import itertools
import math
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from tfamp.training import plots

# Step, loss scale, growth interval, steps skipped so far.
POINTS = [
    (2, 2.0**15, 100, 0),
    (4, 2.0**16, 75, 0),
    (6, 2.0**15, 150, 1),
    (8, 2.0**15, 150, 1),
    (10, 2.0**13, 600, 3),
]
SCALE, INTERVAL = "Loss scale and skipped steps", "Growth interval in force"


def make_rows(points=POINTS, without=(), loss: float | None = 2.0):
    rows = [
        dict(step=s, loss=loss, loss_scale=c, growth_interval=i, skipped_steps=k)
        for s, c, i, k in points
    ]
    return [{k: v for k, v in row.items() if k not in without} for row in rows]


UNSCALED = ("loss_scale", "growth_interval", "skipped_steps")


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def lines(axes):
    """Returns the data of each line by its label, matplotlib's own names aside."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_timeline_shows_scale_skips_and_interval_over_the_same_steps():
    figure = plots.timeline_figure("digits", "mixed_float16", make_rows())
    loss, scale, interval = figure.axes
    assert [scale.get_title(), interval.get_title()] == [SCALE, INTERVAL]
    assert loss.get_title().startswith("Training loss")
    assert scale.get_xlim() == interval.get_xlim() == loss.get_xlim()
    assert interval.get_xlabel() == "training step"
    assert (scale.get_ylabel(), interval.get_ylabel()) == ("loss scale", "finite steps")
    assert scale.get_yscale() == interval.get_yscale() == "log"
    steps = [2, 4, 6, 8, 10]
    drawn = lines(scale)
    assert drawn["mixed_float16; skipped steps: 3"] == (
        steps,
        [2.0**15, 2.0**16, 2.0**15, 2.0**15, 2.0**13],
    )
    # At the points with skips since the one before.
    assert drawn["skipped step"] == ([6, 10], [2.0**15, 2.0**13])
    ((_, intervals),) = lines(interval).values()
    assert intervals == [100, 75, 150, 150, 600]


@pytest.mark.parametrize(
    ("without", "titles"),
    [((), [SCALE, INTERVAL]), (UNSCALED, [])],
    ids=["all", "unscaled"],
)
def test_timeline_leaves_out_what_was_not_recorded(without, titles):
    figure = plots.timeline_figure("digits", "any", make_rows(without=without))
    assert [axes.get_title() for axes in figure.axes][1:] == titles
    assert figure.axes[-1].get_xlabel() == "training step"


def test_timeline_without_a_skip_marks_none():
    figure = plots.timeline_figure("digits", "mixed_float16", make_rows(POINTS[:2]))
    assert list(lines(panels(figure)[SCALE])) == ["mixed_float16; skipped steps: 0"]


def test_comparison_tells_modes_by_color_and_seeds_by_line():
    curves = {
        (mode, seed): make_rows(without=() if mode == "mixed_float16" else UNSCALED)
        for seed in (0, 1)
        for mode in ("float32", "mixed_float16")
    }
    axes = panels(plots.comparison_figure("digits", curves))
    first, second, marks = axes[SCALE].get_lines()
    assert first.get_color() == second.get_color() != marks.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert [line.get_label() for line in (first, second)] == [
        f"mixed_float16, seed {seed}; skipped steps: 3" for seed in (0, 1)
    ]
    assert len(axes[INTERVAL].get_lines()) == 2


def test_comparison_without_a_loss_scale_says_so():
    curves = {
        (mode, 0): make_rows(without=UNSCALED) for mode in ("float32", "mixed_bfloat16")
    }
    axes = panels(plots.comparison_figure("digits", curves))["Loss scale"]
    (text,) = axes.texts
    assert "float32 and mixed_bfloat16 need none" in text.get_text()


def growth(intervals):
    return [(i + 1, 2.0**15, value, 0) for i, value in enumerate(intervals)]


ROWS = {
    "usual": make_rows(),
    "constant_at_7": make_rows(growth([7] * 5)),
    "wide": make_rows(growth([1, 10, 2**14, 2**53])),
    "geometric": make_rows(growth([100, 2000, 2**14])),
    "one_point": make_rows(POINTS[:1]),
    "diverged": make_rows(loss=None),
    "down_to_the_floor": make_rows([(i, 2.0 ** (24 - i), 9, i) for i in range(39)]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["timeline", "comparison"])
def test_tick_labels_exist_and_do_not_overlap(rows, kind):
    if kind == "timeline":
        figure = plots.timeline_figure("digits", "mixed_float16", rows)
    else:
        curves = {("float32", 0): rows, ("mixed_float16", 0): rows}
        figure = plots.comparison_figure("digits", curves)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for title in (SCALE, INTERVAL):
        axes = panels(figure)[title]
        low, high = axes.get_ylim()
        boxes = [
            tick.label1.get_window_extent(canvas.get_renderer())
            for tick in axes.yaxis.get_major_ticks()
            if low <= tick.get_loc() <= high
        ]
        assert boxes, title
        for lower, upper in itertools.pairwise(sorted(boxes, key=lambda b: b.y0)):
            assert lower.y1 <= upper.y0, title


def language_model(losses):
    return [{"step": 2 * place, "loss": loss} for place, loss in enumerate(losses, 1)]


def test_comparison_draws_perplexities_and_where_a_curve_ends():
    good, bad = ("float32", 0), ("mixed_float16, no loss scaling", 0)
    curves = {
        good: language_model([3.0, 2.0, 1.0, 1.0]),
        bad: language_model([3.0, 2.5, None, None]),
    }
    epochs = {
        good: [{"epoch": 1, "val_perplexity": 9.0}, {"epoch": 2, "val_perplexity": 4}],
        bad: [{"epoch": 1, "val_perplexity": 11}, {"epoch": 2, "val_perplexity": None}],
    }
    figure = plots.comparison_figure("text", curves, epochs)
    axes = figure.axes[0]
    assert axes.get_ylabel() == "perplexity" and axes.get_yscale() == "log"
    drawn = lines(axes)
    assert drawn["not finite from here on"] == ([4], [math.exp(2.5)])
    assert drawn["validation split"] == ([4, 8], [9.0, 4])
    # Where the smoothed losses of all points are, not the mean of perplexities.
    assert drawn["float32"] == ([2, 4, 6, 8], [math.exp(1.75)] * 4)
    assert max(x for line in axes.get_lines() for x in line.get_xdata()) == 8
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(texts) == len(set(texts)) == 4


def test_comparison_without_perplexities_draws_losses():
    curves = {("float32", 0): language_model([3.0, None])}
    epochs = {("float32", 0): [{"epoch": 1, "val_accuracy": 0.5}]}
    axes = plots.comparison_figure("points", curves, epochs).axes[0]
    assert axes.get_ylabel() == "training loss"
    assert lines(axes)["not finite from here on"] == ([2], [3.0])


def test_perplexity_beyond_any_float_is_drawn():
    key = ("float32", 0)
    curves = {key: language_model([3.0, 2000.0])}
    epochs = {key: [{"epoch": 1, "val_perplexity": 5.0}]}
    axes = plots.comparison_figure("text", curves, epochs).axes[0]
    assert all(math.isfinite(y) for _, ys in lines(axes).values() for y in ys)


NO_MATH = "cost_$_per_$"  # Not to be parsed, which would fail.


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.comparison_figure(NO_MATH, {("float32", 0): make_rows()}),
        lambda: plots.timeline_figure(NO_MATH, "float32", make_rows()),
        lambda: plots.masks_figure(
            NO_MATH, np.zeros((1, 4, 4, 3), "uint8"), *np.zeros((2, 1, 4, 4), int), 2
        ),
        lambda: plots.regression_figure(NO_MATH, NO_MATH, [1.0], [2.0], True),
    ],
    ids=["comparison", "timeline", "masks", "regression"],
)
def test_names_are_drawn_as_they_are(draw):
    figure = draw()
    FigureCanvasAgg(figure).draw()
    assert NO_MATH in figure.get_suptitle()


@pytest.mark.parametrize("far", [np.inf, np.nan, 1e308])
def test_predictions_out_of_sight_leave_the_others_visible(far):
    target, predicted = np.arange(1.0, 5.0), np.array([2.0, far, 3.0, 8.0])
    figure = plots.regression_figure("sold", "sold", target, predicted, True)
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_ylim() == pytest.approx((0.8, 10.0))


# ---- Files ----


def test_timeline_of_a_run_is_written_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": 2.0, "loss_scale": 4.0, '
        '"growth_interval": 3.0, "skipped_steps": 0.0}\n'
    )
    plots.write_timeline(tmp_path, "digits", "mixed_float16", 0)
    picture = tmp_path / "timeline.png"
    assert imread(picture).std() > 0.05  # Not blank.
    stamp = picture.stat().st_mtime_ns
    plots.write_timeline(tmp_path, "digits", "mixed_float16", 0)
    assert picture.stat().st_mtime_ns == stamp
    assert {path.name for path in tmp_path.iterdir()} == {
        *("metrics.jsonl", "timeline.png")
    }


def test_without_matplotlib_a_warning_names_the_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plots.write_timeline(tmp_path, "digits", "float32", 0)
    assert "tfamp[plot]" in caplog.text
    assert list(tmp_path.iterdir()) == []
