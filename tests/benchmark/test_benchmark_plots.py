"""The benchmark's figures: what is drawn where, and that it can be read."""

import functools
import io
import itertools
import math
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import samples
from matplotlib import image, text
from matplotlib.colors import to_hex

from tfamp.benchmark import (
    bar_charts,
    loss_chart,
    plot_style,
    plots,
    records,
    roofline_chart,
    scale_chart,
    words,
)

GIB = 2**30
LONG = (
    "a task of some $x_1$ and \\frac{ <b>words</b> & WWWWWWWWWWWWWWWWWWWW, 数 as well"
)
# A line of a failure's reason may be long, and may have line breaks.
REASON = (
    "ResourceExhaustedError: OOM when allocating a tensor\nwith shape[65536,1024]" * 3
)


def make_parity(difference, interval, verdict, metric=None):
    name = "" if metric is None else "top 5 accuracy of the validation split"
    return records.Parity(
        *(0.3, difference, interval, name, metric and 0.9, metric, None),
        *(verdict, "why"),
    )


PARITIES = {
    "float32": make_parity(0.0, None, "base", 0.0),
    "tf32": make_parity(1e-5, (-2e-5, 4e-5), "noise", 1e-4),
    "mixed_bfloat16": make_parity(0.0031, (-0.004, 0.0102), "noise", -0.002),
    "rewrite_bfloat16": make_parity(-0.021, (-0.031, -0.011), "explained", -0.012),
    "mixed_float16": make_parity(0.45, (0.2, 0.7), "unexplained", -0.31),
    "rewrite_float16": make_parity(None, None, "broken"),
}
SPEEDS = dict(zip(PARITIES, (1.0, 2.2, 2.9, 2.5, 3.1, 0.04), strict=True))


def make_nasty_rows(task):
    for mode, parity in PARITIES.items():
        yield samples.make_row(
            *(task, "tfamp", mode, mode == "mixed_bfloat16", SPEEDS[mode]),
            parity=parity,
            device_bytes=11 * GIB if mode == "tf32" else None,
        )
    diverged = {"0": [3.0, None, 2.0] * 40 + [None] * 9, "1": [3.0] * 60}
    never = {"0": [None] * 9}
    peer = samples.make_row(task, "keras", "mixed_float16", True)
    yield peer._replace(losses=diverged, parity=None, distance=None, step_ms=None)
    peer = samples.make_row(task, "torch", "rewrite_bfloat16", True)
    distance = records.Distance(2e9, 3e10, "bfloat16", None, None, 40.0, None)
    yield peer._replace(losses=never, speed_up=None, host_bytes=None, distance=distance)
    yield records.Row(task, "tfamp", "tf32", 2**20, True, failed=REASON)


def make_nasty():
    runs, rows = samples.make_accuracy()
    lost = records.AccuracyRun(LONG, "tf32", 0, ((1.0, None), (2.0, 0.4), (3.0, None)))
    none = records.AccuracyRow(LONG, "tf32", LONG, 0.8, 1, 0)
    peaks = {"float32": 1.0e11, "tf32": 1.05e11, "bfloat16": 1.1e11, "float16": 1.12e11}
    return samples.make_report(
        rows=tuple(row for task in (LONG, "cnn") for row in make_nasty_rows(task)),
        accuracy_runs=(*runs, lost, lost._replace(seed=1, points=(), failed="out")),
        accuracy_rows=(*rows, none),
        calibration=records.Calibration(peaks, {}, 1.8e10),
    )


def make_small():
    """One cell measured in float32 with one seed, all others failed; no calibration."""
    failed = [
        records.Row("digits", "tfamp", mode, 32, False, failed="out of memory")
        for mode in ("mixed_bfloat16", "mixed_float16")
    ]
    row = samples.make_row(
        *("digits", "tfamp", "float32"),
        parity=make_parity(0.0, None, "base"),
        losses={"0": [2.0, 1.5]},
        distance=None,
        host_bytes=0,
    )
    return samples.make_report(
        rows=(row, *failed),
        accuracy_runs=(),
        accuracy_rows=(),
        calibration=records.Calibration(failed="too slow"),
    )


def make_many():
    """30 cells of one task."""
    rows = [
        samples.make_row(
            *("bert", framework, mode, xla, 1 + number / 7),
            parity=make_parity(1e-4 * (number - 4), None, "noise"),
        )
        for number, (framework, mode, xla) in enumerate(
            itertools.product(records.FRAMEWORKS, records.VARIANTS, (False, True))
        )
    ]
    return samples.make_report(rows=tuple(rows[:30]), accuracy_runs=())


REPORTS = {
    "sample": samples.make_report(),
    "nasty": make_nasty(),
    "small": make_small(),
    "many": make_many(),
}
CASES = [
    *(("sample", "light", name) for name in plots.FIGURES),
    *(("nasty", "dark", name) for name in plots.FIGURES),
    *(("small", "dark", name) for name in ("speed_up", "loss_curves", "loss_scale")),
    *(("many", "light", name) for name in ("speed_up", "parity", "roofline")),
]


def texts(figure):
    """Returns what a figure says, but for its ticks."""
    found = figure.findobj(text.Text)
    return [each.get_text() for each in found if each.get_text()]


def drawn_boxes(figure, monkeypatch):
    """Returns (text, box in pixels) of every text that is drawn horizontally or up."""
    drawn = []
    draw = text.Text.draw

    def record(self, renderer, *args, **kwargs):
        if self.get_text().strip() and self.get_rotation() % 90 == 0:
            drawn.append(self)
        return draw(self, renderer, *args, **kwargs)

    monkeypatch.setattr(text.Text, "draw", record)
    figure.canvas.draw()
    return [(each.get_text(), each.get_window_extent()) for each in drawn]


@pytest.mark.parametrize(("report", "theme", "name"), CASES)
def test_texts_stay_inside_and_do_not_overlap(report, theme, name, monkeypatch):
    figure = plots.FIGURES[name].draw(REPORTS[report], theme)
    boxes = drawn_boxes(figure, monkeypatch)
    assert boxes
    width, height = figure.canvas.get_width_height()
    assert width == 100 * plot_style.WIDTH
    for shown, box in boxes:
        inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
        assert inside, (shown, box)
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        # A pixel of the line spacing below the letters may be shared.
        shared = [
            min(getattr(first, end), getattr(second, end))
            - max(getattr(first, start), getattr(second, start))
            for start, end in (("x0", "x1"), ("y0", "y1"))
        ]
        assert min(shared) <= 1, (one, two, shared)


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("name", plots.FIGURES)
def test_figures_come_with_words(report, name):
    entry = plots.FIGURES[name]
    assert entry.title and entry.caption.endswith(".")
    if entry.has_data(REPORTS[report]):
        said = entry.alternative_text(REPORTS[report])
        assert said.endswith(".") and "None" not in said and "nan" not in said


def test_a_figure_without_data_is_not_made():
    names = [entry.name for entry in plots.applicable(REPORTS["small"])]
    assert names == ["speed_up", "memory", "loss_curves", "loss_scale"]
    assert len(plots.applicable(REPORTS["sample"])) == len(plots.FIGURES) == 8
    failed = tuple(row for row in REPORTS["small"].rows if row.failed)
    assert plots.applicable(REPORTS["small"]._replace(rows=failed)) == []
    with pytest.raises(ValueError, match="nothing to draw as 'roofline'"):
        plots.FIGURES["roofline"].draw(REPORTS["small"])


@functools.cache  # Tests only look at what is drawn.
def draw(name, report="nasty"):
    return plots.FIGURES[name].draw(REPORTS[report], "light")


def xs(line):
    return np.asarray(line.get_xdata())


def ys(line):
    return np.asarray(line.get_ydata())


def bars(axes):
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches]


def test_speed_up_bars_stand_beside_their_errors():
    figure = draw("speed_up", "sample")
    speeds = [row.speed_up for row in REPORTS["sample"].rows]
    medians = [(0, speed.median) for speed in speeds if speed]
    assert bars(figure.axes[0]) == medians
    assert texts(figure).count("1.70x, loss not compared") == 2
    shown = texts(draw("speed_up"))
    for value in (
        "1.00x, the base",
        "2.20x, loss +0.0010 %",
        "2.50x, loss -2.1 %",
        "3.10x, loss +45 %, unexplained",
        "0.040x, loss not finite",
        "1.00x, loss not compared",
        "failed",
    ):
        assert shown.count(value) == 2, value
    assert "keras mixed_float16, XLA" in shown and "cnn, batch 32" in shown
    assert [each for each in shown if each.startswith("ResourceExhaustedError: OOM")]
    assert not [each for each in shown if "\n" in each]


def test_speed_ups_far_apart_are_drawn_from_one_on_a_logarithmic_axis():
    (axes,) = draw("speed_up").axes
    assert axes.get_xscale() == "log"
    start, width = bars(axes)[5]
    assert start == 1 and start + width == pytest.approx(0.04)
    (axes,) = draw("speed_up", "sample").axes
    assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0


def test_memory_is_the_device_s_where_known():
    figure = draw("memory")
    shown = texts(figure)
    assert "11.00 GiB" in shown and "0.80 GiB (host)" in shown
    assert bars(figure.axes[0])[1] == (0, 11)
    (axes,) = draw("memory", "sample").axes
    assert axes.get_xlabel() == "peak memory of the process on the host (GiB)"
    assert "0.80 GiB" in texts(axes.figure)


def test_parity_keeps_small_differences_visible_beside_large_ones():
    loss, metric = draw("parity").axes
    assert loss.get_xscale() == "symlog"
    markers = {
        xs(line)[0]: line.get_marker()
        for line in loss.get_lines()
        if len(xs(line)) == 1
    }
    assert markers[100 * 1e-5] == "o" and markers[0.0] == "d"
    assert markers[100 * -0.021] == "s" and markers[45.0] == "^"
    tiny, none = loss.transData.transform([(0.001, 0), (0, 0)])[:, 0]
    assert tiny - none > 10  # Pixels.
    assert "+0.010 points" in texts(metric) and "-31 points" in texts(metric)
    assert [axes.get_xscale() for axes in draw("parity", "many").axes] == ["linear"]


def test_loss_curves_have_gaps_marks_and_the_distance_from_float32():
    upper, lower, *_ = draw("loss_curves").axes
    lines = {str(line.get_label()): line for line in upper.get_lines()}
    kept = [mode for mode in records.VARIANTS if mode != "mixed_bfloat16"]
    assert set(kept) < set(lines)
    assert "mixed_bfloat16, XLA" in lines
    assert lines["keras mixed_float16, XLA"].get_linestyle() == "--"
    assert "torch rewrite_bfloat16, XLA: never finite" in lines
    assert len(xs(lines["not finite from here on"])) == 41
    assert upper.get_legend() and lower.get_xlabel() == "training step"
    base, second = (ys(line) for line in lower.get_lines()[:2])
    assert set(base) == {0.0}
    rows = REPORTS["nasty"].rows[:2]
    ours, theirs = (np.array(list(row.losses.values()), float).mean(0) for row in rows)
    np.testing.assert_allclose(second, 100 * (theirs / ours - 1))


def test_long_curves_are_thinned_with_their_ends():
    values = [1.0] * 1001
    values[500] = 7.0
    points = loss_chart.thin(loss_chart.mean_losses({"0": values, "1": [1.0] * 1001}))
    assert len(points) <= 100
    assert max(point.high for point in points) == 7.0
    assert min(point.low for point in points) == 1.0
    means = loss_chart.mean_losses({"0": [1.0, None, 3.0], "1": [2.0, 2.0]})
    assert [point.mean for point in means] == [
        1.5,
        pytest.approx(math.nan, nan_ok=True),
        3,
    ]


def test_loss_scale_shows_drops_as_skipped_steps():
    assert scale_chart.drops([8.0, 8.0, 4.0, 8.0, 2.0]) == [(3, 4.0), (5, 2.0)]
    first, _ = draw("loss_scale", "sample").axes
    assert first.get_title(loc="left") == (
        "mixed_float16: 1 skipped step (digits, batch 32)"
    )
    scale, marks = first.get_lines()[:2]
    assert list(ys(scale)) == [2.0**15, 2.0**14, 2.0**14]
    assert (list(xs(marks)), list(ys(marks))) == ([10], [2.0**14])
    assert first.get_yscale() == "log"


def test_loss_scale_says_which_modes_need_none():
    (shown,) = texts(draw("loss_scale", "small"))
    assert shown.split() == (
        "No cell has a loss scale. Without float16 none is needed: float32.".split()
    )
    row = samples.make_row("digits", "torch", "mixed_float16", loss_scales={})
    report = REPORTS["small"]._replace(rows=(row,))
    assert scale_chart.unscaled_text(report).endswith("recorded of mixed_float16.")


def test_roofline_places_cells_below_labelled_roofs():
    figure = draw("roofline", "sample")
    (axes,) = figure.axes
    rows = roofline_chart.placed_rows(REPORTS["sample"])
    single = [line for line in axes.get_lines() if len(xs(line)) == 1]
    places = {(xs(line)[0], ys(line)[0]) for line in single}
    assert places == {(40.0, distance.flops_per_second) for _, distance in rows}
    shown = [each.strip() for each in texts(figure)]
    for label in ("float32 100 GFLOP/s", "bfloat16 200 GFLOP/s", "memory 18.0 GB/s"):
        assert label in shown
    roofs = [line for line in axes.get_lines() if len(xs(line)) == 3]
    heights = {ys(line)[0]: to_hex(line.get_color()) for line in roofs}
    assert heights[2.0e11] == plot_style.COLORS["mixed_bfloat16"].lower()
    (slope,) = (line for line in axes.get_lines() if len(xs(line)) == 2)
    np.testing.assert_allclose(ys(slope) / xs(slope), 1.8e10)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, {"peak": 20.0, "slower": 50.0, "other": 30.0}),
        ({"matrix_share": None}, {"peak": 20.0, "rest": 80.0}),
        ({"peak": None}, {"matrix": 70.0, "other": 30.0}),
        ({"peak": None, "matrix_share": None}, {"rest": 100.0}),
        ({"peak": 1e9}, {"peak": 70.0, "slower": 0.0, "other": 30.0}),
    ],
    ids=["all", "share unknown", "peak unknown", "both unknown", "above the peak"],
)
def test_parts_of_a_step_add_up_to_it(changes, parts):
    distance = records.Distance(2e9, 2e10, "float32", 1e11, 0.2, 40.0, 1e11, 0.7)
    step = records.Spread(100.0, 99.0, 101.0)
    row = samples.make_row("a", "tfamp", "float32")
    row = row._replace(step_ms=step, distance=distance._replace(**changes))
    assert dict(bar_charts.step_parts(row)) == pytest.approx(parts)


def test_step_parts_are_stacked_to_the_median_step():
    figure = draw("step_parts", "sample")
    first = bars(figure.axes[0])[3:6]
    assert sum(width for _, width in first) == pytest.approx(40.0 / 1.7)
    assert [start for start, _ in first[1:]] == pytest.approx(
        [first[0][1], first[0][1] + first[1][1]]
    )
    assert "23.5 ms, 56.7 % at peak rate" in texts(figure)


def test_time_to_accuracy_marks_where_the_target_was_reached():
    (axes,) = draw("time_to_accuracy", "sample").axes
    circles = [line for line in axes.get_lines() if line.get_marker() == "o"]
    runs = REPORTS["sample"].accuracy_runs
    assert [xs(line)[0] for line in circles] == [run.reached_seconds for run in runs]
    shown = texts(axes)
    assert "mixed_bfloat16: 11 s, 1.42x (1.21 to 1.66) as fast, 3 of 3 seeds" in shown
    assert "target 0.95 of accuracy, a circle where it was reached" in shown
    assert "tf32: 0 of 1 seeds" in texts(draw("time_to_accuracy"))
    bare = REPORTS["sample"]._replace(accuracy_rows=())
    shown = texts(plots.FIGURES["time_to_accuracy"].draw(bare, "light"))
    assert {"float32", "mixed_bfloat16", "score"} <= set(shown)


def test_a_mode_has_one_color_everywhere():
    color = plot_style.COLORS["mixed_float16"]
    (speed,) = draw("speed_up", "sample").axes
    assert to_hex(speed.patches[2].get_facecolor()) == color.lower()
    for name in ("loss_curves", "loss_scale"):
        lines = draw(name, "sample").axes[0].get_lines()
        assert color in [line.get_color() for line in lines]
    assert len(set(plot_style.COLORS.values())) == len(records.VARIANTS)


def test_alternative_texts_give_the_main_numbers():
    said = {
        name: entry.alternative_text(REPORTS["sample"])
        for name, entry in plots.FIGURES.items()
    }
    fastest = REPORTS["sample"].rows[1]
    assert (
        f"{fastest.cell.label}: {words.speed_up(fastest.speed_up)}" in said["speed_up"]
    )
    assert "2 cells failed" in said["speed_up"]
    assert "12 within noise" in said["parity"]
    assert "1 skipped step, 16,384 at the end" in said["loss_scale"]
    assert "85.0 GFLOP/s" in said["roofline"] and "1.42x" in said["time_to_accuracy"]


def test_svg_is_the_same_whatever_the_settings_and_safe_to_inline():
    before = dict(matplotlib.rcParams)
    entry, report = plots.FIGURES["speed_up"], REPORTS["small"]
    one = plots.to_svg(entry.draw(report))
    assert dict(matplotlib.rcParams) == before
    loud: dict[Any, Any] = {"font.size": 20, "axes.grid": True, "xtick.color": "red"}
    with matplotlib.rc_context(loud):
        assert plots.to_svg(entry.draw(report)) == one
    dark = plots.to_svg(entry.draw(report, "dark"))
    light_ids, dark_ids = (
        set(re.findall(r'\bid="([^"]*)"', svg)) for svg in (one, dark)
    )
    assert light_ids.isdisjoint(dark_ids)
    targets = set(re.findall(r'(?:href="|url\()#([^")]*)', one))
    assert targets and targets <= light_ids
    tree = ElementTree.fromstring(one)
    names = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert names.isdisjoint({"text", "metadata", "script", "image"})
    assert tree.get("width") == "360pt" and len(one) < 60_000


@pytest.mark.parametrize("theme", plot_style.THEMES)
def test_png_is_solid_and_has_144_dots_an_inch(theme):
    figure = plots.FIGURES["loss_scale"].draw(REPORTS["small"], theme)
    pixels = image.imread(io.BytesIO(plots.to_png(figure, theme)))
    assert pixels.shape[1] == 144 * plot_style.WIDTH
    background = plot_style.THEMES[theme].background
    assert to_hex(pixels[0, 0]) == background and pixels[..., 3].min() == 1
