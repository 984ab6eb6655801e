"""The twin in PyTorch learns what Keras learns.

PyTorch may be in an environment of its own: TFAMP_TORCH_PYTHON names its interpreter.
"""

import os
import pathlib
import sys

import numpy as np
import pytest

from tfamp.facts import formats
from tfamp.measuring import torch_peer
from tfamp.measuring.benchmark import cells, measure
from tfamp.measuring.torch_peer import exchange
from tfamp.recipes import images, text_classification

PYTHON = os.environ.get("TFAMP_TORCH_PYTHON", sys.executable)
STEPS = 5
# Both sum in float32, in other orders: some epsilons of each loss (2 were seen), and
# more where Adam divides a small gradient by its own size.
TOLERANCE = 100 * formats.float_format("float32").epsilon
EPSILON = formats.float_format("bfloat16").epsilon


@pytest.fixture(autouse=True, scope="module")
def torch_interpreter():
    _, reason = torch_peer.versions(PYTHON)
    if reason:
        pytest.skip(f"{PYTHON} has no PyTorch ({reason}); set TFAMP_TORCH_PYTHON")


def make_images(**model):
    config = images.get_config()
    config.data.name, config.data.image_size = "digits", 9  # Pooling drops a row.
    config.model.update({"blocks": ((8, 8), (16,)), "dense": 32, "dropout": 0.0})
    config.model.update(model)
    return config


def make_texts(**model):
    config = text_classification.get_config()
    config.model.update(config.tiny.model)
    # Few words: each occurs often, the first one, transformers' padding, too.
    config.model.update({"num_layers": 2, "dropout": 0.0, "vocabulary_size": 16})
    config.model.update(model)
    config.data.sequence_length = 16
    return config


def run_both(config, folder, mode="float32"):
    """The figures of the step of `fit` in float32, and of PyTorch's in a mode."""
    task = cells.get_task(config).to_dict()
    cell = cells.Cell("some", "tfamp", "float32", 8, jit="off")
    ours = measure.measure(task, cell, "train", 3, STEPS - 2, 2)
    file = pathlib.Path(folder, "twin.safetensors")
    config.seed, config.batch_size = 3, 8
    exchange.write(str(file), config.to_dict(), STEPS)
    request = {"exchange": str(file), "mode": mode, "threads": 1}
    request |= {"steps": STEPS - 2, "warmup": 2}
    return ours, torch_peer.call(PYTHON, request, 300)


ADAMW = {"name": "adamw", "learning_rate": 5e-3, "weight_decay": 0.5, "epsilon": 1e-3}
ADAMW |= {"clip_global_norm": 0.5, "schedule": "linear", "warmup_fraction": 0.4}
SGD = {"name": "sgd", "learning_rate": 0.05, "weight_decay": 0.5, "nesterov": True}
CASES = {
    "cnn, adamw": (make_images, {}, ADAMW),
    "cnn with batch norm, sgd": (make_images, {"batch_norm": True, "dense": 0}, SGD),
    "bert, adam": (make_texts, {}, {"name": "adam", "learning_rate": 2e-3}),
    "bert with mean pooling, adamw": (make_texts, {"pooling": "mean"}, ADAMW),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_keras(tmp_path, case):
    make, model, optimizer = CASES[case]
    config = make(**model)
    config.optimizer.schedule = "constant"
    config.optimizer.update(optimizer)
    ours, done = run_both(config, tmp_path)
    assert done.failure == ""
    np.testing.assert_allclose(done.value["losses"], ours["losses"], rtol=TOLERANCE)
    assert abs(ours["losses"][4] - ours["losses"][0]) > 1e-3  # Weights have moved.


def test_bfloat16_is_near_float32_and_tells_what_was_in_force(tmp_path):
    ours, done = run_both(make_images(), tmp_path, "mixed_bfloat16")
    figures = done.value
    # A few roundings of the logits, which are about 1.
    np.testing.assert_allclose(figures["losses"], ours["losses"], rtol=2 * EPSILON)
    assert not np.allclose(figures["losses"], ours["losses"], rtol=TOLERANCE)
    assert figures.keys() == ours.keys() and len(figures["seconds"]) == 3
    assert figures["host_bytes"] > 0 and figures["examples"] == 8
    assert "autocast to bfloat16" in figures["note"]
    assert "fused AdamW" in figures["note"]


def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path):
    config = make_images()
    config.precision.loss_scale.initial_scale = 2.0**120
    _, done = run_both(config, tmp_path, "mixed_float16")
    assert done.value["skipped_steps"] == STEPS
    assert done.value["loss_scale"] == 2.0 ** (120 - STEPS)


def test_failure_is_one_line():
    done = torch_peer.call(PYTHON, {"mode": "tf32", "steps": 1, "warmup": 1}, 300)
    assert done.failure == "KeyError: 'exchange'"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.name", "resnet", False),
        ("task", "segmentation", False),
        ("optimizer.accumulation_steps", 2, False),
        ("precision.loss_scale.hysteresis", 2, False),
        ("precision.loss_scale.growth_interval", 2, True),
    ],
)
def test_configurations_without_a_twin_are_known(path, value, expected):
    config = make_images()
    config.update_from_flattened_dict({path: value})
    assert exchange.has_twin(config) is expected
