"""Which updates XLA compiles, and that their masks are gone afterwards."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import graph_context as tracing
from tfamp.updates import compiled, gate

OPT = keras.optimizers


def variables():
    return [keras.Variable(tf.ones([4, 3])), keras.Variable([1.0, 2.0])]


def gradients():
    return [tf.ones([4, 3]), tf.ones([2])]


class Mine(OPT.SGD):
    """A user's optimizer: it may do what XLA cannot compile."""


def test_masks_are_gone_after_tracing():
    made, weights = tfamp.LossScaleOptimizer(OPT.Adam(0.1)), variables()
    made.build(weights)

    @tf.function(jit_compile=True)
    def step():
        made.apply(gradients(), weights)

    step()
    for variable in [*weights, *made.variables]:
        assert "assign" not in vars(variable.value)
        variable.assign(tf.zeros_like(variable))
        np.testing.assert_array_equal(variable, np.zeros(variable.shape))


@pytest.mark.parametrize(
    ("inner", "jit_compile", "expected"),
    [
        (OPT.SGD, "auto", True),
        (OPT.SGD, False, False),
        (Mine, "auto", False),
        (Mine, True, True),
        (lambda: OPT.SGD(lambda: 0.1), "auto", False),
        (lambda: OPT.SGD(gradient_accumulation_steps=2), True, False),
    ],
)
def test_what_is_compiled(inner, jit_compile, expected):
    made, weights = inner(), variables()
    made.build(weights)
    found = []

    @tf.function
    def trace():
        found.append(gate._way(made, gradients(), weights, jit_compile))

        found.append(update._can_compile(made, [slices, None], weights, True))

    slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]), tf.constant([4, 3]))
    trace()
    assert found == [expected, False]
    assert not update._can_compile(made, gradients(), weights, True)  # Eager.


@pytest.mark.parametrize(
    ("devices", "kinds", "expected"),
    [
        (["CPU:0"], ["CPU"], True),
        (["CPU:0", "CPU:1"], ["CPU"], False),
        (["GPU:0"], ["CPU"], False),
        (["GPU:0"], ["CPU", "GPU"], True),
        (["GPU:0", "CPU:0"], ["CPU", "GPU"], False),
        (["TPU:0"], ["CPU", "GPU"], False),
    ],
)
def test_devices_that_one_compiled_function_can_serve(
    devices, kinds, expected, monkeypatch
):
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: True)
    names = [f"/job:localhost/replica:0/task:0/device:{device}" for device in devices]
    assert tracing.xla_supports(names, kinds) is expected
