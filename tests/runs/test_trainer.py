"""Whole runs, on a task of a hundred points, and on real digits where it matters."""

import functools
import json
import os
import random
import shutil
import signal
import types
from unittest import mock

import keras
import numpy as np
import points
import pytest
import tensorflow as tf
import workers

import tfamp
from tfamp.facts import hardware
from tfamp.precision import policy
from tfamp.resume import backup
from tfamp.runs import run_files, trained
from tfamp.runs.callbacks import best_weights, each_epoch, progress_lines, recorder
from tfamp.training import train_and_evaluate


def make_config(mode="float32", **settings):
    fields = {"model__dropout": 0.3, "precision__loss_scale__growth_interval": 7}
    return points.make_config(precision__mode=mode, **{**fields, **settings})


@pytest.fixture
def config():
    return make_config()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a function: mode -> (folder, result) of a run that nothing stopped."""

    @functools.cache
    def train(mode="float32"):
        folder = tmp_path_factory.mktemp(mode) / "run"
        return folder, train_and_evaluate(make_config(mode), folder, report=said.append)

    said = train.said = []
    return train


def losses(folder):
    return [row["loss"] for row in run_files.read_metrics(folder, "step")]


def epochs_of(folder):
    return run_files.read_metrics(folder, "epoch")


def test_run_learns_and_writes_its_files(config, whole):
    before = policy.read()
    folder, result = whole()
    assert policy.read() == before
    assert whole.said[0] == "start: 4 of 4 epochs, 10 steps each"
    assert result.score > 0.7
    assert (result.mode, result.seed, result.loss_scale) == ("float32", 0, None)
    files = {path.name for path in folder.iterdir()}
    assert files - {".tfamp-lock", ".tfamp-run"} == {
        "backup",
        "best.weights.h5",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "model.keras",
        "result.json",
        "tensorboard",
    }
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["precision"]["effective"] == "float32"
    # As in every run, so that modes are compared in nothing but precision.
    assert "summed, then" in environment["precision"]["embedding_gradients"]
    assert environment["packages"]["tensorflow"] == tf.__version__
    loaded = keras.models.load_model(folder / "model.keras")
    test = points.create(config).test.batch(20)
    scores = loaded.evaluate(test, verbose=0, return_dict=True)
    assert scores["accuracy"] == pytest.approx(result.score)
    stamp = (folder / "model.keras").stat().st_mtime_ns
    assert train_and_evaluate(config, folder) == result  # Not repeated.
    assert (folder / "model.keras").stat().st_mtime_ns == stamp


def test_without_validation_the_last_weights_count_and_train_is_augmented(tmp_path):
    config, seen = make_config(epochs=2), []

    def note(features, label, seed):
        tf.py_function(lambda s: seen.append(tuple(s.numpy())), [seed], [])
        return features, label

    task = points.create(config)._replace(validation=None, augment=note)
    result = train_and_evaluate(config, tmp_path / "run", task)
    assert result.best_validation_score is None
    model = keras.models.load_model(tmp_path / "run/model.keras")
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 20
    assert len(seen) >= 160 and len(set(seen)) == len(seen)
    assert {epoch for epoch, _ in seen} == {0, 1}


def test_scores_of_the_task_come_first_and_are_of_the_best_model(config, tmp_path):
    seen = []

    def score(model, folder):
        seen.append(model.get_weights())
        return {"f1": 0.25, "exact_match": 0.125}

    task = points.create(config)._replace(score=score)
    result = train_and_evaluate(config, tmp_path / "run", task)
    assert (result.score_name, result.score) == ("f1", 0.25)
    assert list(result.scores) == ["f1", "exact_match", "accuracy"]
    assert 0.5 < result.scores["accuracy"] <= 1.0
    (weights,) = seen  # Scored once.
    saved = keras.models.load_model(tmp_path / "run/model.keras").get_weights()
    tf.nest.map_structure(np.testing.assert_array_equal, weights, saved)


@pytest.mark.parametrize("lower", [True, False])
def test_weights_of_the_best_epoch_count_the_lowest_of_an_error(tmp_path, lower):
    def error(y_true, y_pred):
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                y_true, y_pred, from_logits=True
            )
        )

    config = make_config(eval_batch_size=20)
    task = points.create(config)._replace(
        metrics=lambda: [keras.metrics.MeanMetricWrapper(error, name="error")],
        errors=frozenset({"error"} if lower else ()),
    )
    with points.stopped(points.interrupt, 2), pytest.raises(KeyboardInterrupt):
        train_and_evaluate(config, tmp_path, task)
    result = train_and_evaluate(config, tmp_path, task)
    errors = [row["val_error"] for row in epochs_of(tmp_path)]
    assert errors[0] == max(errors)  # So that the last epoch is not the highest.
    best = min(errors) if lower else errors[0]
    assert result.best_validation_score == best
    assert (result.errors, result.score_name) == (["error"] * lower, "error")
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    features, labels = next(iter(task.validation.batch(20)))
    assert float(error(labels, model(features))) == pytest.approx(best)


# ---- Going on after a kill ----


@pytest.mark.parametrize(
    ("mode", "killed_after"), [("float32", 1), ("float32", 3), ("mixed_float16", 4)]
)
def test_interrupted_run_goes_on_with_the_same_losses(
    whole, tmp_path, mode, killed_after
):
    config = make_config(mode)
    folder, result = whole(mode)
    stopped = points.stopped(points.interrupt, killed_after)
    with stopped, pytest.raises(KeyboardInterrupt):
        train_and_evaluate(config, tmp_path)
    finished = killed_after - 1
    before, said = epochs_of(tmp_path)[:finished], []
    resumed = train_and_evaluate(config, tmp_path, report=said.append)
    start = f"resumed after epoch {finished}" if finished else "start"
    assert said == [f"{start}: {4 - finished} of 4 epochs, 10 steps each"]
    assert losses(tmp_path) == losses(folder)
    check_same_run((tmp_path, resumed), (folder, result))
    after = epochs_of(tmp_path)
    assert after[:finished] == before
    clock = [row["seconds"] for row in after]
    assert clock == sorted(set(clock))
    traced = [row["epoch"] for row in after if "first_step_seconds" in row]
    assert traced == sorted({1, killed_after})


TIMES = ("seconds", "first_step_seconds", "steps_per_second")


def check_same_run(*runs):
    """Of (folder, result): all but times is the same."""
    found, expected = (
        (result._replace(steps_per_second=0), [*map(without_times, epochs_of(folder))])
        for folder, result in runs
    )
    assert found == expected


def without_times(row):
    """Values alone: Keras' numbers in paths go on from one model to the next."""
    return [value for name, value in row.items() if name not in TIMES]


@pytest.fixture
def signaled(monkeypatch):
    """Returns a function: sends a signal at a call of the step; the batches begun."""

    def at(count, number):
        begun = []

        def on_train_batch_begin(self, batch, logs=None):
            begun.append(batch)
            if len(begun) == count:
                os.kill(os.getpid(), number)

        kind = each_epoch.EpochSeeds
        monkeypatch.setattr(kind, "on_train_batch_begin", on_train_batch_begin)
        return begun

    return at


@pytest.mark.parametrize(
    ("name", "mode"),
    [("SIGTERM", "mixed_float16"), ("SIGUSR1", "float32"), ("SIGINT", "float32")],
)
def test_a_signal_saves_at_the_step_and_the_run_goes_on_there(
    whole, tmp_path, signaled, name, mode
):
    config, (folder, result), said = make_config(mode), whole(mode), []
    batches = signaled(24, getattr(signal, name))
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        train_and_evaluate(config, tmp_path, report=said.append)
    if name != "SIGINT":
        assert stopped.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (
        handlers
    )
    assert f"{name}: saved after step 4 of epoch 3" in said[-1]
    resumed = train_and_evaluate(config, tmp_path, report=said.append)
    assert "resumed after step 4 of epoch 3: 2 of 4 epochs, 10 steps each" in said
    assert len(batches) == 40
    assert losses(tmp_path) == losses(folder)
    check_same_run((tmp_path, resumed), (folder, result))


@pytest.mark.parametrize("mode", ["float32", "mixed_float16"])
def test_several_steps_in_a_call_are_the_same_training_also_after_a_stop(
    whole, tmp_path, signaled, mode
):
    (folder, result), said = whole(mode), []
    config = make_config(mode, steps_per_execution=7)  # Of 10: calls of 5.
    batches = signaled(5, signal.SIGTERM)
    with pytest.raises(SystemExit):
        train_and_evaluate(config, tmp_path, report=said.append)
    start = "start: 4 of 4 epochs, 10 steps each, 5 in a call"
    assert said[0] == f"{start}: they do not divide by 7"
    assert "SIGTERM: saved after step 5 of epoch 3" in said[1]
    resumed = train_and_evaluate(config, tmp_path, report=said.append)
    assert "resumed after step 5 of epoch 3" in said[2]
    assert batches == [0, 5] * 4
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["steps_per_execution"] == {"requested": 7, "effective": 5}
    check_same_run((tmp_path, resumed), (folder, result))
    rows = run_files.read_metrics(tmp_path, "step")
    assert [row["step"] for row in rows] == [*range(5, 41, 5)]
    means = np.reshape(losses(folder), (8, 5)).mean(1)
    np.testing.assert_allclose([row["loss"] for row in rows], means, rtol=1e-5)


def test_a_finished_run_goes_on_to_more_epochs(whole, tmp_path):
    (folder, result), said = whole(), []
    assert train_and_evaluate(make_config(epochs=2), tmp_path).score is not None
    config = make_config(eval_batch_size=7)
    longer = train_and_evaluate(config, tmp_path, report=said.append)
    assert said == ["resumed after epoch 2: 2 of 4 epochs, 10 steps each"]
    trained = [[row["loss"] for row in epochs_of(f)] for f in (tmp_path, folder)]
    assert trained[0] == trained[1]
    assert longer.score == result.score
    models = [keras.models.load_model(f / "model.keras") for f in (folder, tmp_path)]
    weights = [model.get_weights() for model in models]
    tf.nest.map_structure(np.testing.assert_array_equal, *weights)
    assert train_and_evaluate(config, tmp_path) == longer
    shutil.rmtree(tmp_path / "backup")  # As an earlier version left it.
    for changes, words in (
        ({"epochs": 5}, "epochs: 4 -> 5.*has a backup"),
        ({"epochs": 3}, r"epochs: 4 -> 3.*more epochs"),
        (
            {"epochs": 5, "optimizer__schedule": "cosine"},
            "epochs: 4 -> 5; optimizer.schedule",
        ),
    ):
        with pytest.raises(tfamp.RunError, match=words):
            train_and_evaluate(make_config(eval_batch_size=7, **changes), tmp_path)
        assert (tmp_path / "result.json").exists()


def test_a_run_killed_after_its_last_epoch_is_scored(config, whole, tmp_path):
    folder, result = whole()
    shutil.copytree(folder, tmp_path / "run")
    for name in ("result.json", "model.keras"):
        (tmp_path / "run" / name).unlink()
    again = train_and_evaluate(config, tmp_path / "run", report=(said := []).append)
    assert said == ["resumed after epoch 4: 0 of 4 epochs, 10 steps each"]
    assert again == result
    models = [
        keras.models.load_model(f / "model.keras") for f in (folder, tmp_path / "run")
    ]
    for one, other in zip(*(m.optimizer.variables for m in models), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_full_disk_is_told_before_a_file_is_begun(config, tmp_path, monkeypatch):
    """HDF5 would end the process with a segmentation fault."""
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(tfamp.RunError, match="disk is full.*0.0 MiB free.*same comm"):
        train_and_evaluate(config, tmp_path)
    assert not list(tmp_path.rglob("*.h5"))


# A training script that sends itself a signal before some step.
KILLED = """
import os, runpy, signal, sys
import keras
import tensorflow as tf

step, name, devices, script = int(sys.argv[1]), *sys.argv[2:5]
cpu = tf.config.list_physical_devices("CPU")[0]
logical = [tf.config.LogicalDeviceConfiguration()] * int(devices)
tf.config.set_logical_device_configuration(cpu, logical)
fit = keras.Model.fit

class Stop(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == step:
            os.kill(os.getpid(), getattr(signal, name))

def with_stop(self, *given, callbacks=(), **more):
    return fit(self, *given, callbacks=[Stop(), *callbacks], **more)

keras.Model.fit = with_stop
sys.path.insert(0, os.path.dirname(script))
sys.argv = sys.argv[4:]
runpy.run_path(script, run_name="__main__")
"""
# Strategy -> logical devices of each process, processes.
PLACES = {"none": (1, 1), "mirrored": (2, 1), "multi_worker_mirrored": (1, 2)}


def run_digits(folder, strategy, step, name):
    """Runs the digits; returns how the last process, which is stopped, ended."""
    wrapper = folder.parent / "stopped.py"
    wrapper.write_text(KILLED)
    cpus, processes = PLACES[strategy]
    script = workers.TESTS.parent / "scripts/train_cnn.py"
    fields = {
        "epochs": 3,
        "batch_size": 16,
        "limit_examples": 200,
        "strategy": strategy,
        "precision.mode": "mixed_float16",
        "optimizer.accumulation_steps": 2,
        "data.augment": "crop_flip",
        "data.image_size": 8,
        "model.blocks": ((8,), (8,)),
        "model.dense": 8,
        "model.dropout": 0.3,
    }
    given = [f"--config.{field}={value}" for field, value in fields.items()]
    given += ["--job=train", f"--workdir={folder}"]
    cases = []
    for number, environ in enumerate(workers.cluster(processes)):
        at = step if number == processes - 1 else 0
        stop = [str(at), name, str(cpus), str(script)]
        argv = [str(wrapper), *stop, *given]
        cases.append({"argv": argv, "cwd": str(folder.parent), "environ": environ})
    return workers.run_together(cases, 300.0)[-1]


def trained_digits(folder):
    model = keras.models.load_model(folder / "model.keras")
    return losses(folder), [each.tolist() for each in model.get_weights()]


def check_kills(folder, count, strategies):
    draw, names = random.Random(7), ("SIGKILL", "SIGTERM", "SIGUSR1")
    whole = {}
    for strategy in strategies:
        assert not run_digits(folder / strategy, strategy, 0, "").returncode
        whole[strategy] = trained_digits(folder / strategy)
    for number in range(count):
        strategy = strategies[number % len(strategies)]
        given = folder / str(number), strategy
        name, step = names[number % 3], draw.randint(1, 33)
        done = run_digits(*given, step, name)
        expected = -signal.SIGKILL if name == "SIGKILL" else 143
        assert done.returncode == expected, (step, name, done.stderr)
        again = run_digits(*given, 0, "")
        assert not again.returncode, (step, name, again.stderr)
        assert trained_digits(given[0]) == whole[strategy], (step, name)


def test_killed_process_resumes(tmp_path):
    """At three steps of training on real digits, then the same command."""
    check_kills(tmp_path, 3, ["none"])


@pytest.mark.slow
def test_killed_replicas_and_workers_resume_at_20_steps(tmp_path):
    check_kills(tmp_path, 20, [*PLACES, "none"])


# ---- Time ----


@pytest.fixture
def clock(monkeypatch):
    """The callbacks' clock, moved by hand: a list of one number, in seconds."""
    now = [0.0]
    moved = types.SimpleNamespace(perf_counter=lambda: now[0])
    for module in (recorder, progress_lines):
        monkeypatch.setattr(module, "time", moved)
    return now


@pytest.fixture
def slow(clock, monkeypatch):
    """Has a step take a second, a validation five, and writing a file 1000."""

    def take(name, seconds, callback, original=None):
        def method(self, *args, **kwargs):
            clock[0] += seconds
            return original(self, *args, **kwargs) if original else None

        monkeypatch.setattr(callback, name, method, raising=False)

    take("on_train_batch_begin", 1, each_epoch.EpochSeeds)
    take("on_test_begin", 5, each_epoch.ReplicaStatistics)
    for callback in (best_weights.BestWeights, backup.BackupAndRestore):
        take("on_epoch_end", 1000, callback, callback.on_epoch_end)


def test_clock_of_a_run_counts_training_and_validation_alone(tmp_path, slow):
    train_and_evaluate(make_config(epochs=2), tmp_path)
    first, second = epochs_of(tmp_path)
    assert (first["seconds"], first["first_step_seconds"]) == (15.0, 1.0)
    assert second["seconds"] == 30.0 and "first_step_seconds" not in second
    assert second["steps_per_second"] == 1.0


def test_output_to_a_file_has_a_line_every_10_seconds(clock):
    said = []
    lines = progress_lines.ProgressLines(said.append, steps_per_epoch=30, epochs=4)
    lines.set_model(points.build_network())
    lines.on_epoch_begin(1)
    for batch in range(30):
        clock[0] += 50.0 if batch == 0 else 2.0  # The first step traces.
        lines.on_train_batch_end(batch, {"loss": 0.5})
    assert len(said) == 6
    assert said[0] == "step 32 of 120: loss 0.5, 0.5 steps/s, 2.9 min left"
    lines.on_test_begin()
    for batch in range(8):
        clock[0] += 2.0
        lines.on_test_batch_end(batch)
    assert said[6:] == ["evaluation: batch 5"]


# ---- Folders and settings ----


def test_folder_of_another_run_is_refused_with_the_difference(whole):
    for changes, words in (
        ({"batch_size": 5}, "batch_size: 8 -> 5"),
        # Other data, for all one knows.
        ({"data_dir": "elsewhere"}, "data_dir: '' -> 'elsewhere'"),
    ):
        with pytest.raises(tfamp.RunError, match=words):
            train_and_evaluate(make_config(**changes), whole()[0])


WRONG = {
    "config.epochs must be": {"epochs": 0},
    "'chess'. Expected 'module:function'": {"task": "chess"},
    "lamb": {"optimizer.name": "lamb"},
    "Unknown precision mode": {"precision.mode": "x"},
    "'x'": {"precision.overrides": (("dense", "x"),)},
    "'nothing'.*Known paths": {"precision.overrides": (("nothing", "float32"),)},
}


def test_rejected_settings_do_not_block_the_corrected_command(tmp_path):
    config = make_config("mixed_bfloat16", epochs=1)
    before = policy.read()
    for message, changes in WRONG.items():
        wrong = config.copy_and_resolve_references()
        wrong.update_from_flattened_dict(changes)
        with pytest.raises((ValueError, tfamp.OverrideError), match=message):
            train_and_evaluate(wrong, tmp_path)
        assert policy.read() == before and tfamp.status().requested is None
    assert train_and_evaluate(config, tmp_path).mode == "mixed_bfloat16"


# ---- Precision ----


def test_finite_guard_counts_without_scaling(whole, tmp_path):
    config = make_config(precision__finite_guard=True)
    guarded = train_and_evaluate(config, tmp_path / "guarded")
    assert (guarded.loss_scale, guarded.skipped_steps) == (1.0, 0)
    folder, plain = whole()
    assert plain.loss_scale is None
    found, wanted = losses(tmp_path / "guarded"), losses(folder)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    config = make_config("mixed_float16", precision__finite_guard=True, epochs=1)
    scaled = train_and_evaluate(config, tmp_path / "scaled")
    assert scaled.loss_scale >= 2.0**14  # As without the guard.


@pytest.mark.filterwarnings("ignore:.*training steps of this epoch were skipped")
def test_run_whose_loss_scale_is_exhausted_stops_with_the_reason(tmp_path):
    # Overflows in every step.
    fields = {"dynamic": False, "initial_scale": 2.0**60, "max_scale": 2.0**60}
    fields = {f"precision__loss_scale__{k}": v for k, v in fields.items()}
    config = make_config("mixed_float16", epochs=12, **fields)
    says = pytest.warns(UserWarning, match="lower its `initial_scale`")
    with says, pytest.raises(tfamp.LossScaleExhaustedError, match="dense"):
        train_and_evaluate(config, tmp_path)


def test_a_loss_that_is_no_number_is_counted_and_the_mean_is_of_the_others(tmp_path):
    def train(folder, **settings):
        config = make_config("mixed_float16", **settings)
        return train_and_evaluate(config, folder, points.create_poisoned(config))

    result = train(tmp_path / "whole")
    epochs = epochs_of(tmp_path / "whole")
    skipped = np.diff([0, *(row["skipped_steps"] for row in epochs)])
    lost = [row["nonfinite_losses"] for row in epochs]
    assert lost == skipped.tolist() and set(lost) == {1}
    assert result.nonfinite_losses == 1
    steps = np.array(losses(tmp_path / "whole"), "float64").reshape(4, 10)
    assert np.isnan(steps).sum(1).tolist() == lost
    found = [row["loss"] for row in epochs]
    np.testing.assert_allclose(found, np.nanmean(steps, 1), rtol=1e-5)
    assert None not in [row["val_loss"] for row in epochs]
    # A stop after it, in the validation, and several steps in a call.
    original = each_epoch.ReplicaStatistics.on_test_begin

    def on_test_begin(self, logs=None):
        original(self, logs)
        os.kill(os.getpid(), signal.SIGTERM)

    patched = mock.patch.object(
        each_epoch.ReplicaStatistics, "on_test_begin", on_test_begin
    )
    with patched, pytest.raises(SystemExit):
        train(tmp_path / "stopped", steps_per_execution=5)
    train(tmp_path / "stopped", steps_per_execution=5)
    names = "loss", "nonfinite_losses", "accuracy", "val_loss", "skipped_steps"
    for found, row in zip(epochs_of(tmp_path / "stopped"), epochs, strict=True):
        assert [found[name] for name in names] == [row[name] for name in names]


needs_native_bfloat16 = pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast
    or bool(tf.config.list_physical_devices("GPU")),
    reason="the bfloat16 rewrite needs a CPU with native bfloat16",
)


@needs_native_bfloat16
@pytest.mark.parametrize("mode", ["auto", "mixed_bfloat16"])
def test_graph_rewrite_reports_what_it_converted(tmp_path, mode):
    config = make_config(mode, precision__graph_rewrite=True, epochs=1)
    options = tf.config.optimizer.get_experimental_options()
    result = train_and_evaluate(config, tmp_path)
    assert result.mode == "mixed_bfloat16"
    assert "effective: bfloat16" in result.graph_rewrite
    assert tf.config.optimizer.get_experimental_options() == options
    assert keras.models.load_model(tmp_path / "model.keras").dtype == "float32"


def test_overrides_and_kernel_switches_are_of_the_run_and_recorded(tmp_path):
    fields = {"precision__overrides": (("sequential.*/dense.*", "float32"),)}
    fields |= {"precision__cudnn_autotune": False, "epochs": 1}
    config = make_config("mixed_bfloat16", **fields)
    before = os.environ.get("TF_CUDNN_USE_AUTOTUNE")
    train_and_evaluate(config, tmp_path)
    assert os.environ.get("TF_CUDNN_USE_AUTOTUNE") == before
    rows = json.loads((tmp_path / "environment.json").read_text())["kernel_switches"]
    (row,) = [row for row in rows if row["name"] == "TF_CUDNN_USE_AUTOTUNE"]
    assert row["requested"] == "0"
    model = keras.models.load_model(tmp_path / "model.keras")
    dtypes = [layer.compute_dtype for layer in model.layers]
    assert dtypes == ["float32", "bfloat16", "float32"]


def test_a_stopped_run_is_scored_as_unfinished(config, tmp_path):
    with points.stopped(points.interrupt, 2), pytest.raises(KeyboardInterrupt):
        train_and_evaluate(config, tmp_path)
    found = trained.evaluate(config, tmp_path)["weights"]
    assert found.startswith("best.weights.h5; the run is unfinished, with 2 of 4 epoch")
    train_and_evaluate(config, tmp_path)
    assert trained.evaluate(config, tmp_path)["weights"] == "best.weights.h5"
