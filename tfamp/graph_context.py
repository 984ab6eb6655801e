"""What is being traced, and for which device; the only user of TensorFlow's private
names for it, each with the version it was read in and guarded by
tests/test_tensorflow_contract.py.
"""

from collections.abc import Container, Iterable

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config, ops
from tensorflow.python.ops import control_flow_util


def in_xla() -> bool:
    """Whether the graph being traced, or one around it, is compiled by XLA."""
    graph = ops.get_default_graph()  # TensorFlow 2.21
    return control_flow_util.GraphOrParentsInXlaContext(graph)  # TensorFlow 2.21


def watched() -> bool:
    """Whether operations are watched, as by `tf.debugging.enable_check_numerics`.

    What watches them adds operations of its own, which XLA does not compile.
    """
    return bool(context.context().op_callbacks)  # TensorFlow 2.21


def deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()  # TensorFlow 2.21


def xla_supports(devices: Iterable[str], kinds: Container[str]) -> bool:
    """Whether XLA can compile one function over variables on these devices.

    Args:
      devices: Full device names; XLA needs one for all.
      kinds: Device types that may be compiled for.
    """
    names = set(devices)
    if len(names) != 1:
        return False
    kind = _kind(names.pop())
    # A GPU that TensorFlow was not built for is a plug-in (Apple's Metal): no XLA.
    known = kind == "CPU" or (kind == "GPU" and tf.test.is_built_with_gpu_support())
    return known and kind in kinds


def on_one_cpu(values: Iterable[tf.Tensor]) -> bool:
    """Whether the program runs on one CPU alone, as far as tracing can tell."""
    if tf.distribute.has_strategy() or tf.config.get_visible_devices("GPU"):
        return False
    return all(_kind(value.device) in ("CPU", "") for value in values)


def _kind(device):
    return tf.DeviceSpec.from_string(device).device_type or ""


def replicas_without_merging() -> bool:
    """Whether replicas run on their own: under XLA, and all of them on GPUs.

    Only then may a branch be taken, and a collective be used, in a replica context.
    """
    # TensorFlow 2.21; Keras uses it too.
    return tf.__internal__.distribute.strategy_supports_no_merge_call()
