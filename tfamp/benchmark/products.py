"""Counts the matrix products and convolutions of a traced graph.

    | operation                        | m             | n           | k           |
    | MatMul, BatchMatMul, Einsum      | rows          | columns     | summed over |
    | Conv2D, Conv3D                   | N x positions | filters     | C x area    |
    | Conv2DBackpropInput (transposed) | N x positions | C_out x area| C_in        |
    | DepthwiseConv2dNative            | N x positions | 1           | area        |

Each counts 2 m n k operations, as `tf.compat.v1.profiler` does for those it knows.
"""

import math
from collections.abc import Callable

import tensorflow as tf


def flops(op: tf.Operation) -> int | None:
    """Returns the operations of a product, of an `OPERATIONS` type.

    None if a shape is not known.
    """
    try:
        return 2 * OPERATIONS[op.type](op)
    except _UnknownShapeError:
        return None


class _UnknownShapeError(Exception):
    pass


def _shape(tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise _UnknownShapeError
    return tensor.shape.as_list()


def _matmul(op):
    rows = _shape(op.inputs[0])
    turned = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return math.prod(_shape(op.outputs[0])) * rows[-2 if turned else -1]


def _einsum(op):
    equation = op.get_attr("equation").decode()
    terms, result = equation.replace(" ", "").split("->")
    terms = terms.split(",")
    if len(terms) != 2:
        raise _UnknownShapeError
    size = _extents(result, _shape(op.outputs[0]))
    for term, tensor in zip(terms, op.inputs, strict=True):
        size |= _extents(term, _shape(tensor))
    return math.prod(size.values())


def _extents(term, shape):
    """Label -> size. An ellipsis' are numbered from behind; its ones are repeated."""
    before, dots, after = term.partition("...")
    hidden = range(len(before) + len(after) - len(shape), 0) if dots else ()
    labels = [*before, *hidden, *after]
    extents = zip(labels, shape, strict=True)
    return {x: size for x, size in extents if size != 1 or isinstance(x, str)}


def _convolution(op):
    kernel = _shape(op.inputs[1])
    return math.prod(_shape(op.outputs[0])) * math.prod(kernel[:-1])


def _transposed_convolution(op):
    kernel = _shape(op.inputs[1])
    return math.prod(_shape(op.inputs[2])) * math.prod(kernel[:-1])


def _depthwise(op):
    area = math.prod(_shape(op.inputs[1])[:-2])
    return math.prod(_shape(op.outputs[0])) * area


OPERATIONS: dict[str, Callable[[tf.Operation], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "Conv2DBackpropInput": _transposed_convolution,
    "Conv3DBackpropInputV2": _transposed_convolution,
    "DepthwiseConv2dNative": _depthwise,
}
