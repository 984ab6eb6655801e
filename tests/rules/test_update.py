"""Which updates XLA compiles, and that their masks are gone afterwards."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import graph_context as tracing
from tfamp.facts import hardware
from tfamp.updates import compiled, gate, schedules

OPT = keras.optimizers


def variables():
    return [keras.Variable(tf.ones([4, 3])), keras.Variable([1.0, 2.0])]


def gradients():
    return [tf.ones([4, 3]), tf.ones([2])]


COSINE = OPT.schedules.CosineDecay(0.1, 10)
WARMUP = schedules.WarmupSchedule(0.1, total_steps=10)


def accumulating():
    return OPT.SGD(gradient_accumulation_steps=2)


class Mine(OPT.SGD):
    """A user's optimizer: it may do what XLA cannot compile."""


@pytest.mark.device
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


CPU = hardware.DEVICES["cpu-avx2"]  # Whatever there is here.
SLICES = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]), tf.constant([4, 3]))


@pytest.mark.parametrize(
    ("inner", "jit_compile", "on_cpu", "sparse_on_cpu", "on_gpu"),
    [
        (OPT.SGD, "auto", "branch", "plain", "program"),
        (OPT.SGD, False, "plain", "plain", "plain"),
        (Mine, "auto", "plain", "plain", "plain"),
        (Mine, True, "branch", "plain", "program"),
        (lambda: OPT.SGD(lambda: 0.1), "auto", "plain", "plain", "plain"),
        (lambda: OPT.SGD(COSINE), "auto", "branch", "plain", "program"),
        (lambda: OPT.SGD(WARMUP), "auto", "branch", "plain", "program"),
        (accumulating, True, "plain", "plain", "windows"),
    ],
)
def test_how_an_update_is_gated(inner, jit_compile, on_cpu, sparse_on_cpu, on_gpu):
    made, weights = inner(), variables()
    made.build(weights)
    found = []

    @tf.function(autograph=False)
    def trace():
        found.append(gate._way(made, gradients(), weights, jit_compile))
        found.append(gate._way(made, [SLICES, None], weights, jit_compile))
        with hardware.simulated(hardware.DEVICES["h100"]):
            found.append(gate._way(made, [SLICES, None], weights, jit_compile))

    with compiled.HOOKS.installed(), hardware.simulated(CPU):
        trace()
    assert found == [on_cpu, sparse_on_cpu, on_gpu]
    assert gate._way(made, gradients(), weights, True) == "plain"  # Eager.


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["CPU:0"], True),
        (["CPU:0", "CPU:1"], False),
        (["GPU:0"], True),
        (["GPU:0", "CPU:0"], False),
        (["TPU:0"], False),
    ],
)
def test_devices_that_one_compiled_function_can_serve(devices, expected, monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: True)
    names = [f"/job:localhost/replica:0/task:0/device:{device}" for device in devices]
    assert tracing.xla_supports(names) is expected
