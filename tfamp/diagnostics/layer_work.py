"""How much a layer multiplies in one call, from its weights and shapes.

    | layer                   | multiplications                                      |
    | Dense, convolutions     | positions of the result x elements of the kernel     |
    | transposed convolutions | positions of the input x elements of the kernel      |
    | EinsumDense             | input x what its kernel adds to it                   |
    | Embedding, reversed     | positions x width x vocabulary                       |
    | recurrent layers        | examples x steps x elements of the cells' kernels    |
    | MultiHeadAttention      | 2 x examples x heads x queries x keys x key_dim      |

What any other layer computes is not counted.
"""

import math
from typing import NamedTuple

from keras import layers

DEPTHWISE = (
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
)
_TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D, *_TRANSPOSED, *DEPTHWISE)
_IMAGE_CHANNELS = 4  # An input of no more channels is taken to be an image.


class Work(NamedTuple):
    """What a call multiplies.

    Attributes:
      multiplications: How many.
      rows: Rows of the matrix that the weights are multiplied by; 0 without weights.
      sizes: (role, size) pairs of the products, as the user chose them.
    """

    multiplications: int = 0
    rows: int = 0
    sizes: tuple[tuple[str, int], ...] = ()


def of_call(layer: layers.Layer, inputs: list[list[int]], result: list[int]) -> Work:
    """Returns what a call multiplies, nothing where that is not known.

    Args:
      layer: A built layer.
      inputs: Shapes of what the call took.
      result: Shape of what it returned.
    """
    source = inputs[0]
    if isinstance(layer, layers.MultiHeadAttention):
        keys = inputs[min(1, len(inputs) - 1)][1]
        products = 2 * math.prod(source[:-1]) * keys * layer.num_heads * layer.key_dim
        return Work(products, 0, (("key_dim", layer.key_dim),))
    if isinstance(layer, layers.RNN):
        weights = [w for w in layer.weights if "bias" not in w.name]
        kernels = sum(math.prod(w.shape) for w in weights if len(w.shape) == 2)
        sizes = ("input features", source[-1]), ("units", getattr(layer, "units", 0))
        return Work(source[0] * source[1] * kernels, source[0], sizes)
    if isinstance(layer, _CONVOLUTIONS):
        return _of_convolution(layer, source, result)
    if isinstance(layer, layers.EinsumDense):
        return _of_einsum(layer, source)
    kernel = tuple(getattr(getattr(layer, "kernel", None), "shape", ()))
    is_dense = len(kernel) == 2 and kernel == (source[-1], result[-1])
    # A tied embedding makes the logits.
    is_tied = isinstance(layer, layers.Embedding) and len(source) == len(result)
    if not is_dense and not is_tied:
        return Work()
    work = _of_matrix(math.prod(result[:-1]), source[-1], result[-1])
    batch = (("batch size", work.rows),) if len(source) == 2 else ()
    return work._replace(sizes=work.sizes + batch)


def _of_matrix(rows, features, units):
    sizes = ("input features", features), ("units", units)
    return Work(rows * features * units, rows, sizes)


def _of_einsum(layer, source):
    terms, result = layer.equation.replace(" ", "").split("->")
    given, weights = terms.split(",")
    shape = dict(zip(weights, layer.kernel.shape, strict=True))
    summed = math.prod(n for label, n in shape.items() if label not in result)
    new = math.prod(n for label, n in shape.items() if label not in given)
    return _of_matrix(math.prod(source) // summed, summed, new)


def _of_convolution(layer, source, result):
    axis = 1 if layer.data_format == "channels_first" else -1
    shape = source if isinstance(layer, _TRANSPOSED) else result
    rows = math.prod(shape) // shape[axis]
    kernels = sum(math.prod(w.shape) for w in layer.weights if len(w.shape) > 1)
    role = "image channels" if source[axis] <= _IMAGE_CHANNELS else "input channels"
    sizes = ((role, source[axis]), ("filters", result[axis]))
    # Depthwise kernels use no Tensor Cores: nothing to align.
    return Work(rows * kernels, rows, () if isinstance(layer, DEPTHWISE) else sizes)
