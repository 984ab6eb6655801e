"""Gradients of embeddings in which each row occurs once.

TensorFlow gives the gradient of an embedding as rows, one for each use of an index in
the batch. Keras 3.15 takes squares before it sums the rows of one index: the norm that
it clips by is not the gradient's, and Adam's second moment is too small where rows
agree, so that BERT's segment embeddings move up to sqrt(batch * length) times too far.
"""

from collections.abc import Sequence

import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as _tf_optimizer  # Keras 3.15
from keras.src.optimizers import base_optimizer as _base_optimizer

from tfamp import graph_context as tracing
from tfamp import patches

_hooks: list[patches.Hook] = []


def install() -> None:
    """Gives every optimizer rows that are summed, from now on; idempotent.

    What was traced before keeps its gradients. The hooks lie on the method that applies
    gradients; a `LossScaleOptimizer` has one of its own, and calls this one on the
    optimizer within; and on the one that sums over replicas.
    """
    if not _hooks:
        base, own = _base_optimizer.BaseOptimizer, _tf_optimizer.TFOptimizer
        _hooks.append(patches.Hook(base, "apply", _with_summed_rows))
        reduced = patches.Hook(own, "_all_reduce_sum_gradients", _with_summed_sums)
        _hooks.append(reduced)


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


def _with_summed_sums(original):
    """The sum over replicas is sparse, too: the rows of one replica after another's."""

    def reduce(optimizer, grads_and_vars):
        pairs = original(optimizer, grads_and_vars)
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return pairs
        gradients, variables = zip(*pairs, strict=True) if pairs else ((), ())
        return list(zip(sum_rows(gradients), variables, strict=True))

    return reduce


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
