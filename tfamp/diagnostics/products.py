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

from tfamp import alignment

Dim = alignment.Dimension


class Context(NamedTuple):
    """What names the sizes of a product.

    Attributes:
      path: Path of the layer.
      layer: The layer.
      batch_size: Examples in a batch.
      vocabularies: Numbers of tokens of the model's embeddings.
      input_channels: Last dimensions of the model's own inputs.
    """

    path: str
    layer: keras.layers.Layer
    batch_size: int
    vocabularies: frozenset[int]
    input_channels: frozenset[int]


class _Sizes(NamedTuple):
    """As in `alignment.Product`; `weights` in all `repeats` together."""

    m: int
    n: int
    k: int
    repeats: int
    dimensions: tuple[Dim, ...]
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
    dimensions = _matrix_dimensions(m, n, k, a, context)
    return _Sizes(m, n, k, repeats, dimensions, weights)


def _einsum(op, context):
    equation = op.get_attr("equation").decode()
    terms, result = equation.replace(" ", "").split("->")
    terms = terms.split(",")
    shapes = [_shape(tensor) for tensor in op.inputs]
    if len(terms) != 2 or "." in equation:
        raise _UnknownShapeError
    size = {
        label: extent
        for term, shape in zip(terms, shapes, strict=True)
        for label, extent in zip(term, shape, strict=True)
    }
    left, right, out = set(terms[0]), set(terms[1]), set(result)

    def product(labels):
        return math.prod(size[label] for label in labels)

    m, n = product((left - right) & out), product((right - left) & out)
    k, repeats = product((left | right) - out), product(left & right & out)
    weights = math.prod(shapes[1]) if _is_weight(op.inputs[1]) else 0
    dimensions = _matrix_dimensions(m, n, k, shapes[0], context)
    return _Sizes(m, n, k, repeats, dimensions, weights)


def _is_weight(tensor):
    op = tensor.op
    while op.type in ("Cast", "Identity", "Reshape", "Transpose"):
        op = op.inputs[0].op
    return op.type == "ReadVariableOp"


def _matrix_dimensions(m, n, k, rows, context):
    """Names the sizes; of the rows only those that are the batch, or positions."""
    layer = context.layer
    # Attention's two products of activations: Keras' and KerasHub's names.
    heads = {getattr(layer, name, None) for name in _HEAD_SIZES} - {None}
    if heads:
        names = {size: "head size" for size in heads}
        sizes = dict.fromkeys((m, n, k))
        return tuple(Dim(names.get(size, "sequence length"), size) for size in sizes)
    first, last = "input features", "units"
    if isinstance(layer, keras.layers.Embedding):  # Tied: the head is the table.
        first = "embedding width"
    dimensions = [Dim(first, k), Dim(last, n)]
    if len(rows) == 2 and m == context.batch_size:
        dimensions.append(Dim("batch size", m))
    return tuple(
        Dim("vocabulary", size) if size in context.vocabularies else Dim(role, size)
        for role, size in dimensions
    )


_HEAD_SIZES = ("key_dim", "value_dim", "_key_dim", "_value_dim", "head_dim")


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
        dimensions=_channel_dimensions(channels, filters, context),
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
        dimensions=_channel_dimensions(channels, filters, context),
        weights=math.prod(kernel),
    )


def _channel_dimensions(channels, filters, context):
    image = channels < 8 and channels in context.input_channels
    role = "image channels" if image else "input channels"
    return (Dim(role, channels), Dim("filters", filters))


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


def estimate(
    context: Context, shape: list[int | None], repeats: int
) -> list[alignment.Product]:
    """Returns the products of a layer that computes them where no trace shows them.

    Grouped convolutions run in a function of their own on a CPU, recurrent layers in
    one kernel of cuDNN on a GPU.

    Args:
      context: A layer without a product in its graph.
      shape: Shape of its output.
      repeats: Time steps, for a recurrent layer.
    """
    layer, batch = context.layer, context.batch_size
    dtype = keras.backend.standardize_dtype(layer.compute_dtype)
    if isinstance(layer, keras.layers.RNN):
        return [
            alignment.Product(
                *(context.path, "RNN", dtype, batch, n, k, repeats),
                dimensions=(Dim("units", n), Dim("input features", k)),
                activations=batch * (n + k),
                weights=k * n,
                calls=repeats,
            )
            for k, n in (w.shape for w in layer.weights if len(w.shape) == 2)
        ]
    if not isinstance(layer, _CONVOLUTIONS) or None in shape:
        return []
    *area, channels, filters = layer.kernel.shape
    groups, rows = layer.groups, math.prod(shape) // filters
    return [
        alignment.Product(
            *(context.path, "Conv", dtype),
            *(rows, filters // groups, math.prod(area) * channels, groups),
            dimensions=_channel_dimensions(channels, filters, context),
            # The input is taken to be as large as the output.
            activations=rows * (channels + filters // groups),
            weights=math.prod(area) * channels * filters // groups,
        )
    ]


_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
