"""The private names of TensorFlow that tfamp uses are there and mean what it reads."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import config
from tensorflow.python.util import _pywrap_util_port

from tfamp.facts import graph_context as tracing
from tfamp.facts import hardware


def test_onednn_switch_is_read_as_a_bool():
    """That it follows the environment, tests/rules/test_switches.py tries."""
    assert isinstance(_pywrap_util_port.IsMklEnabled(), bool)
    assert hardware._onednn_is_on() is _pywrap_util_port.IsMklEnabled()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_tracing_tells_xla_from_a_graph_also_inside_a_branch(jit_compile):
    found = []

    @tf.function(jit_compile=jit_compile)
    def outer(x):
        def branch():
            found.append(tracing.in_xla())
            return x

        return tf.cond(x > 0, branch, lambda: x)

    outer(tf.constant(1.0))
    assert set(found) == {jit_compile}
    assert not tracing.in_xla()


SEEN = {
    "op determinism": (
        tracing.deterministic,
        tf.config.experimental.enable_op_determinism,
        config.disable_op_determinism,
    ),
    "watched operations": (
        tracing.watched,
        tf.debugging.enable_check_numerics,
        tf.debugging.disable_check_numerics,
    ),
}


@pytest.mark.parametrize(("read", "switch_on", "switch_off"), SEEN.values(), ids=SEEN)
def test_debugging_is_seen(read, switch_on, switch_off):
    switch_on()
    try:
        assert read()
    finally:
        switch_off()
    assert not read()


def test_methods_of_a_variable_can_be_replaced_on_the_object():
    # keras_optimizers.masked_assignments does.
    variable = tf.Variable([1.0])
    variable.assign = lambda value: "mine"
    assert variable.assign([2.0]) == "mine"
    del variable.assign
    variable.assign([2.0])
    assert variable.numpy() == [2.0]


def test_merging_is_needed_outside_xla():
    assert tracing.replicas_without_merging()  # No strategy, nothing to merge.
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert not tracing.replicas_without_merging()
