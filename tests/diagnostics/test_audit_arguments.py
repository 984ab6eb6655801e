"""Arguments of `audit` are checked before anything is done, all at once."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp import errors
from tfamp.diagnostics import audit, timing

layers = keras.layers


class Counting(layers.Layer):
    """Counts how often it was called."""

    calls = 0

    def call(self, x):
        Counting.calls += 1
        return x


@pytest.fixture(scope="module")
def model():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), Counting()])


def batches(size, count=4, **keywords):
    rows = tf.data.Dataset.from_tensors((tf.ones((4,)), tf.ones((3,))))
    return rows.repeat(size * count).batch(size, **keywords)


BAD = {
    "batch size of text": ({"batch_size": "32"}, TypeError, "batch_size='32'"),
    "batch size of a float": ({"batch_size": 2.5}, TypeError, "batch_size=2.5"),
    "batch size of a bool": ({"batch_size": True}, TypeError, "batch_size=True"),
    "negative batch size": ({"batch_size": -1}, ValueError, "batch_size=-1"),
    "jit_compile": ({"jit_compile": "yes"}, ValueError, "jit_compile='yes'"),
    "jit_compile of a number": ({"jit_compile": 1}, ValueError, "jit_compile=1"),
    "rewrite": ({"rewrite": "bf16"}, ValueError, "rewrite='bf16'"),
    "rewrite of a bool": ({"rewrite": True}, ValueError, "rewrite=True"),
    "rewrite without effect": (
        {"rewrite": "float16", "device": "p100"},
        errors.UnsupportedModeError,
        "no tensor cores",
    ),
    "tensor_float_32": ({"tensor_float_32": "no"}, TypeError, "tensor_float_32='no'"),
    "bias_gradient_fixed": (
        {"bias_gradient_fixed": 0},
        TypeError,
        "bias_gradient_fixed=0",
    ),
    "negative time": ({"step_seconds": -1}, ValueError, "step_seconds=-1"),
    "time of text": ({"pipeline_seconds": "1"}, TypeError, "pipeline_seconds='1'"),
    "time that is not finite": (
        {"step_seconds": float("nan")},
        ValueError,
        "step_seconds=nan",
    ),
    "dataset of a number": ({"dataset": 3}, TypeError, "dataset=3"),
    "dataset for nothing": (
        {"dataset": batches(4), "step_seconds": 1, "pipeline_seconds": 1},
        ValueError,
        "nothing to time",
    ),
    "dataset without batches": (
        {"dataset": batches(4).take(0)},
        ValueError,
        "`dataset` must have batches",
    ),
    "dataset of another size": (
        {"dataset": batches(4), "batch_size": 32},
        ValueError,
        "batches of 4, 32",
    ),
    "dataset and inputs": (
        {"dataset": batches(4), "inputs": np.zeros((8, 4))},
        ValueError,
        "batches of 4, 8",
    ),
    "dataset of scalars": ({"dataset": [1, 2]}, ValueError, "shape ()"),
    "no examples": ({"inputs": np.zeros((0, 4))}, ValueError, "shape (0, 4)"),
    "inputs that are no arrays": (
        {"inputs": batches(4)},
        ValueError,
        "`inputs` must be a batch",
    ),
    "ragged inputs": ({"inputs": [[1.0], [1.0, 2.0]]}, ValueError, "`inputs` must"),
    "two at once": (
        {"batch_size": 0, "jit_compile": 3},
        ValueError,
        "2 arguments of `audit` are wrong",
    ),
}


@pytest.mark.parametrize(("keywords", "error", "words"), BAD.values(), ids=BAD)
def test_bad_argument(model, keywords, error, words):
    Counting.calls = 0
    with pytest.raises(error, match=re.escape(words)) as caught:
        audit.audit(model, **keywords)
    assert type(caught.value) is error
    assert Counting.calls == 0


def test_all_problems_are_named(model):
    with pytest.raises(ValueError, match="3 arguments") as caught:
        audit.audit(model, batch_size=0, rewrite="x", tensor_float_32="y")
    for name in ("batch_size=0", "rewrite='x'", "tensor_float_32='y'"):
        assert name in str(caught.value)


def test_dataset_gives_the_batch_that_is_judged_and_timed(model, monkeypatch):
    timed = []

    def step_seconds(model, inputs, jit_compile):
        timed.append(tuple(inputs.shape))
        return 1.0

    monkeypatch.setattr(timing, "step_seconds", step_seconds)
    report = audit.audit(model, dataset=batches(128))
    assert report.batch_size == 128 and timed == [(128, 4)]
    audit.audit(model, dataset=batches(16), inputs=np.zeros((16, 4)))
    assert timed[1:] == [(16, 4)]


def test_dataset_may_yield_inputs_alone(model):
    dataset = batches(6).map(lambda x, y: x)
    assert audit.audit(model, dataset=dataset, step_seconds=1.0).batch_size == 6


def test_auto_is_a_word_of_keras(model):
    assert not audit.audit(model, device="cpu-amx", jit_compile="auto").jit_compile
    assert audit.audit(model, device="a100", jit_compile="auto").jit_compile
