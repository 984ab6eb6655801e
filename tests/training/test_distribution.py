"""Runs over several replicas, in fresh processes: on two CPU devices, and two workers.

The functions before the fixtures run in the workers.
"""

import json
import os
import pathlib
import runpy
import signal
import sys

import helpers
import keras
import numpy as np
import points
import pytest
import tensorflow as tf
import workers

import tfamp
from tfamp.training import (
    callbacks,
    compare,
    distribution,
    run_files,
    train_and_evaluate,
)

ROOT = pathlib.Path(__file__).parents[2]
MODES = ("float32", "mixed_float16")
# Largest difference between the losses, all below 1, of one replica and of two.
TOLERANCE = {
    "float32": 64 * tfamp.float_format("float32").epsilon,
    "mixed_float16": tfamp.float_format("float16").epsilon,
}
KILLED_AFTER = 1
LIMIT = 300.0  # Seconds for a process; they take a tenth of it on an idle machine.
SCRIPT = [
    *("--tiny", "--job=train", "--config.epochs=2", "--config.model.dropout=0.0"),
    *("--config.limit_examples=200", "--config.precision.mode=float32"),
]


def make_config(strategy, mode="float32", **settings):
    """Returns a run on a hundred points; an evaluation ends with one example alone."""
    config = points.make_config(strategy=strategy, precision__mode=mode, **settings)
    config.epochs, config.eval_batch_size = 3, 19
    config.optimizer.clip_global_norm = 0.1  # Clips nearly every gradient.
    # Overflows twice, and by far: what overflows just so depends on the replicas.
    config.precision.loss_scale.initial_scale = 2.0**34
    config.precision.loss_scale.max_scale = 2.0**34
    config.precision.loss_scale.backoff_factor = 2.0**-10
    config.precision.loss_scale.growth_interval = 20
    return config


def train_interrupted(config, folder):
    """Stops after the metrics and before the backup of an epoch; goes on."""
    original = callbacks.AtomicBackup.on_epoch_end

    def interrupt(self, epoch, logs=None):
        if epoch == KILLED_AFTER:
            raise KeyboardInterrupt
        original(self, epoch, logs)

    callbacks.AtomicBackup.on_epoch_end = interrupt
    try:
        train_and_evaluate(config, folder)
    except KeyboardInterrupt:
        callbacks.AtomicBackup.on_epoch_end = original
    train_and_evaluate(config, folder)


def fit_replicas():
    """Returns the state of normalization and dropout on each of two replicas."""
    strategy = distribution.create(make_config("mirrored"))
    assert strategy is not None
    with strategy.scope():
        normalization = keras.layers.BatchNormalization()
        model = points.build_network(normalization, keras.layers.Dropout(0.5))
        model.compile("adam", "sparse_categorical_crossentropy")
    data = points.create(points.make_config()).train.batch(8)
    averaged = callbacks.ReplicaStatistics(), callbacks.EpochSeeds(10)
    model.fit(data, validation_data=data, verbose=0, callbacks=[*averaged])
    (seed,) = [v for v in model.variables if v.name == "seed_generator_state"]
    states = {"moving": normalization.moving_mean, "seed": seed}
    return {
        name: [x.numpy().tolist() for x in strategy.experimental_local_results(v.value)]
        for name, v in states.items()
    }


def run_in_one_process(folder):
    whole = make_config("mirrored", "mixed_float16")
    train_and_evaluate(whole, f"{folder}/mixed_float16/seed0")
    train_interrupted(make_config("mirrored"), f"{folder}/float32/seed0")
    return {
        "replicas": fit_replicas(),
        "errors": [
            find_error(distribution.create, make_config("mirrored", batch_size=9)),
            find_error(distribution.create, make_config("mirrored", jit_compile=True)),
        ],
    }


def find_error(function, *arguments):
    try:
        function(*arguments)
    except (ValueError, tfamp.RunError) as e:
        return str(e)


def run_script(folder, *arguments):
    """Runs the training script as a user does; returns its exit code, None for 0."""
    sys.argv = ["train_cnn.py", *SCRIPT, f"--workdir={folder}", *arguments]
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        runpy.run_path(str(ROOT / "scripts/train_cnn.py"), run_name="__main__")
    except SystemExit as e:
        return e.code


def run_killed_script(folder):
    """Kills the chief with SIGKILL before the backup of an epoch."""
    original = callbacks.AtomicBackup.on_epoch_end

    def kill(self, epoch, logs=None):
        if epoch == KILLED_AFTER and worker_index() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, epoch, logs)

    callbacks.AtomicBackup.on_epoch_end = kill
    return run_script(folder, "--config.strategy=multi_worker_mirrored", "--overwrite")


def worker_index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def run_in_cluster(folder):
    """Goes on with the killed script first: a cluster is joined at program start."""
    strategy = "multi_worker_mirrored"
    config = make_config(strategy, "mixed_float16")
    return {
        "code": run_script(folder + "_script", f"--config.strategy={strategy}"),
        "comparison": compare.compare(config, folder).to_text(),
        "error": find_error(check_other_folders, config),
    }


def check_other_folders(config):
    strategy = distribution.create(config)
    distribution.check_same(strategy, "finished epochs", 3 + worker_index())


# ---- From here on in the test process ----


@pytest.fixture(scope="module")
def one_replica(tmp_path_factory):
    folder = tmp_path_factory.mktemp("none")
    for mode in MODES:
        train_and_evaluate(make_config("none", mode), folder / mode / "seed0")
    return folder


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirrored")
    return folder, workers.run(
        run_in_one_process, (folder,), workers=1, cpus=2, timeout=LIMIT
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with workers.Group(run_killed_script, (f"{folder}_script",)) as group:
        with pytest.raises(workers.WorkersError):
            group.wait(LIMIT)
        codes = [process.returncode for process in group.processes]
        output = group.outputs()
    assert codes == [-signal.SIGKILL, 0], output
    assert "error: Another worker of the cluster has ended" in output, output
    assert not pathlib.Path(f"{folder}_script/result.json").exists()
    return folder, workers.run(run_in_cluster, (folder,), timeout=LIMIT)


@pytest.fixture(params=["mirrored", "cluster"])
def several(request):
    return request.getfixturevalue(request.param)


def losses(folder):
    """All losses of a run: of steps, of epochs and of validation; NaN for null."""
    steps = run_files.read_metrics(folder, "step")
    epochs = run_files.read_metrics(folder, "epoch")
    found = [row["loss"] for row in steps]
    found += [row[key] for row in epochs for key in ("loss", "val_loss")]
    return np.array(found, "float64")


def read_json(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_two_replicas_are_those_of_one(mode, several, one_replica):
    folder = f"{mode}/seed0"
    tolerance = {"rtol": 0, "atol": TOLERANCE[mode]}
    expected = losses(one_replica / folder)
    assert len(expected) == 30 + 3 * 2
    np.testing.assert_allclose(losses(several[0] / folder), expected, **tolerance)
    actual, expected = (
        read_json(root / folder / "result.json") for root in (several[0], one_replica)
    )
    assert actual["score"] == pytest.approx(expected["score"])
    np.testing.assert_allclose(actual["test_loss"], expected["test_loss"], **tolerance)


def test_loss_scale_of_two_replicas_moves_as_that_of_one(several, one_replica):
    actual, expected = (
        [row["loss_scale"] for row in run_files.read_metrics(root / folder, "step")]
        for folder in ["mixed_float16/seed0"]
        for root in (several[0], one_replica)
    )
    assert sorted(set(expected)) == [2.0**14, 2.0**15, 2.0**24]
    assert actual == expected


def test_environment_tells_how_many_replicas_there_were(several, one_replica):
    for root, count in ((one_replica, 1), (several[0], 2)):
        environment = read_json(root / "float32/seed0/environment.json")
        assert environment["distribution"]["replicas"] == count


def test_run_leaves_the_same_files_as_one_replica(several, one_replica):
    names = [
        sorted(path.name for path in (root / "mixed_float16/seed0").iterdir())
        for root in (several[0], one_replica)
    ]
    assert names[0] == names[1]
    events = several[0] / "mixed_float16/seed0/tensorboard/train"
    assert len(list(events.iterdir())) == 1  # Of one writer.


def test_model_of_several_replicas_loads_without_a_strategy(several):
    folder = several[0] / "float32/seed0"
    model = keras.models.load_model(folder / "model.keras")
    test = points.create(points.make_config()).test.batch(20)
    loss = model.evaluate(test, verbose=0, return_dict=True)["loss"]
    expected = read_json(folder / "result.json")["test_loss"]
    np.testing.assert_allclose(loss, expected, rtol=0, atol=TOLERANCE["float32"])


def test_all_workers_return_the_comparison_and_the_chief_exports(cluster):
    first, second = (result["comparison"] for result in cluster[1])
    assert "mixed_float16 minus float32" in first
    assert first == second
    assert (cluster[0] / "export/saved_model.pb").exists()


def test_replicas_average_statistics_and_draw_their_own_numbers(mirrored):
    state = mirrored[1][0]["replicas"]
    first, second = state["moving"]
    assert first == second and any(first)
    (seed, first), (same, second) = state["seed"]
    assert seed == same
    assert (first, second) == (10, 20)  # Ten steps each, from 0 and from 10 on.


def test_settings_that_replicas_cannot_bear_are_refused(mirrored):
    batch, jit = mirrored[1][0]["errors"]
    assert "batch_size=9, 2 replicas" in batch
    assert "config.jit_compile=True, 2 replicas" in jit


def test_killed_workers_go_on_with_the_losses_of_one_replica(cluster, tmp_path):
    folder, results = cluster
    assert [result["code"] for result in results] == [None, None]
    case = ROOT / "scripts/train_cnn.py", [*SCRIPT, "--workdir=script"], tmp_path
    (done,) = helpers.run_scripts([case])
    assert done.returncode == 0, done.stderr
    resumed = pathlib.Path(f"{folder}_script")
    actual, expected = losses(resumed), losses(tmp_path / "script")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE["float32"])


def test_workers_with_other_folders_are_refused(cluster):
    for result in cluster[1]:
        assert "finished epochs [3, 4], by replica" in result["error"]


def test_cluster_needs_its_environment_variable(monkeypatch):
    config = make_config("multi_worker_mirrored")
    for text in ("", "{}", "nonsense", '{"cluster": {"ps": ["localhost:1"]}}'):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(tfamp.RunError, match="TF_CONFIG"):
            distribution.create(config)


def test_index_out_of_range_is_told(monkeypatch):
    task = {"type": "worker", "index": 7}
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(tfamp.RunError, match="TF_CONFIG does not describe.*7"):
        distribution.create(make_config("multi_worker_mirrored"))


def test_cluster_is_joined_before_tensorflow_starts(monkeypatch):
    tf.constant(0)
    task = {"type": "worker", "index": 0}
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(tfamp.RunError, match="start of the program"):
        distribution.create(make_config("multi_worker_mirrored"))
