"""The twin in PyTorch learns what Keras learns.

PyTorch may be in an environment of its own: TFAMP_TORCH_PYTHON names its interpreter.
"""

import os
import pathlib
import sys

import helpers
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


def make_images(**fields):
    sizes = {
        **{"data__name": "digits", "data__image_size": 9},  # Pooling drops a row.
        **{"model__blocks": ((8, 8), (16,)), "model__dense": 32, "model__dropout": 0.0},
    }
    return helpers.configured(images, **{**sizes, **fields})


def make_texts(**fields):
    tiny = text_classification.get_config().tiny.model
    sizes = {
        **{f"model__{name}": size for name, size in tiny.items()},
        # Few words: each occurs often, the first one, transformers' padding, too.
        **{"model__num_layers": 2, "model__dropout": 0.0, "model__vocabulary_size": 16},
        "data__sequence_length": 16,
    }
    return helpers.configured(text_classification, **{**sizes, **fields})


def run_both(config, folder, mode="float32"):
    """The figures of the step of `fit` in float32, and of PyTorch's in a mode."""
    task = cells.get_task(config).to_dict()
    cell = cells.Cell("some", "tfamp", "float32", 8, jit="off")
    ours = measure.measure(task, cell, "train", 3, STEPS - 2, 2)
    file = pathlib.Path(folder, "twin.safetensors")
    config.seed, config.batch_size = 3, 8
    exchange.write(str(file), config.to_dict(), STEPS)
    request = {"exchange": str(file), "mode": mode, "threads": 1, "steps": STEPS - 2}
    return ours, torch_peer.call(PYTHON, {**request, "warmup": 2}, 300)


ADAMW = {
    **{"name": "adamw", "learning_rate": 5e-3, "weight_decay": 0.5, "epsilon": 1e-3},
    **{"clip_global_norm": 0.5, "schedule": "linear", "warmup_fraction": 0.4},
}
SGD = {"name": "sgd", "learning_rate": 0.05, "weight_decay": 0.5, "nesterov": True}
CASES = {
    "cnn, adamw": (make_images, {}, ADAMW),
    "cnn with batch norm, sgd": (
        make_images,
        {"model__batch_norm": True, "model__dense": 0},
        SGD,
    ),
    "bert, adam": (make_texts, {}, {"name": "adam", "learning_rate": 2e-3}),
    "bert with mean pooling, adamw": (make_texts, {"model__pooling": "mean"}, ADAMW),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_keras(tmp_path, case):
    make, model, optimizer = CASES[case]
    config = make(**model)
    config.optimizer.update({"schedule": "constant", **optimizer})
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
    config = make_images(precision__loss_scale__initial_scale=2.0**120)
    _, done = run_both(config, tmp_path, "mixed_float16")
    assert done.value["skipped_steps"] == STEPS
    assert done.value["loss_scale"] == 2.0 ** (120 - STEPS)


def test_failure_is_one_line():
    done = torch_peer.call(PYTHON, {"mode": "tf32", "steps": 1, "warmup": 1}, 300)
    assert done.failure == "KeyError: 'exchange'"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model__name", "resnet", False),
        ("task", "segmentation", False),
        ("optimizer__accumulation_steps", 2, False),
        ("precision__loss_scale__hysteresis", 2, False),
        ("precision__loss_scale__growth_interval", 2, True),
    ],
)
def test_configurations_without_a_twin_are_known(path, value, expected):
    assert exchange.has_twin(make_images(**{path: value})) is expected
