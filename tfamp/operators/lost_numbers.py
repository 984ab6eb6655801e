"""Numbers that 16 bits cannot hold: an epsilon of 1e-12 is 0, a mask of -1e9 infinite.

That is so in float16; in bfloat16, of float32's smallest and largest numbers. What
takes one beside a tensor of 16 bits is computed in float32.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.facts import formats
from tfamp.keras_patches import hooks
from tfamp.operators import again

_NUMBERS = (int, float, np.number)  # A union would be built at each call.
_TENSOR, _PLAIN = tf.Tensor, (int, float)
_LOW = {name: formats.float_format(name) for name in formats.LOW}
_LARGEST = _LOW["float16"].max
_SMALLEST = _LOW["float16"].smallest_subnormal / 2  # Below it float16 has 0.
_LIMITS = {"float16": (_LARGEST, _SMALLEST), "bfloat16": (_LOW["bfloat16"].max, 0.0)}


class NumberError(TypeError):
    """What a conversion raises, so that TensorFlow asks for another result.

    Attributes:
      value: The number, or a list or array with it.
    """

    def __init__(self, value: Any, low: str):
        one = value if np.ndim(value) == 0 else np.max(np.abs(value))
        super().__init__(f"{one!s} is lost in {low}")
        self.value = value


@hooks.around
def _constant(original, value, dtype=None, shape=None, name="Const"):
    """For what makes a constant of a number, or of a list or array of numbers."""
    low = getattr(dtype, "name", "")
    if low in _LIMITS and _is_lost(value, low) and again.retryable_callers():
        raise NumberError(value, low)
    return original(value, dtype, shape, name)


@hooks.around
def _promoted(original, *tensors, force_same_dtype=False):
    """For Python's operators, as `1e-12 + x`, where the number may come first."""
    for number in tensors:
        # Each eager operator comes here.
        if isinstance(number, _TENSOR) or (
            type(number) in _PLAIN and _SMALLEST < abs(number) < _LARGEST
        ):
            continue
        if lost := among(tensors):
            again.note(str(lost), "an operator")
            number, wide = lost.value, tf.constant(lost.value, "float32")
            tensors = [wide if x is number else again.wide(x) for x in tensors]
            break
    return original(*tensors, force_same_dtype=force_same_dtype)


def _is_lost(value, low):
    """Whether a format has 0 or infinity for a number, or infinity for a little more.

    That is so of its largest, as of a mask of `x.dtype.min`. Of many numbers it matters
    that none is infinite.
    """
    largest, smallest = _LIMITS[low]
    if isinstance(value, _NUMBERS):
        is_held = value == 0 or smallest < abs(value) < largest
        return not is_held and bool(np.isfinite(value))
    if not isinstance(value, list | tuple | np.ndarray):
        return False
    try:
        many = np.abs(np.asarray(value, "float64"))
    except (TypeError, ValueError, NotImplementedError):  # Tensors among them.
        return False
    return bool(np.any((many >= largest) & np.isfinite(many)))


def behind(error: BaseException | None) -> NumberError | None:
    """Returns the lost number that led to an error, or None."""
    while error is not None and not isinstance(error, NumberError):
        error = error.__context__
    return error


def among(values: Iterable) -> NumberError | None:
    """Returns a number that is lost beside a tensor of 16 bits, or None."""
    values = list(values)
    low = next((x for x in map(again.format_of, values) if x in _LIMITS), "")
    lost = [x for x in values if low and _is_lost(x, low)]
    return NumberError(lost[0], low) if lost else None


HOOKS = hooks.HookGroup(constant=_constant, maybe_promote_tensors=_promoted)
