"""Whole runs, on a task of a hundred points, and on real digits where it matters."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import hardware
from tfamp.precision import policy
from tfamp.training import (
    base_config,
    callbacks,
    compare,
    run_files,
    run_records,
    tasks,
    train_and_evaluate,
)

ROOT = pathlib.Path(__file__).parents[2]


def create_points(config, data_dir, manual_dir):
    """A task: on which side of a line a point lies. With dropout, for its seeds."""
    generator = np.random.default_rng(0)
    points = generator.normal(size=(120, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))

    def build():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3)]
        head = keras.layers.Dense(2, dtype="float32")
        return keras.Sequential([keras.Input((4,)), *layers, head])

    return tasks.Task(
        train=whole.take(80),
        validation=whole.skip(80).take(20),
        test=whole.skip(100),
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
    config.epochs = 4
    config.batch_size = 8
    config.optimizer.learning_rate = 0.05
    config.precision.mode = "float32"
    return config


def test_without_validation_the_last_epochs_weights_count(config, tmp_path):
    task = create_points(config, None, None)._replace(validation=None)
    result = train_and_evaluate(config, tmp_path / "run", task)
    assert result.best_validation_score is None
    model = keras.models.load_model(tmp_path / "run/model.keras")
    steps = config.epochs * 10
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == steps
    again = train_and_evaluate(config, tmp_path / "run", task)
    assert again == result


def test_scores_of_the_task_come_first_and_are_of_the_best_model(config, tmp_path):
    seen = []

    def score(model, folder):
        seen.append(model.get_weights())
        (folder / "predictions.json").write_text("{}")
        return {"f1": 0.25, "exact_match": 0.125}

    task = create_points(config, None, None)._replace(score=score)
    result = train_and_evaluate(config, tmp_path / "run", task)
    assert (result.score_name, result.score) == ("f1", 0.25)
    assert list(result.scores) == ["f1", "exact_match", "accuracy"]
    assert 0.5 < result.scores["accuracy"] <= 1.0
    saved = keras.models.load_model(tmp_path / "run/model.keras").get_weights()
    for old, new in zip(seen[0], saved, strict=True):
        np.testing.assert_array_equal(old, new)
    run_files.delete_run(tmp_path / "run")  # Predictions belong to a run.
    assert not (tmp_path / "run").exists()


def losses(folder):
    return [row["loss"] for row in run_records.read_metrics(folder, "step")]


def test_run_learns_and_writes_its_files(config, tmp_path):
    before = policy.read()
    result = train_and_evaluate(config, tmp_path / "run")
    assert policy.read() == before
    assert result.score > 0.7
    assert (result.mode, result.seed, result.loss_scale) == ("float32", 0, None)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        "best.weights.h5",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "model.keras",
        "result.json",
        "tensorboard",
    }
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["precision"]["effective"] == "float32"
    # As in every run, so that modes are compared in nothing but precision.
    assert "summed first" in environment["precision"]["embedding_gradients"]
    assert environment["packages"]["tensorflow"] == tf.__version__
    loaded = keras.models.load_model(tmp_path / "run/model.keras")
    task = create_points(config, None, None)
    scores = loaded.evaluate(task.test.batch(20), verbose=0, return_dict=True)
    assert scores["accuracy"] == pytest.approx(result.score)


def test_finite_guard_counts_without_scaling(config, tmp_path):
    plain = train_and_evaluate(config, tmp_path / "plain")
    config.precision.finite_guard = True
    guarded = train_and_evaluate(config, tmp_path / "guarded")
    assert (guarded.loss_scale, guarded.skipped_steps) == (1.0, 0)
    np.testing.assert_allclose(
        losses(tmp_path / "guarded"), losses(tmp_path / "plain"), rtol=1e-4
    )
    config.precision.mode = "mixed_float16"  # Scales the loss, as without the guard.
    assert train_and_evaluate(config, tmp_path / "scaled").loss_scale == 2.0**15
    assert plain.loss_scale is None


@pytest.mark.filterwarnings("ignore:.*training steps of this epoch were skipped")
def test_run_whose_loss_scale_is_exhausted_stops_with_the_reason(config, tmp_path):
    config.precision.mode = "mixed_float16"
    config.precision.loss_scale.dynamic = False
    config.precision.loss_scale.initial_scale = 2.0**60  # Overflows in every step.
    config.precision.loss_scale.max_scale = 2.0**60
    config.epochs = 12
    with pytest.raises(tfamp.LossScaleExhaustedError, match="dense"):
        train_and_evaluate(config, tmp_path)


def test_finished_run_is_not_repeated(config, tmp_path):
    first = train_and_evaluate(config, tmp_path)
    stamp = (tmp_path / "model.keras").stat().st_mtime_ns
    assert train_and_evaluate(config, tmp_path) == first
    assert (tmp_path / "model.keras").stat().st_mtime_ns == stamp


def test_same_seed_same_losses_and_other_seed_others(config, tmp_path):
    train_and_evaluate(config, tmp_path / "a")
    train_and_evaluate(config, tmp_path / "b")
    config.seed = 1
    train_and_evaluate(config, tmp_path / "c")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("mode", ["float32", "mixed_float16"])
@pytest.mark.parametrize("killed_after", [1, 3, 4])
def test_interrupted_run_goes_on_with_the_same_losses(
    config, tmp_path, monkeypatch, mode, killed_after
):
    config.precision.mode = mode
    config.precision.loss_scale.growth_interval = 7
    whole = train_and_evaluate(config, tmp_path / "whole")
    original = callbacks.AtomicBackup.on_epoch_end

    def killed(self, epoch, logs=None):
        if epoch + 1 == killed_after:
            raise KeyboardInterrupt  # After the metrics, before the backup.
        original(self, epoch, logs)

    monkeypatch.setattr(callbacks.AtomicBackup, "on_epoch_end", killed)
    with pytest.raises(KeyboardInterrupt):
        train_and_evaluate(config, tmp_path / "killed")
    monkeypatch.setattr(callbacks.AtomicBackup, "on_epoch_end", original)
    before = epochs_of(tmp_path / "killed")[: killed_after - 1]
    resumed = train_and_evaluate(config, tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert resumed._replace(steps_per_second=0) == whole._replace(steps_per_second=0)
    after, expected = (epochs_of(tmp_path / name) for name in ("killed", "whole"))
    assert list(map(without_times, after)) == list(map(without_times, expected))
    assert after[: killed_after - 1] == before
    clock = [row["seconds"] for row in after]
    assert clock == sorted(set(clock))
    traced = [row["epoch"] for row in after if "first_step_seconds" in row]
    assert traced == sorted({1, killed_after})


TIMES = ("seconds", "first_step_seconds", "steps_per_second")


def epochs_of(folder):
    return run_records.read_metrics(folder, "epoch")


def without_times(row):
    """Values alone: Keras' numbers in paths go on from one model to the next."""
    return [value for name, value in row.items() if name not in TIMES]


def test_clock_of_a_run_counts_training_and_validation_alone(
    config, tmp_path, monkeypatch
):
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(callbacks, "time", clock)

    def take(name, seconds, callback, original=None):
        def slow(self, *args, **kwargs):
            now[0] += seconds
            return original(self, *args, **kwargs) if original else None

        monkeypatch.setattr(callback, name, slow, raising=False)

    take("on_train_batch_begin", 1, callbacks.EpochSeeds)
    take("on_test_begin", 5, callbacks.ReplicaStatistics)
    for callback in (callbacks.BestCheckpoint, callbacks.AtomicBackup):
        take("on_epoch_end", 1000, callback, callback.on_epoch_end)
    config.epochs = 2
    train_and_evaluate(config, tmp_path)
    first, second = epochs_of(tmp_path)
    assert (first["seconds"], first["first_step_seconds"]) == (15.0, 1.0)
    assert second["seconds"] == 30.0 and "first_step_seconds" not in second
    assert second["steps_per_second"] == 1.0


def test_run_of_an_earlier_version_goes_on_without_the_clock(config, tmp_path):
    folder = tmp_path / "old"
    recorder = callbacks.Recorder(folder / "metrics.jsonl", 10, 100)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 1}\n')
    model = create_points(config, None, None).build_model()
    model.compile("adam", "mse")
    recorder.set_model(model)
    recorder.on_train_begin()
    recorder.on_epoch_begin(1)
    recorder.on_train_batch_end(0, {"loss": 1.0})
    recorder.on_epoch_end(1, {"loss": 1.0})
    row = epochs_of(folder)[-1]
    assert row["epoch"] == 2 and row["seconds"] is None
    assert row["first_step_seconds"] >= 0


def test_torn_and_half_moved_backups_do_no_harm(config, tmp_path):
    backup = callbacks.AtomicBackup(tmp_path / "backup")
    model = create_points(config, None, None).build_model()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    backup.set_model(model)
    assert backup.restore(model) == 0
    backup.on_epoch_end(0)
    saved = model.get_weights()
    (tmp_path / "backup.new").mkdir()
    (tmp_path / "backup.new/latest.weights.h5").write_bytes(b"torn")
    os.replace(tmp_path / "backup", tmp_path / "backup.old")
    model.set_weights([weight + 1 for weight in saved])
    assert backup.restore(model) == 1
    for old, new in zip(saved, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    backup.on_epoch_end(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["backup"]
    backup.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resumed_after", [0, 3])
def test_best_checkpoint_breaks_ties_by_the_loss(tmp_path, resumed_after):
    path = tmp_path / "best.weights.h5"
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    nan = float("nan")
    scores = [(nan, nan), (0.9, 0.4), (0.8, 0.1), (0.9, 0.3), (0.9, 0.35), (0.7, nan)]
    logs = [{"val_accuracy": a, "val_loss": loss} for a, loss in scores]
    read = [{k: callbacks.json_number(v) for k, v in row.items()} for row in logs]
    for first, last in ((0, resumed_after), (resumed_after, len(logs))):
        callback = callbacks.BestCheckpoint(path, "accuracy", read[:first])
        callback.set_model(model)
        for epoch in range(first, last):
            model.set_weights([np.full((1, 1), epoch), np.zeros(1)])
            callback.on_epoch_end(epoch, logs[epoch])
    model.load_weights(path)
    assert model.get_weights()[0] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["best.weights.h5"]


def test_folder_of_another_run_is_refused_with_the_difference(config, tmp_path):
    train_and_evaluate(config, tmp_path)
    config.epochs = 5
    with pytest.raises(tfamp.RunError, match="epochs: 4 -> 5"):
        train_and_evaluate(config, tmp_path)
    config.epochs, config.data_dir = 4, "elsewhere"  # Other data, for all one knows.
    with pytest.raises(tfamp.RunError, match="data_dir: '' -> 'elsewhere'"):
        train_and_evaluate(config, tmp_path)


def test_folder_that_cannot_be_written_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tfamp.RunError, match="--workdir"):
        train_and_evaluate(config, tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "files",
    [
        ["thesis.txt"],
        ["config.yaml", "result.json", "thesis.txt"],
        ["old/run/config.yaml", "thesis.txt"],
        ["float32/seed0/config.yaml", "thesis.txt"],
        ["float32/seed0/config.yaml", "float32/seed0/thesis.txt"],
        ["float32/seed0/config.yaml", "float32/thesis.txt"],
        ["float32/seed0/config.yaml", "float32/seed_thesis.txt"],
        ["report.md", "float32"],
    ],
    ids=str,
)
def test_overwrite_deletes_nothing_that_no_run_has_written(tmp_path, files):
    for file in files:
        path = tmp_path / "mine" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    with pytest.raises(tfamp.RunError, match="thesis.txt|holds old|holds float32"):
        run_files.delete_run(tmp_path / "mine")
    assert all((tmp_path / "mine" / file).exists() for file in files)


def test_overwrite_deletes_runs_and_comparisons(config, tmp_path):
    train_and_evaluate(config, tmp_path / "run")
    run_files.delete_run(tmp_path / "run")
    run_files.delete_run(tmp_path / "run")
    config.precision.mode = "mixed_bfloat16"
    compare.compare(config, tmp_path / "comparison")
    # What a kill can leave behind.
    (tmp_path / "comparison/float32/seed0/metrics.jsonl.tmp").write_text("")
    (tmp_path / "comparison/report.md.tmp").write_text("")
    (tmp_path / "comparison/.export.abc/new").mkdir(parents=True)
    run_files.delete_run(tmp_path / "comparison")
    assert list(tmp_path.iterdir()) == []


def test_overwrite_spares_the_current_directory(config, tmp_path, monkeypatch):
    train_and_evaluate(config, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "tensorboard")
    with pytest.raises(tfamp.RunError, match="current directory"):
        run_files.delete_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("batch_size", -1),
        ("eval_batch_size", 0),
        ("limit_examples", -5),
        ("limit_examples", 1),
        ("validation_fraction", 1.0),
        ("optimizer.learning_rate", -1.0),
        ("optimizer.learning_rate", float("nan")),
        ("optimizer.warmup_fraction", 2.0),
        ("model.dropout", 1.0),
    ],
)
def test_nonsensical_settings_are_refused_before_anything_is_written(
    config, tmp_path, field, value
):
    config.model.dropout = 0.1
    config.update_from_flattened_dict({field: value})
    for job in (train_and_evaluate, compare.compare):
        with pytest.raises(ValueError, match=f"config.{field} must be"):
            job(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rejected_settings_do_not_block_the_corrected_command(config, tmp_path):
    config.precision.loss_scale.growth_interval = 0
    with pytest.raises(ValueError, match="growth_interval"):
        train_and_evaluate(config, tmp_path)
    config.precision.loss_scale.growth_interval = 5
    assert train_and_evaluate(config, tmp_path).mode == "float32"


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text"])
def test_folder_with_other_yaml_is_refused(config, tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(tfamp.RunError, match="not the settings of a run"):
        train_and_evaluate(config, tmp_path)


def test_error_in_a_run_restores_the_policy(config, tmp_path):
    before = policy.read()
    config.precision.mode = "mixed_bfloat16"
    config.optimizer.name = "lamb"
    with pytest.raises(ValueError, match="lamb"):
        train_and_evaluate(config, tmp_path)
    assert policy.read() == before
    assert tfamp.status().requested is None


def test_unknown_task_is_refused(config):
    config.task = "chess"
    with pytest.raises(ValueError, match="config.task='chess'"):
        tasks.from_config(config)


def test_comparison_reports_both_modes_and_exports(config, tmp_path):
    config.precision.mode = "mixed_float16"
    config.precision.loss_scale.growth_interval = 10
    said = []
    comparison = compare.compare(config, tmp_path, seeds=2, report=said.append)
    rows = comparison.rows()
    assert [row[0] for row in rows] == ["mode", "float32", "mixed_float16"]
    assert rows[1][-2:] == ["-", "-"]
    assert "±" in rows[2][1] and float(rows[2][-1].split(" ±")[0]) > 1
    assert [line.split(":")[0] for line in said[:4]] == [
        f"run {i} of 4" for i in (1, 2, 3, 4)
    ]
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["schema_version"] == 2
    assert [r["seed"] for r in stored["results"]] == [0, 0, 1, 1]
    report = (tmp_path / "report.md").read_text()
    assert report.count("| mixed_float16 |") == 1
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    served = tf.saved_model.load(str(tmp_path / "export"))
    assert served.signatures["serving_default"].structured_outputs
    modes = {(mode, seed) for mode in ("float32", "mixed_float16") for seed in (0, 1)}
    for mode, seed in modes:
        assert (tmp_path / mode / f"seed{seed}" / "result.json").exists()


def test_finished_comparison_is_read_and_other_settings_are_refused(config, tmp_path):
    config.precision.mode = "mixed_bfloat16"
    first = compare.compare(config, tmp_path)
    assert compare.compare(config, tmp_path).to_text() == first.to_text()
    config.epochs = 2
    with pytest.raises(tfamp.RunError, match="epochs: 4 -> 2"):
        compare.compare(config, tmp_path)


def test_comparison_answers_the_question_that_is_asked(config, tmp_path):
    """Other modes or seeds in the same folder: their own table, runs kept."""

    def ask(mode, seeds):
        config.precision.mode = mode
        rows = compare.compare(config, tmp_path, seeds).results
        return [(row.mode, row.seed) for row in rows]

    bfloat16 = [("float32", 0), ("mixed_bfloat16", 0)]
    assert ask("mixed_bfloat16", 1) == bfloat16
    assert ask("mixed_float16", 1) == [("float32", 0), ("mixed_float16", 0)]
    assert ask("mixed_bfloat16", 1) == bfloat16
    assert len(ask("mixed_bfloat16", 2)) == 4
    assert ask("mixed_bfloat16", 1) == bfloat16
    shutil.rmtree(tmp_path / "export")
    assert ask("mixed_bfloat16", 1) == bfloat16
    assert (tmp_path / "export/saved_model.pb").exists()


def test_comparison_with_a_mode_of_other_hardware_is_refused_first(
    config, tmp_path, monkeypatch
):
    tpu = [hardware.DeviceDescription("TPU")]
    monkeypatch.setattr(hardware, "read_devices", lambda: tpu)
    config.precision.mode = "mixed_float16"
    with pytest.raises(tfamp.UnsupportedModeError, match="TPUs have no float16"):
        compare.compare(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_comparison_on_a_plain_cpu_says_that_the_mixed_mode_is_slow(monkeypatch):
    plain = [hardware.DeviceDescription("CPU", "plain")]
    monkeypatch.setattr(hardware, "read_devices", lambda: plain)
    mode, note = compare.mixed_mode("auto")
    assert mode == "mixed_bfloat16"
    assert "float32 is the mode for this host" in note and "slow here" in note


def test_comparison_says_what_mode_it_chose():
    mode, note = compare.mixed_mode("float32")
    assert mode == "mixed_bfloat16" and "the mode asked for" in note
    mode, note = compare.mixed_mode("mixed_float16")
    assert mode == "mixed_float16" and "asked for" in note


def test_killed_process_resumes(tmp_path):
    """kill -9 in the middle of training on real digits, then the same command."""
    command = [
        *(sys.executable, str(ROOT / "scripts/train_cnn.py"), "--job=train"),
        *("--tiny", "--config.limit_examples=0", "--config.epochs=5"),
    ]

    def start(folder):
        return subprocess.Popen(
            [*command, f"--workdir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )

    killed = start(tmp_path / "killed")
    deadline = time.monotonic() + 300
    while len(run_records.read_metrics(tmp_path / "killed", "epoch")) < 2:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed/result.json").exists()
    for folder in ("killed", "whole"):
        process = start(tmp_path / folder)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


# ---- Precision control ----

needs_native_bfloat16 = pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast
    or bool(tf.config.list_physical_devices("GPU")),
    reason="the bfloat16 rewrite needs a CPU with native bfloat16",
)


@needs_native_bfloat16
@pytest.mark.parametrize("mode", ["auto", "mixed_bfloat16"])
def test_graph_rewrite_reports_what_it_converted(config, tmp_path, mode):
    config.precision.mode = mode
    config.precision.graph_rewrite = True
    options = tf.config.optimizer.get_experimental_options()
    result = train_and_evaluate(config, tmp_path)
    assert result.mode == "mixed_bfloat16"
    assert "effective: bfloat16" in result.graph_rewrite
    assert tf.config.optimizer.get_experimental_options() == options
    assert keras.models.load_model(tmp_path / "model.keras").dtype == "float32"


@needs_native_bfloat16
def test_comparison_sets_the_rewrite_beside_a_twin_without(
    config, tmp_path, monkeypatch
):
    monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    config.precision.mode = "auto"
    compared = compare.compare(config, tmp_path)
    twin, mixed = compared.results
    assert (twin.mode, twin.graph_rewrite) == ("float32", "")
    assert mixed.mode == "mixed_bfloat16"
    assert mixed.graph_rewrite in compared.to_text()
    assert "by graph rewrite" in compared.note


def test_overrides_give_single_layers_a_mode(config, tmp_path):
    config.precision.mode = "mixed_bfloat16"
    config.precision.overrides = (("sequential.*/dense.*", "float32"),)
    train_and_evaluate(config, tmp_path)
    model = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.compute_dtype for layer in model.layers] == [
        "float32",
        "bfloat16",
        "float32",
    ]


def test_override_that_matches_nothing_stops_the_run(config, tmp_path):
    config.precision.mode = "mixed_bfloat16"
    config.precision.overrides = (("nothing", "float32"),)
    with pytest.raises(tfamp.OverrideError, match="'nothing'.*Known paths"):
        train_and_evaluate(config, tmp_path)
    config.precision.overrides = ()  # The folder does not belong to the failed command.
    assert train_and_evaluate(config, tmp_path).mode == "mixed_bfloat16"


def test_kernel_switches_are_set_for_the_run_and_recorded(config, tmp_path):
    config.precision.cudnn_autotune = False
    before = os.environ.get("TF_CUDNN_USE_AUTOTUNE")
    train_and_evaluate(config, tmp_path)
    assert os.environ.get("TF_CUDNN_USE_AUTOTUNE") == before
    rows = json.loads((tmp_path / "environment.json").read_text())["kernel_switches"]
    (row,) = [row for row in rows if row["name"] == "TF_CUDNN_USE_AUTOTUNE"]
    assert row["requested"] == "0"


def test_lower_error_selects_the_checkpoint(config, tmp_path):
    def error(y_true, y_pred):
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                y_true, y_pred, from_logits=True
            )
        )

    task = create_points(config, None, None)._replace(
        metrics=lambda: [keras.metrics.MeanMetricWrapper(error, name="error")],
        errors=frozenset({"error"}),
    )
    config.epochs = 3
    config.optimizer.learning_rate = 3.0  # So that the error goes up and down.
    result = train_and_evaluate(config, tmp_path / "run", task)
    epochs = run_records.read_metrics(tmp_path / "run", "epoch")
    errors = [row["val_error"] for row in epochs]
    assert errors[-1] > min(errors)
    assert result.best_validation_score == min(errors)
    assert (result.errors, result.score_name) == (["error"], "error")


def test_augmentation_is_of_the_training_examples_alone(config, tmp_path):
    task = create_points(config, None, None)
    seen = []

    def note(features, label, seed):
        tf.py_function(lambda s: seen.append(tuple(s.numpy())), [seed], [])
        return features, label

    config.epochs = 2
    train_and_evaluate(config, tmp_path / "run", task._replace(augment=note))
    assert len(seen) >= 160 and len(set(seen)) == len(seen)
    assert {epoch for epoch, _ in seen} == {0, 1}


def test_folder_that_another_process_works_in_is_refused(config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    program = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), "
        "fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        for job in (train_and_evaluate, compare.compare):
            with pytest.raises(tfamp.RunError, match="Another process is at work"):
                job(config, folder)
        assert list(folder.iterdir()) == []
        other.communicate("")
    assert train_and_evaluate(config, folder).mode == "float32"
