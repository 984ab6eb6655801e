"""Which variables' gradients were not finite: counts that live on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Overflow(NamedTuple):
    """One variable whose gradient was not finite.

    Attributes:
      variable: Path of the variable.
      infs: Number of infinite elements.
      nans: Number of NaN elements.
    """

    variable: str
    infs: int
    nans: int


class OverflowCounts:
    """Counts of the last skipped step; not tracked, so never part of a checkpoint.

    An object of a plain class, which neither Keras nor TensorFlow looks into.
    """

    def __init__(self, size: int):
        """Creates the counts of `size` variables under the current strategy."""
        self._names: list[str] = []
        self._counts = tf.Variable(
            tf.zeros([size, 2], tf.int64), trainable=False, name="overflow_counts"
        )

    def record(self, counts, variables: Sequence) -> None:
        """Stores `count`'s result for these variables; traced, no host sync."""
        self._names = [getattr(v, "path", v.name) for v in variables]
        missing = self._counts.shape[0] - len(variables)
        self._counts.assign(tf.pad(counts, [[0, missing], [0, 0]]))

    def read(self) -> list[Overflow]:
        """Returns the variables whose gradients were not finite, in model order."""
        counts = self._counts.numpy()[: len(self._names)]
        return [
            Overflow(name, int(infs), int(nans))
            for name, (infs, nans) in zip(self._names, counts, strict=True)
            if infs or nans
        ]


def count(grads: Sequence):
    """Returns the numbers of infinite and NaN elements: int64 tensor [len(grads), 2].

    Args:
      grads: Tensors, `tf.IndexedSlices` (their `values` count) or None.
    """
    return tf.stack([_count_one(grad) for grad in grads])


def _count_one(grad):
    if grad is None:
        return tf.zeros([2], tf.int64)
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    kinds = tf.math.is_inf(values), tf.math.is_nan(values)
    return tf.stack([tf.math.count_nonzero(kind) for kind in kinds])
