"""Layers that Keras quantizes: their policies, float8's scales, and the way back.

Integers (`model.quantize("int8")`, "int4", "gptq", "awq") are how a weight is stored,
as bfloat16 or 8-bit slots are: a plan leaves them, and decides what the layer computes
in otherwise. float8 is a format that a plan assigns to a layer, and takes back:
`quantize("float8")` adds variables for its scales, which go with it.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.facts import graph_context
from tfamp.inspect import structure

FLOAT8 = "float8"
_PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)
# Tensor cores take float8 in sizes of 16 (Transformer Engine, torchao); a smaller
# product costs more in scales than it gains.
_MULTIPLE, _LEAST = 16, 2**16
_E4M3, _E5M2 = 448.0, 57344.0  # The largest numbers of the two formats.
_ADDED = tuple(
    f"{of}_{what}"
    for of in ("inputs", "kernel", "outputs_grad")
    for what in ("scale", "amax_history")
)
# Layer -> largest absolute input and output gradient, while `calibrated` is in force.
_seen: contextvars.ContextVar[dict] = contextvars.ContextVar("seen")


# ---- Policies ----


def name_of(policy: keras.DTypePolicy) -> str:
    """Returns the name of a policy.

    Saving a KerasHub backbone sets that of quantized ones to None, and loading it makes
    "..._from_None" of that (Keras 3.15, `DTypePolicyMap.get_config`).
    """
    if policy.name is not None and not policy.name.endswith("_from_None"):
        return policy.name
    return f"{policy.get_config()['mode']}_from_{_source(policy)}"


def base_name(policy: keras.DTypePolicy) -> str:
    """Returns the name of a policy, of one of integers that which it is made from."""
    if policy.quantization_mode in (None, FLOAT8):
        return name_of(policy)
    return _source(policy)


def _source(policy):
    low, stored = policy.compute_dtype, policy.variable_dtype
    by_dtypes = low if low == stored else f"mixed_{low}"
    return policy.get_config()["source_name"] or by_dtypes


def policy_of(policy: keras.DTypePolicy, name: str) -> keras.DTypePolicy:
    """Returns the policy by a name, with the integers of the one a layer has."""
    if policy.quantization_mode in (None, FLOAT8):
        return keras.dtype_policies.get(name)
    source = name.rpartition("_from_")[2]
    return type(policy).from_config({**policy.get_config(), "source_name": source})


def quantization_of(layer: keras.layers.Layer) -> str | None:
    """Returns how a layer is quantized, as "int8"; None if it is not."""
    return structure.policy(layer).quantization_mode


def multiplies(layer: keras.layers.Layer) -> bool:
    """Whether a layer is of the kinds for which Keras has float8."""
    return type(layer) in _PRODUCTS


def why_not_float8(layer: keras.layers.Layer, any_size: bool = False) -> str:
    """Returns why a layer does not compute in float8; empty if it does.

    Args:
      layer: A built layer.
      any_size: Whether small products count, too.
    """
    if not multiplies(layer):
        return "Keras has float8 for Dense and EinsumDense"
    if quantization_of(layer) not in (None, FLOAT8):
        return f"its weights are {quantization_of(layer)}"
    if getattr(layer, "lora_enabled", False):
        return "Keras has no float8 with LoRA"
    rows, *others = layer.kernel.shape if layer.built else (0,)
    columns = math.prod(others)
    odd = rows % _MULTIPLE or columns % _MULTIPLE
    if not any_size and (odd or rows * columns < _LEAST):
        return "float8 needs 2^16 weights or more, and sizes that are multiples of 16"
    return ""


def check_graph(model: keras.Model, has_float8: bool) -> None:
    """Checks that a model with float8 layers trains in a graph.

    Raises:
      UnsupportedModeError: If it has them and `run_eagerly` is on.
    """
    if has_float8 and model.run_eagerly:
        raise errors.UnsupportedModeError(
            "Keras trains float8 only in a graph. Received: a model with float8 layers "
            f"and run_eagerly=True ({model.name!r}). Compile it with "
            "run_eagerly=False, or use 'mixed_bfloat16'."
        )


# ---- float8's scales ----


def add_scales(undo: contextlib.ExitStack, layer: keras.layers.Layer) -> None:
    """Adds the variables of float8 to a layer that lacks them.

    A kernel's scale begins by its largest weight; those of inputs and gradients by
    what was seen (`calibrated`), else at 1, as in Keras, until the second step.

    Args:
      undo: Takes back what is done.
      layer: A built layer of those that have float8.
    """
    if _scales(layer):
        return
    policy, config = layer._dtype_policy, getattr(layer, "quantization_config", None)
    # Else Keras would write the new policy into a map that other layers share.
    layer._dtype_policy = keras.dtype_policies.get(f"{FLOAT8}_from_float32")
    layer.quantize(FLOAT8)
    layer._dtype_policy, layer.quantization_config = policy, config
    undo.callback(_drop, layer)
    inputs, gradients = _seen.get({}).get(id(layer), (0.0, 0.0))
    for name, amax, largest in (
        ("kernel", _amax(layer.kernel), _E4M3),
        ("inputs", inputs, _E4M3),
        ("outputs_grad", gradients, _E5M2),
    ):
        if amax > 0:
            getattr(layer, f"{name}_scale").assign(amax / largest)


def remove_scales(undo: contextlib.ExitStack, layer: keras.layers.Layer) -> None:
    """Removes the variables of float8 from a layer that has them.

    Args:
      undo: Takes back what is done.
      layer: A layer that computes in float8 no longer.
    """
    if scales := _scales(layer):
        _drop(layer)
        undo.callback(_put_back, layer, scales)


def _scales(layer):
    """A layer of int8 has a `kernel_scale`, too."""
    scales = {name: vars(layer)[name] for name in _ADDED if name in vars(layer)}
    return scales if len(scales) == len(_ADDED) else {}


def _put_back(layer, scales):
    layer._tracker.unlock()
    for name, variable in scales.items():
        setattr(layer, name, variable)
    layer._tracker.lock()
    layer._is_quantized = True


def _drop(layer):
    for name in _ADDED:
        layer._untrack_variable(getattr(layer, name))
        # Keras' own `__delattr__` collects garbage each time.
        super(keras.layers.Layer, layer).__delattr__(name)
    layer._is_quantized = False


def calibrated(
    seen: Mapping[int, tuple[float, float]],
) -> contextlib.AbstractContextManager[None]:
    """Scopes what float8's scales begin by.

    Args:
      seen: {id of a layer: (largest absolute input, largest absolute gradient of its
        outputs)}.
    """
    return graph_context.during(_seen, {**_seen.get({}), **seen})


def largest(model, paths, passes, scale) -> dict[int, tuple[float, float]]:
    """Returns what `calibrated` takes, of the calls of a float32 pass.

    Args:
      model: The model.
      paths: (path of the layer, number of the call) of each call.
      passes: The tensors of each: `inputs`, and the gradients of its results in
        `upstream`.
      scale: The loss scale of the pass in float8.
    """
    ids = {place.path: id(place.layer) for place in structure.walk(model)}
    maxima: dict[int, tuple[float, float]] = {}
    for (path, _), each in zip(paths, passes, strict=True):
        inputs, gradients = maxima.get(ids.get(path, 0), (0.0, 0.0))
        maxima[ids.get(path, 0)] = (
            max([inputs, *map(_amax, each.inputs)]),
            max([gradients, *(_amax(x) * scale for x in each.upstream)]),
        )
    return maxima


def _amax(x):
    return float(tf.reduce_max(tf.abs(x))) if tf.size(x) else 0.0


# ---- Integers as floats ----


@contextlib.contextmanager
def dequantized(model: keras.Model) -> Iterator[None]:
    """Scopes float weights in place of integers in all layers of a model, LoRA merged.

    Raises:
      ValueError: If a layer is of a kind that has no such weights. Nothing is changed.
    """
    weights = [
        (place.layer, *_float_weights(place))
        for place in structure.walk(model)
        if quantization_of(place.layer) not in (None, FLOAT8)
    ]
    with contextlib.ExitStack() as undo:
        for layer, name, value in weights:
            kernel = keras.Variable(value, dtype="float32", name=name.strip("_"))
            bias = getattr(layer, "bias", None)
            new = {
                name: kernel,
                "_trainable_variables": [kernel] + [bias] * (bias is not None),
                "_non_trainable_variables": [],
                "_dtype_policy": keras.dtype_policies.get(
                    base_name(structure.policy(layer))
                ),
                "lora_enabled": False,
            }
            held = vars(layer)
            undo.callback(held.update, {key: held[key] for key in new if key in held})
            for key in new.keys() - held.keys():
                undo.callback(held.pop, key)
            held.update(new)
        yield


def _float_weights(place):
    """Returns the name and the value of what a layer computes with, in float32."""
    layer = place.layer
    policy = layer._dtype_policy
    layer._dtype_policy = policy_of(structure.policy(layer), "float32")
    try:
        if isinstance(layer, keras.layers.Embedding):
            return "_embeddings", layer(tf.range(layer.input_dim))
        if isinstance(layer, _PRODUCTS):
            return "_kernel", _kernel_of(layer)
    finally:
        layer._dtype_policy = policy
    raise ValueError(
        "Only Dense, EinsumDense and Embedding can be dequantized. Received: "
        f"{place.path!r} ({type(layer).__name__})."
    )


def _kernel_of(layer):
    """A kernel in floats: what the gradient of a layer's inputs multiplies with.

    So that it is right however Keras packs and scales the integers.
    """
    taken, kernel, output, sizes = _axes(layer)
    summed = [x for x in kernel if x in taken]
    free = [x for x in kernel if x not in summed]
    rows = math.prod(sizes[x] for x in free)
    # The last such axis: TensorFlow 2.19 writes beyond a product of [n, 1, h, r] by
    # [r, d] (`matmul` with oneDNN).
    batch = [x for x in taken if x not in summed][-1]
    sizes = dict.fromkeys((*taken, *output), 1) | {x: sizes[x] for x in kernel}
    sizes[batch] = rows
    # A row of inputs for each unit, the gradient of whose outputs is 1 for that unit.
    inputs = tf.zeros([sizes[x] for x in taken])
    units = tf.reshape(tf.eye(rows), [rows, *(sizes[x] for x in free)])
    order = [x for x in output if x == batch or x in free]
    units = tf.einsum(f"{batch}{''.join(free)}->{''.join(order)}", units)
    activation, layer.activation = layer.activation, keras.activations.linear
    try:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs)
    finally:
        layer.activation = activation
    units = tf.reshape(units, [sizes[x] for x in output])
    gradient = tape.gradient(outputs, inputs, units)
    order = "".join(x for x in taken if x == batch or x in summed)
    gradient = tf.reshape(gradient, [sizes[x] for x in order])
    gradient = tf.einsum(f"{order}->{batch}{''.join(summed)}", gradient)
    whole = tf.reshape(gradient, [sizes[x] for x in (*free, *summed)])
    return tf.einsum(f"{''.join((*free, *summed))}->{kernel}", whole)


def _axes(layer):
    """Returns the axes of inputs, kernel and outputs as letters, and their sizes."""
    shape = layer.get_build_config()["input_shape"]
    if isinstance(layer, keras.layers.Dense):
        return "zx", "xy", "zy", {"x": shape[-1], "y": layer.units}
    inputs, output = layer.equation.split("->")
    taken, kernel = inputs.split(",")
    more = "ABCDEFGH"[: len(shape) - len(taken.replace("...", ""))]
    taken, output = (x.replace("...", more) for x in (taken, output))
    sizes = dict(zip(output, layer.compute_output_shape(shape), strict=True))
    return taken, kernel, output, sizes | dict(zip(taken, shape, strict=True))
