"""What an export is verified by: the dtypes in its graph, and how outputs differ."""

import collections
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tfamp.facts import formats

# Operations that multiply, by how their names begin.
_PRODUCT = re.compile("(Batch)?MatMul|Einsum|Conv|DepthwiseConv|CudnnRNN|Xla(Dot|Conv)")
# Narrow floating dtypes as the text of a message has them, references ("_REF") too; the
# text of a string has a quotation mark before it.
_LOW = re.compile(r": DT_(HALF|BFLOAT16|FLOAT8_\w+?|FLOAT4_\w+?)(?:_REF)?\b")


class Difference(NamedTuple):
    """How far outputs are from reference outputs, the worst of all outputs.

    Attributes:
      relative: max|a - b| / max(max|b|, smallest normal float32) over the elements
        of one output, b being the reference. Equal infinities and pairs of NaN
        count as equal; any other one makes it infinite.
      absolute: max|a - b|.
    """

    relative: float
    absolute: float

    def __str__(self) -> str:
        return f"{self.relative:.1e} relative, {self.absolute:.1e} absolute"


def difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference:
    """Returns the worst difference of named arrays from the expected ones.

    It is infinite where names, shapes or strings differ.
    """
    if set(actual) != set(expected):
        return Difference(np.inf, np.inf)
    each = [_difference(np.asarray(actual[k]), np.asarray(expected[k])) for k in actual]
    return Difference(*map(max, zip((0.0, 0.0), *each, strict=True)))


def _difference(a, b):
    if a.shape != b.shape:
        return np.inf, np.inf
    absolute = float(gaps(a, b).max(initial=0.0))
    if b.dtype.kind in "OSU":
        return absolute, absolute
    b = b.astype(np.float64)
    tiny = formats.float_format("float32").smallest_normal
    return absolute / float(np.abs(b[np.isfinite(b)]).max(initial=tiny)), absolute


def gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns |a - b| in float64: 0 for what is equal, NaN too, else of strings inf."""
    if b.dtype.kind in "OSU":
        return np.where(a == b, 0.0, np.inf)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity minus infinity.
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gap), np.inf, gap)


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
