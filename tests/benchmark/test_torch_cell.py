"""The twin in PyTorch learns what Keras learns; its process keeps to the contract.

PyTorch may be in an environment of its own: TFAMP_TORCH_PYTHON names its interpreter.
"""

import functools
import itertools
import json
import os
import sys

import keras
import numpy as np
import pytest

from tfamp import formats
from tfamp.benchmark import exchange, records
from tfamp.precision import control
from tfamp.training import (
    benchmark_inputs,
    benchmark_process,
    bert_config,
    child_process,
    memory_limit,
    timed_steps,
)
from tfamp.training.tasks import images

PYTHON = os.environ.get("TFAMP_TORCH_PYTHON", sys.executable)
STEPS = 5
# Both sum in float32, in other orders: some epsilons of each loss (2 were seen), and
# more where Adam divides a small gradient by its own size.
TOLERANCE = 100 * formats.float_format("float32").epsilon
# Each takes over 3 s: PyTorch and transformers are imported in a process of their own.
pytestmark = pytest.mark.slow


@functools.cache
def reason_without_torch():
    _, reason = exchange.torch_versions(PYTHON)
    return reason and f"{PYTHON} has no PyTorch ({reason}); set TFAMP_TORCH_PYTHON"


@pytest.fixture(autouse=True)
def torch_interpreter():
    if reason := reason_without_torch():
        pytest.skip(reason)


def make_images(**model):
    config = images.get_config()
    config.data.name, config.data.image_size = "digits", 9  # Pooling drops a row.
    config.model.update({"blocks": ((8, 8), (16,)), "dense": 32, "dropout": 0.0})
    config.model.update(model)
    config.batch_size = 16
    return config


def make_texts(**model):
    config = bert_config.get_bert_config()
    config.model.update(config.tiny.model)
    # Few words: each occurs often, the first one, transformers' padding, too.
    config.model.update({"num_layers": 2, "dropout": 0.0, "vocabulary_size": 16})
    config.model.update(model)
    config.data.sequence_length, config.batch_size = 16, 8
    return config


def make_source(config):
    """Two batches by turns; an encoder with weights large enough for its GELU."""
    source = benchmark_inputs.create(config)

    def build_model():
        model = source.build_model()
        for variable in model.weights:
            if config.task == "text_classification" and "kernel" in variable.path:
                variable.assign(10 * variable)
        return model

    batches = source.batches.take(2).repeat()
    return source._replace(build_model=build_model, batches=batches)


def make_padded(config):
    """As `make_source`, of texts of different lengths in two segments."""
    source = make_source(config)
    random = np.random.default_rng(0)

    def pad(features, labels):
        shape = features["token_ids"].shape
        places = np.arange(shape[1])
        mask = places < random.integers(3, shape[1], (shape[0], 1))
        segments = (places > 1) & mask
        ids = features["token_ids"] * mask
        return {
            "token_ids": ids.astype("int32"),
            "segment_ids": segments.astype("int32"),
            "padding_mask": mask.astype("int32"),
        }, labels

    batches = itertools.islice(source.batches.as_numpy_iterator(), 2)
    features, labels = zip(*itertools.starmap(pad, batches), strict=True)
    stacked = {name: np.stack([f[name] for f in features]) for name in features[0]}
    return source._replace(batches=benchmark_inputs.repeat(stacked, np.stack(labels)))


def keras_logs(config, source):
    """Returns the loss and the accuracy of each step."""
    with control.enabled("float32"):
        keras.utils.set_random_seed(config.seed)
        model = source.build_model()
        step = timed_steps.training_step(model, config, source, STEPS)
        found = []
        for _ in range(STEPS):
            model.reset_metrics()
            logs = step()
            found.append((float(logs["loss"]), float(logs["accuracy"])))
    return np.array(found).T


def run_torch(folder, config, source, mode="float32", warmup=2, **changes):
    """Returns the process' figures, and why it failed."""
    exchange.write(folder / "twin.npz", config, source, STEPS)
    return ask_torch(folder, mode, warmup, **changes)


def ask_torch(folder, mode="float32", warmup=2, **changes):
    file, output = folder / "twin.npz", folder / "figures.json"
    memory = changes.pop("memory", None)
    asked = {
        "cell": records.Cell("task", "torch", mode, 4, False)._asdict(),
        "exchange": str(file),
        "steps": STEPS - warmup,
        "warmup": warmup,
        "threads": 1,
    }
    request = child_process.to_request(asked, output, {"host": 1}, memory)
    request = json.dumps(json.loads(request) | changes)
    reason = benchmark_process.run(request, output, exchange.command(PYTHON))
    return benchmark_process.read(output, {"host": 1}), reason


# ---- Parity in float32 ----

SCHEDULE = {"schedule": "linear", "warmup_fraction": 0.4}
ADAMW = {
    "name": "adamw",
    "learning_rate": 5e-3,
    "weight_decay": 0.5,
    "clip_global_norm": 0.5,
    "epsilon": 1e-3,
    **SCHEDULE,
}
SGD = {"name": "sgd", "learning_rate": 0.05, "weight_decay": 0.5, **SCHEDULE}
NORMED = {"batch_norm": True, "dense": 0}
CASES = {
    "cnn, adam": (make_images, {}, {"name": "adam", "learning_rate": 5e-3}),
    "cnn, adamw": (make_images, {}, ADAMW),
    "cnn with batch norm, sgd": (make_images, NORMED, SGD),
    "cnn with batch norm, nesterov": (
        make_images,
        {"batch_norm": True},
        SGD | {"nesterov": True},
    ),
    "bert, adam": (make_texts, {}, {"name": "adam", "learning_rate": 2e-3}),
    "bert, sgd": (make_texts, {}, SGD | {"learning_rate": 0.5}),
    "padded bert with mean pooling, adamw": (make_texts, {"pooling": "mean"}, ADAMW),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_accuracy_are_those_of_keras(tmp_path, case):
    make, model, optimizer = CASES[case]
    config = make(**model)
    config.optimizer.schedule = "constant"
    config.optimizer.update(optimizer)
    source = (make_padded if "padded" in case else make_source)(config)
    losses, accuracy = keras_logs(config, source)
    figures, reason = run_torch(tmp_path, config, source, warmup=2)
    assert reason == ""
    np.testing.assert_allclose(figures["losses"], losses, rtol=TOLERANCE)
    assert figures["metric"] == pytest.approx(accuracy[2:].mean())
    # The same batch as in the first step: they agree although weights have moved.
    assert abs(losses[4] - losses[0]) > 0.01


# ---- The other modes ----


def test_bfloat16_is_near_float32_and_tells_what_was_in_force(tmp_path):
    config = make_images()
    source = make_source(config)
    losses, _ = keras_logs(config, source)
    figures, reason = run_torch(tmp_path, config, source, "mixed_bfloat16")
    assert reason == ""
    # A few roundings of the logits, which are about 1.
    epsilon = formats.float_format("bfloat16").epsilon
    np.testing.assert_allclose(figures["losses"], losses, rtol=2 * epsilon)
    assert not np.allclose(figures["losses"], losses, rtol=TOLERANCE)
    assert len(figures["seconds"]) == 3 and min(figures["seconds"]) > 0
    assert figures["first_step_seconds"] > 0
    assert figures["metric_name"] == "accuracy" and 0 <= figures["metric"] <= 1
    assert figures["loss_scales"] == [] and figures["loss_scale"] is None
    assert figures["skipped_steps"] is None and figures["xla"] is False
    assert figures["host_bytes"] > 2**20
    for part in ("autocast to bfloat16", "no GradScaler", "channels_last", "fused"):
        assert part in figures["note"]
    assert figures["versions"]["torch"] in figures["note"]
    assert figures["parameters"] == source.build_model().count_params()


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adam"}, SGD],
    ids=["adam", "decayed sgd"],
)
def test_overflow_skips_the_whole_step_and_halves_the_scale(tmp_path, optimizer):
    config = make_images()
    config.optimizer.update(optimizer)
    config.precision.loss_scale.initial_scale = 2.0**60
    config.precision.loss_scale.backoff_factor = 0.25
    source = make_source(config)
    figures, reason = run_torch(tmp_path, config, source, "mixed_float16")
    assert reason == ""
    assert figures["loss_scales"] == [2.0**n for n in (58, 56, 54, 52, 50)]
    assert (figures["loss_scale"], figures["skipped_steps"]) == (2.0**50, STEPS)
    # Two batches by turns, and no weight has changed.
    first, second, *rest = figures["losses"]
    assert first != second and rest == [first, second, first]
    assert "GradScaler" in figures["note"] and "float16" in figures["note"]


def test_float16_learns_with_the_schedule_of_the_steps_that_count(tmp_path):
    config = make_images(**NORMED)
    # Of the first steps very different rates.
    config.optimizer.update(SGD | {"learning_rate": 0.02, "warmup_fraction": 0.8})
    # The first step overflows: 2**40 times a gradient is beyond float16.
    config.precision.loss_scale.initial_scale = 2.0**40
    config.precision.loss_scale.backoff_factor = 2.0**-30
    source = make_source(config)
    figures, reason = run_torch(tmp_path, config, source, "mixed_float16")
    assert reason == "" and figures["skipped_steps"] == 1
    swapped = source._replace(batches=source.batches.skip(1))
    losses, _ = keras_logs(config, swapped)
    epsilon = formats.float_format("float16").epsilon
    np.testing.assert_allclose(figures["losses"][1:], losses[:-1], rtol=8 * epsilon)


# ---- What goes wrong ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cell": {"mode": "rewrite_float16", "xla": False}},
            "ValueError: PyTorch has",
        ),
        ({"cell": {"mode": "float32", "xla": True}}, "and no XLA"),
        ({"steps": STEPS}, "ValueError: The exchange has too few batches"),
        ({"memory": {"host": 2**20, "device": None}}, "MemoryError: "),
        ({"parent": 1}, "the process that asked has ended"),
    ],
    ids=["mode", "XLA", "batches", "memory", "parent"],
)
def test_failure_is_one_line(tmp_path, changes, words):
    config = make_images()
    figures, reason = run_torch(tmp_path, config, make_source(config), **changes)
    assert figures is None and words in reason
    if "memory" in changes:
        assert memory_limit.lack(reason)


def test_network_that_does_not_fit_is_a_lack_of_memory(tmp_path):
    config = make_images()
    exchange.write(tmp_path / "twin.npz", config, make_source(config), STEPS)
    file = tmp_path / "twin.json"
    described = json.loads(file.read_text())
    described["network"]["dense"] = 2**40
    file.write_text(json.dumps(described))
    figures, reason = ask_torch(tmp_path)
    assert figures is None and memory_limit.lack(reason)
