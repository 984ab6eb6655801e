"""What the process of a cell measures, in this process: real steps of tiny models."""

import json

import keras
import numpy as np
import pytest

from tfamp.benchmark import (
    cell_figures,
    plan,
    records,
    source,
    suite_config,
    time_to_accuracy,
    worker,
)
from tfamp.training import bert_config, run_files
from tfamp.training.tasks import images

STEPS, WARMUP = 3, 2


def make_task(synthetic=False, **model):
    config = images.get_config()
    config.name, config.data.name = "tiny", "digits"
    config.data.image_size, config.batch_size, config.limit_examples = 8, 8, 40
    config.model.update(config.tiny.model)
    config.model.update(model)
    task = suite_config.get_task(config)
    task.synthetic = synthetic
    return task


def measure(task, mode="float32", framework="tfamp", batch_size=8, **asked):
    request = {
        "job": "cell",
        "task": json.loads(json.dumps(run_files.plain_config(task))),
        "cell": records.Cell("tiny", framework, mode, batch_size, False)._asdict(),
        **{"seed": 1, "steps": STEPS, "warmup": WARMUP},
        **{"profile_steps": 0, "count": False},
    }
    return json.loads(json.dumps(worker.serve(request | asked)))


def test_figures_of_a_cell_on_the_tasks_own_data():
    found = measure(make_task(), count=True, profile_steps=1)
    assert len(found["seconds"]) == STEPS and len(found["losses"]) == WARMUP + STEPS
    assert found["metric_name"] == "accuracy" and 0 <= found["metric"] <= 1
    assert found["first_step_seconds"] > max(found["seconds"])
    assert found["operations"]["flops"] > 0 and found["pipeline_seconds"] > 0
    assert 0 < found["kernels"]["matrix_share"] < 1
    assert found["host_bytes"] > 0 and found["parameters"] > 0
    assert (found["unit"], found["loss_scales"]) == ("images", [])
    assert found["tensor_float_32"] is False and found["versions"].keys() == {
        *("tensorflow", "keras")
    }


def test_plain_keras_computes_the_same_in_float32_and_scales_by_itself():
    task = make_task()
    assert measure(task)["losses"] == measure(task, framework="keras")["losses"]
    stock = measure(task, "mixed_float16", "keras")
    ours = measure(task, "mixed_float16")
    for found in (stock, ours):
        assert found["loss_scale"] == 2.0**15 and found["skipped_steps"] == 0
        assert found["loss_scales"] == [2.0**15] * (WARMUP + STEPS)
    assert "its own loss scaling" in stock["note"] and "asked for" in ours["note"]


def test_skipped_steps_of_stock_loss_scaling_are_those_without_an_update():
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    stock.build(model.trainable_variables)
    stock.inner_optimizer.iterations.assign(3)
    assert cell_figures.skipped_steps(stock, 5) == 2


def test_random_batches_have_no_metric_and_no_pipeline():
    found = measure(make_task(synthetic=True), "mixed_bfloat16")
    assert (found["metric_name"], found["metric"]) == ("", None)
    assert found["pipeline_seconds"] is None and found["kernels"] is None


def test_batch_larger_than_the_data_goes_through_them_again():
    found = measure(make_task(), batch_size=100)
    assert len(found["losses"]) == WARMUP + STEPS


def test_seed_decides_weights_and_data():
    task = make_task()
    first, again, other = (measure(task, seed=seed) for seed in (1, 1, 2))
    assert first["losses"] == again["losses"] != other["losses"]


def test_calibration_comes_back_as_plain_data():
    found = worker.serve({"job": "calibration", "seconds": 0.02})["calibration"]
    calibrated = records.Calibration(**json.loads(json.dumps(found)))
    assert calibrated.peaks["float32"] > 0 and calibrated.bandwidth > 0


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_exchange_writes_what_a_twin_needs_for_each_seed(kind, tmp_path):
    if kind == "images":
        task = make_task()
    else:
        config = bert_config.get_bert_config()
        config.model.update(config.tiny.model)
        config.data.sequence_length = 8
        task = suite_config.get_task(config)
        task.synthetic = True
    files = {str(seed): str(tmp_path / f"{seed}.npz") for seed in (0, 1)}
    worker.serve(
        {
            **{"job": "exchange", "task": run_files.plain_config(task)},
            **{"batch_size": 4, "steps": 2, "files": files},
        }
    )
    found = [json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (0, 1)]
    assert [each["seed"] for each in found] == [0, 1]
    assert (tmp_path / "0.npz").read_bytes() != (tmp_path / "1.npz").read_bytes()


def test_run_up_to_an_accuracy_leaves_what_is_read_of_it(tmp_path):
    config = make_task().config
    config.epochs, config.validation_fraction = 2, 0.3
    ((mode, seed), one), *_ = time_to_accuracy.plan(
        config, "tiny", 1, ("float32",)
    ).items()
    plain = run_files.plain_config(one)
    worker.serve({"job": "accuracy", "config": plain, "folder": str(tmp_path)})
    found = time_to_accuracy.read_run(tmp_path, "tiny", mode, 0.001)
    assert len(found.points) == 2 and found.points[0][0] < found.points[1][0]
    assert (found.seed, found.reached_epoch) == (seed, 1) or not found.points[0][1]


def test_configuration_survives_the_way_to_the_process():
    task = make_task(blocks=((4,), (8, 8)))
    cell = records.Cell("tiny", "tfamp", "float32", 8, False)
    sent = worker._config(json.loads(json.dumps(run_files.plain_config(task))))
    assert plan.config_of(sent, cell, 3).model.blocks == ((4,), (8, 8))


def test_twin_is_given_the_batches_and_the_weights_of_the_cell(tmp_path):
    """On real data, whose shuffling depends on the process' seed, too."""
    task = make_task()
    cell = records.Cell("tiny", "tfamp", "float32", 8, False)
    for seed in (0, 3):
        config = plan.config_of(task, cell, seed)
        keras.utils.set_random_seed(99)  # Whatever the process did before.
        found, _ = source.create(config, False, 4)
        drawn = list(found.batches.take(4).as_numpy_iterator())
        keras.utils.set_random_seed(77)
        file = tmp_path / f"{seed}.npz"
        worker.serve(
            {
                **{"job": "exchange", "task": run_files.plain_config(task)},
                **{"batch_size": 8, "steps": 4, "files": {str(seed): str(file)}},
            }
        )
        with np.load(file) as written:
            for number, (images, labels) in enumerate(drawn):
                assert (written[f"batches/{number}/image"] == images).all()
                assert (written[f"batches/{number}/labels"] == labels).all()
