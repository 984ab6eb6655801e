"""Sizes for XLA, which compiles each anew, for tenths of a second."""

import math

import tensorflow as tf


def padded_size(count: tf.Tensor) -> tf.Tensor:
    """Returns the next of four steps between powers of 2: int32 scalar."""
    with tf.device("CPU:0"):  # A GPU would copy it to the host, and be waited for.
        logarithm = tf.math.log(tf.cast(tf.maximum(count, 1), tf.float64)) / math.log(2)
        step = tf.bitwise.left_shift(1, tf.maximum(tf.cast(logarithm, tf.int32) - 2, 0))
        return (count + step - 1) // step * step


def padded(rows: tf.Tensor) -> tf.Tensor:
    """Appends rows of zeros until their number is a `padded_size`.

    Args:
      rows: [unknown, ...]. Batches of any size come to few sizes.
    """
    count = tf.shape(rows)[0]
    more = padded_size(count) - count
    return tf.pad(rows, [[0, more], *[[0, 0]] * (len(rows.shape) - 1)])
