"""What the graph of a SavedModel has: dtypes, products, variables."""

import collections
import math
import pathlib
import re
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

# Operations that multiply, by how their names begin.
_PRODUCT = re.compile("(Batch)?MatMul|Einsum|Conv|DepthwiseConv|CudnnRNN|Xla(Dot|Conv)")
# Narrow floating dtypes as the text of a message has them, references ("_REF") too; the
# text of a string has a quotation mark before it.
_LOW = re.compile(r": DT_(HALF|BFLOAT16|FLOAT8_\w+?|FLOAT4_\w+?)(?:_REF)?\b")


class Graph(NamedTuple):
    """What the graph of a SavedModel has, with all functions of its library.

    Attributes:
      nodes: How many nodes.
      low: A line for each node, function argument and variable of a floating dtype
        below 32 bits.
      products: Matrix products and convolutions by floating dtype.
      weight_bytes: Bytes of the variables by dtype.
    """

    nodes: int
    low: list[str]
    products: dict[str, list[str]]
    weight_bytes: dict[str, int]


def read(folder: pathlib.Path) -> Graph:
    """Reads the graph of a SavedModel, without loading it."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    (meta,) = saved.meta_graphs
    functions = meta.graph_def.library.function
    graphs = [("the graph", meta.graph_def.node)]
    graphs += [(f"function {f.signature.name!r}", f.node_def) for f in functions]
    nodes = [(f"{n.op} {n.name!r} in {g}", n) for g, held in graphs for n in held]
    products = collections.defaultdict(list)
    for what, node in nodes:
        dtype = tf.as_dtype(node.attr["Ta" if "Ta" in node.attr else "T"].type or 1)
        if _PRODUCT.match(node.op) and dtype.is_floating:
            products[dtype.name].append(what)
    objects = meta.object_graph_def.nodes
    variables = [each.variable for each in objects if each.HasField("variable")]
    sizes = collections.Counter()
    for each in variables:
        dtype = tf.as_dtype(each.dtype)
        sizes[dtype.name] += dtype.size * math.prod(x.size for x in each.shape.dim)
    parts = [(f"an argument of {f.signature.name!r}", f.signature) for f in functions]
    parts += [(f"variable {each.name!r}", each) for each in variables]
    low = [
        f"{what}: {name.replace('HALF', 'FLOAT16').lower()}"
        for what, message in nodes + parts
        for name in sorted(set(_LOW.findall(str(message))))
    ]
    return Graph(len(nodes), low, dict(products), dict(sizes))
