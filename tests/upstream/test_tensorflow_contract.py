"""The private names of TensorFlow that tfamp uses are there and mean what it reads."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import config
from tensorflow.python.util import _pywrap_util_port

from tfamp.facts import graph_context as tracing
from tfamp.facts import hardware, names


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


def test_names_that_count_launches_are_there():
    """What each does, tests/rules/test_launches.py tries."""
    used = [name for name, what in names.NAMES.items() if "launches" in what]
    assert len(used) == 4
    assert [name for name in used if names.resolve(name) is None] == []


def test_kernels_are_registered_for_gpus_that_are_not_there():
    name = "tensorflow.python.framework.kernels:get_registered_kernels_for_op"
    registered = names.resolve(name)("StatelessRandomGetKeyCounter").kernel
    on_gpu = [kernel for kernel in registered if kernel.device_type == "GPU"]
    if not on_gpu:
        pytest.skip("this TensorFlow was built without GPUs")
    assert "seed" in on_gpu[0].host_memory_arg


def test_a_variable_without_a_value_is_one_in_a_trace():
    name = "tensorflow.python.ops.resource_variable_ops:UninitializedVariable"
    variable = names.resolve(name)(shape=[4, 3], dtype=tf.float32)
    assert isinstance(variable, tf.Variable) and variable.shape == [4, 3]
    step = tf.function(lambda: variable.assign_add(tf.ones([4, 3])))
    assert step.get_concrete_function().structured_outputs.shape == [4, 3]
    assert not tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
