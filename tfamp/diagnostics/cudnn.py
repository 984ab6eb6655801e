"""Which recurrent layers TensorFlow runs by cuDNN on an NVIDIA GPU.

The rules of Keras 3.15 (`cudnn_ok` in its TensorFlow backend, which asks this host for
a GPU, too): a layer that meets them has no XLA.
"""

import keras
import tensorflow as tf

_TANH = (keras.activations.tanh, keras.ops.tanh, tf.tanh)
_SIGMOID = (keras.activations.sigmoid, keras.ops.sigmoid, tf.sigmoid)


def refuses_xla(layer: keras.layers.Layer) -> bool:
    """Whether Keras takes a layer for one of cuDNN, and XLA off for its model."""
    if not isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
        return False
    return (
        layer.use_cudnn in (True, "auto")
        and layer.activation in _TANH
        and layer.recurrent_activation in _SIGMOID
        and layer.use_bias
        and not layer.unroll
        and getattr(layer, "reset_after", True)  # Of a GRU only.
    )


def runs_whole(layer: keras.layers.Layer) -> bool:
    """Whether one kernel of cuDNN runs all time steps of a layer."""
    return refuses_xla(layer) and not layer.recurrent_dropout
