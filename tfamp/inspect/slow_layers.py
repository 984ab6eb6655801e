"""Layers that CPUs run slower in bfloat16 than in float32, as measured."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.facts import hardware


class SlowLayer(NamedTuple):
    """A kind of layer that CPUs run slower in bfloat16 than in float32.

    Attributes:
      what: The layers, as text.
      kinds: Their classes.
      is_slow: Function of a layer of these kinds: whether it is meant.
      ratio: Time of a training step of the layer in bfloat16 to that in float32.
    """

    what: str
    kinds: tuple[type, ...]
    is_slow: Callable[[Any], bool]
    ratio: str


def _strided(layer):
    return max(tf.nest.flatten(layer.strides)) > 1


def _wide(layer):
    return not _strided(layer) and max(tf.nest.flatten(layer.kernel_size)) > 3


DEPTHWISE = (
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)
# results/layers: 2 cores of an AMD EPYC with AVX512_BF16, TensorFlow 2.21 with oneDNN.
SLOW = (
    SlowLayer("depthwise convolutions with strides", DEPTHWISE, _strided, "4 to 19"),
    SlowLayer("those with kernels above 3", DEPTHWISE, _wide, "1.8 to 2.0"),
    SlowLayer(
        "GRU and SimpleRNN of up to 64 units",
        (keras.layers.GRU, keras.layers.SimpleRNN),
        lambda layer: layer.units <= 64,
        "1.0 to 1.3",
    ),
)


def ratio_of(layer: keras.layers.Layer) -> str:
    """Returns how much slower than in float32 a layer is in bfloat16 on CPUs, or ""."""
    ratios = (x.ratio for x in SLOW if isinstance(layer, x.kinds) and x.is_slow(layer))
    return next(ratios, "")


def has_slow(low: str) -> bool:
    """Whether `SLOW` is about this host: a CPU that computes bfloat16 natively."""
    devices = hardware.read_devices()
    native = hardware.format_support("bfloat16", devices).fast
    return low == "bfloat16" and native and all(x.kind == "CPU" for x in devices)


def slow_here(layer: keras.layers.Layer, low: str) -> str:
    """Returns why a layer is faster in float32 on this host; empty if it is not."""
    ratio = ratio_of(layer)
    if not ratio or not has_slow(low):
        return ""
    return f"{ratio} times slower in bfloat16 on this CPU"
