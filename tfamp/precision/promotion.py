"""Where formats meet, float32 wins: such an operator is computed in float32.

TensorFlow's operators take one format. In a mixed mode a layer's own code meets two:
its inputs have 16 bits; a `tf.Variable`, a mask or noise has 32, and `x + noise` is an
error. While `HOOKS` are installed, an operator that failed on float32 beside 16 bits
runs again with the 16 bits cast up; gradients have the formats of their inputs.

| where | what failed | what runs again |
| --- | --- | --- |
| graphs, XLA | a function of `tf` raised a TypeError or ValueError | that function |
| eager | a kernel refused its inputs | the kernel, by its operator's slow path |

All of it comes after a failure, so that programs of one format are as fast as before.
What fails in float32 too fails as it does there; what is no case of float32 beside 16
bits (other formats; bfloat16 beside float16 alone) fails as in TensorFlow. Keras' own
operators (`keras.ops`, and Python's on a Keras variable) promote by Keras' rules, and
never come here.

Errors stay where something has a format of its own, so that there is no operator to
compute in float32: `variable.assign(x)`, a `TensorArray`, a variable of a loop, the
branches of one `tf.cond`, `tf.convert_to_tensor(x, "float32")`; and for `tf.raw_ops`
in graphs, which TensorFlow gives no second try. Loops and maps are not run again: in
their bodies, each operator is. NumPy arrays and numbers take the format of the tensor
beside them, as ever.
"""

import contextlib
import os
import pathlib
import re
import sys
import threading
import traceback
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.facts import formats, names
from tfamp.inspect import calls
from tfamp.keras_patches import hooks

_NOT_SUPPORTED = tf.__internal__.dispatch.OpDispatcher.NOT_SUPPORTED
_MIXED = re.compile(r"cannot compute \w+ as input .* a (\w+) tensor but is a (\w+) ")
_OWN = pathlib.Path(__file__).parents[1]
_places: set[str] = set()  # Those that were told of since `HOOKS` went in.
_lock = threading.Lock()


# ---- Formats ----


def _format(value) -> str | None:
    """Returns the format of a tensor or variable; None for everything else."""
    kinds = tf.Tensor, tf.Variable, tf.SparseTensor, keras.Variable
    dtype = value.dtype if isinstance(value, kinds) else None
    return getattr(dtype, "name", dtype)


def _leaves(values):
    for value in values:
        if type(value) in (list, tuple):
            yield from _leaves(value)
        else:
            yield value


def _low(found) -> list[str]:
    """Returns the 16-bit formats that are beside float32; none where it is not."""
    found = set(found)
    return sorted(found.intersection(formats.LOW)) if "float32" in found else []


def _meeting(values) -> list[str]:
    return _low(map(_format, _leaves(values)))


def _wide(value):
    """Returns a tensor in float32, if it has 16 bits; lists and tuples with those."""
    if type(value) in (list, tuple):
        return type(value)(map(_wide, value))
    return tf.cast(value, "float32") if _format(value) in formats.LOW else value


def widened(outputs: Any) -> Any:
    """Returns a model's outputs with those of 16 bits in float32; others as they are.

    Args:
      outputs: Tensors in any structure, or None.
    """
    return keras.tree.map_structure(_as_float32, outputs)


def _as_float32(value):
    if not isinstance(value, tf.Tensor) or value.dtype.name not in formats.LOW:
        return value
    # Losses and metrics leave out what a mask hides.
    return calls.with_mask_of(tf.cast(value, "float32"), value)


# ---- Graphs, and eager functions that complain in Python ----


def _dispatch(original):
    """For the function that TensorFlow asks, once `op` raised, for another result."""

    def dispatch(op, args, kwargs):
        result = original(op, args, kwargs)
        if result is not _NOT_SUPPORTED:
            return result
        given = [*_leaves([*args, *kwargs.values()])]
        low = _meeting(given)
        # A body that is traced again would have its effects twice.
        if not low or any(callable(x) and not isinstance(x, type) for x in given):
            return result
        if op.__name__ == "assert_same_float_dtype":
            return result
        return _in_float32(op, args, kwargs, low)

    return dispatch


def _in_float32(op, args, kwargs, low):
    told = str(sys.exc_info()[1])  # TensorFlow asks while it handles the error.
    named = re.search(r"'(\w+)' Op|cannot compute (\w+) as", told)
    try:
        result = op(*_wide(args), **{name: _wide(x) for name, x in kwargs.items()})
    except Exception as error:
        raise error from None
    _note(low, (named[1] or named[2]) if named else op.__name__)
    return result


# ---- Eager kernels ----
# A generated function is, as to TensorFlow 2.21:
#
#   def add_v2(x, y, name=None):
#     try:
#       return TFE_Py_FastPathExecute(...)
#     except _core._NotOkStatusException as e:
#       _ops.raise_from_not_ok_status(e, name)  # Where it returns, what is below runs.
#     ...
#     return add_v2_eager_fallback(x, y, ...)  # Begins with args_to_matching_eager.


class _MixedError(tf.errors.InvalidArgumentError, TypeError):
    """TensorFlow's own, of a type that has it ask `dispatch`."""


def _raise_from_not_ok_status(original):
    def raise_from_not_ok_status(e, name):
        pair = _MIXED.search(e.message)
        frame = e.__traceback__.tb_frame
        if not pair or not _matches_on_slow_path(frame):
            original(e, name)
        # Python deletes the `e` of `except ... as e`: here, an argument of `select_v2`.
        if "e" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            _raise_for_dispatch(original, e, name, pair)
        if not _meeting(frame.f_locals.values()):
            original(e, name)

    return raise_from_not_ok_status


def _matches_on_slow_path(frame) -> bool:
    """Whether the function that failed goes on to bring its inputs to one format."""
    slow = frame.f_globals.get(f"{frame.f_code.co_name}_eager_fallback")
    return slow is not None and "args_to_matching_eager" in slow.__code__.co_names


def _raise_for_dispatch(original, e, name, pair):
    try:
        original(e, name)
    except tf.errors.InvalidArgumentError as error:
        if not _low(tf.as_dtype(each).name for each in pair.groups()):
            raise
        raise _MixedError(error.node_def, error.op, error.message) from None


def _args_to_matching_eager(original):
    def args_to_matching_eager(l, *args, **kwargs):  # noqa: E741
        if low := _meeting(l):
            l = _wide(list(l))  # noqa: E741
            _note(low, _slow_operator())
        return original(l, *args, **kwargs)

    return args_to_matching_eager


def _slow_operator() -> str:
    """Returns the operator whose slow path is running, a constant of its code."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_name.endswith("_eager_fallback"):
        frame = frame.f_back
    constants = frame.f_code.co_consts if frame else ()
    return next((x.decode() for x in constants if isinstance(x, bytes)), "an operator")


# ---- What is told ----


def _note(low, operator):
    """Tells of a place, the first time."""
    file, line = _place()
    text = f"{file}:{line}: float32 and {' and '.join(low)} meet in {operator}"
    with _lock:
        known = text in _places
        _places.add(text)
    if not known:
        logging.warning("%s: computed in float32", text)


def _place() -> tuple[str, int]:
    """Returns the user's file and line; under AutoGraph, those that he wrote."""
    folders = os.path.dirname(tf.__file__), os.path.dirname(keras.__file__), str(_OWN)
    skipped = (*(folder + os.sep for folder in folders), contextlib.__file__)
    tf_stack = "tensorflow.python.util.tf_stack:extract_stack"
    for frame in reversed(names.resolve(tf_stack, traceback.extract_stack)()):
        if not frame.filename.startswith(skipped):
            return frame.filename, frame.lineno
    return "an unknown file", 0


class _Hooks(hooks.HookGroup):
    def install(self) -> None:
        if not self.in_force():
            _places.clear()
        super().install()


HOOKS = _Hooks(
    dispatch=_dispatch,
    raise_from_not_ok_status=_raise_from_not_ok_status,
    args_to_matching_eager=_args_to_matching_eager,
)
