"""Numbers that float16 cannot hold: an epsilon of 1e-12 is 0, a mask of -1e9 infinite.

What takes one beside a tensor of float16 is computed in float32.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.keras_patches import hooks
from tfamp.operators import again

_NUMBERS = (int, float, np.number)  # A union would be built at each call.
_PLAIN = {int, float, np.float16, np.float32, np.float64}


class NumberError(TypeError):
    """What a conversion raises, so that TensorFlow asks for another result."""

    def __init__(self, value):
        super().__init__(f"{value!r} is lost in float16")
        self.value = value


def _constant(original):
    """For what makes a constant of a number."""

    def constant(value, dtype=None, shape=None, name="Const"):
        if dtype is tf.float16 and _is_lost(value) and again.functions_around():
            raise NumberError(value)
        return original(value, dtype, shape, name)

    return constant


def _promoted(original):
    """For Python's operators, as `1e-12 + x`, where the number may come first."""

    def maybe_promote_tensors(*tensors, force_same_dtype=False):
        for number in tensors:
            # Each eager operator comes here.
            if type(number) in _PLAIN and _is_lost(number) and among(tensors):
                again.note(f"{number} is lost in float16", "an operator")
                wide = tf.constant(number, "float32")
                tensors = [wide if x is number else again.wide(x) for x in tensors]
                break
        return original(*tensors, force_same_dtype=force_same_dtype)

    return maybe_promote_tensors


def _is_lost(value):
    """Whether float16 has 0 or infinity for a number, or infinity for a little more.

    That is so of its largest, as of a mask of `x.dtype.min`.
    """
    # Each eager operator asks: what most numbers are comes first, and is fast.
    if not isinstance(value, _NUMBERS):
        return False
    if value == 0 or 2**-25 < abs(value) < 65504:
        return False
    return bool(np.isfinite(value))


def behind(error: BaseException | None) -> Any:
    """Returns the number that led to an error, or None."""
    while error is not None:
        if isinstance(error, NumberError):
            return error.value
        error = error.__context__
    return None


def among(values: Iterable) -> Any:
    """Returns a number that is lost beside a tensor of float16, or None."""
    values = list(values)
    has_float16 = "float16" in map(again.format_of, values)
    return next(filter(_is_lost, values), None) if has_float16 else None


# In bfloat16 no number is lost, and eager operators need not ask.
HOOKS = hooks.HookGroup(constant=_constant, maybe_promote_tensors=_promoted)
