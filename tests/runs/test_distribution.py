"""Runs over several replicas, in fresh processes: on two CPU devices, and two workers.

The functions before the fixtures run in the workers.
"""

import contextlib
import io
import json
import os
import pathlib
import runpy
import signal
import sys
from unittest import mock

import keras
import numpy as np
import points
import pytest
import tensorflow as tf
import workers

import tfamp
from tfamp.keras_patches import replicas
from tfamp.runs import compare, distribution, run_files
from tfamp.runs.callbacks import each_epoch
from tfamp.training import train_and_evaluate

MODES = ("float32", "mixed_float16")
# Largest difference between the losses, all below 1, of one replica and of two.
TOLERANCE = {
    "float32": 64 * tfamp.float_format("float32").epsilon,
    "mixed_float16": tfamp.float_format("float16").epsilon,
}
# Of a comparison, as a file in `configs/` has it.
CONFIG = """
import test_distribution

def get_config():
    return test_distribution.make_config(
        "multi_worker_mirrored", "mixed_float16", bytes_per_pack=64
    )
"""


def make_config(strategy, mode="float32", **settings):
    """Returns a run on a hundred points; an evaluation ends with one example alone."""
    # Overflows by far, and not at first, where a scale is sought that just fits: what
    # just fits depends on the replicas.
    scaling = {
        **{"initial_scale": 2.0**14, "max_scale": 2.0**34, "growth_interval": 3},
        **{"growth_factor": 2.0**10, "backoff_factor": 2.0**-10},
    }
    given = {
        **{"strategy": strategy, "precision__mode": mode},
        **{"epochs": 3, "eval_batch_size": 19},
        "optimizer__clip_global_norm": 0.1,  # Clips nearly every gradient.
        "optimizer__accumulation_steps": 3,  # Of ten batches an epoch.
        **{f"precision__loss_scale__{name}": x for name, x in scaling.items()},
    }
    return points.make_config(**{**given, **settings})


def train_by_batches(strategy, folder):
    config = make_config(strategy, optimizer__accumulation_steps=1)
    train_and_evaluate(config, f"{folder}/batches/seed0")


def train_interrupted(config, folder):
    with contextlib.suppress(KeyboardInterrupt), points.stopped(points.interrupt, 2):
        train_and_evaluate(config, folder)
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
    averaged = each_epoch.ReplicaStatistics(), each_epoch.EpochSeeds(10)
    model.fit(data, validation_data=data, verbose=0, callbacks=[*averaged])

    def local(variable):
        values = strategy.experimental_local_results(variable.value)
        return [x.numpy().tolist() for x in values]

    validated = local(normalization.moving_mean)
    model.fit(data, verbose=0, callbacks=[each_epoch.ReplicaStatistics()])
    (seed,) = [v for v in model.variables if v.name == "seed_generator_state"]
    states = {"moving": normalization.moving_mean, "seed": seed}
    found = {name: local(variable) for name, variable in states.items()}
    return {**found, "validated": validated}


def run_in_one_process(folder):
    whole = make_config("mirrored", "mixed_float16")
    train_and_evaluate(whole, f"{folder}/mixed_float16/seed0")
    train_interrupted(make_config("mirrored"), f"{folder}/float32/seed0")
    train_by_batches("mirrored", folder)
    return {
        "replicas": fit_replicas(),
        "poisoned": train_poisoned("mirrored", f"{folder}/poisoned"),
        "errors": [
            find_error(distribution.create, make_config("mirrored", batch_size=9)),
            find_error(distribution.create, make_config("mirrored", jit_compile=True)),
        ],
    }


def train_poisoned(strategy, folder):
    """Returns losses that are no number, and the mean of the others."""
    fields = {"strategy": strategy, "precision__mode": "mixed_float16"}
    config = points.make_config(epochs=1, **fields)
    result = train_and_evaluate(config, folder, points.create_poisoned(config))
    return result.nonfinite_losses, result.final_loss


def find_error(function, *arguments):
    try:
        function(*arguments)
    except (ValueError, tfamp.RunError) as e:
        return str(e)


def run_script(folder, *arguments):
    """Runs the training script as a user does; returns (exit code, standard error)."""
    script = workers.TESTS.parent / "scripts/train_cnn.py"
    given = [f"--config={folder}_config.py", f"--workdir={folder}", *arguments]
    sys.argv = [str(script), *given]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as e:
            return e.code, said.getvalue()


def run_killed_script(folder):
    """The chief deletes another run, then kills itself before an epoch's backup."""
    with points.stopped(lambda: worker_index() or os.kill(os.getpid(), 9), 2):
        return run_script(folder, "--overwrite")


def run_stopped_script(folder):
    """A worker that is not the chief gets SIGTERM in the fourth step, under SLURM."""
    index = worker_index()
    workers_of = json.loads(os.environ.pop("TF_CONFIG"))["cluster"]["worker"]
    os.environ |= {
        "SLURM_JOB_ID": workers_of[0].rpartition(":")[2],  # Gives the ports.
        "SLURM_PROCID": str(index),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURMD_NODENAME": "localhost",
    }

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and index:
            os.kill(os.getpid(), signal.SIGTERM)

    kind = each_epoch.EpochSeeds
    with mock.patch.object(kind, "on_train_batch_begin", on_train_batch_begin):
        return run_script(folder)


def worker_index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def run_in_cluster(folder):
    """Goes on with the killed script first: a cluster is joined at program start."""
    script = run_script(folder)
    config = make_config("multi_worker_mirrored", "mixed_float16", bytes_per_pack=64)
    return {
        "script": script,
        "comparison": compare.compare(config, folder).to_text(),
        "reductions": count_reductions(distribution.create(config)),
        "error": find_error(check_other_folders, config),
    }


def count_reductions(strategy):
    """How many collectives sum four gradients of 400 bytes each."""

    def step():
        return replicas.sum_gradients([tf.ones([100]) for _ in range(4)], [None] * 4)

    traced = tf.function(lambda: strategy.run(step), autograph=False)
    operations = traced.get_concrete_function().graph.get_operations()
    return sum(each.type.startswith("CollectiveReduce") for each in operations)


def check_other_folders(config):
    strategy = distribution.create(config)
    distribution.check_same(strategy, "finished epochs", 3 + worker_index())


# ---- From here on in the test process ----


@pytest.fixture(scope="module")
def one_replica(tmp_path_factory):
    folder = tmp_path_factory.mktemp("none")
    for mode in MODES:
        train_and_evaluate(make_config("none", mode), folder / mode / "seed0")
    train_by_batches("none", folder)
    return folder


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirrored")
    return folder, workers.run(run_in_one_process, (folder,), workers=1, cpus=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    pathlib.Path(f"{folder}_config.py").write_text(CONFIG)
    for name in (".tfamp-comparison", "of an earlier run"):
        (folder / name).touch()
    _, (code, said) = workers.run(run_killed_script, (folder,), killed=0)
    assert not (folder / "of an earlier run").exists()
    assert code == 1 and "error: Another worker of the cluster has ended" in said
    assert not list(folder.rglob("result.json"))
    stopped = workers.run(run_stopped_script, (folder,))
    assert [code for code, _ in stopped] == [143, 143], stopped
    environment = read_json(folder / "float32/seed0/environment.json")
    assert environment["distribution"]["cluster"] == "SlurmClusterResolver"
    _, said = stopped[0]
    assert "resumed after epoch 1: 2 of 3 epochs" in said
    assert "SIGTERM: saved after step 4 of epoch 2" in said
    return folder, workers.run(run_in_cluster, (folder,))


@pytest.fixture(params=["mirrored", "cluster"])
def several(request):
    return request.getfixturevalue(request.param)[0]


def losses(folder):
    """All losses of a run: of steps, of epochs and of validation; NaN for null."""
    steps = run_files.read_metrics(folder, "step")
    epochs = run_files.read_metrics(folder, "epoch")
    found = [row["loss"] for row in steps]
    found += [row[key] for row in epochs for key in ("loss", "val_loss")]
    return np.array(found, "float64")


def read_json(path):
    return json.loads(path.read_text())


def test_updates_by_each_batch_are_those_of_one_replica(mirrored, one_replica):
    found, expected = (
        losses(root / "batches/seed0") for root in (mirrored[0], one_replica)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE["float32"])
    accumulated = losses(one_replica / "float32/seed0")
    assert abs(expected - accumulated).max() > 1e-3


@pytest.mark.issue("tensorflow#55592", "keras#19308")
@pytest.mark.parametrize("mode", MODES)
def test_run_of_two_replicas_is_that_of_one(mode, several, one_replica):
    tolerance = {"rtol": 0, "atol": TOLERANCE[mode]}
    found, expected = (root / mode / "seed0" for root in (several, one_replica))
    assert len(losses(expected)) == 30 + 3 * 2
    np.testing.assert_allclose(losses(found), losses(expected), **tolerance)
    results = [read_json(folder / "result.json") for folder in (found, expected)]
    assert results[0]["score"] == pytest.approx(results[1]["score"])
    np.testing.assert_allclose(*[r["test_loss"] for r in results], **tolerance)
    scales, same = (
        [row.get("loss_scale") for row in run_files.read_metrics(folder, "step")]
        for folder in (found, expected)
    )
    assert scales == same
    if mode == "mixed_float16":
        assert sorted(set(scales)) == [2.0**14, 2.0**24]
    for folder, count in ((found, 2), (expected, 1)):
        environment = read_json(folder / "environment.json")
        assert environment["distribution"]["replicas"] == count
    names = [{path.name for path in folder.iterdir()} for folder in (found, expected)]
    assert names[0] - {"backup-worker1"} == names[1]
    if mode == "mixed_float16":  # The other was resumed.
        assert len(list((found / "tensorboard/train").iterdir())) == 1  # One writer.


def test_model_of_several_replicas_loads_without_a_strategy(several):
    folder = several / "float32/seed0"
    model = keras.models.load_model(folder / "model.keras")
    test = points.create(points.make_config()).test.batch(20)
    loss = model.evaluate(test, verbose=0, return_dict=True)["loss"]
    expected = read_json(folder / "result.json")["test_loss"]
    np.testing.assert_allclose(loss, expected, rtol=0, atol=TOLERANCE["float32"])


def test_replicas_average_statistics_and_draw_their_own_numbers(mirrored):
    state = mirrored[1][0]["replicas"]
    for name in ("validated", "moving"):  # The second without a validation.
        first, second = state[name]
        assert first == second and any(first)
    (seed, first), (same, second) = state["seed"]
    assert seed == same
    # Ten steps each, from 0 and from 10 on; and ten more.
    assert (first, second) == (20, 30)


def test_a_loss_of_no_number_on_one_replica_is_left_out_on_all(mirrored, tmp_path):
    lost, mean = mirrored[1][0]["poisoned"]
    assert lost == 1
    assert (lost, pytest.approx(mean, abs=TOLERANCE["mixed_float16"])) == (
        train_poisoned("none", tmp_path)
    )


def test_settings_that_replicas_cannot_bear_are_refused(mirrored):
    batch, jit = mirrored[1][0]["errors"]
    assert "batch_size=9, 2 replicas" in batch
    assert "config.jit_compile=True, 2 replicas" in jit


def test_all_workers_return_the_comparison_and_the_chief_exports(cluster):
    folder, results = cluster
    first, second = (result["comparison"] for result in results)
    assert "mixed_float16 minus float32" in first
    assert first == second
    assert (folder / "export/saved_model.pb").exists()
    environment = read_json(folder / "float32/seed0/environment.json")
    expected = {"strategy": "multi_worker_mirrored", "replicas": 2, "workers": 2}
    expected["cluster"] = "TFConfigClusterResolver"
    expected["bytes_per_pack"] = {"requested": 64, "effective": 64}
    assert environment["distribution"] == expected
    assert [result["reductions"] for result in results] == [4, 4]
    for result in results:  # Of workers with other folders.
        assert "finished epochs [3, 4], by replica" in result["error"]


def test_killed_and_stopped_workers_go_on_where_all_were(cluster):
    """With the losses of one replica, see above."""
    (code, said), (same, _) = (result["script"] for result in cluster[1])
    assert code is None and same is None
    assert "run 1 of 2" in said
    assert "resumed after step 4 of epoch 2: 2 of 3 epochs" in said


def cluster_of(job, index=0):
    names = ["localhost:1", "localhost:2"]
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {job: names}, "task": task})


def test_slurm_s_order_of_nodes_that_tensorflow_changes_is_told(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in (
        ("PROCID", "0"),
        ("STEP_NUM_TASKS", "2"),
        ("STEP_NODELIST", "n[9-10]"),
        ("STEP_TASKS_PER_NODE", "1(x2)"),
    ):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n9")
    with pytest.raises(tfamp.RunError, match="this task runs on n9, and would be n10"):
        distribution.create(make_config("multi_worker_mirrored"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "TF_CONFIG, with") for text in ("", "{}", "nonsense", "[]")),
        (cluster_of("ps"), "TF_CONFIG, with"),
        (cluster_of("worker", 7), "TF_CONFIG, with.*7"),
        (cluster_of("worker"), "start of the program"),  # The tests have started it.
    ],
)
def test_what_is_no_cluster_to_join_is_told(text, message, monkeypatch):
    tf.constant(0)
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(tfamp.RunError, match=message):
        distribution.create(make_config("multi_worker_mirrored"))
