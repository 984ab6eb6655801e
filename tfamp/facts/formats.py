"""Facts about floating-point formats, and how each rounds a number.

Every number that describes a dtype anywhere in tfamp comes from here, and here from
`ml_dtypes.finfo`.
"""

import decimal
import functools
import math
import numbers
from fractions import Fraction
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

LOW = ("bfloat16", "float16")  # The 16-bit formats that layers compute in.


class FloatFormat(NamedTuple):
    """Limits of one binary floating-point format, as Python numbers.

    Attributes:
      name: Dtype name, e.g. "float16". "tf32" is a compute format, not a dtype.
      bits: Significant bits; for tf32 19 of the 32 that it is stored in.
      exponent_bits: Bits of the exponent.
      mantissa_bits: Explicit bits of the fraction.
      max: Largest finite value.
      smallest_normal: Smallest positive value with full precision.
      smallest_subnormal: Smallest positive value; half of it is rounded to 0.
      epsilon: Distance from 1.0 to the next larger value.
      bytes: Bytes of an element in memory.
      supported: The hardware that computes in it, in one phrase.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    bytes: int
    supported: str


class Representation(NamedTuple):
    """How one format rounds one number.

    Attributes:
      format: Name of the format.
      stored: The nearest value that the format has.
      absolute_error: |stored - number|; NaN where one of them is NaN.
      relative_error: The same over |number|; 0 for 0.
      outcome: "rounded" is to the format's full precision, "subnormal" to less;
        "underflow": it became 0; "overflow": it became infinite, or NaN in a format
        without infinity; "nan": it was NaN.
    """

    format: str
    stored: float
    absolute_error: float
    relative_error: float
    outcome: Literal["exact", "rounded", "subnormal", "underflow", "overflow", "nan"]


# Capabilities are CUDA's. References: NVIDIA, "CUDA C++ Programming Guide", arithmetic
# instructions; "NVIDIA A100" and "NVIDIA H100 Tensor Core GPU Architecture", 2020 and
# 2022; "NVIDIA Ada GPU Architecture", 2022. A CPU's formats: oneDNN, "Data Types".
_FP8 = "NVIDIA tensor cores of capability 8.9 (L4, RTX 40) on; no mode here"
_SUPPORTED = {
    "float64": "CPU; NVIDIA GPU, at half of float32's rate on P100, V100, A100 and "
    "H100, at 1/32 or less on others",
    "float32": "everything",
    "tf32": "NVIDIA tensor cores of capability 8.0 (A100, RTX 30) on: float32 matrix "
    "products and convolutions",
    "float16": "NVIDIA tensor cores of capability 7.0 (V100, T4) on; slow on a CPU "
    "without AVX512_FP16 or AMX_FP16; no TPU",
    "bfloat16": "NVIDIA tensor cores of capability 8.0 (A100, RTX 30) on; TPU; CPU "
    "with AVX512_BF16 or AMX_BF16",
    "float8_e4m3fn": _FP8,
    "float8_e5m2": _FP8,
}
FORMAT_NAMES = tuple(_SUPPORTED)


def float_format(dtype) -> FloatFormat:
    """Returns the limits of a floating-point format.

    Args:
      dtype: Name ("float16", "bfloat16", "tf32", ...), or a NumPy or TensorFlow dtype.

    Raises:
      ValueError: If the format is not one of `FORMAT_NAMES`.

    Example:
      >>> float_format("float16").max
      65504.0

    References:
      NVIDIA, "NVIDIA A100 Tensor Core GPU Architecture", 2020, for tf32: the
      exponent of float32 with the 10 fraction bits of float16.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    if name not in FORMAT_NAMES:
        raise ValueError(
            f"Unknown floating-point format. Received: dtype={dtype!r}. "
            f"Expected one of {', '.join(FORMAT_NAMES)}."
        )
    return _read(name)


@functools.cache
def _read(name):
    if name == "tf32":
        wide, narrow = _read("float32"), _read("float16")
        return wide._replace(
            name=name,
            bits=1 + wide.exponent_bits + narrow.mantissa_bits,
            mantissa_bits=narrow.mantissa_bits,
            max=(2 - narrow.epsilon) / (2 - wide.epsilon) * wide.max,
            smallest_subnormal=wide.smallest_normal * narrow.epsilon,
            epsilon=narrow.epsilon,
            supported=_SUPPORTED[name],
        )
    info = ml_dtypes.finfo(name)
    return FloatFormat(
        name,
        *map(int, (info.bits, info.nexp, info.nmant)),
        *map(float, (info.max, info.smallest_normal)),
        *map(float, (info.smallest_subnormal, info.eps)),
        bytes=np.dtype(name).itemsize,
        supported=_SUPPORTED[name],
    )


def represent(value: float | Fraction | decimal.Decimal, dtype) -> Representation:
    """Returns a real number rounded to a format: once, half to even.

    Rounded in rational arithmetic: `ml_dtypes` rounds a float64 to float32 first, and
    then errs by a whole unit near the middle between two values. In tf32, a GPU's
    library may differ by one unit in the last place: it rounds half away from 0, or
    drops the 13 bits.

    Args:
      value: An int, a `Fraction`, a `Decimal`, a Python or NumPy float.
      dtype: As for `float_format`.

    Raises:
      ValueError: If the format is unknown.

    Example:
      >>> represent(70000, "float16").outcome
      'overflow'

    References:
      IEEE 754-2019, sections 4.3.1 and 7.4; Micikevicius et al., "FP8 Formats for Deep
      Learning", 2022, for e4m3, which has no infinity.
    """
    target, exact = float_format(dtype), _as_exact(value)
    infinity = math.nan if target.name == "float8_e4m3fn" else math.inf
    if exact != exact:
        row = exact, exact, exact, "nan"
    elif exact == 0 or abs(exact) == infinity:
        row = float(value), 0.0, 0.0, "exact"
    elif (rounded := _round(abs(exact), target)) > target.max:
        stored = infinity if exact > 0 else -infinity
        row = stored, infinity, infinity, "overflow"
    else:
        error, outcome = abs(rounded - abs(exact)), "rounded"
        if error == 0:
            outcome = "exact"
        elif rounded < target.smallest_normal:
            outcome = "subnormal" if rounded else "underflow"
        stored = math.copysign(rounded, exact)
        row = stored, float(error), float(error / abs(exact)), outcome
    return Representation(target.name, *row)


def _as_exact(value):
    """The number as a `Fraction`, or as a float if it is infinite or NaN."""
    if isinstance(value, numbers.Integral):
        value = int(value)  # NumPy's would overflow.
    elif not isinstance(value, Fraction | decimal.Decimal):
        value = float(value)
    try:
        return Fraction(value)
    except (OverflowError, ValueError):
        return float(value)


def _round(magnitude, target):
    """To the nearest multiple of the unit at that magnitude, half to even."""
    if magnitude == math.inf:
        return magnitude
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1  # Now 2**exponent <= magnitude < 2**(exponent + 1).
    lowest = math.frexp(target.smallest_normal)[1] - 1
    unit = Fraction(2) ** (max(exponent, lowest) - target.mantissa_bits)
    return round(magnitude / unit) * unit
