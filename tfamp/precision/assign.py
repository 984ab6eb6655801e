"""Assigns dtype policies to the layers of a built model, in place, and puts them back.

In every mode variables are float32, so that the format a layer computes in is a
property of the built layer: the next trace computes in it. Three things that are kept
apart from the policy follow it: variables stored in 16 bits are widened, which is
exact; `Normalization` makes its constants again; an input declared in 16 bits takes
float32.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp import names
from tfamp.precision import policy

LOW = ("bfloat16", "float16")
_ASSIGNABLE = (*LOW, "float32")  # A float64 layer is one on purpose.
# What models of Keras and KerasHub make of themselves when they are first traced.
_TRACED = ("train_function", "test_function", "predict_function", "generate_function")
# Two assignments at a time would put each other's policies back.
EXCLUSIVE = threading.RLock()


class Place(NamedTuple):
    """Where a layer is in a model.

    Attributes:
      layer: The layer.
      path: Names from the outermost layer to it, with slashes. The name of a functional
        model is left out, as in Keras' own paths.
      holders: Places of those that hold it; a shared layer has several, a model none.
    """

    layer: keras.layers.Layer
    path: str
    holders: list["Place"]


def walk(model: keras.layers.Layer) -> list[Place]:
    """Returns the place of a model and of each layer in it, parents first.

    Formed from the structure: Keras (<= 3.15) gives no path to layers without a
    `build`, and a shorter one to layers that are loaded from a file.
    """
    found: dict[int, Place] = {}

    def visit(layer, scope, *holders):
        if id(layer) in found:
            found[id(layer)].holders.extend(holders)
            return
        path = f"{scope}/{layer.name}" if scope else layer.name
        found[id(layer)] = place = Place(layer, path, list(holders))
        for each in children(layer):
            visit(each, "" if is_functional(layer) else path, place)

    visit(model, "")
    return list(found.values())


def check_built(model: Any, error: type[Exception] = ValueError) -> None:
    """Raises TypeError if this is no model, `error` if it is not built."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {type(model).__name__}."
        )
    if not model.built:
        raise error(
            f"Model {model.name!r} is not built, so its layers and inputs are not "
            "known. Call it on a batch first, or build it under `tfamp.enable` or "
            "`tfamp.policy_scope`. Of a model that has no `call`, take its parts."
        )


def is_functional(layer: Any) -> bool:
    """Whether a layer is a model made of a graph, as `keras.Model(inputs, outputs)`."""
    return isinstance(layer, keras.Model) and hasattr(type(layer), "operations")


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers that a layer holds itself, each once."""
    # A sequential model keeps a functional one of the same layers (Keras <= 3.15).
    twin = getattr(layer, "_functional", None)
    held = names.flatten_layers(layer, include_self=False, recursive=False)
    return [each for each in held if each is not twin]


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer that no layer in it has."""
    theirs = {id(weight) for each in children(layer) for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in theirs]


def is_assignable(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a precision to choose; ids, strings and files have none."""
    fixed = (keras.layers.InputLayer, keras.layers.TFSMLayer)
    return layer.compute_dtype in _ASSIGNABLE and not isinstance(layer, fixed)


def assign(model: keras.Model, policies: Mapping[int, str]) -> contextlib.ExitStack:
    """Gives layers of a built model other dtype policies, all of them or none.

    The model forgets what was traced. A `tf.function` of the user's that was traced
    before keeps its precision.

    Args:
      model: A built model, of any kind.
      policies: {id of a layer: name of a Keras dtype policy}.

    Returns:
      What puts everything back when it is closed, traced functions included.
    """
    inside = tf.distribute.get_strategy()
    strategy = getattr(model, "distribute_strategy", None) or inside
    # A replica, in whose step it may be, cannot enter it again.
    scope = contextlib.nullcontext() if strategy is inside else strategy.scope()
    with contextlib.ExitStack() as undo, scope, tf.init_scope():
        for place in walk(model):
            layer = place.layer
            if isinstance(layer, keras.layers.InputLayer):
                _widen_input(undo, layer)
            elif id(layer) in policies:
                _assign_layer(undo, layer, policies[id(layer)])
            _forget_traces(undo, layer)
        return undo.pop_all()


@contextlib.contextmanager
def assigned_float32(model: keras.Model) -> Iterator[None]:
    """Scopes float32 in all layers of a model, and in those made in a `call`.

    The casts and constants of 16 bits in a functional model's graph are float32
    meanwhile, too. The model itself is changed: nothing else may use it in the block.
    What it had traced is valid again afterwards.
    """
    layers = [place.layer for place in walk(model)]
    policies = {id(layer): "float32" for layer in layers if is_assignable(layer)}
    with EXCLUSIVE, policy.policy_scope("float32"), assign(model, policies) as undo:
        for layer in layers:
            for operation in getattr(layer, "operations", ()):
                _widen_operation(undo, operation)
        yield


def _set(undo, owner, name, value):
    if name in vars(owner) or isinstance(getattr(type(owner), name, None), property):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _assign_layer(undo, layer, name):
    # Through the property, Keras would write into a map, which layers share.
    is_map = isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    held = "_dtype_policy" if is_map else "dtype_policy"
    _set(undo, layer, held, keras.dtype_policies.get(name))
    for variable in own_weights(layer):
        _widen_variable(undo, variable)
    for state in keras.tree.flatten(getattr(layer, "states", None) or ()):
        _widen_variable(undo, state)
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        for constant in ("mean", "variance"):
            undo.callback(setattr, layer, constant, getattr(layer, constant, None))
        if layer.input_mean is None:
            layer.finalize_state()
        else:  # The unwrapped method: it makes no variable, and opens no scope.
            type(layer).build(layer, layer._build_input_shape)


def _widen_variable(undo, variable):
    if getattr(variable, "dtype", None) in LOW:
        wide = tf.cast(variable.value, "float32")
        _set(undo, variable, "_dtype", "float32")
        _set(undo, variable, "_value", None)
        variable._initialize(wide)


def _widen_input(undo, layer):
    if layer.output.dtype in LOW:
        _set(undo, layer, "_dtype", "float32")
        _set(undo, layer.output, "_dtype", "float32")


def _widen_operation(undo, operation):
    """Makes float32 the 16-bit dtypes and constants in a node of a graph."""
    if not isinstance(operation, keras.layers.Layer):
        for key, value in list(vars(operation).items()):
            if key != "name" and isinstance(value, str) and value in LOW:
                _set(undo, operation, key, "float32")
    for node in operation._inbound_nodes:
        for part in ("args", "kwargs"):
            wide = keras.tree.map_structure(_widened, getattr(node.arguments, part))
            _set(undo, node.arguments, part, wide)


def _widened(value):
    if isinstance(value, tf.Tensor | np.ndarray | np.generic):
        if tf.as_dtype(value.dtype).name in LOW:
            return tf.cast(value, "float32")
    return value


def _forget_traces(undo, layer):
    for name in _TRACED:
        if vars(layer).get(name) is not None:
            _set(undo, layer, name, None)
    for base in (layer, *type(layer).__mro__):
        for name, value in list(vars(base).items()):
            if _is_traced(value) and _is_traced(found := getattr(layer, name)):
                # TensorFlow 2.21; the same options, nothing traced.
                _set(undo, layer, name, found._clone(None))


def _is_traced(value):
    return isinstance(value, tf.types.experimental.PolymorphicFunction)
