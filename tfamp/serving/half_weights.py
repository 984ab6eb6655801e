"""Weights stored in 16 bits, in a SavedModel that computes in what it did before.

Stored so: float32 weights of two axes or more, that is kernels and tables. What has one
axis or none (biases, scales, the statistics of normalization, counters) is a thousandth
of the bytes, and stays as it is.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.serving import writing


def stored(model: keras.Model, format_name: str) -> Callable:
    """Returns the model in inference as a function that reads 16-bit copies of weights.

    Each is cast up where it is read; the model keeps its own.

    Args:
      model: A built model, in the precision that it is to be served in.
      format_name: "bfloat16" or "float16".

    Raises:
      ExportError: If there are no such weights, or one is beyond the format's range.
    """
    large = [v for v in model.weights if v.dtype == "float32" and len(v.shape) > 1]
    if not large:
        raise errors.ExportError(
            f"`half_weights=True` stores float32 weights of two axes or more. "
            f"Received: model {model.name!r}, which has none."
        )
    with tf.init_scope():
        copies = [_copy(variable, format_name) for variable in large]
    ids = {id(variable) for variable in large}
    others = [v for v in writing.states(model) if id(v) not in ids]

    def call(inputs):
        pairs = zip(large, copies, strict=True)
        wide = [(variable, tf.cast(copy, "float32")) for variable, copy in pairs]
        with keras.StatelessScope(wide) as scope:
            outputs = model(inputs, training=False)
        for variable in others:  # A scope collects updates, and makes none.
            if (value := scope.get_current_value(variable)) is not None:
                variable.assign(value)
        return outputs

    return call


def _copy(variable, format_name):
    low = tf.cast(keras.ops.convert_to_tensor(variable), format_name)
    finite = tf.math.is_finite(tf.cast(low, "float32"))
    if not bool(tf.reduce_all(finite | ~tf.math.is_finite(variable.value))):
        raise errors.ExportError(
            f"{format_name} overflows in weight {variable.path!r}. Store it in "
            'bfloat16, by precision="mixed_bfloat16", or leave out `half_weights`.'
        )
    return tf.Variable(low, trainable=variable.trainable, name=variable.name)
