"""Reads matrix products and convolutions, with their sizes, from a traced graph.

    | operation                        | m             | n           | k           |
    | MatMul, BatchMatMul, Einsum      | rows          | columns     | summed over |
    | Conv2D, Conv3D                   | N x positions | filters     | C x area    |
    | Conv2DBackpropInput (transposed) | N x positions | C_out x area| C_in        |
    | DepthwiseConv2dNative            | N x positions | 1           | area        |

Each counts 2 m n k operations, as `tf.compat.v1.profiler` does for those it knows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfamp.diagnostics import alignment, dimensions

Context = dimensions.Context
Dims = dimensions.Dims


class _Sizes(NamedTuple):
    """As in `alignment.Product`; `weights` in all `repeats` together."""

    m: int
    n: int
    k: int
    repeats: int
    dimensions: Dims
    weights: int


def read(op: tf.Operation, context: Context, calls: int) -> alignment.Product | None:
    """Returns the product that an operation computes.

    Args:
      op: A TensorFlow operation with `OPERATIONS` type.
      context: Whose it is.
      calls: How often it runs: time steps of a loop.

    Returns:
      An `alignment.Product`; None if a shape is not known.
    """
    try:
        sizes = OPERATIONS[op.type](op, context)
        moved = sum(math.prod(_shape(tensor)) for tensor in _operands(op))
    except _UnknownShapeError:
        return None
    return alignment.Product(
        layer=context.path,
        operation=op.type,
        dtype=op.inputs[1].dtype.base_dtype.name,
        m=sizes.m,
        n=sizes.n,
        k=sizes.k,
        repeats=sizes.repeats * calls,
        dimensions=sizes.dimensions,
        activations=(moved - sizes.weights) // sizes.repeats,
        weights=sizes.weights // sizes.repeats,
        calls=calls,
    )


def _operands(op):
    """Both operands and the result; not the shape that some operations take, too."""
    return [t for t in (*op.inputs, *op.outputs) if t.dtype.is_floating]


class _UnknownShapeError(Exception):
    pass


def _shape(tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise _UnknownShapeError
    return tensor.shape.as_list()


def _matmul(op, context):
    a, b = _shape(op.inputs[0]), _shape(op.inputs[1])
    batched = op.type != "MatMul"
    turned = "adj" if batched else "transpose"
    turn_a, turn_b = (
        op.get_attr(f"{turned}_{side}")
        for side in (("x", "y") if batched else ("a", "b"))
    )
    m, k = (a[-1], a[-2]) if turn_a else (a[-2], a[-1])
    n = b[-2] if turn_b else b[-1]
    repeats = math.prod(_shape(op.outputs[0])[:-2])
    weights = 0
    if math.prod(b[:-2]) == 1:  # One matrix for all: TensorFlow folds the rest into m.
        m, repeats, weights = m * repeats, 1, k * n
    named = dimensions.of_matrix(m, n, k, a, context)
    return _Sizes(m, n, k, repeats, named, weights)


def _einsum(op, context):
    equation = op.get_attr("equation").decode()
    terms, result = equation.replace(" ", "").split("->")
    terms = terms.split(",")
    shapes = [_shape(tensor) for tensor in op.inputs]
    if len(terms) != 2:
        raise _UnknownShapeError
    left, right = (_extents(*pair) for pair in zip(terms, shapes, strict=True))
    out, size = set(_extents(result, _shape(op.outputs[0]))), {**left, **right}

    def product(labels):
        return math.prod(size[label] for label in labels)

    both = left.keys() & right.keys()
    m, n = product((left.keys() - both) & out), product((right.keys() - both) & out)
    k, repeats = product(size.keys() - out), product(both & out)
    weights = math.prod(shapes[1]) if _is_weight(op.inputs[1]) else 0
    named = dimensions.of_matrix(m, n, k, shapes[0], context)
    return _Sizes(m, n, k, repeats, named, weights)


def _extents(term, shape):
    """Label -> size. An ellipsis' are numbered from behind; its ones are repeated."""
    before, dots, after = term.partition("...")
    hidden = range(len(before) + len(after) - len(shape), 0) if dots else ()
    labels = [*before, *hidden, *after]
    extents = zip(labels, shape, strict=True)
    return {x: size for x, size in extents if size != 1 or isinstance(x, str)}


def _is_weight(tensor):
    op = tensor.op
    while op.type in ("Cast", "Identity", "Reshape", "Transpose"):
        op = op.inputs[0].op
    return op.type == "ReadVariableOp"


def _channels(op, shape):
    first = op.get_attr("data_format").decode().startswith("NC")
    return shape[1] if first else shape[-1]


def _convolution(op, context):
    kernel, out = _shape(op.inputs[1]), _shape(op.outputs[0])
    filters, channels = kernel[-1], kernel[-2]
    groups = _channels(op, _shape(op.inputs[0])) // channels
    return _Sizes(
        m=math.prod(out) // filters,
        n=filters // groups,
        k=math.prod(kernel[:-1]),
        repeats=groups,
        dimensions=dimensions.of_convolution(channels, filters, context),
        weights=math.prod(kernel),
    )


def _transposed_convolution(op, context):
    kernel, small = _shape(op.inputs[1]), _shape(op.inputs[2])
    filters, channels = kernel[-2], kernel[-1]
    return _Sizes(
        m=math.prod(small) // channels,
        n=math.prod(kernel[:-1]),
        k=channels,
        repeats=1,
        dimensions=dimensions.of_convolution(channels, filters, context),
        weights=math.prod(kernel),
    )


def _depthwise(op, context):
    kernel, out = _shape(op.inputs[1]), _shape(op.outputs[0])
    channels = kernel[-1] * kernel[-2]
    rows = math.prod(out) // channels
    # Each channel for itself: no Tensor Core, so nothing to align.
    area = math.prod(kernel[:-2])
    return _Sizes(rows, 1, area, channels, (), math.prod(kernel))


OPERATIONS: dict[str, Callable[[tf.Operation, Context], _Sizes]] = {
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


def estimate(context: Context, repeats: int) -> list[alignment.Product]:
    """Returns the products of a recurrent layer that no trace shows.

    It runs in one kernel of cuDNN on a GPU.

    Args:
      context: A layer without a product in its graph.
      repeats: Time steps, of all its calls; 0 for a layer of another kind.
    """
    layer, batch = context.layer, context.batch_size
    if not isinstance(layer, keras.layers.RNN):
        return []
    return [
        alignment.Product(
            *(
                context.path,
                "RNN",
                keras.backend.standardize_dtype(layer.compute_dtype),
            ),
            *(batch, n, k, repeats),
            dimensions=dimensions.of_matrix(batch, n, k, [], context),
            activations=batch * (n + k),
            weights=k * n,
            calls=repeats,
        )
        for k, n in (w.shape for w in layer.weights if len(w.shape) == 2)
    ]
