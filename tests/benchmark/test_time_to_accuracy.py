"""Time to accuracy: runs made and read, and their ratios over seeds."""

import json
import math
import statistics
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.benchmark import records, time_to_accuracy
from tfamp.training import (
    base_config,
    run_files,
    tasks,
)


@pytest.fixture
def config():
    config = base_config.get_config()
    config.name = config.task = "points"
    config.epochs, config.batch_size = 4, 8
    config.optimizer.learning_rate = 0.05
    return config


# ---- Planning ----


def test_modes_of_a_seed_are_trained_next_to_each_other_none_always_first(config):
    config.seed = 5
    config.precision.mode = "auto"
    modes = ("float32", "tf32", "mixed_bfloat16", "rewrite_float16")
    planned = time_to_accuracy.plan(config, "points", 2, modes)
    order = [*((mode, 5) for mode in modes)]
    order += [*((mode, 6) for mode in (*modes[1:], modes[0]))]
    assert list(planned) == order
    settings = [
        (one.seed, one.precision.mode, one.precision.graph_rewrite)
        for one in planned.values()
    ]
    assert settings[4:] == [
        (6, "tf32", False),
        (6, "mixed_bfloat16", False),
        (6, "mixed_float16", True),
        (6, "float32", False),
    ]
    assert config.precision.mode == "auto" and config.seed == 5  # A copy was changed.


@pytest.mark.parametrize(
    ("seeds", "modes", "message"),
    [
        (1, ("float32", "bf16"), "'digits' must be some of float32.*'bf16'"),
        (1, (), "'digits' must be some of"),
        (0, ("float32",), "`seeds` must be an integer of at least 1"),
    ],
    ids=["unknown mode", "no mode", "no seed"],
)
def test_plan_without_runs_is_refused(config, seeds, modes, message):
    with pytest.raises(ValueError, match=message):
        time_to_accuracy.plan(config, "digits", seeds, modes)


@pytest.mark.parametrize(
    ("task", "target", "refused"),
    [
        ("image_classification", 0.95, False),
        ("image_classification", 1, False),
        ("image_classification", 0.0, True),
        ("image_classification", 95.0, True),
        ("image_classification", math.nan, True),
        ("language_model", 400.0, False),
        ("language_model", -1.0, True),
        ("language_model", math.inf, True),
        ("tabular_regression", 1.5, False),
    ],
)
def test_target_must_be_a_score_of_the_task(config, task, target, refused):
    config.task = task
    if refused:
        with pytest.raises(ValueError, match="`target`.*Received: target="):
            time_to_accuracy.check(config, target)
    else:
        time_to_accuracy.check(config, target)


def test_task_without_a_validation_split_is_refused(config):
    config.validation_fraction = 0.0
    with pytest.raises(ValueError, match="validation_fraction=0 of 'points'"):
        time_to_accuracy.check(config, 0.9)


# ---- One run ----


def create(config, data_dir, manual_dir):
    """A task: on which side of a line a point lies."""
    points = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))
    return tasks.Task(
        train=whole.take(80),
        validation=whole.skip(80).take(20),
        test=whole.skip(100),
        build_model=lambda: keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(2, dtype="float32")]
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description="points",
    )


def test_run_is_timed_up_to_its_target_and_made_once(config, tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "points", __name__)
    assert sys.modules[__name__].create is create
    planned = time_to_accuracy.plan(config, "points", 1, ("mixed_bfloat16",))
    time_to_accuracy.run(planned["mixed_bfloat16", 0], tmp_path)
    stamp = (tmp_path / "model.keras").stat().st_mtime_ns
    time_to_accuracy.run(planned["mixed_bfloat16", 0], tmp_path)
    assert (tmp_path / "model.keras").stat().st_mtime_ns == stamp
    assert time_to_accuracy.read_metric(tmp_path) == ("accuracy", False)
    best = run_files.read_result(tmp_path).best_validation_score
    run = time_to_accuracy.read_run(tmp_path, "points", "mixed_bfloat16", best)
    scores = [score for _, score in run.points]
    assert len(scores) == 4 and run.reached_epoch == scores.index(best) + 1
    assert run.reached_seconds == run.points[run.reached_epoch - 1][0]
    assert 0 < run.first_step_seconds < run.points[0][0]
    assert (run.task, run.mode, run.seed) == ("points", "mixed_bfloat16", 0)
    assert run.failed == ""


def write_run(folder, course, seconds, metric="accuracy", errors=(), **changes):
    """A finished run's files, as far as they are read."""
    rows = [
        {"kind": "epoch", "epoch": i, f"val_{metric}": score, "seconds": second}
        for i, (score, second) in enumerate(zip(course, seconds, strict=True), 1)
    ]
    rows[0]["first_step_seconds"] = 0.5
    for epoch, fields in changes.pop("rows", {}).items():
        rows[epoch - 1] |= fields
    result = {name: None for name in run_files.RunResult._fields}
    result |= {"seed": 3, "score_name": metric, "errors": list(errors)}
    result |= {"scores": {metric: 0.5}, **changes}
    lines = [{"kind": "step", "step": 1, "loss": 1.0}, *rows]
    text = "".join(json.dumps(row) + "\n" for row in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "result.json").write_text(json.dumps(result))


def read(folder, target):
    return time_to_accuracy.read_run(folder, "task", "float32", target)


@pytest.mark.parametrize(
    ("scores", "target", "epoch"),
    [
        ((0.5, 0.9, 0.8, 0.95), 0.9, 2),
        ((0.5, None, 0.8, 0.95), 0.9, 4),
        ((0.5, 0.6, 0.7, 0.8), 0.9, None),
        ((0.5, float(np.float32(0.9)) - 6e-8, 0.8, 0.95), 0.9, 2),
        ((0.5, 0.8999, 0.8, 0.95), 0.9, 4),
    ],
    ids=["first", "not finite", "never", "rounded", "just below"],
)
def test_target_is_reached_by_the_first_score_that_is_as_good(
    tmp_path, scores, target, epoch
):
    write_run(tmp_path, scores, (2.0, 3.0, 4.5, 6.0))
    run = read(tmp_path, target)
    assert run.reached_epoch == epoch
    assert run.reached_seconds == (epoch and (2.0, 3.0, 4.5, 6.0)[epoch - 1])
    assert run.points == tuple(zip((2.0, 3.0, 4.5, 6.0), scores, strict=True))
    assert (run.seed, run.test_score, run.first_step_seconds) == (3, 0.5, 0.5)


def test_lower_is_better_of_an_error(tmp_path):
    write_run(tmp_path, (900.0, 500.0, 390.0), (1, 2, 3), "perplexity", ["perplexity"])
    assert read(tmp_path, 400.0).reached_epoch == 3


def test_score_of_the_test_alone_gives_way_to_one_of_the_validation(tmp_path):
    scores = {"f1": 0.7, "accuracy": 0.8}
    write_run(tmp_path, (0.5, 0.9), (1, 2), scores=scores, score_name="f1")
    assert time_to_accuracy.read_metric(tmp_path) == ("accuracy", False)
    assert read(tmp_path, 0.9).test_score == 0.8


def test_resumed_run_is_not_charged_for_tracing_again(tmp_path):
    again = {3: {"first_step_seconds": 1.5}}
    write_run(tmp_path, (0.1, 0.2, 0.9, 0.9), (2, 3, 5.5, 6.5), rows=again)
    run = read(tmp_path, 0.9)
    assert [second for second, _ in run.points] == [2, 3, 4, 5]
    assert (run.reached_seconds, run.first_step_seconds) == (4, 0.5)


def test_run_of_an_earlier_version_is_a_run_with_its_reason(tmp_path):
    write_run(tmp_path, (0.1, 0.9), (1, None))
    run = read(tmp_path, 0.5)
    assert "without wall time" in run.failed
    assert (run.points, run.reached_epoch, run.seed) == ((), None, 3)


def test_folder_without_a_finished_run_or_validation_is_refused(tmp_path):
    with pytest.raises(tfamp.RunError, match="no finished run"):
        read(tmp_path, 0.5)
    write_run(tmp_path, (0.1, 0.9), (1, 2), scores={"f1": 0.7})
    with pytest.raises(tfamp.RunError, match="no validation score.*f1"):
        read(tmp_path, 0.5)


# ---- Over the seeds ----


def make_run(mode, seed, epoch=4, second=1.0, first=0.5, **changes):
    """A run of 8 epochs, each as long, that reaches the target in one of them."""
    points = tuple(
        (first + second * (i + 1), 0.96 if epoch and i + 1 >= epoch else 0.5)
        for i in range(8)
    )
    reached = points[epoch - 1][0] if epoch else None
    made = records.AccuracyRun(
        *("digits", mode, seed, points, first, reached, epoch, 0.9 + seed / 100)
    )
    return made._replace(**changes)


def summarize(*runs):
    rows = time_to_accuracy.summarize(runs, "accuracy", 0.95)
    return {(row.task, row.mode): row for row in rows}


def both(base, other):
    """The row of a mode; (epoch, seconds of an epoch) of each seed."""
    runs = [
        make_run(mode, seed, *place)
        for mode, places in (("float32", base), ("mixed_bfloat16", other))
        for seed, place in enumerate(places)
    ]
    rows = summarize(*runs)
    return rows["digits", "float32"], rows["digits", "mixed_bfloat16"]


def test_ratio_is_the_geometric_mean_with_a_paired_interval():
    base, row = both([(4, 2.0), (4, 3.0), (4, 4.0)], [(4, 1.0), (4, 2.0), (4, 1.5)])
    logs = [math.log(t / u) for t, u in ((8, 4), (12, 8), (16, 6))]
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    reach = 4.302653 * deviation / math.sqrt(3)  # Student's t for 2, from tables.
    expected = [math.exp(mean + side * reach) for side in (0, -1, 1)]
    assert row.ratio_without_first_step == pytest.approx(expected, rel=1e-6)
    whole = math.prod(t / u for t, u in ((8.5, 4.5), (12.5, 8.5), (16.5, 6.5)))
    assert row.ratio[0] == pytest.approx(whole ** (1 / 3))
    assert row.seconds == records.Spread(6.5, 4.5, 8.5)
    assert row.without_first_step == records.Spread(6.0, 4.0, 8.0)
    assert (row.seeds, row.reached, row.epochs) == (3, 3, 4.0)
    assert (row.metric, row.target) == ("accuracy", 0.95)
    assert row.test_score == pytest.approx(0.91)
    assert row.note == "The clock's resolution is one epoch, 1.5 s."
    assert base.ratio is None and base.reached == 3


def test_equal_ratios_and_one_seed_have_no_interval():
    _, row = both([(4, 2.0), (4, 2.0)], [(4, 1.0), (4, 1.0)])
    assert row.ratio == (pytest.approx(8.5 / 4.5), None, None)
    _, row = both([(4, 2.0)], [(4, 1.0)])
    assert row.ratio == (pytest.approx(8.5 / 4.5), None, None)
    assert "One seed shows no noise." in row.note


def test_seeds_that_never_got_there_are_told_and_not_hidden():
    base, row = both([(4, 2.0)] * 3, [(4, 1.0), (None, 1.0), (4, 1.0)])
    assert (row.reached, row.seeds, row.epochs) == (2, 3, 4.0)
    assert row.ratio[0] == pytest.approx(8.5 / 4.5)
    assert "reached by 2 of 3 seeds in mixed_bfloat16." in row.note
    assert "The ratio is of the 2 that" in row.note and "flatters" in row.note
    assert "reached by" not in base.note


def test_ratio_of_less_than_half_of_the_seeds_is_withheld():
    base, row = both(
        [(4, 2.0), (4, 2.0), (None, 2.0)], [(None, 1.0), (4, 1.0), (4, 1.0)]
    )
    assert (base.reached, row.reached, row.ratio) == (2, 2, None)
    assert row.ratio_without_first_step is None and row.seconds is not None
    assert "No ratio: 1 of 3 seeds reached the target in both modes." in row.note
    assert "2 of 3 seeds in mixed_bfloat16 and 2 of 3 seeds in float32" in row.note
    assert "reached by 2 of 3 seeds in float32." in base.note


def test_mode_that_never_got_there_has_no_times():
    _, row = both([(4, 2.0)] * 2, [(None, 1.0)] * 2)
    assert (row.reached, row.seconds, row.epochs, row.ratio) == (0, None, None, None)
    assert "No ratio: 0 of 2 seeds" in row.note


def test_note_tells_that_a_mode_needs_more_epochs():
    _, row = both([(4, 2.0), (4, 2.0)], [(5, 1.0), (6, 1.0)])
    assert row.epochs == 5.5
    assert "differ: 5.5 in mixed_bfloat16, 4 in float32" in row.note


def test_failed_runs_count_as_seeds_that_never_got_there():
    failed = records.AccuracyRun("digits", "tf32", 1, failed="out of memory")
    rows = summarize(
        *(make_run("float32", seed) for seed in (0, 1)), make_run("tf32", 0), failed
    )
    row = rows["digits", "tf32"]
    assert (row.seeds, row.reached, row.test_score) == (2, 1, 0.9)
    assert row.note.startswith("Failed with seed 1: out of memory.")
    assert row.ratio == (1.0, None, None)


def test_tasks_are_compared_with_their_own_float32():
    rows = summarize(
        make_run("float32", 0, second=2.0),
        make_run("mixed_bfloat16", 0),
        make_run("float32", 0, second=4.0, task="bert"),
        make_run("mixed_bfloat16", 0, task="bert"),
        make_run("mixed_bfloat16", 0, task="lm"),
    )
    ratios = {task: row.ratio for (task, mode), row in rows.items() if "_" in mode}
    assert ratios["digits"][0] == pytest.approx(8.5 / 4.5)
    assert ratios["bert"][0] == pytest.approx(16.5 / 4.5)
    assert ratios["lm"] is None
    assert "float32 was not run" in rows["lm", "mixed_bfloat16"].note


def test_unknown_first_step_and_score_are_not_made_up():
    rows = summarize(
        make_run("float32", 0, first_step_seconds=None),
        make_run("mixed_bfloat16", 0, test_score=None),
    )
    base, row = rows.values()
    assert base.without_first_step is None and base.seconds is not None
    assert row.ratio_without_first_step is None and row.ratio is not None
    assert row.test_score is None and "No mean test score" in row.note
