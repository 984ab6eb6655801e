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

import math
from collections.abc import Iterable
from typing import NamedTuple

REQUIRED_BYTES = 16
BEST_BYTES = 128  # From A100 (capability 8.0) on.
BEST_COST = 0.1  # A larger share of zeros costs more than alignment gains: our choice.
_IMAGE_CHANNELS = 4
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4}


class Dimension(NamedTuple):
    """A size that a user chose.

    Attributes:
      role: What it is: "units", "batch size", ...
      size: How much.
      times: How many of it make one dimension of the product: 4 gates of an LSTM's
        units, or the heads of an attention layer's `key_dim`.
    """

    role: str
    size: int
    times: int = 1


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
    products: Iterable[Product],
    format_name: str,
    width: int = REQUIRED_BYTES,
    narrow: str | None = None,
) -> list[Miss]:
    """Returns the sizes that miss the alignment, those in most operations first.

    With `width` of 128 only those that are aligned to 16 bytes, and that padding would
    enlarge by no more than `BEST_COST`. A first layer's 4 image channels are enough.

    Args:
      products: Products that compute in the format.
      format_name: "float16", "bfloat16" or "tf32".
      width: `REQUIRED_BYTES` or `BEST_BYTES`.
      narrow: A format that padded sizes should fit, too; None for this one alone.

    Returns:
      A list of `Miss`, one for each pair of role and size.
    """
    products = list(products)
    multiple = max(elements(name) for name in (format_name, narrow) if name)
    found: dict[tuple[str, int], list[Dimension]] = {}
    for dimension in _missed(products, format_name, width):
        found.setdefault(dimension[:2], []).append(dimension)
    misses = [
        _miss(dimensions, products, multiple, format_name)
        for dimensions in found.values()
    ]
    return sorted(misses, key=lambda miss: -miss.flops)


def _missed(products, format_name, width):
    """The dimensions that miss, each once."""
    every = dict.fromkeys(each for x in products for each in x.dimensions)
    unaligned = [each for each in every if _is_unaligned(each, format_name)]
    if width == REQUIRED_BYTES:
        return unaligned
    told = {each[:2] for each in unaligned}
    others = [each for each in every if each[:2] not in told]
    return [each for each in others if _may_be_better(each, format_name)]


def _is_unaligned(dimension, format_name):
    if dimension.role == "image channels" and dimension.size == _IMAGE_CHANNELS:
        return False
    return dimension.size % _step(dimension, elements(format_name)) != 0


def _may_be_better(dimension, format_name):
    best = pad(dimension.size, _step(dimension, elements(format_name, BEST_BYTES)))
    return dimension.size < best <= (1 + BEST_COST) * dimension.size


def _step(dimension, multiple):
    """The size must be a multiple of this for the product's to be one of `multiple`."""
    return multiple // math.gcd(multiple, dimension.times)


def _miss(dimensions, products, multiple, format_name):
    """One miss for all dimensions of a role and a size; powers of two fit them all."""
    role, size, _ = dimensions[0]
    best = elements(format_name, BEST_BYTES)
    padded = max(pad(size, _step(each, multiple)) for each in dimensions)
    if role == "image channels" and size < _IMAGE_CHANNELS:
        padded = _IMAGE_CHANNELS
    having = [p for p in products if not set(dimensions).isdisjoint(p.dimensions)]
    return Miss(
        role=role,
        size=size,
        padded=padded,
        best=max(pad(size, _step(each, best)) for each in dimensions),
        layers=tuple(dict.fromkeys(product.layer for product in having)),
        flops=sum(product.flops for product in having),
    )


def affected(
    products: Iterable[Product], format_name: str, width: int = REQUIRED_BYTES
) -> set[Product]:
    """Returns the products with a size that misses the alignment; as `find_misses`."""
    products = list(products)
    missed = set(_missed(products, format_name, width))
    return {p for p in products if not missed.isdisjoint(p.dimensions)}
