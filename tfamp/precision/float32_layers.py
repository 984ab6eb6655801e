"""Layers that a 16-bit mode keeps in float32, each with the reason.

| which | when |
|---|---|
| preprocessing, unit norms | made under `enable`; `set_precision` |
| what XLA does not compile | `compile` or first step under `enable`; `set_precision` |
| `SLOW`: faster in float32 on this device | `compile` or first step under `enable` |

An explicit `dtype=` wins over the first row, an override over all of them.
"""

from typing import NamedTuple

import keras

from tfamp import hardware

RAW = "takes raw values, which 16 bits would round before they are scaled"
_SQUARES = "its gradient divides by squares, which underflow in 16 bits (keras#23546)"
_BILINEAR = "XLA does not compile its gradient in 16 bits (keras#20931)"


class SlowLayer(NamedTuple):
    """A kind of layer that is slower in 16 bits than in float32.

    Attributes:
      kinds: Names of classes in `keras.layers`.
      format: The format, which the device computes natively.
      device: Kind of device.
      ratio: Time of a training step of the layer in 16 bits to that in float32.
    """

    kinds: tuple[str, ...]
    format: str
    device: str
    ratio: str


# Measured by benchmarks/layers.py; see docs/hardware.md.
SLOW: tuple[SlowLayer, ...] = ()


def made_in_float32(layer: keras.layers.Layer) -> bool:
    """Whether a layer that is being made, without a `dtype`, is float32."""
    return bool(_of_kind(layer))


def _of_kind(layer):
    kinds = keras.layers
    # What Keras' preprocessing derives from: `DataLayer`, before 3.11 `TFDataLayer`.
    if isinstance(layer, kinds.Rescaling.__bases__[0]):
        return RAW
    return _SQUARES if isinstance(layer, kinds.UnitNormalization) else ""


def reason(layer: keras.layers.Layer) -> str:
    """Returns why a layer is float32 in each 16-bit mode; empty if it is not."""
    bilinear = getattr(layer, "interpolation", "nearest") != "nearest"
    if isinstance(layer, keras.layers.UpSampling2D) and bilinear:
        return _BILINEAR
    return _of_kind(layer)


def slow(layer: keras.layers.Layer, format_name: str) -> str:
    """Returns why a layer is faster in float32 on this host; empty if it is not.

    Args:
      layer: A layer.
      format_name: "bfloat16" or "float16".
    """
    for row in slow_here(format_name):
        if type(layer).__name__ in row.kinds:
            return f"{row.ratio} times slower in {row.format} on this {row.device}"
    return ""


def slow_here(format_name: str) -> list[SlowLayer]:
    """Returns the rows of `SLOW` for this host; none where a format is emulated."""
    devices = hardware.read_devices()
    if not hardware.format_support(format_name, devices).fast:
        return []
    kinds = {each.kind for each in devices}
    device = "CPU" if kinds == {"CPU"} else (kinds - {"CPU"}).pop()
    return [r for r in SLOW if r.device == device and r.format == format_name]
