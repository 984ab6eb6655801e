"""Reads a SavedModel's graph: its signature, and anything below float32 in it."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tfamp import formats

_REFERENCE = 100  # A reference type's number is its base type's plus 100.


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
      signature: Name of a signature.

    Returns:
      A `SavedGraph`.

    Raises:
      KeyError: If there is no such signature.
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
    bodies = list(_bodies(meta.graph_def))
    return SavedGraph(
        inputs=_descriptions(chosen.inputs),
        outputs=_descriptions(chosen.outputs),
        nodes=sum(len(nodes) for _, nodes in bodies),
        low_precision=(*_low_nodes(bodies), *_low_arguments(meta), *_low_state(meta)),
    )


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


def _bodies(graph_def) -> Iterator[tuple[str, Any]]:
    """Yields (where, nodes) of the graph and of each function."""
    yield "the graph", graph_def.node
    for function in graph_def.library.function:
        yield f"function {function.signature.name!r}", function.node_def


def _low_nodes(bodies):
    for where, nodes in bodies:
        for node in nodes:
            types = [kind for attr in node.attr.values() for kind in _types(attr)]
            for name in _low_names(types):
                yield f"{node.op} {node.name!r} in {where}: {name}"


def _low_arguments(meta):
    for function in meta.graph_def.library.function:
        signature = function.signature
        arguments = [*signature.input_arg, *signature.output_arg]
        for name in _low_names(argument.type for argument in arguments):
            yield f"an argument of function {signature.name!r}: {name}"


def _low_state(meta):
    for node in meta.object_graph_def.nodes:
        for name in _low_names([node.variable.dtype]):
            yield f"variable {node.variable.name!r}: {name}"


def _types(attr) -> Iterator[int]:
    """Yields every dtype number in a node's attribute, nested ones too."""
    yield attr.type
    yield attr.tensor.dtype
    yield from attr.list.type
    yield from (tensor.dtype for tensor in attr.list.tensor)
    for function in (attr.func, *attr.list.func):
        for inner in function.attr.values():
            yield from _types(inner)


def _low_names(types) -> list[str]:
    low = _low_precision_types()
    return sorted(
        {low[kind % _REFERENCE] for kind in types if kind % _REFERENCE in low}
    )


@functools.cache
def _low_precision_types() -> dict[int, str]:
    """Returns dtype number -> name of TensorFlow's narrow floating dtypes."""
    dtypes = [tf.as_dtype(name) for name in formats.FORMAT_NAMES if name != "tf32"]
    return {
        dtype.as_datatype_enum: dtype.name
        for dtype in dtypes
        if formats.float_format(dtype).bits < formats.float_format("float32").bits
    }
