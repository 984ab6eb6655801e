"""What the graph of a SavedModel has: dtypes, products, variables."""

import collections
import math
import pathlib
import re

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

# Operations that multiply, by how their names begin.
_PRODUCT = re.compile("(Batch)?MatMul|Einsum|Conv|DepthwiseConv|CudnnRNN|Xla(Dot|Conv)")
# Narrow floating dtypes as the text of a message has them, references ("_REF") too; the
# text of a string has a quotation mark before it.
_LOW = re.compile(r": DT_(HALF|BFLOAT16|FLOAT8_\w+?|FLOAT4_\w+?)(?:_REF)?\b")


def read_graph(folder: pathlib.Path) -> tuple[int, list[str]]:
    """Reads the graph of a SavedModel, without loading it.

    Returns:
      How many nodes it and all functions of its library have; and a line for each
      node, function argument and variable of a floating dtype below 32 bits.
    """
    meta = _meta_graph(folder)
    functions = meta.graph_def.library.function
    graphs = [("the graph", meta.graph_def.node)]
    graphs += [(f"function {f.signature.name!r}", f.node_def) for f in functions]
    parts = [(f"{n.op} {n.name!r} in {g}", n) for g, nodes in graphs for n in nodes]
    count = len(parts)
    parts += [(f"an argument of {f.signature.name!r}", f.signature) for f in functions]
    variables = [node.variable for node in meta.object_graph_def.nodes]
    parts += [(f"variable {each.name!r}", each) for each in variables]
    return count, [
        f"{what}: {name.replace('HALF', 'FLOAT16').lower()}"
        for what, message in parts
        for name in sorted(set(_LOW.findall(str(message))))
    ]


def read_products(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns the names of matrix products and convolutions by floating dtype."""
    graph = _meta_graph(folder).graph_def
    functions = [function.node_def for function in graph.library.function]
    nodes = [node for part in (graph.node, *functions) for node in part]
    found: dict[str, list[str]] = {}
    for node in nodes:
        dtype = tf.as_dtype(node.attr["Ta" if "Ta" in node.attr else "T"].type or 1)
        if _PRODUCT.match(node.op) and dtype.is_floating:
            found.setdefault(dtype.name, []).append(f"{node.op} {node.name!r}")
    return found


def read_variables(folder: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of a SavedModel's variables by dtype."""
    found: collections.Counter = collections.Counter()
    for node in _meta_graph(folder).object_graph_def.nodes:
        if node.HasField("variable"):
            dtype, shape = tf.as_dtype(node.variable.dtype), node.variable.shape
            found[dtype.name] += dtype.size * math.prod(x.size for x in shape.dim)
    return dict(found)


def _meta_graph(folder):
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    (meta,) = saved.meta_graphs
    return meta
