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

import keras
import numpy as np
import tensorflow as tf

from tfamp.facts import formats
from tfamp.inspect import structure
from tfamp.precision import policy

# What models of Keras and KerasHub make of themselves when they are first traced.
_TRACED = ("train_function", "test_function", "predict_function", "generate_function")
# Two assignments at a time would put each other's policies back.
EXCLUSIVE = threading.RLock()


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
        for place in structure.walk(model):
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
    layers = [place.layer for place in structure.walk(model)]
    policies = {
        id(layer): "float32" for layer in layers if structure.is_assignable(layer)
    }
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
    for variable in structure.own_weights(layer):
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
    if getattr(variable, "dtype", None) in formats.LOW:
        wide = tf.cast(variable.value, "float32")
        _set(undo, variable, "_dtype", "float32")
        _set(undo, variable, "_value", None)
        variable._initialize(wide)


def _widen_input(undo, layer):
    if layer.output.dtype in formats.LOW:
        _set(undo, layer, "_dtype", "float32")
        _set(undo, layer.output, "_dtype", "float32")


def _widen_operation(undo, operation):
    """Makes float32 the 16-bit dtypes and constants in a node of a graph."""
    if not isinstance(operation, keras.layers.Layer):
        for key, value in list(vars(operation).items()):
            if key != "name" and isinstance(value, str) and value in formats.LOW:
                _set(undo, operation, key, "float32")
    for node in operation._inbound_nodes:
        for part in ("args", "kwargs"):
            wide = keras.tree.map_structure(_widened, getattr(node.arguments, part))
            _set(undo, node.arguments, part, wide)


def _widened(value):
    if isinstance(value, tf.Tensor | np.ndarray | np.generic):
        if tf.as_dtype(value.dtype).name in formats.LOW:
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
