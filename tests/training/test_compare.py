"""Several seeds: every score in the table, a verdict, and no run done twice."""

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.training import base_config, compare, tasks, trainer


def create_points(config, data_dir, manual_dir):
    """A task with two scores of its own: on which side of a line a point lies."""
    points = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))

    def build():
        head = keras.layers.Dense(2, dtype="float32")
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), head])

    def score(model, folder):
        found = model.predict(points[80:], verbose=0).argmax(-1) == labels[80:]
        return {"even": found[::2].mean(), "odd": found[1::2].mean()}

    return tasks.Task(
        train=whole.take(60),
        validation=whole.skip(60).take(20),
        test=whole.skip(80),
        build_model=build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description="points",
        score=score,
    )


def make_config():
    config = base_config.get_config()
    config.name = config.task = "points"
    config.epochs, config.batch_size = 2, 10
    config.optimizer.learning_rate = 0.03
    config.precision.mode = "mixed_bfloat16"
    return config


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison over two seeds, then over three in the same folder."""
    folder = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "points", __name__)
        patch.setattr(sys.modules[__name__], "create", create_points, raising=False)
        two = compare.compare(make_config(), folder, 2)
        models = sorted(folder.glob("*/seed*/model.keras"))
        stamps = {path: path.stat().st_mtime_ns for path in models}
        said = []
        three = compare.compare(make_config(), folder, 3, report=said.append)
        # As a comparison of an earlier version left it.
        file = folder / "comparison.json"
        stored = json.loads(file.read_text())
        del stored["statistics"]
        file.write_text(json.dumps({**stored, "schema_version": 1}))
        again = compare.compare(make_config(), folder, 3)
    return folder, two, stamps, said, three, again


def test_every_score_is_a_column_the_tasks_own_first(compared):
    head, base, other = compared[4].rows()
    assert [name for name in head if name.startswith("test ")] == [
        "test even",
        "test odd",
        "test accuracy",
    ]
    assert all("±" in cell for cell in base[1:7] + other[1:7])


def test_differences_are_those_of_the_runs(compared):
    three = compared[4]
    found = three.differences()
    assert [each.score for each in found] == ["even", "odd", "accuracy"]
    runs = three.by_mode()
    expected = [
        m.scores["odd"] - b.scores["odd"]
        for b, m in zip(runs["float32"], runs["mixed_bfloat16"], strict=True)
    ]
    assert found[1].differences == pytest.approx(tuple(expected))
    text = three.to_text()
    assert found[0].to_verdict() in text.splitlines()
    assert f"{found[2].to_text()}: {found[2].verdict}" in three.to_markdown()


def test_more_seeds_reuse_the_runs_that_there_are(compared):
    _, two, stamps, said, three, _ = compared
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(stamps) == 4
    assert sum("finished before" in line for line in said) == 4
    assert three.results[:4] == two.results
    assert three.differences()[0].seeds == (0, 1, 2)


def test_statistics_are_in_the_file_and_one_of_before_is_made_anew(compared):
    folder, _, _, _, three, again = compared
    assert again.to_text() == three.to_text()
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored["schema_version"] == 2
    first = stored["statistics"][0]
    assert (first["score"], first["seeds"]) == ("even", [0, 1, 2])
    assert first["differences"] == list(three.differences()[0].differences)


def test_runs_without_named_scores_are_compared_by_their_score(compared):
    results = [run._replace(scores={}) for run in compared[4].results]
    bare = compared[4]._replace(results=results)
    assert bare.score_names() == ["even"]
    assert bare.rows()[1][4] == compared[4].rows()[1][4]
    assert isinstance(bare.results[0], trainer.RunResult)
