"""Facts about floating-point formats, and what each makes of a number.

Every number that describes a dtype anywhere in tfamp comes from here; all are read
from `ml_dtypes.finfo`.
"""

import decimal
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

Outcome = Literal["exact", "rounded", "subnormal", "underflow", "overflow", "nan"]


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
      bytes: Bytes of an element in memory; 4 for tf32, which is stored as float32.
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
    """What one format makes of one number.

    Attributes:
      format: Name of the format.
      stored: The nearest value that the format has, as a float.
      absolute_error: |stored - number|; NaN where one of them is NaN.
      relative_error: The same over |number|; 0 for 0.
      outcome: "exact"; "rounded", to the format's full precision; "subnormal", to
        less; "underflow": it became 0; "overflow": it became infinite, or NaN in a
        format without infinity; "nan": it was NaN.
    """

    format: str
    stored: float
    absolute_error: float
    relative_error: float
    outcome: Outcome


# Capabilities are CUDA's. References: NVIDIA, "CUDA C++ Programming Guide", arithmetic
# instructions; "NVIDIA A100" and "NVIDIA H100 Tensor Core GPU Architecture", 2020 and
# 2022; "NVIDIA Ada GPU Architecture", 2022. A CPU's formats: oneDNN, "Data Types".
_FP8 = (
    "NVIDIA tensor cores of capability 8.9 (L4, RTX 40) and 9.0 (H100) on; no mode here"
)
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
_WITHOUT_INFINITY = {"float8_e4m3fn"}  # "fn": finite values and NaN only.


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
        bytes=np.dtype(name).itemsize,
        supported=_SUPPORTED[name],
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
        bytes=wide.bytes,
        supported=_SUPPORTED["tf32"],
    )


def represent(value: float | Fraction, dtype) -> Representation:
    """Returns what a format makes of a number: rounded once, half to even.

    Rounded in rational arithmetic: `ml_dtypes` rounds a float64 to float32 first, and
    then errs by a whole unit near the middle between two values. In tf32, a GPU's
    library may differ by one unit in the last place: it rounds half away from 0, or
    drops the 13 bits.

    Args:
      value: Any real number: an int, a `Fraction`, a Python or NumPy float.
      dtype: As for `float_format`.

    Returns:
      A `Representation`.

    Raises:
      TypeError: If `value` is not a real number.
      ValueError: If the format is unknown.

    Example:
      >>> represent(70000, "float16").outcome
      'overflow'

    References:
      IEEE 754-2019, sections 4.3.1 and 7.4; Micikevicius et al., "FP8 Formats for Deep
      Learning", 2022, for e4m3, which has no infinity.
    """
    target = float_format(dtype)
    exact = _as_exact(value)
    if isinstance(exact, float):  # Not finite.
        return _represent_special(exact, target)
    if exact == 0:
        return Representation(target.name, float(value), 0.0, 0.0, "exact")
    rounded = _round(abs(exact), target)
    if rounded > Fraction(target.max):
        return _overflow(exact, target)
    error = abs(rounded - abs(exact))
    return Representation(
        target.name,
        math.copysign(float(rounded), exact),
        float(error),
        float(error / abs(exact)),
        _outcome(rounded, error, target),
    )


def _as_exact(value):
    """The number as a `Fraction`, or as a float if it is infinite or NaN."""
    is_real = isinstance(value, numbers.Real) or not isinstance(value, numbers.Complex)
    if isinstance(value, bool | np.bool_ | str) or not (
        is_real and hasattr(value, "__float__")
    ):
        raise TypeError(
            f"`value` must be a real number. Received: value={value!r} "
            f"of type {type(value).__name__}."
        )
    if isinstance(value, Fraction):
        return value
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return Fraction(value)
    if isinstance(value, numbers.Integral):
        return Fraction(int(value))
    number = float(value)
    return Fraction(number) if math.isfinite(number) else number


def _round(magnitude: Fraction, target: FloatFormat) -> Fraction:
    """To the nearest multiple of the unit at that magnitude, half to even."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1  # Now 2**exponent <= magnitude < 2**(exponent + 1).
    lowest = math.frexp(target.smallest_normal)[1] - 1
    unit = Fraction(2) ** (max(exponent, lowest) - target.mantissa_bits)
    return round(magnitude / unit) * unit


def _outcome(rounded, error, target) -> Outcome:
    if error == 0:
        return "exact"
    if rounded == 0:
        return "underflow"
    return "subnormal" if rounded < Fraction(target.smallest_normal) else "rounded"


def _represent_special(number, target):
    if math.isnan(number):
        return Representation(target.name, math.nan, math.nan, math.nan, "nan")
    if target.name in _WITHOUT_INFINITY:
        return _overflow(number, target)
    return Representation(target.name, number, 0.0, 0.0, "exact")


def _overflow(number, target):
    if target.name in _WITHOUT_INFINITY:
        return Representation(target.name, math.nan, math.nan, math.nan, "overflow")
    stored = math.inf if number > 0 else -math.inf
    return Representation(target.name, stored, math.inf, math.inf, "overflow")


# ---- Tables ----

# Beyond any format, and its exact value still takes no time.
_LARGEST_EXPONENT = 400


def parse_numbers(texts: Iterable[str]) -> dict[str, float | Fraction]:
    """Reads numbers as they are written, without rounding them to float64 first.

    Args:
      texts: Numbers, or several with commas between them: "1e-7", "-2,inf,nan".

    Returns:
      Dict from the text of each number to its value.

    Raises:
      ValueError: If some are not numbers; all of them are named.
    """
    words = [word.strip() for text in texts for word in text.split(",")]
    found = {word: _parse(word) for word in words}
    bad = [repr(word) for word, value in found.items() if value is None]
    if bad:
        raise ValueError(
            f"Not a number, or beyond 1e{_LARGEST_EXPONENT} or below "
            f"1e-{_LARGEST_EXPONENT}: {', '.join(bad)}. Expected decimal numbers, "
            "inf or nan, with commas between them."
        )
    return found


def _parse(word) -> float | Fraction | None:
    try:
        number = decimal.Decimal(word)
    except decimal.InvalidOperation:
        return None
    if number.is_nan():  # Decimal's may signal, and carry digits.
        return math.nan
    if not number.is_finite() or number == 0:
        return float(word)
    if abs(number.adjusted()) > _LARGEST_EXPONENT:
        return None
    return Fraction(number)


def limits_table() -> list[list[str]]:
    """Returns the limits of every format, the head of the table first."""
    head = ["format", "bits", "bytes", "max", "smallest normal", "smallest subnormal"]
    rows = [
        [f.name, str(f.bits), str(f.bytes)]
        + [_digits(x) for x in (f.max, f.smallest_normal, f.smallest_subnormal)]
        + [_digits(f.epsilon), f.supported]
        for f in map(float_format, FORMAT_NAMES)
    ]
    return [[*head, "epsilon", "computed by"], *rows]


def values_table(values: Mapping[str, float | Fraction]) -> list[list[str]]:
    """Returns what every format makes of each number, the head of the table first.

    Args:
      values: Dict from what to call a number to the number.
    """
    rows = [["value", "format", "stored", "relative error", "outcome"]]
    for label, value in values.items():
        for name in FORMAT_NAMES:
            found = represent(value, name)
            row = [_digits(found.stored), f"{found.relative_error:.2g}", found.outcome]
            rows.append([label, name, *row])
    return rows


def _digits(number):
    return f"{number:.9g}"  # Nine tell every float32 from the next.


def to_text(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal; `rows` starts with the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruler = ["-" * len(cell) for cell in rows[0]]
    return "\n".join(
        "  ".join(map(str.ljust, row, widths)).rstrip()
        for row in [rows[0], ruler, *rows[1:]]
    )
