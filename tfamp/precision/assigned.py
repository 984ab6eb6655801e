"""Applies a plan to the layers of a model, in place: for good, or for a scope.

In every mode variables are float32, so that the format a layer computes in is a
property of the built layer: the next trace computes in it. Three things that are kept
apart from the policy follow it: variables stored in 16 bits are widened, which is
exact; `Normalization` makes its constants again; an input declared in 16 bits takes
float32.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf

from tfamp import records
from tfamp.facts import formats, modes
from tfamp.inspect import quantized, structure
from tfamp.kernels import bias_gradient
from tfamp.operators import lost_numbers, promotion
from tfamp.precision import plan, policy
from tfamp.storage import recomputed

# What models of Keras and KerasHub make of themselves when they are first traced.
_TRACED = ("train_function", "test_function", "predict_function", "generate_function")
# Two assignments at a time would put each other's policies back.
EXCLUSIVE = threading.RLock()
_scopes: list[keras.Model] = []  # Those in force, under the lock.


@contextlib.contextmanager
def assigned(model: keras.Model, planned: plan.Plan) -> Iterator[None]:
    """Scopes a plan in a model, and its mode in layers that are made in a `call`.

    It has the lock that all assignments share, sets the TF32 flag as the mode does, and
    installs what a step in 16 bits needs. Scopes nest. In float32 the casts and
    constants of 16 bits in a functional model's graph are float32 meanwhile, too. The
    model itself is changed: nothing else may use it in the block. Afterwards all is as
    before, and what the model had traced is valid again.

    Args:
      model: A built model.
      planned: Its plan.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(EXCLUSIVE)
        _scopes.append(model)
        undo.callback(_scopes.pop)
        undo.enter_context(policy.policy_scope(planned.mode.name))
        undo.enter_context(assign(model, planned.rows))
        if planned.mode.policy == "float32":
            for layer in structure.layers(model):
                for operation in getattr(layer, "operations", ()):
                    _widen_operation(undo, operation)
        else:
            for hooks in (bias_gradient.HOOKS, promotion.HOOKS, lost_numbers.HOOKS):
                undo.enter_context(hooks.installed())
        yield


def in_force() -> bool:
    """Whether a scope is in force; to be asked under the lock."""
    return bool(_scopes)


def keep(model: keras.Model, planned: plan.Plan, takes_over: bool) -> None:
    """Applies a plan, of a model or of one around it, to the model for good.

    Args:
      model: The model.
      planned: The plan.
      takes_over: True (`compile`, `set_precision`): layers that have their plan from
        another model get this one, and the model forgets its traces if anything
        changes. False (a first call): only layers without a plan, or with that of a
        model in this one, get it, so calling a part of a model, or another view of its
        layers, changes nothing of it.
    """
    layers = {id(layer): layer for layer in structure.layers(model)}
    inside = structure.layer_ids(planned.model)

    def is_free(layer):
        last = plan.assignment_of(layer)
        root = last and last.root()
        if root is None or id(root) in inside:
            return True
        theirs, ours = (records.of(x).precision_is_set for x in (root, planned.model))
        return takes_over and (ours or not theirs)

    rows = {
        key: row
        for key, row in planned.rows.items()
        if key in layers and is_free(layers[key])
    }
    with EXCLUSIVE:
        changes = any(v.dtype in formats.LOW for v in model.variables) or any(
            quantized.base_name(structure.policy(layers[key])) != name
            for key, (name, _) in rows.items()
        )
        if planned.remat is not None and not records.of(model).remat_is_set:
            free = [layer for layer in layers.values() if is_free(layer)]
            changes |= recompute(free, planned.remat)
        assign(model, rows, takes_over and changes, planned.model)


def recompute(
    layers: Iterable[keras.layers.Layer], patterns: Mapping[int, str]
) -> bool:
    """Has those layers computed again that have a pattern, and no others.

    Args:
      layers: Layers of a model.
      patterns: {id of a layer: pattern}.

    Returns:
      Whether anything changes.
    """
    changes = False
    for layer in layers:
        wanted = patterns.get(id(layer))
        changes |= (recomputed.pattern_of(layer) is None) != (wanted is None)
        recomputed.mark(layer, wanted)
    return changes


def float32(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Scopes float32 in all layers of a model: its twin, without a copy."""
    return assigned(model, plan.Plan(model, modes.get_mode("float32")))


def assign(
    model: keras.layers.Layer,
    rows: Mapping[int, plan.Row],
    forget: bool = True,
    root: keras.layers.Layer | None = None,
) -> contextlib.ExitStack:
    """Gives layers of a model other dtype policies, all of them or none.

    A `tf.function` of the user's that was traced before keeps its precision.

    Args:
      model: A model of any kind, or a layer.
      rows: {id of a layer: (name of a Keras dtype policy, why)}.
      forget: Whether the model forgets what it has traced.
      root: The model whose plan it is, if that is another one.

    Returns:
      What puts everything back when it is closed, traced functions included.
    """
    inside = tf.distribute.get_strategy()
    strategy = getattr(model, "distribute_strategy", None) or inside
    # A replica, in whose step it may be, cannot enter it again.
    scope = contextlib.nullcontext() if strategy is inside else strategy.scope()
    with contextlib.ExitStack() as undo, scope, tf.init_scope():
        for layer in structure.layers(model):
            if isinstance(layer, keras.layers.InputLayer):
                _widen_input(undo, layer)
            elif id(layer) in rows:
                _assign_layer(undo, layer, *rows[id(layer)], root or model)
            if forget:
                _forget_traces(undo, layer)
        return undo.pop_all()


def _set(undo, owner, name, value):
    if name in vars(owner) or isinstance(getattr(type(owner), name, None), property):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _assign_layer(undo, layer, name, reason, root):
    original = plan.made_with(layer)
    is_original = quantized.base_name(original) == name
    new = original if is_original else quantized.policy_of(original, name)
    record = records.of(layer)
    undo.callback(setattr, record, "assignment", record.assignment)
    record.assignment = plan.Assignment(original, new, reason, weakref.ref(root))
    # Through the property, Keras would write into a map, which layers share.
    is_map = isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    held = "_dtype_policy" if is_map else "dtype_policy"
    # A layer that has float8's policy and no scales would make some, now or undone.
    if new.quantization_mode == quantized.FLOAT8:
        quantized.add_scales(undo, layer)
    if new is not structure.policy(layer):
        _set(undo, layer, held, new)
    if new.quantization_mode != quantized.FLOAT8:
        quantized.remove_scales(undo, layer)
    if new.variable_dtype in formats.LOW:  # It was made so.
        return
    states = keras.tree.flatten(getattr(layer, "states", None) or ())
    for variable in (*structure.own_weights(layer), *states):
        _widen_variable(undo, variable)
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        for constant in ("mean", "variance"):
            undo.callback(setattr, layer, constant, getattr(layer, constant, None))
        if layer.input_mean is None:
            layer.finalize_state()
        else:  # The unwrapped method: it makes no variable, and opens no scope.
            type(layer).build(layer, layer._build_input_shape)


def _widen_variable(undo, variable):
    # Not `dtype`: inside of a call, that is the layer's.
    if getattr(variable, "_dtype", None) in formats.LOW:
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
    is_array = isinstance(value, tf.Tensor | np.ndarray | np.generic)
    is_low = is_array and tf.as_dtype(value.dtype).name in formats.LOW
    return tf.cast(value, "float32") if is_low else value


def _forget_traces(undo, layer):
    for name in _TRACED:
        if vars(layer).get(name) is not None:
            _set(undo, layer, name, None)
    for base in (layer, *type(layer).__mro__):
        for name, value in list(vars(base).items()):
            if _is_traced(value) and _is_traced(function := getattr(layer, name)):
                # TensorFlow 2.21; the same options, nothing traced.
                _set(undo, layer, name, function._clone(None))


def _is_traced(value):
    return isinstance(value, tf.types.experimental.PolymorphicFunction)
