"""Reads a SavedModel's graph: its signature, and anything below float32 in it."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

# Narrow floating dtypes as the text of a message has them, references ("_REF") too; the
# text of a string has a quotation mark before it.
_LOW = re.compile(r": DT_(HALF|BFLOAT16|FLOAT8_\w+?|FLOAT4_\w+?)(?:_REF)?\b")


class TensorDescription(NamedTuple):
    """A tensor of a signature: name, dtype name, shape (None: any size, any rank)."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.shape}"


class SavedGraph(NamedTuple):
    """What a SavedModel's graph holds.

    Attributes:
      inputs: Inputs of the signature, sorted by name.
      outputs: Outputs of the signature, sorted by name.
      nodes: Number of nodes in the graph and in all functions of its library.
      low_precision: One line for each node, function argument and variable that has
        a floating dtype of fewer than 32 bits.
    """

    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    nodes: int
    low_precision: tuple[str, ...]


def read(folder: pathlib.Path, signature: str = "serving_default") -> SavedGraph:
    """Reads the graph of a SavedModel without loading it.

    Args:
      folder: The SavedModel's folder.
      signature: Name of a signature; KeyError if there is none.
    """
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    meta = saved.meta_graphs[0]
    if signature not in meta.signature_def:
        raise KeyError(
            f"There is no signature {signature!r} in {folder}. "
            f"It has: {', '.join(sorted(meta.signature_def))}."
        )
    chosen = meta.signature_def[signature]
    functions = meta.graph_def.library.function
    return SavedGraph(
        inputs=_descriptions(chosen.inputs),
        outputs=_descriptions(chosen.outputs),
        nodes=len(meta.graph_def.node) + sum(len(each.node_def) for each in functions),
        low_precision=tuple(
            f"{what}: {name}"
            for what, message in _parts(meta)
            for name in _low_dtypes(message)
        ),
    )


def _low_dtypes(message):
    found = set(_LOW.findall(str(message)))
    return sorted(name.replace("HALF", "FLOAT16").lower() for name in found)


def _descriptions(tensors):
    return tuple(
        TensorDescription(
            name, tf.as_dtype(tensor.dtype).name, _shape(tensor.tensor_shape)
        )
        for name, tensor in sorted(tensors.items())
    )


def _shape(shape):
    if shape.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)


def _parts(meta) -> Iterator[tuple[str, Any]]:
    """Yields (what, message) of all that has dtypes."""
    for node in meta.graph_def.node:
        yield f"{node.op} {node.name!r} in the graph", node
    for function in meta.graph_def.library.function:
        name = function.signature.name
        yield f"an argument of function {name!r}", function.signature
        for node in function.node_def:
            yield f"{node.op} {node.name!r} in function {name!r}", node
    for node in meta.object_graph_def.nodes:
        yield f"variable {node.variable.name!r}", node.variable
