"""Gradient values that a 16-bit format cannot hold, with and without a loss scale.

Backpropagation in float16 rounds each gradient to the format. What is smaller than half
of its smallest subnormal becomes 0, and what is beyond its maximum infinite. Gradients
of weights, which are sums, show the least of it: most is lost at activations, such as
the logits of a large vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp import formats
from tfamp.precision import assign

SCHEMA_VERSION = 1


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

    @property
    def kept(self) -> float | None:
        """Share of the nonzero values that stay nonzero; None if none is or may be."""
        nonzero = self.values - self.zeros
        if not nonzero or self.not_finite:
            return None
        return 1.0 - self.underflow / nonzero


class GradientRange(NamedTuple):
    """The gradient of one tensor.

    Attributes:
      name: Path of the weight, or name of the layer whose output it is.
      kind: "activation" or "weight".
      largest: Largest finite magnitude, unscaled.
      below_smallest_subnormal: Nonzero values whose magnitude is below the format's
        smallest subnormal, unscaled; some round up to it.
      unscaled: What becomes of the gradient of the loss itself.
      scaled: The same of the loss times the loss scale.
    """

    name: str
    kind: str
    largest: float
    below_smallest_subnormal: int
    unscaled: Counts
    scaled: Counts


class UnderflowReport(NamedTuple):
    """What a format makes of a model's gradients on one batch.

    Attributes:
      format: Name of the format.
      smallest_subnormal: Its smallest positive value; half of it becomes 0.
      loss_scale: The loss scale of the `scaled` counts.
      rows: Activations in the order of the model, then weights.
    """

    format: str
    smallest_subnormal: float
    loss_scale: float
    rows: tuple[GradientRange, ...]

    def row(self, name: str) -> GradientRange:
        """Returns the first row of a name; KeyError if there is none."""
        return {row.name: row for row in reversed(self.rows)}[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        rows = [
            row._asdict()
            | {"unscaled": row.unscaled._asdict(), "scaled": row.scaled._asdict()}
            for row in self.rows
        ]
        return {"schema_version": SCHEMA_VERSION, **self._asdict(), "rows": rows}

    def to_markdown(self) -> str:
        """Returns the shares of the nonzero values of each gradient, in a table."""
        head = [
            "gradient of",
            "largest",
            f"below {self.smallest_subnormal:.3g}",
            "become 0",
            f"become 0, times {self.loss_scale:g}",
            "subnormal",
            f"subnormal, times {self.loss_scale:g}",
            f"infinite, times {self.loss_scale:g}",
        ]
        rows = [head, ["---"] * len(head), *map(_cells, self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        title = f"# Gradients in {self.format}: shares of their nonzero values"
        return "\n".join([title, "", *lines, ""])


def _cells(row):
    nonzero = row.unscaled.values - row.unscaled.zeros
    counts = (
        row.below_smallest_subnormal,
        *(row.unscaled.underflow, row.scaled.underflow),
        *(row.unscaled.subnormal, row.scaled.subnormal, row.scaled.overflow),
    )
    shares = [f"{count / nonzero:.2%}" if nonzero else "-" for count in counts]
    return [f"{row.name} ({row.kind})", f"{row.largest:.2g}", *shares]


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
    finite = np.isfinite(magnitudes)
    held = magnitudes[finite]
    zeros = held == 0.0
    underflow = held <= limits.smallest_subnormal / 2
    # A number half a unit below the smallest normal, or nearer, rounds up to it.
    normal = limits.smallest_normal - limits.smallest_subnormal / 2
    return Counts(
        values=magnitudes.size,
        zeros=int(zeros.sum()),
        underflow=int((underflow & ~zeros).sum()),
        subnormal=int((~underflow & (held < normal)).sum()),
        overflow=int((held >= _first_infinite(limits)).sum()),
        not_finite=int(magnitudes.size - held.size),
    )


def _first_infinite(limits):
    """The smallest number that rounds to infinity: half a unit above the maximum."""
    unit = math.ldexp(limits.epsilon, math.frexp(limits.max)[1] - 1)
    return limits.max + unit / 2


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

    Raises:
      ValueError: If the model's layers are not connected to a graph.
    """
    if not getattr(model, "inputs", None):
        raise ValueError(
            "Gradients at activations need a built functional or sequential model. "
            f"Received: {model!r}."
        )
    with assign.assigned_float32(model):
        gradients = [*_gradients(model, loss, features, labels)]
    limits = formats.float_format(dtype)
    rows = [_range(*each, limits, loss_scale) for each in gradients]
    return UnderflowReport(
        limits.name, limits.smallest_subnormal, loss_scale, tuple(rows)
    )


def _gradients(model, loss, features, labels):
    """Yields (name, kind, float32 array) of each layer's output and each weight."""
    layers, taps = _tap(model)
    weights = taps.trainable_weights
    with tf.GradientTape() as tape:
        activations, outputs = taps(features)
        value = loss(labels, outputs)
    sources = [*activations, *(weight.value for weight in weights)]
    found = tape.gradient(value, sources)
    names = [(x.name, "activation") for x in layers]
    names += [(weight.path, "weight") for weight in weights]
    for (name, kind), gradient in zip(names, found, strict=True):
        if gradient is not None:
            gradient_f32 = tf.cast(tf.convert_to_tensor(gradient), "float32")
            yield name, kind, gradient_f32.numpy()


def _tap(model):
    """Returns layers of one output, and a model of their outputs and the model's."""
    layers = [x for x in model.layers if not isinstance(x, keras.layers.InputLayer)]
    # Where it was called first; a nested model's `output` is of a graph of its own.
    found = [keras.Operation.output.fget(x) for x in layers]  # pyright: ignore[reportOptionalCall]
    kept = [(x, y) for x, y in zip(layers, found, strict=True) if _is_tensor(y)]
    if isinstance(model, keras.Sequential):  # It was never called.
        ends = model.inputs[0], model.outputs[0]
    else:
        ends = model.input, model.output
    return [x for x, _ in kept], keras.Model(ends[0], [[y for _, y in kept], ends[1]])


def _is_tensor(value):
    return isinstance(value, keras.KerasTensor)


def _range(name, kind, gradient_f32, limits, loss_scale):
    magnitudes = np.abs(gradient_f32[np.isfinite(gradient_f32)])
    below = (magnitudes > 0) & (magnitudes < limits.smallest_subnormal)
    return GradientRange(
        name=name,
        kind=kind,
        largest=float(magnitudes.max(initial=0.0)),
        below_smallest_subnormal=int(below.sum()),
        unscaled=count_out_of_range(gradient_f32, limits.name),
        scaled=count_out_of_range(gradient_f32, limits.name, loss_scale),
    )
