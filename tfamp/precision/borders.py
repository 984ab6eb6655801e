"""What goes into and comes out of a model: ids that are exact, outputs in float32."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import formats


def widened(outputs: Any) -> Any:
    """Returns a model's outputs with those of 16 bits in float32; others as they are.

    Args:
      outputs: Tensors in any structure, or None.
    """
    return keras.tree.map_structure(_wide, outputs)


def _wide(value):
    if not isinstance(value, tf.Tensor) or value.dtype.name not in formats.LOW:
        return value
    wide = tf.cast(value, "float32")
    if (mask := getattr(value, "_keras_mask", None)) is not None:
        wide._keras_mask = mask  # By which losses and metrics leave out what it hides.
    return wide


def check_ids(layer: keras.layers.Embedding, ids: Any = None, *args: Any) -> None:
    """Raises ValueError for ids in a 16-bit format that rounds some of the layer's."""
    dtype = getattr(getattr(ids, "dtype", None), "name", "")
    if isinstance(ids, tf.Tensor) and dtype in formats.LOW:
        # All integers up to two to the power of the bits of the significand.
        exact = 2 / formats.float_format(dtype).epsilon
        if layer.input_dim - 1 > exact:
            raise ValueError(
                f"Ids of {dtype} are rounded above {exact:.0f}. Received: {dtype} "
                f"ids for layer {layer.path!r} of {layer.input_dim} rows. Pass "
                "integers, or keep the model or layer that they come through in "
                "float32."
            )
