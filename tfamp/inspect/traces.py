"""A trace of a model, its layers watched, and what flows where in it."""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.inspect import structure


def trace(
    model: keras.Model, args: tuple, kwargs: dict[str, Any], note: Callable
) -> tf.Graph:
    """Traces a model, and watches its layers' calls; executes and changes nothing.

    A model that is not built is built by it.

    Args:
      model: A model.
      args, kwargs: What it is called with: tensors, or `tf.TensorSpec`s.
      note: Function of (layer, its inputs, its outputs), lists of tensors; it is called
        after each call of a layer or model, of inner ones first.

    Returns:
      The graph.
    """
    args, kwargs = keras.tree.map_structure(_spec, (args, kwargs))
    layers: list = []
    graph: Any = None
    # Layers that a trace makes are watched in a second one.
    while len(layers) < len(now := [place.layer for place in structure.walk(model)]):
        layers = now
        with unchanged(layers):
            for layer in layers:
                watch(layer, functools.partial(_noted, layer, note))
                if not layer.built:
                    object.__setattr__(layer, "build", _lifted(layer.build))
            forward = tf.function(lambda *a, **k: model(*a, **k), autograph=False)
            with looking():
                graph = forward.get_concrete_function(*args, **kwargs).graph
    return graph


class _Now(threading.local):
    tracing = 0  # Traces around what this thread runs.


_now = _Now()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Scopes calls of a model that only look at it."""
    _now.tracing += 1
    try:
        yield
    finally:
        _now.tracing -= 1


def is_tracing() -> bool:
    """Whether this thread only looks at a model: its call is none of the user's."""
    return _now.tracing > 0


def _spec(x):
    if isinstance(x, tf.Tensor | np.ndarray):
        return tf.TensorSpec(x.shape, x.dtype)
    return x


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


def _noted(layer, note, original):
    def call(*args, **kwargs):
        returned = original(*args, **kwargs)
        note(layer, _tensors((args, kwargs)), _tensors(returned))
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
    kept = [(vars(layer), dict(vars(layer))) for layer in layers]
    for held, before in kept:
        for name in _ADDED:
            if before.get(name) is not None:
                held[name] = copy.copy(before[name])
    try:
        yield
    finally:
        for held, before in kept:
            for name, value in list(held.items()):
                if name in _REPLACED + _ADDED or _holds_tensors(value):
                    held.pop(name)
                    held |= {name: before[name]} if name in before else {}


def _holds_tensors(value):
    leaves = value.values() if isinstance(value, dict) else value
    leaves = leaves if isinstance(value, list | tuple | dict) else [value]
    return any(isinstance(x, tf.Tensor) and tf.is_symbolic_tensor(x) for x in leaves)


# ---- What flows where ----

# Operations that move numbers, and compute none.
_MOVES = frozenset(
    "BroadcastTo Cast ConcatV2 ExpandDims GatherV2 GatherNd Identity IdentityN "
    "MirrorPad Pack Pad PadV2 Reshape ResizeNearestNeighbor ReverseV2 Roll SelectV2 "
    "Slice Split SplitV Squeeze StridedSlice Tile Transpose Unpack".split()
)


class Flow(NamedTuple):
    """What flows where in a model, read from a trace of it.

    Backwards from the outputs: the layers that compute them, and those that pass them
    on. Forwards from the inputs: the layers that pass them, unchanged, to some that
    take them.

    Attributes:
      computing: Layers that compute outputs.
      passing: Layers, without others in them, that pass outputs on.
      exact: Layers that take floats as they came into the model.
      between: Layers, and models with a custom `call`, that pass those on.
      rounded: Layers that take floats that were rounded to 16 bits on their way.
    """

    computing: list[keras.layers.Layer]
    passing: list[keras.layers.Layer]
    exact: list[keras.layers.Layer]
    between: list[keras.layers.Layer]
    rounded: list[keras.layers.Layer]


def read_flow(
    model: keras.Model,
    args: tuple,
    kwargs: dict[str, Any],
    computes: Callable[[keras.layers.Layer], bool],
    takes: Callable[[keras.layers.Layer], bool],
) -> Flow:
    """Traces a model, and reads the trace.

    Args:
      model: A model; one that is not built is built by it.
      args, kwargs: What it is called with: tensors, or `tf.TensorSpec`s.
      computes: Whether a layer computes, and does not only pass on.
      takes: Whether it matters to a layer that values are exact.
    """
    returned: dict[Any, list] = {}
    taken: list[tuple[Any, tf.Tensor]] = []

    def note(layer, inputs, outputs):
        for tensor in outputs:
            returned.setdefault(tensor.ref(), []).append(layer)
        if takes(layer):
            given = map(_uncast, inputs)
            taken.extend((layer, x) for x in given if x.dtype.is_floating)

    graph = trace(model, args, kwargs, note)
    return Flow(
        *_backwards(graph, returned, computes),
        *_forwards(model, graph, taken, returned),
    )


def _uncast(tensor):
    """Returns what was cast to integers, as Keras 3.10 does before `Discretization`."""
    cast = tensor.op.type == "Cast" and not tensor.dtype.is_floating
    return tensor.op.inputs[0] if cast else tensor


def _backwards(graph, returned, computes):
    computing, passing = {}, {}
    queue = [tensor for tensor in graph.outputs if tensor.dtype.is_floating]
    visited = set()
    while queue:
        tensor = queue.pop()
        layers = returned.get(tensor.ref(), [])
        stops = [layer for layer in layers if computes(layer)]
        if tensor.ref() not in visited and not stops:
            queue += tensor.op.inputs
        visited.add(tensor.ref())
        plain = [x for x in layers if x not in stops and not structure.children(x)]
        passing |= {id(layer): layer for layer in plain}
        computing |= {id(layer): layer for layer in stops}
    return [*computing.values()], [*passing.values()]


def _forwards(model, graph, taken, returned):
    captured = {tensor.ref() for tensor in graph.internal_captures}
    inputs = {tensor.ref() for tensor in graph.inputs} - captured
    known: dict[Any, bool] = {}

    def reaches(tensor):
        if (key := tensor.ref()) not in known:
            sources = [x for x in tensor.op.inputs if x.dtype.is_floating]
            moved = tensor.op.type in _MOVES and [*map(reaches, sources)]
            known[key] = key in inputs or (bool(moved) and any(moved))
        return known[key]

    taken = [each for each in taken if each[1].graph is graph]
    exact = [layer for layer, tensor in taken if reaches(tensor)]
    others = [each for each in taken if not reaches(each[1])]
    rounded = [layer for layer, tensor in others if _is_rounded(tensor)]
    if not exact:
        return [], [], rounded
    between = {id(x) for key, on in known.items() if on for x in returned.get(key, ())}
    between -= set(map(id, exact))
    places = structure.walk(model)
    for place in places:
        if id(place.layer) in between or place.layer in exact:
            between |= {id(layer) for layer in _around(place)}  # They cast it, too.
    found = [place.layer for place in places if id(place.layer) in between]
    return exact, [x for x in found if not structure.is_functional(x)], rounded


def _around(place):
    for holder in place.holders:
        yield holder.layer
        yield from _around(holder)


def _is_rounded(tensor):
    while tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_floating:
        tensor = tensor.op.inputs[0]
    return tensor.dtype in (tf.bfloat16, tf.float16)
