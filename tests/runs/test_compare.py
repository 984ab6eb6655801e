"""Comparisons: every score in the table, a verdict, and no run done twice."""

import json
import os
import pathlib
import shutil

import keras
import points
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import hardware
from tfamp.runs import base_config, compare, results, tasks


def make_config(**settings):
    given = {"precision__mode": "mixed_bfloat16", "epochs": 2, **settings}
    return points.make_config(**given)


def with_scores(config):
    """The task with two scores of its own."""
    task = points.create(config)
    labels = [int(label) for _, label in task.test.as_numpy_iterator()]

    def score(model, folder):
        found = model.predict(task.test.batch(20), verbose=0).argmax(-1) == labels
        return {"even": found[::2].mean(), "odd": found[1::2].mean()}

    return task._replace(score=score)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison over one seed, then over two in the same folder."""
    folder = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "from_config", with_scores)
        said = [[], []]
        one = compare.compare(make_config(), folder, 1, report=said[0].append)
        models = sorted(folder.glob("*/seed*/model.keras"))
        stamps = {path: path.stat().st_mtime_ns for path in models}
        two = compare.compare(make_config(), folder, 2, report=said[1].append)
    return folder, one, stamps, said, two


@pytest.fixture
def finished(compared, tmp_path, monkeypatch):
    """A copy of the comparison over two seeds, to be damaged."""
    monkeypatch.setattr(tasks, "from_config", with_scores)
    return shutil.copytree(compared[0], tmp_path / "copy")


def test_comparison_reports_both_modes_and_exports(compared):
    folder, one, _, said, two = compared
    runs = [line.split(":")[0] for line in said[0] if line.startswith("run ")]
    assert runs == [f"run {i} of 2" for i in (1, 2)]
    rows = two.rows()
    assert [row["mode"] for row in rows] == ["float32", "mixed_bfloat16"]
    names = [name for name in rows[0] if name.startswith("test ")]
    assert names == ["test even", "test odd", "test accuracy"]  # The task's own first.
    assert all("±" in row[name] for row in rows for name in ("steps/s", *names))
    assert rows[0]["skipped steps"] == rows[0]["final loss scale"] == "-"
    report = (folder / "report.md").read_text()
    assert report == two.to_markdown()
    assert (
        report.count("| mixed_bfloat16 |") == 1 and "do not show a speed-up" in report
    )
    assert (folder / "comparison.png").stat().st_size > 10_000
    served = tf.saved_model.load(str(folder / "export"))
    assert served.signatures["serving_default"].structured_outputs
    assert "unknown with one seed" in one.to_text()
    assert [(run.mode, run.seed) for run in two.results] == [
        (mode, seed) for seed in (0, 1) for mode in ("float32", "mixed_bfloat16")
    ]


def test_differences_are_those_of_the_runs_and_stored(compared):
    folder, *_, two = compared
    found = two.differences()
    assert [each.score for each in found] == ["even", "odd", "accuracy"]
    runs = two.by_mode()
    expected = [
        m.scores["odd"] - b.scores["odd"]
        for b, m in zip(runs["float32"], runs["mixed_bfloat16"], strict=True)
    ]
    assert found[1].differences == pytest.approx(tuple(expected))
    verdict = f"verdict on even: {found[0].verdict}"
    assert verdict in two.to_text().splitlines()
    assert f"{found[2].to_text()}: {found[2].verdict}" in two.to_markdown()
    stored = json.loads((folder / "comparison.json").read_text())
    first = stored["statistics"][0]
    assert (first["score"], first["seeds"]) == ("even", [0, 1])
    assert first["differences"] == list(found[0].differences)


def test_more_seeds_reuse_the_runs_that_there_are(compared):
    _, one, stamps, said, two = compared
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert sum("finished before" in line for line in said[1]) == len(stamps) == 2
    assert two.results[:2] == one.results


def test_finished_comparison_is_not_made_again(finished, compared, monkeypatch):
    stamp = (finished / "comparison.json").stat().st_mtime_ns
    monkeypatch.setattr(tasks, "from_config", pytest.fail)  # Reads no data.
    assert compare.compare(make_config(), finished, 2) == compared[-1]
    assert (finished / "comparison.json").stat().st_mtime_ns == stamp
    with pytest.raises(tfamp.RunError, match="epochs: 2 -> 1"):
        compare.compare(make_config(epochs=1), finished, 2)


@pytest.mark.parametrize("name", ["comparison.json", "comparison.png"])
def test_damaged_comparison_is_made_anew_from_its_runs(name, finished, compared):
    (finished / name).unlink()
    if name == "comparison.json":
        (finished / name).write_text("{")  # Cut short.
    shutil.rmtree(finished / "export")
    again = compare.compare(make_config(), finished, 2)
    assert again.to_text() == compared[-1].to_text()
    assert (finished / "comparison.png").exists()
    assert (finished / "export/saved_model.pb").exists()
    assert json.loads((finished / "comparison.json").read_text())


def test_report_is_of_the_comparison_that_is_returned(finished, compared, monkeypatch):
    """Killed on the way from two seeds to one, then two again: no mixture."""
    replace = os.replace

    def kill(source, target):
        if pathlib.Path(target).name == "report.md":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            compare.compare(make_config(), finished, 1)
    for seeds, expected in ((1, compared[1]), (2, compared[-1])):
        compare.compare(make_config(), finished, seeds)
        assert (finished / "report.md").read_text() == expected.to_markdown()


def test_damaged_model_is_named_with_the_way_out(finished):
    (finished / "comparison.json").unlink()
    (finished / "mixed_bfloat16/seed0/model.keras").write_bytes(b"PK torn")
    with pytest.raises(
        tfamp.RunError, match=r"seed0/model.keras' cannot be read as a model.*Delete"
    ):
        compare.compare(make_config(), finished, 2)


def test_runs_of_several_environments_are_told_apart(finished):
    file = finished / "float32/seed1/environment.json"
    file.write_text(file.read_text().replace(tf.__version__, "9.9"))
    (finished / "comparison.json").unlink()
    note = compare.compare(make_config(), finished, 2).note
    assert note.endswith(
        "float32 seed 1: of other versions or another device than float32 seed 0, see "
        "`environment.json`"
    )


def test_score_and_loss_that_are_not_finite_are_told_and_stop_nothing(
    tmp_path, monkeypatch
):
    def create(config):
        score = {"mcc": float("nan")}
        return points.create(config)._replace(score=lambda model, folder: score)

    monkeypatch.setattr(tasks, "from_config", create)
    config = make_config(epochs=1, optimizer__learning_rate=1e37)
    text = compare.compare(config, tmp_path).to_text()
    assert "verdict on mcc: no verdict: the difference is not finite" in text
    assert "the loss of mixed_bfloat16 is not finite with seed 0" in text
    for file in ("comparison.json", "float32/seed0/result.json"):
        json.loads((tmp_path / file).read_text(), parse_constant=pytest.fail)
    assert results.read_result(tmp_path / "float32/seed0").score is None


def test_table_is_of_the_seeds_and_the_scores_that_there_are(compared):
    first, *rest = compared[-1].results
    part = compared[-1]._replace(results=[first._replace(final_loss=None), *rest])
    assert part.rows()[0]["final loss"].endswith("(of 1 seeds)")
    assert "the loss of float32 is not finite with seed 0" in part.notes()
    part = part._replace(results=[first._replace(scores={"f1": 0.5}), *rest])
    assert "no verdict: the runs have no score in common" in part.notes()


def test_models_that_learned_nothing_are_no_comparison(compared):
    found = compared[-1]
    nothing = [x._replace(chance=0.9, at_chance=True) for x in found.results]
    text = found._replace(results=nothing).to_text()
    for mode in ("float32", "mixed_bfloat16"):
        assert f"test even of {mode} with seed 0, 1 is at the chance level, 0.9" in text
    both = "no verdict: float32 and mixed_bfloat16 are both at the chance level"
    assert f"verdict on even: {both}" in text and text.count(both) == 3
    assert "seed noise" not in text and "in each of" not in text
    # One that has learned is enough for a comparison.
    one = [*found.results[:3], nothing[3]]
    text = found._replace(results=one).to_text()
    assert "even of mixed_bfloat16 with seed 1 is at the chance" in text
    assert "at the chance level" not in found.to_text() and both not in text


def test_notes_are_those_of_the_model(compared):
    """Of gradients of embeddings for a model with embeddings alone."""
    found, words = compared[-1], "gradients of embeddings"
    assert found.environment["embedding_layers"] == 0 and words not in found.to_text()
    there = found.environment | {"embedding_layers": 2}
    assert words in found._replace(environment=there).to_text()


def test_other_modes_in_the_same_folder_have_their_own_table(tmp_path):
    """Without loss scaling, too; the runs that there are serve again."""
    given, said = {"precision__mode": "mixed_float16", "epochs": 1}, []
    before = compare.compare(make_config(**given), tmp_path)
    assert list(before.by_mode()) == ["float32", "mixed_float16"]
    config = make_config(compare_unscaled=True, **given)
    found = compare.compare(config, tmp_path, report=said.append)
    assert sum("finished before" in line for line in said) == 2
    names = ["float32", "mixed_float16, no loss scaling", "mixed_float16"]
    assert list(found.by_mode()) == names
    assert (tmp_path / "mixed_float16_unscaled/seed0/result.json").exists()
    _, without, scaled = found.results
    assert without.loss_scale is None and scaled.loss_scale is not None
    assert [each.mode for each in found.differences()] == names[1:]
    assert "mixed_float16, no loss scaling minus float32" in found.to_text()
    assert compare.compare(config, tmp_path) == found
    assert compare.compare(make_config(**given), tmp_path).to_text() == before.to_text()


def test_float32_may_have_a_batch_size_of_its_own(tmp_path):
    own = {"float32__batch_size": 5, "float32__learning_rate": 0.01}
    config = make_config(batch_size=10, epochs=1, **own)
    found = compare.compare(config, tmp_path)
    assert [run.batch_size for run in found.results] == [5, 10]
    assert "different batch sizes: float32 5, mixed_bfloat16 10" in found.to_text()
    settings = (tmp_path / "float32/seed0/config.yaml").read_text()
    assert "learning_rate: 0.01" in settings
    assert base_config.apply_tiny(config).float32.batch_size is None


def test_comparison_that_makes_no_sense_is_refused_before_a_folder_is_made(
    tmp_path, monkeypatch
):
    tpu = [hardware.DeviceDescription("TPU")]
    monkeypatch.setattr(hardware, "read_devices", lambda: tpu)
    other = make_config()
    with other.unlocked():
        other.float32.epochs = 3
    half = make_config(precision__mode="mixed_float16")
    for config, error, message in (
        (make_config(compare_unscaled=True), ValueError, "'mixed_bfloat16'"),
        (
            make_config(float32__batch_size=0),
            ValueError,
            r"config\.float32\.batch_size must be",
        ),
        (other, ValueError, r"config\.float32 has epochs"),
        (half, tfamp.UnsupportedModeError, "TPUs have no float16"),
    ):
        with pytest.raises(error, match=message):
            compare.compare(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_pattern_that_matches_no_layer_is_told_before_float32_is_trained(tmp_path):
    config, said = make_config(precision__overrides=(("haed", "float32"),)), []
    with pytest.raises(tfamp.OverrideError, match="matched no layer: 'haed'"):
        compare.compare(config, tmp_path / "run", report=said.append)
    assert not [line for line in said if line.startswith("run ")]
    assert not [*tmp_path.glob("run/*/*/result.json")]


def test_a_task_is_made_under_no_mode(tmp_path, monkeypatch):
    """Layers that it makes are of float32's run, too."""
    policies, original = [], tasks.from_config

    def from_config(config):
        policies.append(keras.config.dtype_policy().name)
        return original(config)

    monkeypatch.setattr(tasks, "from_config", from_config)
    config = make_config(epochs=1, precision__overrides=((r"dense(_\d+)?", "float32"),))
    compare.compare(config, tmp_path / "run")
    assert {*policies} == {"float32"}


def test_comparison_says_what_mode_it_chose(monkeypatch):
    mode, note = compare.mixed_mode("float32")
    assert mode == "mixed_bfloat16" and "the requested mode" in note
    mode, note = compare.mixed_mode("mixed_float16")
    assert mode == "mixed_float16" and "requested" in note
    plain = [hardware.DeviceDescription("CPU", "plain")]
    monkeypatch.setattr(hardware, "read_devices", lambda: plain)
    mode, note = compare.mixed_mode("auto")
    assert mode == "mixed_bfloat16"
    assert "float32 is the mode for this host" in note
    assert hardware.format_support("bfloat16", plain).reason in note


@pytest.mark.issue("tensorflow#33435")
@pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast
    or bool(tf.config.list_physical_devices("GPU")),
    reason="the bfloat16 rewrite needs a CPU with native bfloat16",
)
def test_comparison_sets_the_rewrite_beside_a_twin_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    compared = compare.compare(make_config(precision__mode="auto"), tmp_path)
    twin, mixed = compared.results
    assert (twin.mode, twin.graph_rewrite) == ("float32", "")
    assert mixed.mode == "mixed_bfloat16"
    assert mixed.graph_rewrite in compared.to_text()
    assert "by graph rewrite" in compared.note


def test_the_twin_stores_weights_and_slots_in_float32():
    config = make_config(
        precision__optimizer_state="8bit", precision__weights="bfloat16"
    )
    low, twin = (
        compare.config_of(config, mode, 0).precision
        for mode in ("mixed_bfloat16", "float32")
    )
    assert (low.optimizer_state, low.weights) == ("8bit", "bfloat16")
    assert (twin.optimizer_state, twin.weights) == ("float32", "float32")
