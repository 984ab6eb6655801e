"""Two gradients that TensorFlow and Keras compute another way than PyTorch.

Biases: TensorFlow 2.21 sums the gradient of a bias (`BiasAddGrad`) in bfloat16 on a
CPU: the sum of 4096 ones is 256. Keras adds every bias by `BiasAdd`, so that the bias
gradients of a mixed_bfloat16 model come out up to 98 % wrong, without any message.

Embeddings: TensorFlow gives the gradient of an embedding as rows, one for each use of
an index in the batch. Keras 3.15 takes squares before it sums the rows of one index:
the norm that it clips by is not the gradient's, and Adam's second moment is too small
where rows agree, so that BERT's segment embeddings move up to sqrt(batch * length)
times too far. That is so in every mode, and PyTorch's rule is another training: it
comes on request.
"""

import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.keras_patches import hooks


def _of_bias(original, op, received):
    """Sums over all dimensions but the channels'.

    A `tf.custom_gradient` around the addition would hide it from the fusion with
    `MatMul` and `Conv2D`, and show up in SavedModels. `tf.reduce_sum` keeps a wider
    accumulator on a CPU, and takes no more time there than `BiasAddGrad`.
    """
    if received.dtype != tf.bfloat16:
        return original(op, received)  # Those of other formats are right.
    gradient, axes = received, 0
    if tf.config.get_visible_devices("GPU"):  # The cost of the cast is unknown.
        gradient = tf.cast(gradient, tf.float32)
    if op.get_attr("data_format") in (b"NCHW", "NCHW"):
        axes = tf.concat([[0], tf.range(2, tf.rank(gradient))], 0)
    else:  # To a matrix first: faster than a sum over several axes.
        gradient = tf.reshape(gradient, [-1, tf.shape(gradient)[-1]])
    return received, tf.cast(tf.reduce_sum(gradient, axes), tf.bfloat16)


@hooks.around
def _with_summed_rows(original, optimizer, grads, trainable_variables=None):
    """A `LossScaleOptimizer` has an `apply` of its own, and calls the inner one's."""
    return original(optimizer, [*map(_summed, grads)], trainable_variables)


@hooks.around
def _with_summed_sums(original, optimizer, grads_and_vars):
    """The sum over replicas is sparse, too: the rows of one replica after another's."""
    pairs = original(optimizer, grads_and_vars)
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return pairs
    return [(_summed(gradient), variable) for gradient, variable in pairs]


def _summed(gradient):
    """Sums the rows of one index in a sparse gradient; leaves any other as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if graph_context.in_xla():  # Which does not know how many indices differ: dense.
        return tf.convert_to_tensor(gradient)
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


HOOKS = hooks.HookGroup(lookup=hooks.of_gradient("BiasAdd", _of_bias))
EMBEDDING_HOOKS = hooks.HookGroup(
    apply=_with_summed_rows, _all_reduce_sum_gradients=_with_summed_sums
)
