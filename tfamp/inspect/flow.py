"""What flows where in a model, read from a trace of it.

Backwards from the outputs: the layers that compute them, and those that pass them on.
Forwards from the inputs: the layers that hand them, unchanged, to some that take them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.inspect import structure, traces

# Operations that move numbers, and compute none.
_MOVES = frozenset(
    "BroadcastTo Cast ConcatV2 ExpandDims GatherV2 GatherNd Identity IdentityN "
    "MirrorPad Pack Pad PadV2 Reshape ResizeNearestNeighbor ReverseV2 Roll SelectV2 "
    "Slice Split SplitV Squeeze StridedSlice Tile Transpose Unpack".split()
)


class Flow(NamedTuple):
    """What a trace shows.

    Attributes:
      computing: Layers that compute outputs.
      passing: Layers, without others in them, that pass outputs on.
      exact: Layers that take floats as they came into the model.
      between: Layers, and models with a `call` of their own, that hand those on.
      rounded: Layers that take floats that were rounded to 16 bits on their way.
    """

    computing: list[keras.layers.Layer]
    passing: list[keras.layers.Layer]
    exact: list[keras.layers.Layer]
    between: list[keras.layers.Layer]
    rounded: list[keras.layers.Layer]


def read(
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

    graph = traces.trace(model, args, kwargs, note)
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
    queue = [p for p in places if id(p.layer) in between | set(map(id, exact))]
    while queue:
        for holder in queue.pop().holders:  # It casts what it takes, too.
            if id(holder.layer) not in between:
                between.add(id(holder.layer))
                queue.append(holder)
    found = [place.layer for place in places if id(place.layer) in between]
    return exact, [x for x in found if not structure.is_functional(x)], rounded


def _is_rounded(tensor):
    while tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_floating:
        tensor = tensor.op.inputs[0]
    return tensor.dtype in (tf.bfloat16, tf.float16)
