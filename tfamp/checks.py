"""Checks of numbers that a caller gave; errors say what was received."""

import math
import numbers
from typing import Any

import tensorflow as tf

# The integer dtype of Keras' own step counter on the TensorFlow backend.
COUNTER_DTYPE = "int64"


def check_real(name: str, value: Any) -> None:
    """Raises unless `value` is a finite number; `name` is that of the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _type_error(name, value, "a number")
    # An integer is finite, and `isfinite` overflows on one beyond float64.
    if not isinstance(value, numbers.Integral) and not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Received: {name}={value}.")


def check_count(name: str, value: Any, largest: int | None = None) -> None:
    """Raises unless `value` is an integer from 1 to `largest` (default: of int64)."""
    if not is_integer(value):
        raise _type_error(name, value, "an integer")
    limit = tf.dtypes.as_dtype(COUNTER_DTYPE).max if largest is None else largest
    if not 1 <= value <= limit:
        ceiling = "" if value < 1 else f" and at most {limit}"
        raise ValueError(
            f"`{name}` must be an integer of at least 1{ceiling}. "
            f"Received: {name}={value}."
        )


def as_counts(name: str, values: Any) -> tuple[int, ...]:
    """Returns a tuple or list of integers of at least 1 as a tuple; else raises."""
    if not isinstance(values, tuple | list):
        raise _type_error(name, values, "a tuple of integers")
    for index, value in enumerate(values):
        check_count(f"{name}[{index}]", value)
    return tuple(int(value) for value in values)


def is_integer(value: Any) -> bool:
    """Whether `value` is Python's or NumPy's integer; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _type_error(name, value, noun):
    return TypeError(
        f"`{name}` must be {noun}. Received: {name}={value!r} "
        f"of type {type(value).__name__}."
    )
