"""A user's function, whose measurements are golden data: its text is part of them."""

import keras
import tensorflow as tf


def build(batch_size=8):
    """Returns a compiled model and its batches."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((4,)), tf.ones((2,))))
    return model, data.repeat().batch(batch_size)
