"""Several seeds: every score in the table, a verdict, and no run done twice."""

import json
import os
import pathlib
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

import tfamp
from tfamp.training import base_config, compare, run_files, run_result, tasks


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
        register(patch)
        two = compare.compare(make_config(), folder, 2)
        models = sorted(folder.glob("*/seed*/model.keras"))
        stamps = {path: path.stat().st_mtime_ns for path in models}
        said = []
        three = compare.compare(make_config(), folder, 3, report=said.append)
    return folder, two, stamps, said, three


def register(patch, create=create_points):
    patch.setitem(tasks.TASKS, "points", __name__)
    patch.setattr(sys.modules[__name__], "create", create, raising=False)


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
    _, two, stamps, said, three = compared
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(stamps) == 4
    assert sum("finished before" in line for line in said) == 4
    assert three.results[:4] == two.results
    assert three.differences()[0].seeds == (0, 1, 2)


def test_statistics_are_in_the_file(compared):
    folder, *_, three = compared
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored["schema_version"] == 2
    first = stored["statistics"][0]
    assert (first["score"], first["seeds"]) == ("even", [0, 1, 2])
    assert first["differences"] == list(three.differences()[0].differences)


@pytest.fixture
def finished(compared, tmp_path, monkeypatch):
    """A copy of the comparison over three seeds, to be damaged."""
    register(monkeypatch)
    return shutil.copytree(compared[0], tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("comparison.json", '{"schema_version": 1, "results": []}'),
        ("comparison.json", "{"),
        ("comparison.json", "[1]"),
        ("comparison.png", None),
    ],
    ids=["other schema", "cut short", "a list", "no figure"],
)
def test_damaged_comparison_is_made_anew_from_its_runs(
    name, damaged, finished, compared
):
    (finished / name).unlink()
    if damaged:
        (finished / name).write_text(damaged)
    again = compare.compare(make_config(), finished, 3)
    assert again.to_text() == compared[-1].to_text()
    assert (finished / "comparison.png").exists()
    assert json.loads((finished / "comparison.json").read_text())


def test_report_is_of_the_comparison_that_is_returned(finished, compared, monkeypatch):
    """Killed on the way from three seeds to two, then three again: no mixture."""
    replace = os.replace

    def kill(source, target):
        if pathlib.Path(target).name == "report.md":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            compare.compare(make_config(), finished, 2)
    for seeds, expected in ((2, compared[1]), (3, compared[-1])):
        compare.compare(make_config(), finished, seeds)
        assert (finished / "report.md").read_text() == expected.to_markdown()


def test_result_of_another_version_is_an_error_that_names_the_file(finished):
    file = finished / "float32/seed1/result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "joules": 7}))
    (finished / "comparison.json").unlink()
    with pytest.raises(tfamp.RunError, match=r"seed1/result.json.*joules"):
        compare.compare(make_config(), finished, 3)


def test_runs_of_several_environments_are_told_apart(finished):
    file = finished / "float32/seed1/environment.json"
    file.write_text(file.read_text().replace(tf.__version__, "9.9"))
    (finished / "comparison.json").unlink()
    note = compare.compare(make_config(), finished, 3).note
    assert "environments differ" in note and "float32 seed 1: tensorflow 9.9;" in note
    assert "keras" not in note


# Fields that an earlier version did not have, and those that it alone had.
@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    [
        ("  epsilon: 1.0e-07\n", "", "optimizer.epsilon: none such -> 1e-07"),
        ("epochs: 2\n", "epochs: 2\nspeed: 3\n", "speed: 3 -> none such"),
    ],
    ids=["new field", "old field"],
)
def test_folder_of_another_version_is_refused_as_such(old, new, phrase, finished):
    file = finished / "float32/seed0/config.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(tfamp.RunError, match="another version of tfamp") as caught:
        compare.compare(make_config(), finished, 3)
    assert phrase in str(caught.value)


def test_score_and_loss_that_are_not_finite_are_told_and_stop_nothing(
    tmp_path, monkeypatch
):
    def create(config, data_dir, manual_dir):
        task = create_points(config, data_dir, manual_dir)
        return task._replace(score=lambda model, folder: {"mcc": float("nan")})

    register(monkeypatch, create)
    config = make_config()
    config.epochs, config.optimizer.learning_rate = 1, 1e37
    text = compare.compare(config, tmp_path).to_text()
    assert "verdict on mcc: no verdict: the score of float32 is not finite" in text
    assert "the loss of mixed_bfloat16 is not finite with seed 0" in text
    for file in ("comparison.json", "float32/seed0/result.json"):
        json.loads((tmp_path / file).read_text(), parse_constant=pytest.fail)
    stored = json.loads((tmp_path / "float32/seed0/result.json").read_text())
    assert stored["score"] is None


def test_column_is_of_the_seeds_that_have_a_number(compared):
    first, *rest = compared[-1].results
    part = compared[-1]._replace(results=[first._replace(final_loss=None), *rest])
    head, base, _ = part.rows()
    assert base[head.index("final loss")].endswith("(of 2 seeds)")
    assert "the loss of float32 is not finite with seed 0" in part.notes()


def test_runs_without_a_common_score_have_no_verdict(compared):
    first, *rest = compared[-1].results
    alone = first._replace(scores={"f1": 0.5})
    text = compared[-1]._replace(results=[alone, *rest]).to_text()
    assert "no verdict: the runs have no score in common" in text


def test_runs_without_named_scores_are_compared_by_their_score(compared):
    results = [run._replace(scores={}) for run in compared[4].results]
    bare = compared[4]._replace(results=results)
    assert bare.score_names() == ["even"]
    assert bare.rows()[1][4] == compared[4].rows()[1][4]
    assert isinstance(bare.results[0], run_result.RunResult)


def test_mixed_mode_without_loss_scaling_is_a_column_of_its_own(tmp_path, monkeypatch):
    register(monkeypatch)
    config = make_config()
    config.precision.mode = "mixed_float16"
    config.epochs = 1
    before = compare.compare(config, tmp_path)
    assert list(before.by_mode()) == ["float32", "mixed_float16"]
    config.compare_unscaled = True
    said = []
    found = compare.compare(config, tmp_path, report=said.append)
    assert sum("finished before" in line for line in said) == 2
    names = ["float32", "mixed_float16, no loss scaling", "mixed_float16"]
    assert list(found.by_mode()) == names
    assert (tmp_path / "mixed_float16_unscaled/seed0/result.json").exists()
    _, without, scaled = found.results
    assert without.loss_scale is None and scaled.loss_scale is not None
    assert [each.mode for each in found.differences()[:2]] == names[1:]
    assert "mixed_float16, no loss scaling minus float32" in found.to_text()
    assert compare.compare(config, tmp_path) == found
    run_files.delete_run(tmp_path)
    assert not tmp_path.exists()


def test_scaling_can_be_left_out_only_where_there_is_some(tmp_path, monkeypatch):
    register(monkeypatch)
    config = make_config()
    config.compare_unscaled = True
    with pytest.raises(ValueError, match="'mixed_bfloat16'"):
        compare.compare(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_float32_may_have_a_batch_size_of_its_own(tmp_path, monkeypatch):
    register(monkeypatch)
    config = make_config()
    config.float32.batch_size = 5
    config.float32.learning_rate = 0.01
    found = compare.compare(config, tmp_path)
    assert [run.batch_size for run in found.results] == [5, 10]
    assert "batch sizes: float32 5, mixed_bfloat16 10" in found.to_text()
    base, other = found.results
    ratio = 2 * other.steps_per_second / base.steps_per_second
    assert found.rows()[2][2] == f"{ratio:.2f}"
    settings = yaml.safe_load((tmp_path / "float32/seed0/config.yaml").read_text())
    assert settings["optimizer"]["learning_rate"] == 0.01
    assert base_config.apply_tiny(config).float32.batch_size is None


def test_comparison_that_makes_no_sense_is_refused_before_a_folder_is_made(tmp_path):
    config = make_config()
    config.float32.batch_size = 0
    with pytest.raises(ValueError, match=r"config\.float32\.batch_size must be"):
        compare.compare(config, tmp_path / "run")
    config.float32.batch_size = None
    with config.unlocked():
        config.float32.epochs = 3
    with pytest.raises(ValueError, match=r"config\.float32 has epochs"):
        compare.compare(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
