"""Which dimensions of matrix products miss the alignment of Tensor Cores.

Pure functions over a list of products.

    | format            | bytes of an element | 16 bytes | 128 bytes |
    | float16, bfloat16 | 2                   | 8        | 64        |
    | tf32 (in float32) | 4                   | 4        | 32        |

References:
  NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001, 2023), 2.2
  "Tensor Core Requirements": dimensions that are multiples of 16 bytes are the most
  efficient, on A100 multiples of 128 bytes; cuBLAS before 11.0 used Tensor Cores for
  nothing else.
  NVIDIA, "Convolutional Layers User's Guide" (2023): the same for channels; 4 are
  enough for the images of a first layer.
  https://docs.nvidia.com/deeplearning/performance/
"""

from collections.abc import Iterable
from typing import NamedTuple

REQUIRED_BYTES = 16
BEST_BYTES = 128  # From A100 (capability 8.0) on.
BEST_COST = 0.1  # A larger share of zeros costs more than alignment gains: our choice.
_IMAGE_CHANNELS = 4
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4}


class Dimension(NamedTuple):
    """A size that a user chose: what it is ("units", "batch size", ...), how much."""

    role: str
    size: int


class Product(NamedTuple):
    """`repeats` equal matrix products [m, k] x [k, n], or a convolution as one.

    Attributes:
      layer: Path of the layer that computes it.
      operation: TensorFlow's operation, e.g. "MatMul".
      dtype: Dtype of the operands.
      m: Rows: batch size times positions.
      n: Columns: units or filters.
      k: Summed over: input features, or channels times the filter's area.
      repeats: How many of them.
      dimensions: The sizes that alignment is asked of.
      activations: Elements of operands and results that grow with the batch, of one.
      weights: Elements of the operand that does not, of one.
      calls: How often the operation runs: time steps of a loop.
    """

    layer: str
    operation: str
    dtype: str
    m: int
    n: int
    k: int
    repeats: int
    dimensions: tuple[Dimension, ...]
    activations: int = 0
    weights: int = 0
    calls: int = 1

    @property
    def flops(self) -> int:
        """Operations, a multiplication and an addition each counted as one."""
        return 2 * self.m * self.n * self.k * self.repeats


class Miss(NamedTuple):
    """A size that is no multiple of what the format asks.

    Attributes:
      role: What it is.
      size: The size.
      padded: The next size that is aligned to 16 bytes.
      best: The next size that is aligned to 128 bytes.
      layers: Paths of the layers that have it.
      flops: Operations of the products that it is a dimension of.
    """

    role: str
    size: int
    padded: int
    best: int
    layers: tuple[str, ...]
    flops: int


def elements(format_name: str, width: int = REQUIRED_BYTES) -> int:
    """Returns how many elements of a format take `width` bytes.

    Args:
      format_name: "float16", "bfloat16" or "tf32".
      width: Bytes.

    Raises:
      ValueError: If Tensor Cores do not take the format.
    """
    if format_name not in _ELEMENT_BYTES:
        raise ValueError(
            f"No alignment is known for this format. Received: {format_name!r}. "
            f"Expected one of {', '.join(_ELEMENT_BYTES)}."
        )
    return width // _ELEMENT_BYTES[format_name]


def pad(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


def find_misses(
    products: Iterable[Product], format_name: str, width: int = REQUIRED_BYTES
) -> list[Miss]:
    """Returns the sizes that miss the alignment, those in most operations first.

    With `width` of 128 only those that are aligned to 16 bytes, and that padding would
    enlarge by no more than `BEST_COST`. A first layer's 4 image channels are enough.

    Args:
      products: Products that compute in the format.
      format_name: "float16", "bfloat16" or "tf32".
      width: `REQUIRED_BYTES` or `BEST_BYTES`.

    Returns:
      A list of `Miss`, one for each pair of role and size.
    """
    found: dict[Dimension, list[Product]] = {}
    for product in products:
        for dimension in dict.fromkeys(product.dimensions):
            if _misses(dimension, format_name, width):
                found.setdefault(dimension, []).append(product)
    misses = [_miss(*item, format_name) for item in found.items()]
    return sorted(misses, key=lambda miss: -miss.flops)


def _misses(dimension, format_name, width):
    multiple = elements(format_name, REQUIRED_BYTES)
    if dimension.role == "image channels" and dimension.size == _IMAGE_CHANNELS:
        return False
    if width == REQUIRED_BYTES:
        return dimension.size % multiple != 0
    best = pad(dimension.size, elements(format_name, width))
    affordable = best <= (1 + BEST_COST) * dimension.size
    return dimension.size % multiple == 0 and best != dimension.size and affordable


def _miss(dimension, products, format_name):
    padded = pad(dimension.size, elements(format_name))
    if dimension.role == "image channels" and dimension.size < _IMAGE_CHANNELS:
        padded = _IMAGE_CHANNELS
    return Miss(
        role=dimension.role,
        size=dimension.size,
        padded=padded,
        best=pad(dimension.size, elements(format_name, BEST_BYTES)),
        layers=tuple(dict.fromkeys(product.layer for product in products)),
        flops=sum(product.flops for product in products),
    )


def affected(misses: Iterable[Miss], products: Iterable[Product]) -> set[Product]:
    """Returns the products that have one of the missed sizes."""
    missed = {Dimension(miss.role, miss.size) for miss in misses}
    return {product for product in products if missed.intersection(product.dimensions)}
