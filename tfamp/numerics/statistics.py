"""What becomes of float32 values in a 16-bit format: counts and errors.

Rounded to float16, what is smaller than half of its smallest subnormal becomes 0, and
what is beyond its maximum infinite. Gradients of weights, which are sums, show the
least of it: most is lost at activations, such as the logits of a large vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.facts import formats


class Counts(NamedTuple):
    """How many of some values a format holds, and how.

    Attributes:
      values: All values.
      zeros: Those that are 0 already.
      underflow: Others that the format rounds to 0.
      subnormal: Those that it holds as subnormals, with fewer bits.
      overflow: Finite ones that it rounds to infinity.
      not_finite: Those that are infinite or NaN already.
    """

    values: int
    zeros: int
    underflow: int
    subnormal: int
    overflow: int
    not_finite: int

    def share(self, count: int) -> float:
        """Returns a count as a share of the nonzero values; NaN if there is none."""
        nonzero = self.values - self.zeros
        return count / nonzero if nonzero else math.nan

    @property
    def kept(self) -> float:
        """Share of the nonzero values that stay so; NaN if none is, or may be."""
        return math.nan if self.not_finite else 1.0 - self.share(self.underflow)


class LayerNumerics(NamedTuple):
    """What becomes of one layer's float32 values in its format, in one step.

    Attributes:
      path: As `describe_layers` gives it.
      format: The format that it computes in.
      outputs: Of what it returns.
      weights: Of its weights when they are cast.
      gradients: Of the gradients of what it returns, times the loss scale.
      weight_gradients: Of the gradients of its weights, times the loss scale.
      largest_gradient: The largest magnitude of both, unscaled.
      updates_lost: Share of the step's changes of its weights that weights stored in
        its format would round away; NaN if none changed. Nothing is lost where weights
        are stored in float32, as in all mixed modes: it shows why.
    """

    path: str
    format: str
    outputs: Counts
    weights: Counts
    gradients: Counts
    weight_gradients: Counts
    largest_gradient: float
    updates_lost: float

    def __str__(self):
        kinds = {
            "outputs": [self.outputs],
            "weights": [self.weights],
            "gradients": [self.gradients, self.weight_gradients],
        }
        told = (f"{name} {describe(*counts)}" for name, counts in kinds.items())
        text = f"{self.path} in {self.format}: {', '.join(told)}"
        if not self.updates_lost > 0:
            return text
        return (
            f"{text}; {self.updates_lost:.0%} of its updates would be rounded away if "
            f"weights were stored in {self.format} (harmless: they are in float32)"
        )

    __repr__ = __str__  # In a list, and in a notebook.

    @property
    def gradients_lost(self) -> float:
        """Share of the nonzero gradients that become 0, infinite or NaN; NaN if none.

        Of its outputs or of its weights, whichever is larger.
        """
        return self._largest_share("underflow", "overflow")

    @property
    def gradients_underflowed(self) -> float:
        """The like, of those that become 0."""
        return self._largest_share("underflow")

    def _largest_share(self, *kinds):
        both = self.gradients, self.weight_gradients
        return float(
            np.fmax(*(x.share(sum(getattr(x, k) for k in kinds)) for x in both))
        )


def describe(*counts: Counts) -> str:
    """Returns what becomes of values, by the counts that lose most: "2.0% to 0"."""
    kinds = {"underflow": "to 0", "overflow": "infinite"}
    shares = {
        words: max(np.nan_to_num(each.share(getattr(each, kind))) for each in counts)
        for kind, words in kinds.items()
    }
    lost = [f"{share:.1%} {words}" for words, share in shares.items() if share]
    return " and ".join(lost) or "kept"


def count_lost(low: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> tf.Tensor:
    """Counts what float32 values have become in another format.

    By their bits: TensorFlow's kernels take subnormals of float32, and those of
    bfloat16 are such, for 0.

    Args:
      low: Values in a format of 16 or 32 bits.
      exact: What they are in float32, in the same shapes.

    Returns:
      int64 [6], the fields of `Counts`.
    """
    total = tf.zeros([6], tf.int64)
    for x, y in zip(low, exact, strict=True):
        was_zero, was_subnormal, was_lost = _classes(y)
        is_zero, is_subnormal, is_lost = _classes(x)
        gone = (
            was_zero,
            is_zero & ~was_zero,
            is_subnormal & ~was_subnormal if x.dtype == y.dtype else is_subnormal,
            is_lost & ~was_lost,
            was_lost,
        )
        total += tf.stack([tf.size(y, tf.int64), *map(count_true, gone)])
    return total


def count_true(mask: tf.Tensor) -> tf.Tensor:
    """Returns how many of some booleans are true, an int64 scalar.

    Row by row in int32, which is faster than int64, and holds a row.
    """
    rows = list(range(1, mask.shape.rank or 1))
    return tf.reduce_sum(tf.cast(tf.reduce_sum(tf.cast(mask, tf.int32), rows), "int64"))


@functools.partial(tf.function, autograph=False)
def count_rounded_away(
    layers: Sequence[Sequence[tuple[tf.Tensor, tf.Tensor]]], formats: Sequence[str]
) -> tf.Tensor:
    """Counts updates of weights, and those that 16-bit weights would round away.

    Args:
      layers: For each layer pairs of float32 weights, before and after an update.
      formats: For each layer the name of its format.

    Returns:
      int64 [layers, 2]: the weights that changed, and those whose change the
      format rounds away.
    """
    rows = []
    for pairs, low in zip(layers, formats, strict=True):
        row = tf.zeros([2], tf.int64)
        for before, after in pairs:
            moved = before != after
            same = tf.cast(before, low) == tf.cast(after, low)
            row += tf.stack([*map(count_true, (moved, moved & same))])
        rows.append(row)
    return tf.stack(rows)


def _classes(x):
    """Returns which values are zeros, which subnormals, and which infinite or NaN."""
    wide = x.dtype == tf.float32
    bits = tf.bitcast(x, tf.int32 if wide else tf.int16)
    magnitude = tf.bitwise.bitwise_and(bits, bits.dtype.max)  # Without the sign.
    limits = formats.float_format(x.dtype.name)
    # Exponents of all zeros are of subnormals, of all ones of what is not finite.
    normal, infinite = (
        tf.bitcast(tf.constant(value, x.dtype), bits.dtype)
        for value in (limits.smallest_normal, math.inf)
    )
    return (
        magnitude == 0,
        (magnitude > 0) & (magnitude < normal),
        magnitude >= infinite,
    )


def relative_error(low: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the norm of the difference of values over that of the exact ones.

    Args:
      low: Values in any float format.
      exact: What they should be, in the same shapes. What is not finite there is left
        out; TensorFlow may take subnormals of float32 for 0.

    Returns:
      A float64 scalar: 0 for 0 / 0; infinite if a value is not finite that should be.
    """
    difference = norm = tf.zeros([], tf.float64)
    lost = tf.zeros([], tf.bool)
    for x, y in zip(low, exact, strict=True):
        x, y = tf.cast(x, tf.float64), tf.cast(y, tf.float64)
        counted = tf.math.is_finite(y)
        lost |= tf.reduce_any(counted & ~tf.math.is_finite(x))
        difference += tf.reduce_sum(tf.where(counted, x - y, 0.0) ** 2)
        norm += tf.reduce_sum(tf.where(counted, y, 0.0) ** 2)
    error = tf.where(difference == 0.0, difference, tf.sqrt(difference / norm))
    return tf.where(lost, tf.constant(math.inf, tf.float64), error)


def recommended_loss_scale(largest: float) -> float | None:
    """Returns the largest power of two that leaves gradients three bits below float16.

    Args:
      largest: The largest magnitude of a gradient in float16, unscaled.

    Returns:
      The largest power of two with `largest` times it at most 65504 / 8; None for 0.
    """
    room = formats.float_format("float16").max / 8
    return 2.0 ** math.floor(math.log2(room / largest)) if largest else None
