"""Names the sizes of a product as the user chose them.

| layer                     | size of the product | named                     |
| GRU(50)                   | 150 columns         | units 50, 3 times         |
| MultiHeadAttention(4, 15) | 60 columns          | key_dim 15, 4 times       |
| EinsumDense               | several labels      | the last of them          |
| Embedding, used as a head | its tokens          | vocabulary                |
| any other                 |                     | input features and units  |
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import keras

from tfamp.diagnostics import alignment
from tfamp.precision import model_structure

Dim = alignment.Dimension
Dims = tuple[Dim, ...]

# Keras' and KerasHub's names of the sizes of a head; the first of equal ones is told.
_HEAD_SIZES = ("key_dim", "_key_dim", "value_dim", "_value_dim", "head_dim")
_MOST_GATES = 4
_FEW_CHANNELS = 8  # An input of fewer is taken to be an image.
_NO_HEADS: Mapping[int, str] = {}


class Context(NamedTuple):
    """What names the sizes of a product.

    Attributes:
      path: Path of the layer.
      layer: The layer.
      batch_size: Examples in a batch.
      vocabularies: Numbers of tokens of the model's embeddings.
      input_channels: Last dimensions of the model's own inputs.
      heads: Size of a head -> its name, of the attention layer around the layer.
    """

    path: str
    layer: keras.layers.Layer
    batch_size: int
    vocabularies: frozenset[int]
    input_channels: frozenset[int]
    heads: Mapping[int, str] = _NO_HEADS


def heads_inside(layer: keras.layers.Layer) -> dict[int, Mapping[int, str]]:
    """Returns id of a layer -> names of the sizes of a head, for those in attention."""
    sizes = _head_sizes(layer)
    return {id(x): sizes for x in model_structure.flatten_layers(layer)[1:] if sizes}


def _head_sizes(layer):
    names = [(getattr(layer, name, None), name.lstrip("_")) for name in _HEAD_SIZES]
    return {size: name for size, name in reversed(names) if isinstance(size, int)}


def of_matrix(m: int, n: int, k: int, rows: list[int], context: Context) -> Dims:
    """Names a matrix product's sizes; of the rows only those that are the batch.

    Args:
      m: Rows.
      n: Columns.
      k: Summed over.
      rows: Shape of the operand with the rows.
      context: Whose product it is.
    """
    layer = context.layer
    heads = _head_sizes(layer)
    if heads:  # Attention's two products of activations.
        sizes = dict.fromkeys((m, n, k))
        return tuple(Dim(heads.get(size, "sequence length"), size) for size in sizes)
    first = "embedding width" if _is_embedding(layer) else "input features"
    summed, columns = _labels(layer)
    dimensions = [
        _joined(first, k, summed, context.heads) or Dim(first, k),
        _joined("units", n, columns, context.heads) or Dim("units", n),
    ]
    units = getattr(getattr(layer, "cell", layer), "units", None)
    if _is_recurrent(layer) and units:
        dimensions = [_gates(dimension, units) for dimension in dimensions]
    if len(rows) == 2 and m == context.batch_size:
        dimensions.append(Dim("batch size", m))
    return tuple(_vocabulary(each, context) for each in dimensions)


def _vocabulary(dimension, context):
    if dimension.times == 1 and dimension.size in context.vocabularies:
        return Dim("vocabulary", dimension.size)
    return dimension


def _is_embedding(layer):
    return isinstance(layer, keras.layers.Embedding)


def _is_recurrent(layer):
    cells = (
        *(keras.layers.RNN, keras.layers.SimpleRNNCell),
        *(keras.layers.LSTMCell, keras.layers.GRUCell),
    )
    return isinstance(layer, cells)


def _gates(dimension, units):
    """The units behind a size that is theirs, or that of their gates side by side."""
    times, rest = divmod(dimension.size, units)
    is_columns = dimension.role == "units"
    if rest or times > (_MOST_GATES if is_columns else 1):
        return dimension
    return Dim("units", units, times)


def _labels(layer):
    """Sizes of what an `EinsumDense` sums over, and of its columns, label by label."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return [], []
    terms, result = layer.equation.replace(" ", "").split("->")
    inputs, weights = terms.split(",")
    extents = list(zip(weights, layer.kernel.shape, strict=True))
    summed = [extent for label, extent in extents if label not in result]
    columns = [e for label, e in extents if label in result and label not in inputs]
    return summed, columns


def _joined(role, size, extents, heads):
    """The last of several sizes that make one; None if they do not."""
    if len(extents) < 2 or math.prod(extents) != size:
        return None
    *others, last = extents
    return Dim(heads.get(last, role), last, math.prod(others))


def of_convolution(channels: int, filters: int, context: Context) -> Dims:
    """Names a convolution's sizes: channels of its input, and filters."""
    image = channels < _FEW_CHANNELS and channels in context.input_channels
    role = "image channels" if image else "input channels"
    return (Dim(role, channels), Dim("filters", filters))
