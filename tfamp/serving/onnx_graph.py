"""The graph of an ONNX file: what is changed in it, and what is read from it."""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp import extras
from tfamp.facts import formats
from tfamp.serving import report

_PRODUCT = re.compile("MatMul|Gemm|Conv|Einsum|LSTM|GRU|RNN")
# What gives back numbers of its first input, so that a cast may be before as after it.
_MOVES = ("Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def graphs(graph: Any) -> Iterator[Any]:
    """Yields a graph and those in its nodes, as the body of a loop."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def lift(graph: Any) -> None:
    """Lets the body of a loop read weights from outside, which it only passes on."""
    read = {name for node in graph.node for name in node.input}
    read |= {output.name for output in graph.output}
    for loop in [node for node in graph.node if node.op_type == "Loop"]:
        (body,) = (x.g for x in loop.attribute if x.name == "body")
        for index in reversed(range(len(loop.input) - 2)):
            # A body takes the step and the condition, too, and returns the condition.
            outer, inner = loop.input[index + 2], body.input[index + 2].name
            if body.output[index + 1].name != inner or loop.output[index] in read:
                continue
            for node in [node for each in graphs(body) for node in each.node]:
                node.input[:] = [outer if x == inner else x for x in node.input]
            del loop.input[index + 2], body.input[index + 2]
            del loop.output[index], body.output[index + 1]


def narrow(graph: Any) -> None:
    """Stores in float16 what is only cast to it.

    TensorFlow folds such a cast, but not behind the look-up of an embedding, or in a
    loop.
    """
    onnx = extras.require("onnx")
    users = collections.defaultdict(list)
    for each in graphs(graph):
        for node in each.node:
            # In a loop's body names may be those of another's.
            followed = each is graph or node.op_type == "Cast"
            for name in node.input:
                users[name].append(node if followed else onnx.NodeProto())
        for output in each.output:
            users[output.name].append(onnx.NodeProto())
    low, is_changed = onnx.TensorProto.FLOAT16, False
    for tensor in graph.initializer:
        is_float32 = tensor.data_type == onnx.TensorProto.FLOAT
        casts = _casts(tensor.name, users, low) if is_float32 else []
        if not casts:
            continue
        is_changed = True
        with np.errstate(over="ignore"):  # As the cast would.
            value = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        for cast in casts:
            cast.op_type = "Identity"
            del cast.attribute[:]
    if is_changed:  # The types of what is between are found anew.
        del graph.value_info[:]


def _casts(name, users, low):
    """Returns the casts to `low` that a tensor ends in; none if it goes elsewhere."""
    casts = []
    for node in users[name]:
        if node.op_type == "Cast" and node.attribute[0].i == low:
            casts.append(node)
        elif node.op_type in _MOVES and list(node.input).index(name) == 0:
            inner = _casts(node.output[0], users, low)
            if not inner:
                return []
            casts += inner
        else:
            return []
    return casts


def read(proto: Any) -> report.Graph:
    """Reads an ONNX graph as `report.read_graph` does a SavedModel's."""
    onnx = extras.require("onnx")
    every = list(graphs(onnx.shape_inference.infer_shapes(proto).graph))
    stored = [x for graph in every for x in graph.initializer]
    types = {x.name: x.data_type for x in stored}
    for graph in every:
        for each in (*graph.input, *graph.output, *graph.value_info):
            types.setdefault(each.name, each.type.tensor_type.elem_type)
    to_numpy = onnx.helper.tensor_dtype_to_np_dtype
    dtypes = {name: to_numpy(dtype).name for name, dtype in types.items() if dtype}
    nodes = [node for graph in every for node in graph.node]
    products = collections.defaultdict(list)
    for node in nodes:
        held = map(dtypes.get, (*node.input, *node.output))
        floats = [x for x in held if x in (*formats.LOW, "float32")]
        if _PRODUCT.search(node.op_type) and floats:
            products[floats[0]].append(f"{node.op_type} {node.name!r}")
    sizes = collections.Counter()
    for each in stored:
        dtype = to_numpy(each.data_type)
        sizes[dtype.name] += dtype.itemsize * math.prod(each.dims)
    low = [f"{x!r}: {dtype}" for x, dtype in dtypes.items() if dtype in formats.LOW]
    return report.Graph(len(nodes), low, dict(products), dict(sizes))
