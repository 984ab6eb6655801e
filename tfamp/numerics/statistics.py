"""Gradient values that a 16-bit format cannot hold, with and without a loss scale.

Backpropagation in float16 rounds each gradient to the format. What is smaller than half
of its smallest subnormal becomes 0, and what is beyond its maximum infinite. Gradients
of weights, which are sums, show the least of it: most is lost at activations, such as
the logits of a large vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp import formats
from tfamp.precision import assign


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


class GradientRange(NamedTuple):
    """The gradient of one tensor.

    Attributes:
      name: Path of the weight, or name of the layer whose output it is.
      kind: "activation" or "weight".
      largest: Largest finite magnitude, unscaled.
      unscaled: What becomes of the gradient of the loss itself.
      scaled: The same of the loss times the loss scale.
    """

    name: str
    kind: str
    largest: float
    unscaled: Counts
    scaled: Counts


class UnderflowReport(NamedTuple):
    """What a format makes of a model's gradients on one batch.

    Attributes:
      format: Name of the format.
      loss_scale: The loss scale of the `scaled` counts.
      rows: Activations in the order of the model, then weights.
    """

    format: str
    loss_scale: float
    rows: tuple[GradientRange, ...]

    def row(self, name: str) -> GradientRange:
        """Returns the first row of a name."""
        return next(row for row in self.rows if row.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        rows = [
            row._asdict()
            | {"unscaled": row.unscaled._asdict(), "scaled": row.scaled._asdict()}
            for row in self.rows
        ]
        return {"schema_version": 2, **self._asdict(), "rows": rows}

    def to_markdown(self) -> str:
        """Returns the shares of the nonzero values of each gradient, in a table."""
        times = f", times {self.loss_scale:g}"
        rows = [
            ["gradient of", "largest", "become 0", f"become 0{times}"]
            + ["subnormal", f"subnormal{times}", f"infinite{times}"]
        ]
        rows.append(["---"] * len(rows[0]))
        for name, kind, largest, plain, scaled in self.rows:
            counts = [plain.underflow, scaled.underflow]
            counts += [plain.subnormal, scaled.subnormal, scaled.overflow]
            shares = [f"{plain.share(count):.2%}" for count in counts]
            rows.append([f"{name} ({kind})", f"{largest:.2g}", *shares])
        lines = [f"| {' | '.join(row)} |\n" for row in rows]
        title = f"# Gradients in {self.format}: shares of their nonzero values"
        return f"{title}\n\n{''.join(lines)}"


def count_out_of_range(values: Any, dtype: str, loss_scale: float = 1.0) -> Counts:
    """Counts the values that a format rounds to 0, to subnormals and to infinity.

    Compared with the format's limits in float64, where float32 values and their
    products with a power of two are exact; nothing is rounded to the format.

    Args:
      values: Float array of any shape.
      dtype: Name of the format, as for `formats.float_format`.
      loss_scale: What they are multiplied by first; positive.

    Returns:
      `Counts`, Python integers.

    Raises:
      ValueError: If the format is unknown.

    References:
      IEEE 754-2019, sections 4.3.1 and 7.4: half of the smallest subnormal is a tie,
      which goes to the even one, 0; what is half a unit beyond the maximum is infinite.
    """
    limits = formats.float_format(dtype)
    magnitudes = np.abs(np.asarray(values, "float64").reshape(-1)) * loss_scale
    held = magnitudes[np.isfinite(magnitudes)]
    zeros = held == 0.0
    underflow = held <= limits.smallest_subnormal / 2
    # A number half a unit below the smallest normal, or nearer, rounds up to it.
    normal = limits.smallest_normal - limits.smallest_subnormal / 2
    unit = math.ldexp(limits.epsilon, math.frexp(limits.max)[1] - 1)  # Of the maximum.
    return Counts(
        values=magnitudes.size,
        zeros=int(zeros.sum()),
        underflow=int((underflow & ~zeros).sum()),
        subnormal=int((~underflow & (held < normal)).sum()),
        overflow=int((held >= limits.max + unit / 2).sum()),
        not_finite=magnitudes.size - held.size,
    )


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
        known, found = _classes(y), _classes(x)
        gone = (
            tf.ones_like(known.zero),
            known.zero,
            found.zero & ~known.zero,
            found.subnormal & ~known.subnormal
            if x.dtype == y.dtype
            else found.subnormal,
            found.not_finite & ~known.not_finite,
            known.not_finite,
        )
        total += tf.stack([tf.math.count_nonzero(each) for each in gone])
    return total


class _Classes(NamedTuple):
    zero: tf.Tensor
    subnormal: tf.Tensor
    not_finite: tf.Tensor


def _classes(x):
    """Which values are zeros, subnormals, or infinite or NaN."""
    wide = x.dtype == tf.float32
    bits = tf.bitcast(x, tf.int32 if wide else tf.int16)
    magnitude = tf.bitwise.bitwise_and(bits, bits.dtype.max)  # Without the sign.
    limits = formats.float_format(x.dtype.name)
    # Exponents of all zeros are of subnormals, of all ones of what is not finite.
    normal, infinite = (
        tf.bitcast(tf.constant(value, x.dtype), bits.dtype)
        for value in (limits.smallest_normal, math.inf)
    )
    return _Classes(
        magnitude == 0, (magnitude > 0) & (magnitude < normal), magnitude >= infinite
    )


def relative_error(low: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the norm of the difference of values over that of the exact ones.

    Args:
      low: Values in any float format.
      exact: What they should be, in the same shapes. What is not finite there is left
        out.

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


def gradient_underflow(
    model: keras.Model,
    loss: Callable[[Any, Any], Any],
    features: Any,
    labels: Any,
    *,
    dtype: str = "float16",
    loss_scale: float = 1.0,
) -> UnderflowReport:
    """Computes a model's gradients in float32 and counts what a format cannot hold.

    The model runs with float32 assigned to its layers, eagerly, without dropout, on one
    batch. Computed in the format itself more would be lost: what one layer's backward
    pass rounds to 0, the layers before it never see.

    Args:
      model: A built functional or sequential model, in any precision; put back.
      loss: Function of (labels, outputs), a scalar; a Keras loss is one.
      features: A batch, as the model takes it.
      labels: Its labels.
      dtype: Name of the format.
      loss_scale: Loss scale of the `scaled` counts.

    Returns:
      An `UnderflowReport` of the output of every layer that has one, where it is
      called first, and of the trained weights.
    """
    with assign.assigned_float32(model):
        names, taps = _tap(model)
        weights = taps.trainable_weights
        with tf.GradientTape() as tape:
            activations, outputs = taps(features)
            value = loss(labels, outputs)
        sources = [*activations, *(weight.value for weight in weights)]
        gradients = tape.gradient(value, sources)
    named = [(name, "activation") for name in names]
    named += [(weight.path, "weight") for weight in weights]
    rows = []
    for (name, kind), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            found = tf.convert_to_tensor(gradient).numpy()
            largest = float(np.abs(found[np.isfinite(found)]).max(initial=0.0))
            counts = [count_out_of_range(found, dtype, x) for x in (1.0, loss_scale)]
            rows.append(GradientRange(name, kind, largest, *counts))
    name = formats.float_format(dtype).name
    return UnderflowReport(name, loss_scale, tuple(rows))


def _tap(model):
    """Returns names of layers of one output, and a model of those and the model's."""
    layers = [x for x in model.layers if not isinstance(x, keras.layers.InputLayer)]
    # Where it was called first; a nested model's `output` is of a graph of its own.
    found = {x.name: keras.Operation.output.fget(x) for x in layers}  # pyright: ignore[reportOptionalCall]
    kept = {k: y for k, y in found.items() if isinstance(y, keras.KerasTensor)}
    connected = not isinstance(model, keras.Sequential)  # That was never called.
    given = model.input if connected else model.inputs[0]
    outputs = model.output if connected else model.outputs[0]
    return list(kept), keras.Model(given, [list(kept.values()), outputs])
