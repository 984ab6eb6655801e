"""Layers that a 16-bit mode keeps in float32, each with the reason.

| which | when |
|---|---|
| preprocessing, unit norms, SavedModels | made under `enable`; `set_precision` |
| what XLA does not compile | `compile` or first step under `enable`; `set_precision` |
| `SLOW`: faster in float32 on this device | `compile` or first step under `enable` |
| output layers, found in a trace of the model | `set_precision` |

An explicit `dtype=` wins over the first row, an override over all of them.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.facts import hardware
from tfamp.inspect import model_inputs, structure, traces

RAW = "takes raw values, which 16 bits would round before they are scaled"
_SQUARES = "its gradient divides by squares, which underflow in 16 bits (keras#23546)"
_SAVED = "calls a SavedModel, which takes the formats that it was saved with"
_BILINEAR = "XLA does not compile its gradient in 16 bits (keras#20931)"
OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"


# ---- By their kind ----


class SlowLayer(NamedTuple):
    """A kind of layer that CPUs run slower in bfloat16 than in float32.

    Attributes:
      what: The layers, in words.
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


_KINDS = keras.layers
DEPTHWISE = (
    *(_KINDS.DepthwiseConv1D, _KINDS.DepthwiseConv2D),
    *(_KINDS.SeparableConv1D, _KINDS.SeparableConv2D),
)
_RECURRENT = (_KINDS.GRU, _KINDS.SimpleRNN)
# results/layers: 2 cores of an AMD EPYC with AVX512_BF16, TensorFlow 2.21 with oneDNN.
SLOW = (
    SlowLayer("depthwise convolutions with strides", DEPTHWISE, _strided, "4 to 19"),
    SlowLayer("those with kernels above 3", DEPTHWISE, _wide, "1.8 to 2.0"),
    SlowLayer(
        "GRU and SimpleRNN of up to 64 units",
        *(_RECURRENT, lambda layer: layer.units <= 64, "1.0 to 1.3"),
    ),
)


def made_in_float32(layer: keras.layers.Layer) -> str:
    """Returns why a layer that is made without a `dtype` is float32; empty if not."""
    # What Keras' preprocessing derives from: `DataLayer`, before 3.11 `TFDataLayer`.
    if isinstance(layer, _KINDS.Rescaling.__bases__[0]):
        return RAW
    if isinstance(layer, _KINDS.TFSMLayer):
        return _SAVED
    return _SQUARES if isinstance(layer, _KINDS.UnitNormalization) else ""


def uncompiled(layer: keras.layers.Layer) -> str:
    """Returns why XLA does not compile a layer in 16 bits; empty if it does."""
    bilinear = getattr(layer, "interpolation", "nearest") != "nearest"
    return _BILINEAR if bilinear and isinstance(layer, _KINDS.UpSampling2D) else ""


def slow(layer: keras.layers.Layer) -> str:
    """Returns how much slower than in float32 a layer is in bfloat16 on CPUs, or ""."""
    ratios = (x.ratio for x in SLOW if isinstance(layer, x.kinds) and x.is_slow(layer))
    return next(ratios, "")


def slow_here(layer: keras.layers.Layer, format_name: str) -> str:
    """Returns why a layer is faster in float32 on this host; empty if it is not."""
    ratio = slow(layer)
    if not ratio or not has_slow(format_name):
        return ""
    return f"{ratio} times slower in bfloat16 on this CPU"


def has_slow(format_name: str) -> bool:
    """Whether `SLOW` is about this host: a CPU that computes bfloat16 natively."""
    devices = hardware.read_devices()
    native = hardware.format_support("bfloat16", devices).fast
    only_cpu = all(device.kind == "CPU" for device in devices)
    return format_name == "bfloat16" and native and only_cpu


def mostly_slow(model: keras.Model, format_name: str) -> list[str]:
    """Returns the layers that are faster in float32, if little else multiplies.

    That is, if they hold most weights, tables of embeddings apart, and there is no
    other convolution or attention, which multiply by their weights often.
    """
    found, in_slow, others, inside = [], 0, 0, set()
    for place in structure.walk(model):
        layer = place.layer
        size = sum(math.prod(v.shape) for v in structure.own_weights(layer))
        why = layer.compute_dtype == "float32" and slow_here(layer, format_name)
        if why:
            found.append(f"{layer.name}: {why}")
        if why or inside & {id(each.layer) for each in place.holders}:
            inside.add(id(layer))
            in_slow += size
        elif re.search("Conv|Attention", type(layer).__name__):
            return []
        elif not isinstance(layer, _KINDS.Embedding):
            others += size
    return found if in_slow > others else []


# ---- By their place ----

_ATTENTION = keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention


def follows(layer: keras.layers.Layer, holder: keras.layers.Layer) -> bool:
    """Whether Keras runs a layer by the precision of the one that holds it.

    Read in Keras 3.15: `TimeDistributed` calls `layer.call` in its own autocast
    scope; recurrent layers cast what goes into and out of their cell; attention
    layers leave out their softmax and dropout where a fused kernel does both.
    """
    kinds = keras.layers
    if isinstance(holder, kinds.TimeDistributed | kinds.RNN | kinds.StackedRNNCells):
        return True
    skipped = isinstance(layer, kinds.Softmax | kinds.Dropout)
    return skipped and isinstance(holder, _ATTENTION)


def output_layers(model: keras.Model) -> dict[int, str]:
    """Returns {id of a layer: why it stays in float32} from a trace of the model.

    Parameter-free layers (activation, reshape, dropout) pass on what the layers
    before them compute; both belong to the output.

    Args:
      model: A built model; it is traced in inference, and not changed.

    Raises:
      ExportError: If the inputs are not known, or the model does not take them.
    """
    returned: dict[Any, list] = {}

    def note(layer, inputs, outputs):
        for tensor in outputs:
            returned.setdefault(tensor.ref(), []).append(layer)

    specs = model_inputs.specs(model)
    with model_inputs.explained(model, "cannot be traced"):
        graph = traces.trace(model, specs, note)
    found: dict[int, str] = {}
    queue = [tensor for tensor in graph.outputs if tensor.dtype.is_floating]
    visited = set()
    while queue:
        tensor = queue.pop()
        layers = returned.get(tensor.ref(), [])
        stops = [layer for layer in layers if _computes(layer)]
        if tensor.ref() not in visited and not stops:
            queue += tensor.op.inputs
        visited.add(tensor.ref())
        plain = [x for x in layers if x not in stops and not structure.children(x)]
        found |= {id(layer): PASSES_OUTPUT for layer in plain}
        found |= {id(layer): OUTPUT for layer in stops}
    return found


def _computes(layer):
    """Whether a layer has weights of its own, or runs its inner layers as its own."""
    if isinstance(layer, keras.Model):
        return False
    inner = structure.children(layer)
    if any(follows(each, layer) for each in inner):
        return not isinstance(layer, _ATTENTION)
    return bool(structure.own_weights(layer))
