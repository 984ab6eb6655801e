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

What 16 bits are converted to float32 for, outside of operators, is cast, such as in
`variable.assign(x)`; so are the branches of one `tf.cond`. Errors remain where
something has its own format: a `TensorArray`, a variable of a loop of AutoGraph's or of
`tf.map_fn`; and for `tf.raw_ops` in graphs, which TensorFlow gives no second try. Loops
and maps are not run again: in their bodies, each operator is. NumPy arrays and numbers
take the format of the tensor beside them, as ever, but for numbers that float16 cannot
hold.
"""

import os
import re
import sys
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.facts import formats, user_code
from tfamp.inspect import calls
from tfamp.keras_patches import hooks

_NOT_SUPPORTED = tf.__internal__.dispatch.OpDispatcher.NOT_SUPPORTED
_MIXED = re.compile(r"cannot compute \w+ as input .* a (\w+) tensor but is a (\w+) ")
_WITHIN = (os.path.dirname(tf.__file__), os.path.dirname(hooks.__file__), __file__)
_NUMBERS = (int, float, np.number)  # A union would be built at each call.
_places: set[str] = set()  # Those reported since `HOOKS` went in.
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
        error = sys.exc_info()[1]  # TensorFlow asks while it handles it.
        given = [*_leaves([*args, *kwargs.values()])]
        low = _meeting(given)
        if number := _number(error, given):
            if _second_tries() > 1:  # What the user called is the one to try again.
                return result
            low = [] if op is tf.convert_to_tensor else ["float16"]
        if op is tf.convert_to_tensor and not low:  # `keras.ops` calls it, too.
            return _converted(given, number)
        if op.__name__.startswith("cond") and "same number, type" in str(error):
            return _branched(*args, **kwargs)
        # A body that is traced again would have its effects twice.
        if not low or any(callable(x) and not isinstance(x, type) for x in given):
            return result
        if op.__name__ == "assert_same_float_dtype":
            return result
        named = re.search(r"'(\w+)' Op|cannot compute (\w+) as", str(error))
        plain = re.sub(r"^_|_dispatch$|_v2$", "", op.__name__)
        name = (named[1] or named[2]) if named and not number else plain
        try:
            wide = {name: _wide(x) for name, x in kwargs.items()}
            result = op(*_wide(args), **wide)
        except Exception as error:
            raise error from None
        _note(f"{number} is lost in float16" if number else _met(low), name)
        return result

    return dispatch


def _branched(pred, true_fn, false_fn, *_, name=None, **__):
    """Returns what `tf.cond` does where one branch returns float32, one 16 bits."""
    wide = [lambda function=each: widened(function()) for each in (true_fn, false_fn)]
    try:
        return tf.cond(pred, *wide, name=name)
    except (TypeError, ValueError):  # That of the branches as they are.
        return _NOT_SUPPORTED


def _converted(given, number):
    """Returns another result of `tf.convert_to_tensor`, if there is one."""
    if number:
        _note(f"{number} is lost in float16", "convert_to_tensor")
        return tf.constant(number, "float32")
    value, *others = given
    names = [getattr(x, "name", x) for x in others if isinstance(x, str | tf.DType)]
    if "float32" not in names or _format(value) not in formats.LOW:
        return _NOT_SUPPORTED
    return tf.cast(value, "float32")


def _tf_tensor(original):
    """For what a tensor is converted by: `variable.assign(x)` computes nothing."""

    def __tf_tensor__(tensor, dtype=None, name=None):
        if dtype is tf.float32 and tensor.dtype.name in formats.LOW:
            if not _second_tries():
                return tf.cast(tensor, dtype)
        return original(tensor, dtype, name)

    return __tf_tensor__


# ---- Numbers that float16 cannot hold ----
# An epsilon of 1e-12 is 0 in it, a mask of -1e9 infinite: what takes one is float32.


class _NumberError(TypeError):
    """What a conversion raises, so that `dispatch` is asked."""

    def __init__(self, value):
        super().__init__(f"{value!r} is lost in float16")
        self.value = value


def _constant(original):
    def constant(value, dtype=None, shape=None, name="Const"):
        if dtype is tf.float16 and _is_lost(value) and _second_tries():
            raise _NumberError(value)
        return original(value, dtype, shape, name)

    return constant


def _is_lost(value):
    """Whether float16 has 0 or infinity for a number that is neither."""
    # Each eager operator asks: what most numbers are comes first, and is fast.
    if not isinstance(value, _NUMBERS):
        return False
    if value == 0 or 2**-25 < abs(value) < 65520:
        return False
    return bool(np.isfinite(value))


def _number(error, given):
    """Returns the number that led to an error, or None."""
    while error is not None:
        if isinstance(error, _NumberError):
            return error.value
        error = error.__context__
    # `x + 1e-12` tries float32 by itself, and then fails.
    found = filter(_is_lost, given) if "float16" in map(_format, given) else ()
    return next(iter(found), None)


def _second_tries() -> int:
    """Returns how many functions around have a second try, up to the user's code."""
    frame, found = sys._getframe(2), 0
    while frame and (file := frame.f_code.co_filename).startswith(_WITHIN):
        code = frame.f_code
        generated = "gen_" in file and "dispatch" in code.co_names
        found += generated or code.co_name == "op_dispatch_handler"
        frame = frame.f_back
    return found


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
    """Whether the failed function can continue by casting its inputs to one format."""
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
            _note(_met(low), _slow_operator())
        return original(l, *args, **kwargs)

    return args_to_matching_eager


def _slow_operator() -> str:
    """Returns the operator whose slow path is running, a constant of its code."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_name.endswith("_eager_fallback"):
        frame = frame.f_back
    constants = frame.f_code.co_consts if frame else ()
    return next((x.decode() for x in constants if isinstance(x, bytes)), "an operator")


# ---- Reports ----


def _met(low):
    return f"float32 and {' and '.join(low)} meet"


def _note(what, operator):
    """Tells of a place, the first time."""
    file, line = user_code.place()
    text = f"{file}:{line}: {what} in {operator}"
    with _lock:
        known = text in _places
        _places.add(text)
    if not known:
        logging.warning("%s: computed in float32", text)


def places() -> list[str]:
    """Returns where operators were computed in float32 since `HOOKS`, as text."""
    with _lock:
        return sorted(_places)


class _Hooks(hooks.HookGroup):
    def install(self) -> None:
        if not self.in_force():
            _places.clear()
        super().install()


HOOKS = _Hooks(
    dispatch=_dispatch,
    constant=_constant,
    __tf_tensor__=_tf_tensor,
    raise_from_not_ok_status=_raise_from_not_ok_status,
    args_to_matching_eager=_args_to_matching_eager,
)
