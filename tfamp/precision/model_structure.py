"""Reads how a Keras model is made up: its layers, inputs, graph and states."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Keras 3.15 exports neither these functions nor a name for what they read; guarded
# by tests/test_convert.py, like the private names below `path_of`.
from keras.src.backend.common import global_state, name_scope

# Keras 3.15 exports no name for the class of `keras.Model(inputs, outputs)`;
# guarded by tests/test_export.py, like `_run_through_graph` and `_flatten_layers`.
from keras.src.models.functional import Functional


def flatten_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layer and all layers in it, each once, parents first."""
    return layer._flatten_layers()


def is_plain_functional(operation: Any) -> bool:
    """Whether the operation is a model that computes just what its graph shows."""
    # A class with a `call` of its own computes something more.
    return isinstance(operation, Functional) and _calls_as(operation, Functional)


def is_plain_sequential(operation: Any) -> bool:
    """Whether the operation is a model that just calls its layers in turn."""
    is_sequential = isinstance(operation, keras.Sequential)
    return is_sequential and _calls_as(operation, keras.Sequential)


def has_own_class(operation: Any) -> bool:
    """Whether the operation is a functional or sequential model of another class."""
    plain = is_plain_functional(operation) or is_plain_sequential(operation)
    return plain and type(operation) not in (Functional, keras.Model, keras.Sequential)


def _calls_as(operation, cls):
    return type(operation).call is cls.call


def run_graph(model: Any, inputs: Any, replace: Callable, call: Callable) -> Any:
    """Runs a functional model's graph on other inputs with other operations.

    Args:
      model: A functional model.
      inputs: Symbolic tensors, structured as the model's.
      replace: Takes an operation of the graph; returns the one to call instead.
      call: Takes that one and the arguments of the call; returns the outputs.

    Returns:
      Symbolic tensors, structured as the model's outputs.
    """
    return model._run_through_graph(inputs, operation_fn=replace, call_fn=call)


def recurrent_states(layer: keras.layers.Layer) -> list[Any]:
    """Returns a stateful recurrent layer's states, which Keras counts nowhere."""
    states = getattr(layer, "states", None) if _is_stateful(layer) else None
    return [] if states is None else keras.tree.flatten(states)


def _is_stateful(layer):
    return bool(getattr(layer, "stateful", False))


def declared_inputs(model: keras.Model) -> Any:
    """Returns the symbolic inputs of a functional or sequential model, else None.

    A sequential model without an input layer declares the batch size of its first
    call; that is forgotten here, unless a recurrent layer keeps a state for it.
    """
    if isinstance(model, Functional):
        return model.input
    # A sequential model has no `inputs` before it is built.
    if not isinstance(model, keras.Sequential) or not hasattr(model, "inputs"):
        return None
    tensor = model.inputs[0]
    stateful = any(map(_is_stateful, flatten_layers(model)))
    batch = tensor.shape[0] if stateful else None
    shape = (batch, *tensor.shape[1:])
    return keras.KerasTensor(shape, tensor.dtype, tensor.sparse, name=tensor.name)


# ---- Paths ----


def path_of(layer: keras.layers.Layer, around: str = "") -> str:
    """Returns a layer's path; Keras gives none to layers without a `build`.

    Theirs is formed as Keras would: the scope of the first call, and the name. A
    layer that was never called takes the path of the layer around it for a scope.
    """
    if layer.path is not None:
        return layer.path
    scope = around if layer._parent_path is None else layer._parent_path
    return f"{scope}/{layer.name}" if scope else layer.name


def path_in_scope(layer: keras.layers.Layer) -> str:
    """Returns the path that a layer would get if it were built or called now."""
    if layer._parent_path is not None:
        return path_of(layer)
    scope = name_scope.current_path()
    return f"{scope}/{layer.name}" if scope else layer.name


def layer_in_scope() -> keras.layers.Layer | None:
    """Returns the layer whose `build` or call is running in this thread."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    callers = [each.caller for each in reversed(stack)]
    return next((c for c in callers if isinstance(c, keras.layers.Layer)), None)


def was_used(layer: keras.layers.Layer) -> bool:
    """Whether a layer was built by its own `build`, or called, before."""
    # Without either, its `__init__` did not run: Keras says so itself.
    return getattr(layer, "_called", True) or layer.path is not None


def is_built(model: keras.Model) -> bool:
    """Whether a model and its layers are built; Keras says so too soon.

    `build` of a model that defines none marks the model alone as built.
    """
    used = model._called or all(each.built for each in flatten_layers(model))
    return model.built and used


def makes_itself(model: keras.Model) -> bool:
    """Whether the constructor of a model, or Keras that loads it, is running."""
    frame = inspect.currentframe()
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name in ("__init__", "compile_from_config") and names:
            if frame.f_locals.get(names[0]) is model:
                return True
        frame = frame.f_back
    return False


def is_part_of_sequential(layer: keras.layers.Layer, parent: Any) -> bool:
    """Whether a layer is the functional model by which Keras runs a sequential one."""
    is_model = isinstance(layer, Functional) and isinstance(parent, keras.Sequential)
    return is_model and all(each is not layer for each in parent.layers)


def own_scope(layer: keras.layers.Layer) -> contextlib.AbstractContextManager:
    """Opens a layer's name scope; opened in itself, it stays the same one."""
    return layer._open_name_scope()


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers that a layer holds itself."""
    return layer._flatten_layers(include_self=False, recursive=False)


def unsaved_layers(
    model: keras.Model,
) -> list[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """Returns (layer, the layer that holds it) where no configuration has the layer.

    A file then holds its weights; all else, its class makes anew.
    """
    found: dict[int, tuple] = {}
    seen = set()

    def visit(holder, is_saved):
        inner = [] if id(holder) in seen else children(holder)
        seen.add(id(holder))
        names = _saved_names(holder) if inner and is_saved else set()
        for each in inner:
            if names is not None and each.name not in names:
                found[id(each)] = (each, holder)
            visit(each, id(each) not in found)

    visit(model, True)
    return list(found.values())


def _saved_names(holder):
    """Names of the layers in a layer's configuration; None: those of all in it."""
    plain = is_plain_functional(holder) or is_plain_sequential(holder)
    maps = keras.dtype_policies.DTypePolicyMap
    if plain and not has_own_class(holder):
        return None
    if any(isinstance(x.dtype_policy, maps) for x in flatten_layers(holder)):
        return None  # Keras 3.15's `get_config` would change the map.
    try:
        return _names_in(holder.get_config())
    except Exception:  # Code of the user's layers; such a model cannot be saved.
        return set()


def _names_in(config):
    if isinstance(config, list | tuple):
        return set().union(*map(_names_in, config))
    if not isinstance(config, dict):
        return set()
    inner = config.get("config")
    own = {inner.get("name")} if isinstance(inner, dict) else set()
    return own.union(*map(_names_in, config.values()))


# ---- Graphs ----


def refresh_dtypes(model: keras.Model) -> None:
    """Makes the dtypes of symbolic tensors those that the layers now compute.

    Keras writes them down when a functional model is made and never again.
    """
    for layer in reversed(flatten_layers(model)):  # Inner models first.
        graph = layer if isinstance(layer, Functional) else None
        graph = graph or getattr(layer, "_functional", None)  # A sequential model's.
        for node in _computing_nodes(graph) if graph else []:
            _refresh_node(node)


def _computing_nodes(graph):
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def _refresh_node(node):
    operation, arguments = node.operation, node.arguments
    producers = [tensor._keras_history.operation for tensor in arguments.keras_tensors]
    before = [(each, len(each._outbound_nodes)) for each in producers if each]
    outputs = operation(*arguments.args, **arguments.kwargs)
    # That call, and the casts before it, are no part of any graph.
    operation._inbound_nodes.pop()
    for producer, count in before:
        del producer._outbound_nodes[count:]
    for old, new in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
        old._dtype = new.dtype


def output_chains(
    model: keras.Model, inputs: Any, stops: Callable[[Any], bool]
) -> list[tuple[keras.layers.Layer, bool]]:
    """Finds the layers that make a model's floating outputs, from a trace of it.

    Args:
      model: A built model; it is traced in inference, and not changed.
      inputs: `tf.TensorSpec`s or tensors, structured as the model takes them.
      stops: Whether the layers behind a layer have nothing to do with an output
        any more: it computes from weights.

    Returns:
      (layer, whether the search stopped there), each layer once, from the output
      backward. Layers that only pass on or reshape come before those that stop.
    """
    returned: dict[Any, list] = {}
    with _recorded_calls(flatten_layers(model), returned):
        function = tf.function(lambda x: model(x, training=False), autograph=False)
        graph = function.get_concrete_function(inputs).graph
    found: dict[int, tuple] = {}
    queue = [tensor for tensor in graph.outputs if tensor.dtype.is_floating]
    visited = set()
    while queue:
        tensor = queue.pop(0)
        if _key(tensor) in visited:
            continue
        visited.add(_key(tensor))
        chain = [(layer, stops(layer)) for layer in returned.get(_key(tensor), [])]
        found.update({id(layer): (layer, stop) for layer, stop in chain})
        if not any(stop for _, stop in chain):
            queue += tensor.op.inputs
    return list(found.values())


def _key(tensor):
    return id(tensor.graph), tensor.name


@contextlib.contextmanager
def _recorded_calls(layers, returned) -> Iterator[None]:
    """While a model is traced, notes which layers returned each tensor."""
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer in layers:
            vars(layer)["call"] = _recording(layer, layer.call, returned)
        yield
    finally:
        for layer, call in before:
            vars(layer).pop("call")
            if call is not None:
                vars(layer)["call"] = call


def _recording(layer, original, returned):
    @functools.wraps(original)
    def call(*args, **kwargs):
        outputs = original(*args, **kwargs)
        for tensor in keras.tree.flatten(outputs):
            if tf.is_symbolic_tensor(tensor):
                returned.setdefault(_key(tensor), []).append(layer)
        return outputs

    return call
