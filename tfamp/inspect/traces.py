"""A trace of a model, its layers watched."""

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.inspect import structure


class Call(NamedTuple):
    """A call of a layer in a trace.

    Attributes:
      layer: The layer or model.
      inputs, outputs: Its tensors.
      operations: Indices of its operations among the graph's, which has those of layers
        in it, too.
    """

    layer: keras.layers.Layer
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    operations: range


def trace(
    model: keras.Model, args: tuple, kwargs: dict[str, Any]
) -> tuple[tf.Graph, list[Call]]:
    """Traces a model, and watches its layers' calls; executes and changes nothing.

    A model that is not built is built by it.

    Args:
      model: A model.
      args, kwargs: What it is called with: tensors, or `tf.TensorSpec`s.

    Returns:
      The graph, and the calls, of inner layers first; also those in the graphs of loops
      and branches.
    """
    args, kwargs = keras.tree.map_structure(_spec, (args, kwargs))
    layers, calls = [], []
    graph: Any = None
    # Layers that a trace makes are watched in a second one.
    while len(layers) < len(now := structure.layers(model)):
        layers, calls = now, []
        with unchanged(layers):
            for layer in layers:
                watch(layer, functools.partial(_noted, layer, calls))
                if not layer.built:
                    object.__setattr__(layer, "build", _lifted(layer.build))
            forward = tf.function(lambda *a, **k: model(*a, **k), autograph=False)
            with looking():
                graph = forward.get_concrete_function(*args, **kwargs).graph
    return graph, calls


_is_tracing = contextvars.ContextVar("is_tracing", default=False)


def looking() -> contextlib.AbstractContextManager[None]:
    """Scopes calls of a model that only look at it."""
    return graph_context.during(_is_tracing, True)


def is_tracing() -> bool:
    """Whether this thread only looks at a model: its call is none of the user's."""
    return _is_tracing.get()


def _spec(x):
    is_array = isinstance(x, tf.Tensor | np.ndarray)
    return tf.TensorSpec(x.shape, x.dtype) if is_array else x


def watch(owner: keras.Operation, replacing: Callable[[Callable], Callable]) -> None:
    """Replaces the `call` of a layer or an operation, until `unchanged` ends.

    Args:
      owner: The layer or operation.
      replacing: Function of its `call` that returns another one.
    """
    is_quantized = getattr(owner, "quantization_mode", None) is not None
    name = "quantized_call" if is_quantized else "call"
    original = getattr(owner, name)
    # The tensors of a `tf.function` are of a graph of its own.
    original = getattr(original, "python_function", original)
    # Past Keras, which would look for layers and variables in it.
    object.__setattr__(owner, name, replacing(original))


def _noted(layer, calls, original):
    def call(*args, **kwargs):
        graph = tf.compat.v1.get_default_graph()
        began = graph.version  # How many operations it has.
        returned = original(*args, **kwargs)
        taken, made = _tensors((args, kwargs)), _tensors(returned)
        calls.append(Call(layer, taken, made, range(began, graph.version)))
        return returned

    return call


def _lifted(build):
    """Tensors that `build` makes, and keeps, are to be valid after the trace."""

    @functools.wraps(build)  # Keras reads its parameters.
    def lifted(*args, **kwargs):
        with tf.init_scope():
            return build(*args, **kwargs)

    return lifted


def _tensors(nested):
    return [x for x in keras.tree.flatten(nested) if tf.is_symbolic_tensor(x)]


# While a model is traced; Keras turns XLA off for what cuDNN's kernels compute.
_REPLACED = ("call", "quantized_call", "build", "supports_jit")
# Keras 3.15 has no public setter of what `add_loss` and activity regularizers add;
# guarded by tests/contract/test_audit.py.
_ADDED = ("_losses", "_loss_ids")


@contextlib.contextmanager
def unchanged(layers: Iterable[keras.Operation]) -> Iterator[None]:
    """Scopes a trace: afterwards no layer holds a tensor, a loss or a `call` of it.

    Everything else stays as it is then: other threads may use the model meanwhile.
    """
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    for held, before in attributes:
        for name in _ADDED:
            if before.get(name) is not None:
                held[name] = copy.copy(before[name])
    try:
        yield
    finally:
        for held, before in attributes:
            for name, value in list(held.items()):
                if name in _REPLACED + _ADDED or _holds_tensors(value):
                    held.pop(name)
                    held |= {name: before[name]} if name in before else {}


def _holds_tensors(value):
    leaves = value.values() if isinstance(value, dict) else value
    leaves = leaves if isinstance(value, list | tuple | dict) else [value]
    return any(isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x) for x in leaves)


def all_nodes(definition: tf.compat.v1.GraphDef) -> list:
    """Returns the nodes of a graph, and of its functions."""
    functions = definition.library.function
    return [*definition.node, *(node for each in functions for node in each.node_def)]


def meta_graph(
    graph: tf.Graph, definition: tf.compat.v1.GraphDef
) -> tf.compat.v1.MetaGraphDef:
    """Returns what Grappler takes: a function's definition, and what it is run for."""
    meta = tf.compat.v1.train.export_meta_graph(graph_def=definition, graph=graph)
    meta.ClearField("collection_def")  # Variables, whose initializers are elsewhere.
    fetches = meta.collection_def["train_op"].node_list.value
    fetches.extend(tensor.name for tensor in graph.outputs)
    fetches.extend(operation.name for operation in graph.control_outputs)
    return meta
