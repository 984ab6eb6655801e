"""EfficientNet-B0 of `keras.applications`, from scratch."""

import keras

# What stands between the pixels and the first convolution. Keras names them by its own
# count, which goes on from one run of a process to the next.
_PINNED = {keras.layers.Rescaling: "rescaling", keras.layers.Normalization: "scaling"}


def features(inputs, model):
    """The network without its last layer, under the dtype policy in force.

    Keras' network scales the pixels itself. Those layers are pinned to float32: 8-bit
    steps do not survive bfloat16's 8 bits of precision.

    Args:
      inputs: Symbolic images, [batch, height, width, channels]; values in 0..255.
      model: Config with `dropout`, before the last layer.

    Returns:
      Symbolic [batch, 1280].

    References:
      Tan and Le, "EfficientNet", 2019, https://arxiv.org/abs/1905.11946.
    """
    made = keras.applications.EfficientNetB0(
        include_top=False, weights=None, input_tensor=inputs, pooling="avg"
    )
    made = keras.models.clone_model(made, [inputs], clone_function=_copy)
    dropout = keras.layers.Dropout(model.dropout, name="dropout")
    return dropout(made.outputs[0])


def _copy(layer):
    """A new layer of the same settings; in float32 if it scales pixels."""
    settings = layer.get_config()
    if type(layer) in _PINNED:
        settings |= {"dtype": "float32", "name": _PINNED[type(layer)]}
    return type(layer).from_config(settings)
