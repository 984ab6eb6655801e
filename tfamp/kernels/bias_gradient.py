"""Bias gradients that do not lose precision in bfloat16.

TensorFlow 2.21 sums the gradient of a bias (`BiasAddGrad`) in bfloat16 on a CPU: the
sum of 4096 ones is 256. Keras adds every bias by `BiasAdd`, so that the bias gradients
of a mixed_bfloat16 model come out up to 98 % wrong, without any message.
"""

import tensorflow as tf

# TensorFlow 2.21 lets nobody register another gradient for an operation, and a
# `tf.custom_gradient` around the addition would hide it from the fusion with `MatMul`
# and `Conv2D` and show up in SavedModels; so the registered function is replaced in
# the registry, where each trace looks it up. Guarded by tests/test_bias_gradient.py.
from tensorflow.python.framework import ops as _tensorflow_ops

_OPERATION = "BiasAdd"
_originals: list = []


def install() -> None:
    """Sums bias gradients rightly in what is traced from now on; idempotent.

    For every `BiasAdd` of bfloat16 in this process, Keras' and others', in eager and
    graph mode and under XLA. Other dtypes keep TensorFlow's gradient, which is right.
    """
    if not installed():
        entry = _registered()
        _originals[:] = [entry["type"]]
        entry["type"] = _gradient


def remove() -> None:
    """Puts TensorFlow's gradient back; idempotent. Traced functions keep theirs."""
    if installed():
        _registered()["type"] = _originals.pop()


def installed() -> bool:
    """Whether bias gradients are summed rightly in what is traced now."""
    return _registered()["type"] is _gradient


def _registered() -> dict:
    return _tensorflow_ops.gradient_registry._registry[_OPERATION]  # TensorFlow 2.21


def _gradient(op, received):
    if received.dtype != tf.bfloat16:
        return _originals[0](op, received)
    data_format = op.get_attr("data_format")
    return received, _sum_to_bias(received, data_format in (b"NCHW", "NCHW"))


def _sum_to_bias(gradient, channels_first):
    """Sums over all dimensions but the channels'.

    `tf.reduce_sum` keeps a wider accumulator on a CPU, and takes no more time there
    than `BiasAddGrad`. No other device was measured: float32 is right on any.
    """
    if tf.config.get_visible_devices("GPU"):
        gradient = tf.cast(gradient, tf.float32)
    if channels_first:
        axes = tf.concat([[0], tf.range(2, tf.rank(gradient))], 0)
        total = tf.reduce_sum(gradient, axes)
    else:
        # To a matrix first: faster than a sum over several axes.
        channels = tf.shape(gradient)[-1]
        total = tf.reduce_sum(tf.reshape(gradient, [-1, channels]), 0)
    return tf.cast(total, tf.bfloat16)
