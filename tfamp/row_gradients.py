"""Gradients of embeddings in which each row occurs once.

TensorFlow gives the gradient of an embedding as rows, one for each use of an index in
the batch. Keras 3.15 takes squares before it sums the rows of one index: the norm that
it clips by is not the gradient's, and Adam's second moment is too small where rows
agree, so that BERT's segment embeddings move up to sqrt(batch * length) times too far.
"""

from collections.abc import Sequence

import tensorflow as tf
from keras.src.optimizers import base_optimizer as _base_optimizer  # Keras 3.15

from tfamp import keras_hooks, tracing

_hooks: list[keras_hooks.Hook] = []


def install() -> None:
    """Gives every optimizer rows that are summed, from now on; idempotent.

    What was traced before keeps its gradients. The hook lies on the method that applies
    gradients; a `LossScaleOptimizer` has one of its own, and calls this one on the
    optimizer within.
    """
    if not _hooks:
        owner = _base_optimizer.BaseOptimizer
        _hooks.append(keras_hooks.Hook(owner, "apply", _with_summed_rows))


def remove() -> None:
    """Puts Keras' own method back; idempotent."""
    while _hooks:
        _hooks.pop().remove()


def installed() -> bool:
    """Whether optimizers are given summed rows now."""
    return bool(_hooks)


def _with_summed_rows(original):
    def apply(optimizer, grads, trainable_variables=None):
        return original(optimizer, sum_rows(grads), trainable_variables)

    return apply


def sum_rows(gradients: Sequence) -> list:
    """Sums the rows of one index in each sparse gradient.

    Args:
      gradients: Tensors, `tf.IndexedSlices` or None.

    Returns:
      The same, with sparse gradients whose indices differ from each other. Under XLA,
      which knows no such thing as differing indices, they are dense.
    """
    return [_summed(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _summed(gradient):
    if tracing.in_xla() and gradient.dense_shape is not None:
        rows = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
