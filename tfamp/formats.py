"""Facts about floating-point formats, read from `ml_dtypes.finfo`.

Every number that describes a dtype anywhere in tfamp comes from here.
"""

import functools
from typing import NamedTuple

import ml_dtypes
import numpy as np


class FloatFormat(NamedTuple):
    """Limits of one binary floating-point format, as Python numbers.

    Attributes:
      name: Dtype name, e.g. "float16". "tf32" is a compute format, not a dtype.
      bits: Storage bits (19 significant bits of a 32-bit word for tf32).
      exponent_bits: Bits of the exponent.
      mantissa_bits: Explicit bits of the fraction.
      max: Largest finite value.
      smallest_normal: Smallest positive value with full precision.
      smallest_subnormal: Smallest positive value; below half of it, 0.
      epsilon: Distance from 1.0 to the next larger value.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)
FORMAT_NAMES = (*_DTYPES, "tf32")


def float_format(dtype) -> FloatFormat:
    """Returns the limits of a floating-point format.

    Args:
      dtype: Name ("float16", "bfloat16", "tf32", ...) or anything with a dtype
        name: a NumPy or TensorFlow dtype.

    Returns:
      A `FloatFormat`.

    Raises:
      ValueError: If the format is not one of `FORMAT_NAMES`.

    Example:
      >>> float_format("float16").max
      65504.0

    References:
      NVIDIA, "NVIDIA A100 Tensor Core GPU Architecture", 2020, for tf32: the
      exponent of float32 with the 10 fraction bits of float16.
    """
    name = _dtype_name(dtype)
    if name not in FORMAT_NAMES:
        raise ValueError(
            f"Unknown floating-point format. Received: dtype={dtype!r}. "
            f"Expected one of {', '.join(FORMAT_NAMES)}."
        )
    return _tf32() if name == "tf32" else _from_finfo(name)


def _dtype_name(dtype):
    """A dtype's name; None if `dtype` is no dtype (NumPy takes None for float64)."""
    if isinstance(dtype, str) or dtype is None:
        return dtype
    try:
        return getattr(dtype, "name", None) or np.dtype(dtype).name
    except TypeError:
        return None


@functools.cache
def _from_finfo(name: str) -> FloatFormat:
    info = ml_dtypes.finfo(name)
    return FloatFormat(
        name=name,
        bits=int(info.bits),
        exponent_bits=int(info.nexp),
        mantissa_bits=int(info.nmant),
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        epsilon=float(info.eps),
    )


@functools.cache
def _tf32() -> FloatFormat:
    wide, narrow = _from_finfo("float32"), _from_finfo("float16")
    top = 2.0 ** (2 ** (wide.exponent_bits - 1) - 1)  # largest power of two
    return FloatFormat(
        name="tf32",
        bits=1 + wide.exponent_bits + narrow.mantissa_bits,
        exponent_bits=wide.exponent_bits,
        mantissa_bits=narrow.mantissa_bits,
        max=top * (2.0 - narrow.epsilon),
        smallest_normal=wide.smallest_normal,
        smallest_subnormal=wide.smallest_normal * narrow.epsilon,
        epsilon=narrow.epsilon,
    )
