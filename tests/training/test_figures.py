"""The timeline of a whole run: recorded, drawn, written into the run's folder."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib.image import imread

from tfamp.training import app, base_config, figures, run_files, run_records, tasks


def create_points(config, data_dir, manual_dir):
    """A task: on which side of a line a point lies."""
    points = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))

    def build():
        head = keras.layers.Dense(2, dtype="float32")
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), head])

    return tasks.Task(
        train=whole.take(40),
        validation=whole.skip(40).take(10),
        test=whole.skip(50),
        build_model=build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description="points",
    )


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "points", __name__)
    monkeypatch.setattr(sys.modules[__name__], "create", create_points, raising=False)
    config = base_config.get_config()
    config.name = config.task = "points"
    config.epochs, config.batch_size = 3, 4
    config.precision.mode = "mixed_float16"
    return config


def is_picture(path):
    return path.exists() and imread(path).std() > 0.05  # Not blank.


def test_train_job_records_the_interval_and_draws_the_timeline(config, tmp_path):
    scaling = config.precision.loss_scale
    scaling.schedule.name = "geometric"
    scaling.schedule.min_interval, scaling.schedule.initial = 1, 4
    scaling.initial_scale = 2.0**8  # Nothing overflows soon.
    app.run_job("train", config, tmp_path / "run")
    rows = run_records.read_metrics(tmp_path / "run", "step")
    # Growth after 4, 3, 2, 1, 1, ... steps.
    intervals = [row["growth_interval"] for row in rows[:10]]
    assert intervals == [4, 4, 4, 3, 3, 3, 2, 2, 1, 1]
    assert rows[9]["skipped_steps"] == 0 and rows[9]["loss_scale"] == 2.0**12
    assert is_picture(tmp_path / "run" / "timeline.png")
    run_files.delete_run(tmp_path / "run")  # The timeline is one of the run's files.


def test_train_job_without_a_loss_scale_draws_the_loss(config, tmp_path):
    config.precision.mode = "float32"
    app.run_job("train", config, tmp_path)
    assert "growth_interval" not in run_records.read_metrics(tmp_path, "step")[0]
    assert is_picture(tmp_path / "timeline.png")


def test_timeline_of_a_run_is_written_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": 2.0, "loss_scale": 4.0, '
        '"growth_interval": 3.0, "skipped_steps": 0.0}\n'
    )
    figures.write_timeline(tmp_path, "digits", "mixed_float16", 0)
    picture = tmp_path / "timeline.png"
    assert is_picture(picture)
    stamp = picture.stat().st_mtime_ns
    figures.write_timeline(tmp_path, "digits", "mixed_float16", 0)
    assert picture.stat().st_mtime_ns == stamp
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.jsonl",
        "timeline.png",
    }


def test_without_matplotlib_a_warning_names_the_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tfamp.training.plots", None)
    monkeypatch.delattr("tfamp.training.plots", raising=False)
    figures.write_timeline(tmp_path, "digits", "float32", 0)
    assert "tfamp[plot]" in caplog.text
    assert list(tmp_path.iterdir()) == []
