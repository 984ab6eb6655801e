"""Reductions that make a loss are float32, as in PyTorch's autocast.

A sum over a batch and its pixels passes 65,504, float16's largest number, soon. While
`HOOKS` are installed, these compute in float32 and return it:

| what | where |
|---|---|
| sums, means, products, norms of all, or for each row of a batch | the user's code |
| squares that are only summed so | the same, in graphs |
| activity regularizers | as a whole, if they are a `Regularizer` |

Not in the body of a loop or a branch, nor in a `tf.custom_gradient`: what it returns
has the format that it was made for. Others stay, too: they make activations (a pooling,
a normalization of the user's own, where `keepdims` tells), and what they make is as
large. So do `exp`, `log` and `pow`, which PyTorch computes in float32: their results
are as large as an activation.
"""

import inspect
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_patches import hooks
from tfamp.operators import again

_TF, _KERAS, _OWN = (
    os.path.dirname(x) + os.sep
    for x in (tf.__file__, keras.__file__, os.path.dirname(__file__))
)
# What a user calls, and what that calls.
_WITHIN = (_TF, _OWN, *(os.path.join(_KERAS, "src", x) for x in ("ops", "backend")))
_MAKES_LOSSES = tuple(
    os.path.join(_KERAS, "src", x) for x in ("losses", "metrics", "regularizers")
)
# A gradient has the format of its input, a loop's state the one that it began with.
_FIXED = {
    os.path.join(_TF, "python", *x.split("/"))
    for x in (
        "eager/backprop.py",
        "ops/custom_gradient.py",
        "ops/functional_ops.py",
        "ops/map_fn.py",
        "ops/while_loop.py",
    )
}
_BODIES = {"CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph"}


def _reduction(original):
    signature = inspect.signature(original)

    def reduce(*args, **kwargs):
        x = args[0] if args else None
        if again.is_low(x):
            arguments = signature.bind(*args, **kwargs).arguments
            keeps = arguments.get("keep_dims") or arguments.get("keepdims")
            if not keeps and _leaves_rows(x, arguments.get("axis")) and _makes_loss():
                args = (_wide(x), *args[1:])
        return original(*args, **kwargs)

    return reduce


def _leaves_rows(x, axis):
    """Whether at most the first dimension is left of a tensor."""
    rank = x.shape.rank
    if not rank:
        return False
    axes = range(rank) if axis is None else tf.get_static_value(axis)
    if axes is None:
        return False
    reduced = {int(each) % rank for each in np.ravel(axes)}
    return len(reduced) > 0 and set(range(rank)) - reduced <= {0}


def _makes_loss():
    """Whether the user's code, or a regularizer, asks, where no format is fixed."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(_WITHIN):
        if frame.f_code.co_filename in _FIXED:
            return False
        frame = frame.f_back
    file = frame.f_code.co_filename if frame else _KERAS
    if file.startswith(_KERAS) and not file.startswith(_MAKES_LOSSES):
        return False
    graph = tf.compat.v1.get_default_graph()
    if type(graph).__name__ in _BODIES:
        return False
    while frame and not file.startswith(_KERAS) and file not in _FIXED:
        frame = frame.f_back  # As far as the layer or step that the user's code is.
        file = frame.f_code.co_filename if frame else ""
    return file not in _FIXED


def _wide(x):
    """Returns a tensor in float32; a square, computed so."""
    if tf.is_symbolic_tensor(x) and x.op.type in ("Square", "Mul"):
        one, *others = x.op.inputs
        if all(each is one for each in others):
            return tf.square(tf.cast(one, "float32"))
    return tf.cast(x, "float32")


def _write(original):
    signature = inspect.signature(original)

    def write(array, *args, **kwargs):
        call = signature.bind(array, *args, **kwargs)
        # It may be such a sum; or 16 bits, for an array that was made as float32.
        value = again.in_format(call.arguments["value"], array.dtype.name)
        call.arguments["value"] = value
        return original(*call.args, **call.kwargs)

    return write


@hooks.around
def _regularized(original, regularizer, x):
    return original(regularizer, _wide(x) if again.is_low(x) else x)


class _Hooks(hooks.HookGroup):
    def add(self, regularizer: Any) -> None:
        """Has a layer's activity regularizer compute in float32, too."""
        if isinstance(regularizer, keras.Regularizer):  # A function is its sum.
            self.add_to(type(regularizer), "__call__", _regularized)


HOOKS = _Hooks(
    _sum=_reduction,
    mean=_reduction,
    prod=_reduction,
    euclidean_norm=_reduction,
    l2_loss=_reduction,
    norm=_reduction,
    linalg_norm=_reduction,
    keras_mean=_reduction,
    write=_write,
    scatter=_write,
    unstack=_write,
    split=_write,
)
