"""The table of rules: which layers a 16-bit mode leaves in float32, and why.

`BY_KIND` are rules that read a layer alone; `traced` has those that read a trace of the
model. Between them and overrides, healed layers and what a layer keeps, `plan.Plan` has
the order.

| rule | matches | when |
|---|---|---|
| raw values | preprocessing | first call |
| raw inputs | what computes with the model's inputs before any product | plan |
| normalized float32 | normalization of what comes in float32 | plan |
| saved | a layer that calls a SavedModel | first call |
| squares | `UnitNormalization` | first call |
| sine positions | KerasHub's `SinePositionEncoding` | first call |
| bilinear, softmax | by kind | plan |
| int8 | weights of int8, in float16 | plan |
| healed | what overflowed float16 in training | from then on |
| slow | what this CPU runs slower in bfloat16 | plan |
| outputs | what computes, or passes on, an output | plan |

"First call": already when such a layer is first called, so that what comes in is not
rounded. "Plan": when the model is compiled, or first called if it is built by that;
`set_precision`, a comparison, a search and an export have the same plan.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import errors, records
from tfamp.facts import formats
from tfamp.inspect import flow, model_inputs, quantized, slow_layers, structure

OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"
# Of a larger product, a vocabulary's say, float32 costs more than it gains.
_MOST_WEIGHTS, _MOST_UNITS = 2**20, 4096

_KINDS = keras.layers


class Rule(NamedTuple):
    """A row of the table.

    Attributes:
      what: The layers, as text.
      why: Function of (a layer, the 16-bit format of the mode) that returns why the
        layer stays in float32; empty if it does not.
      first_call: Whether it holds when the layer is first called.
    """

    what: str
    why: Callable[[Any, str], str]
    first_call: bool = False


# ---- By the kind of a layer ----


def _takes_raw_values(layer):
    """Whether a layer is Keras' preprocessing, or derived from it."""
    folder = "keras.src.layers.preprocessing."
    return any(base.__module__.startswith(folder) for base in type(layer).__mro__)


def _is_sine_positions(layer):
    kind = "SinePositionEncoding", "keras_hub"
    return any((x.__name__, x.__module__[:9]) == kind for x in type(layer).__mro__)


def _is_softmax(layer):
    kinds = (keras.activations.softmax, keras.activations.log_softmax)
    activation = getattr(layer, "activation", None)
    return isinstance(layer, _KINDS.Softmax) or activation in kinds


def _is_bilinear(layer):
    bilinear = getattr(layer, "interpolation", "nearest") != "nearest"
    return bilinear and isinstance(layer, _KINDS.UpSampling2D)


def _if(matches, reason):
    return lambda layer, low: reason if matches(layer) else ""


def healed_by(largest: float) -> str:
    """Returns why a layer that was healed stays in float32."""
    return f"healed: it overflowed float16 in training (up to {largest:g})"


BY_KIND = (
    Rule(
        "preprocessing",
        _if(
            _takes_raw_values,
            "takes raw values, which 16 bits would round before they are scaled",
        ),
        first_call=True,
    ),
    Rule(
        "TFSMLayer",
        _if(
            lambda layer: isinstance(layer, _KINDS.TFSMLayer),
            "calls a SavedModel, which takes the formats that it was saved with",
        ),
        first_call=True,
    ),
    Rule(
        "UnitNormalization",
        _if(
            lambda layer: isinstance(layer, _KINDS.UnitNormalization),
            "its gradient divides by squares, which underflow in 16 bits (keras#23546)",
        ),
        first_call=True,
    ),
    Rule(
        "SinePositionEncoding",
        _if(
            _is_sine_positions,
            "16 bits round positions beyond 256, or their angles",
        ),
        first_call=True,
    ),
    Rule(
        "softmax",
        _if(
            _is_softmax,
            "softmax stays in float32: its exponentials overflow and its sums round",
        ),
    ),
    Rule(
        "bilinear UpSampling2D",
        _if(_is_bilinear, "XLA does not compile its gradient in 16 bits (keras#20931)"),
    ),
    Rule(
        "weights of int8 in a float16 mode",
        lambda layer, low: (
            "sums of products of int8 overflow in float16"
            if low == "float16" and quantized.quantization_of(layer) == "int8"
            else ""
        ),
    ),
    Rule("layers slower in bfloat16 on this CPU", slow_layers.slow_here),
)


def by_kind(layer: keras.layers.Layer, low: str, first_call: bool = False) -> str:
    """Returns why a layer stays in float32 by its kind; empty if it does not.

    Args:
      layer: The layer, built or not.
      low: The 16-bit format of the mode.
      first_call: Whether only rules count that hold when a layer is first called.
    """
    rules = (rule for rule in BY_KIND if rule.first_call or not first_call)
    return next(filter(None, (rule.why(layer, low) for rule in rules)), "")


def size(layer: keras.layers.Layer) -> int:
    """Returns how many numbers the weights of a layer have, without those in it."""
    return sum(math.prod(weight.shape) for weight in structure.own_weights(layer))


# ---- By the place in a trace ----

_ATTENTION = _KINDS.MultiHeadAttention | _KINDS.GroupQueryAttention


def follows(layer: keras.layers.Layer, holder: keras.layers.Layer) -> bool:
    """Whether Keras runs a layer by the precision of the one that holds it.

    Read in Keras 3.15: `TimeDistributed` calls `layer.call` in its own autocast
    scope; recurrent layers cast what goes into and out of their cell; attention
    layers leave out their softmax and dropout where a fused kernel does both.
    """
    if isinstance(holder, _KINDS.TimeDistributed | _KINDS.RNN | _KINDS.StackedRNNCells):
        return True
    skipped = isinstance(layer, _KINDS.Softmax | _KINDS.Dropout)
    return skipped and isinstance(holder, _ATTENTION)


class Traced(NamedTuple):
    """The result of a trace of a model; without one, all are empty.

    Attributes:
      outputs: {id of a layer: why it stays in float32}, as outputs come from it, or
        pass through it. Layers in it stay with it.
      routes: The same of layers that compute with raw values, or pass them on; not of
        layers in them.
      sources: {id of a normalization: the layers, no normalizations, whose results it
        takes}. The normalization itself is among them if its input is float32 whatever
        those compute in.
      rounded: Names of layers of raw values that get what 16 bits have rounded.
      mixed: Names of operations, of no layer, of raw values and computed ones.
    """

    outputs: dict[int, str] = {}
    routes: dict[int, str] = {}
    sources: dict[int, list] = {}
    rounded: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()


UNTRACED = Traced()
_RAW = "computes with raw values, which 16 bits would round"
NORMALIZES = "normalizes what comes in float32"
_NORMALIZATIONS = (
    _KINDS.BatchNormalization,
    _KINDS.GroupNormalization,
    _KINDS.LayerNormalization,
    _KINDS.RMSNormalization,
)


def traced(model: keras.Model, *args, **kwargs) -> Traced:
    """Reads a trace of a model in inference; the model is not changed.

    Args:
      model: A built model, or one that the trace builds.
      *args, **kwargs: What it is called with: tensors or `tf.TensorSpec`s.
    """
    kwargs["training"] = False
    trace = flow.read_flow(model, args, kwargs, _computes, _takes_exact_values)
    outputs = {id(layer): PASSES_OUTPUT for layer in trace.passing}
    outputs |= {id(layer): OUTPUT for layer in trace.computing if not _is_large(layer)}
    ends = [*(x.name for x in (*trace.exact, *trace.raw)), *trace.mixed, "operators"]
    why = f"passes values on to {ends[0]!r}, and must not round them"
    routes = {id(layer): why for layer in trace.between}
    routes |= {id(layer): _RAW for layer in trace.raw}
    sources = {
        id(x): [y for y in trace.sources.get(id(x), ()) if y is x or not _normalizes(y)]
        for x in structure.layers(model)
        if _normalizes(x)
    }
    rounded = [layer.name for layer in trace.rounded if _takes_raw_values(layer)]
    result = Traced(outputs, routes, sources, tuple(rounded), tuple(trace.mixed))
    records.of(model).traced = structure.layer_ids(model), result
    return result


def _last(model):
    """Returns the result of a model's last trace, if it has the same layers yet."""
    layers, result = records.of(model).traced or (None, None)
    return result if layers == structure.layer_ids(model) else None


def latest(model: keras.Model) -> Traced:
    """Returns the results of traces of the models in one that has none itself."""
    outputs, routes, sources = {}, {}, {}
    for layer in structure.layers(model):
        if last := _last(layer):
            outputs |= last.outputs
            routes |= last.routes
            sources |= last.sources
    return Traced(outputs, routes, sources)


def traced_by(model: keras.Model, inputs: Any = None) -> Traced:
    """Returns `traced` of a model by a batch, or by what it records of its inputs.

    If the model records too little of its inputs, the last trace of it is used, for
    example that of its first call.

    Args:
      model: A built model.
      inputs: Tensors or `tf.TensorSpec`s, structured as the model takes them.

    Raises:
      ExportError: If the inputs are not known, or the model cannot be traced.
    """
    try:
        specs = model_inputs.specs(model) if inputs is None else inputs
    except errors.ExportError:
        if last := _last(model):
            return last
        raise
    with model_inputs.explained(model, "cannot be traced"):
        return traced(model, specs)


def _normalizes(layer):
    return isinstance(layer, _NORMALIZATIONS)


def _is_large(layer):
    shapes = [weight.shape for weight in structure.own_weights(layer)]
    units = max((shape[-1] for shape in shapes if len(shape)), default=0)
    return size(layer) >= _MOST_WEIGHTS or units >= _MOST_UNITS


def _takes_exact_values(layer):
    return _takes_raw_values(layer) or isinstance(layer, _KINDS.Embedding)


def _computes(layer):
    """Whether a layer has weights of its own, or runs its inner layers as its own."""
    if isinstance(layer, keras.Model):
        return False
    inner = structure.children(layer)
    if any(follows(each, layer) for each in inner):
        return not isinstance(layer, _ATTENTION)
    return bool(structure.own_weights(layer))


def check_ids(layer: keras.layers.Embedding, ids: Any = None, *_: Any) -> None:
    """Raises ValueError for ids in a 16-bit format that rounds some of the layer's."""
    dtype = getattr(getattr(ids, "dtype", None), "name", "")
    if isinstance(ids, tf.Tensor) and dtype in formats.LOW:
        # All integers up to two to the power of the bits of the significand.
        exact = 2 / formats.float_format(dtype).epsilon
        if layer.input_dim - 1 > exact:
            raise ValueError(
                f"Ids of {dtype} are rounded above {exact:.0f}. Received: {dtype} "
                f"ids for layer {layer.path!r} of {layer.input_dim} rows. Pass "
                "integers, or keep the model or layer that they come through in "
                "float32."
            )
