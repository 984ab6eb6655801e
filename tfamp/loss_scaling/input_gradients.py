"""Gradients by inputs (saliency, FGSM) that float16 loses: outside of training the loss
is not scaled, and nothing else would say so.

Below its smallest normal number float16 has multiples of one number only, and 0 below
that. So has a gradient that was computed in it, whatever it was multiplied by later.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.facts import formats, user_code

_FEWEST = 256  # Elements; fewer may well be all 0.
_SHARE = 0.1  # Of zeros, from which on it is said.
_FEW, _MOST = 3, 64  # Multiples: how many there must be, and how many are looked at.
_TEXT = (
    f"a gradient by an input is 0 in {_SHARE:.0%} of its elements or more: float16 has "
    "no numbers below 6e-8, and outside of a training step the loss is not scaled. "
    "Compute it in float32: `with tfamp.precision_scope(model, 'float32'):` around "
    "the tape."
)


def look(grads: Sequence[Any]) -> None:
    """Warns, once, of eager gradients of which float16 has lost a part."""
    if user_code.is_told(_TEXT) or not tf.executing_eagerly():
        return
    for grad in grads:
        if isinstance(grad, tf.Tensor) and grad.dtype.is_floating and grad.shape.rank:
            if _is_lost(np.abs(tf.cast(grad, "float32").numpy()).ravel()):
                user_code.warn(_TEXT)
                return


def _is_lost(sizes):
    """Whether there are many zeros, and the other numbers are those of an underflow."""
    if len(sizes) < _FEWEST:
        return False
    share, numbers = np.mean(sizes == 0), sizes[sizes > 0]
    if share < _SHARE:
        return False
    if share == 1.0:
        return True
    unit = numbers.min()
    multiples = numbers[numbers < _MOST * unit] / unit
    whole = np.abs(multiples - np.round(multiples)) < 0.01
    is_small = unit < formats.float_format("float16").smallest_normal
    several = len(set(np.round(multiples))) >= _FEW
    return is_small and several and whole.mean() > 0.9
