"""What flows where in a model, read from a trace of it.

Backwards from the outputs: the layers that compute them, and those that pass them on.
Forwards from the floating inputs, each tensor is one of three:

| tensor | is |
|---|---|
| raw | an input, or computed from inputs before any product |
| computed | behind a matrix product, convolution, embedding, loop or call |
| neither | weights, constants, integers and what is computed from these alone |

The result of an operation that only moves numbers is raw if any input is raw. That of
any other operation is raw if an input is raw and none is computed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.inspect import quantized, structure, traces

_RAW, _COMPUTED = "raw", "computed"
# Operations that move numbers, and compute none.
_MOVES = frozenset(
    "BroadcastTo Cast ConcatV2 ExpandDims ExtractImagePatches GatherV2 GatherNd "
    "Identity IdentityN MirrorPad Pack Pad PadV2 Reshape ResizeNearestNeighbor "
    "ReverseV2 Roll SelectV2 Slice Split SplitV Squeeze StridedSlice Tile Transpose "
    "Unpack".split()
)
# In the names of operations after which values are computed.
_PRODUCTS = ("MatMul", "Conv", "Einsum", "Gather", "Call", "While", "If", "Case")


class Flow(NamedTuple):
    """What flows where in a model.

    Attributes:
      computing: Layers that compute outputs.
      passing: Layers, without others in them, that pass outputs on.
      exact: Layers that take raw values, for which it matters that they are exact.
      raw: Layers that compute with raw values. A layer without others in it takes raw
        values alone; one that holds others takes some. Layers whose only operation on
        raw values is a product are not among these.
      between: Layers, and models with a custom `call`, that pass raw values on to
        those, or to operations in models of a graph.
      rounded: Layers to which exact values matter, and that take what was rounded to
        16 bits.
      sources: {id of a layer: the layers that returned what it takes}; the layer itself
        is among them if its floats were cast from float32 just before it.
      mixed: Names of operations, in models of a graph, that compute with raw values and
        computed ones.
    """

    computing: list[keras.layers.Layer]
    passing: list[keras.layers.Layer]
    exact: list[keras.layers.Layer]
    raw: list[keras.layers.Layer]
    between: list[keras.layers.Layer]
    rounded: list[keras.layers.Layer]
    sources: dict[int, list[keras.layers.Layer]]
    mixed: list[str]


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
    graph, calls = traces.trace(model, args, kwargs)
    calls = [x for x in calls if any(y.graph is graph for y in (*x.inputs, *x.outputs))]
    returned: dict[Any, list] = {}
    for call in calls:
        for tensor in call.outputs:
            returned.setdefault(tensor.ref(), []).append(call.layer)
    return Flow(
        *_backwards(graph, returned, computes),
        *_forwards(model, graph, calls, returned, takes),
    )


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


def _forwards(model, graph, calls, returned, takes):
    kinds = _kinds(graph)

    def is_raw(tensor):
        return kinds.get(tensor.ref()) == _RAW

    raw, mixed, wide, queue = _with_raw(graph, calls, is_raw)
    exact, rounded, sources = {}, {}, {}
    for layer, inputs, _, _ in calls:
        taken = [x for x in map(_uncast, inputs) if x.dtype.is_floating]
        if takes(layer) and any(map(is_raw, taken)):
            exact[id(layer)] = layer
            queue += filter(is_raw, taken)
        elif takes(layer) and any(_source(x).dtype in _LOW for x in taken):
            rounded[id(layer)] = layer
        for x in taken:
            source = _source(x)
            is_wide = x.dtype in _LOW and source.dtype == tf.float32
            itself = [layer] if is_wide or source.ref() in wide else []
            sources.setdefault(id(layer), []).extend(
                itself or returned.get(source.ref(), [])
            )
    marked = exact | raw
    between = _between(model, returned, is_raw, queue, marked)
    rows = map(list, map(dict.values, (exact, raw, between, rounded)))
    return *rows, sources, mixed


def _with_raw(graph, calls, is_raw):
    """Returns what computes with raw values.

    Returns:
      Layers by id; names of operations in models of a graph, that mix raw values with
      computed ones; references of what these make, which is float32; raw tensors that
      are computed with.
    """
    owners: dict[int, keras.layers.Layer] = {}
    for layer, _, _, operations in calls:
        owners |= dict.fromkeys(set(operations) - owners.keys(), layer)
    raw, mixed, wide = {}, [], set()
    used: list[tf.Tensor] = []
    for index, operation in enumerate(graph.get_operations()):
        layer, all_raw = owners.get(index), all(map(is_raw, operation.outputs))
        floats = [x for x in operation.inputs if x.dtype.is_floating]
        raw_inputs = [x for x in floats if is_raw(x)]
        if layer is None or not (raw_inputs or any(x.ref() in wide for x in floats)):
            continue
        mixes = _is_graph(layer) and not all_raw
        if mixes and not _ends(operation):
            wide |= {x.ref() for x in operation.outputs}
        if not raw_inputs or operation.type in _MOVES or _ends(operation):
            continue
        if mixes:
            mixed.append(operation.name.split("/")[-1])
        elif quantized.quantization_of(layer):
            continue  # It scales its inputs before its product, in any format.
        elif not _is_graph(layer) and (all_raw or structure.children(layer)):
            raw[id(layer)] = layer
        used += raw_inputs
    return raw, mixed, wide, used


def _is_graph(layer):
    return structure.is_functional(layer) or isinstance(layer, keras.Sequential)


def _between(model, returned, is_raw, queue, marked):
    """Returns, by id, the layers that pass raw values on to those that are marked."""
    visited, ids = set(), set()
    while queue:
        tensor = queue.pop()
        if tensor.ref() not in visited:
            visited.add(tensor.ref())
            queue += filter(is_raw, tensor.op.inputs)
            ids |= {id(layer) for layer in returned.get(tensor.ref(), ())}
    places = structure.walk(model)
    for place in places:
        if id(place.layer) in ids | marked.keys():
            ids |= {id(layer) for layer in _around(place)}  # They cast it, too.
    layers = {
        id(x.layer): x.layer for x in places if id(x.layer) in ids - marked.keys()
    }
    return {key: x for key, x in layers.items() if not structure.is_functional(x)}


_LOW = (tf.bfloat16, tf.float16)


def _kinds(graph):
    """Returns {reference of a tensor: whether it is raw, or computed}; see above."""
    captured = {tensor.ref() for tensor in graph.internal_captures}
    inputs = {tensor.ref() for tensor in graph.inputs} - captured
    kinds: dict[Any, str] = {}
    for operation in graph.get_operations():  # In the order in which they were made.
        if operation.type == "IdentityN":  # Of a custom gradient: inputs, too.
            pairs = zip(operation.outputs, operation.inputs, strict=True)
            kinds |= {y.ref(): kinds[x.ref()] for y, x in pairs if x.ref() in kinds}
            continue
        input_kinds = {kinds.get(x.ref()) for x in operation.inputs}
        of_integers = [x for x in operation.inputs if not x.dtype.is_floating]
        # The product of a quantized layer is one of integers.
        product = "MatMul" in operation.type or "Conv" in operation.type
        product |= any(kinds.get(x.ref()) == _COMPUTED for x in of_integers)
        for tensor in operation.outputs:
            if tensor.ref() in inputs and tensor.dtype.is_floating:
                kinds[tensor.ref()] = _RAW
            elif tensor.dtype.is_floating and (kind := _kind(operation, input_kinds)):
                kinds[tensor.ref()] = kind
            elif product and not tensor.dtype.is_floating:
                kinds[tensor.ref()] = _COMPUTED
    return kinds


def _kind(operation, input_kinds):
    if operation.type in _MOVES and _RAW in input_kinds:
        return _RAW
    if _COMPUTED in input_kinds or any(each in operation.type for each in _PRODUCTS):
        return _COMPUTED
    return _RAW if _RAW in input_kinds else None


def _ends(operation):
    """Whether raw values end in an operation: a product, or one without floats."""
    product = any(each in operation.type for each in _PRODUCTS)
    floats = [x.dtype.is_floating for x in operation.outputs]
    return operation.type not in _MOVES and (product or not floats or not all(floats))


def _uncast(tensor):
    """Returns what was cast to integers, as Keras 3.10 does before `Discretization`."""
    cast = tensor.op.type == "Cast" and not tensor.dtype.is_floating
    return tensor.op.inputs[0] if cast else tensor


def _around(place):
    for holder in place.holders:
        yield holder.layer
        yield from _around(holder)


def _source(tensor):
    """Returns the tensor of floats from which one was cast, or the tensor itself."""
    while tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_floating:
        tensor = tensor.op.inputs[0]
    return tensor
