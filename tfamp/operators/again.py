"""What failed on 16 bits is run again in float32: when, on what, and what is said."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.facts import formats, user_code
from tfamp.keras_patches import hooks

_WITHIN = tuple(os.path.dirname(x) for x in (tf.__file__, hooks.__file__, __file__))
_TENSORS = (tf.Tensor, tf.Variable, tf.SparseTensor, tf.IndexedSlices, keras.Variable)
# Where operators were computed in float32 since `promotion.HOOKS` went in, as text.
LINES: set[str] = set()


# ---- Formats ----


def format_of(value: Any) -> str | None:
    """Returns the format of a tensor or variable; None for everything else."""
    dtype = value.dtype if isinstance(value, _TENSORS) else None
    return getattr(dtype, "name", dtype)


def is_low(value: Any) -> bool:
    """Whether a value is a tensor of 16 bits."""
    return isinstance(value, tf.Tensor) and value.dtype.name in formats.LOW


def leaves(values: Iterable) -> Iterator[Any]:
    """Yields what lists and tuples hold, at any depth."""
    for value in values:
        if type(value) in (list, tuple):
            yield from leaves(value)
        else:
            yield value


def differ(one: Any, other: Any) -> bool:
    """Whether one format is float32, and the other has 16 bits.

    Args:
      one: A format, as `format_of` returns it.
      other: Another one.
    """
    return (one == "float32" and other in formats.LOW) or (
        other == "float32" and one in formats.LOW
    )


def in_format(value: Any, format: str | None) -> Any:
    """Returns a tensor of 16 bits in float32, or one of float32 in 16 bits, as asked.

    What is in neither, or asked for in neither, is returned as it is.

    Args:
      value: A tensor, slices of one, or anything else.
      format: The format that is asked for.
    """
    found = format_of(value)
    return tf.cast(value, format) if found and differ(found, format) else value


def low_formats(values: Iterable) -> list[str]:
    """Returns the 16-bit formats among tensors, if float32 can stand for them.

    None for bfloat16 beside float16 alone, which is an error of its own.
    """
    dtypes = {format_of(each) for each in leaves(values)}
    low = sorted(dtypes.intersection(formats.LOW))
    return low if len(low) == 1 or "float32" in dtypes else []


def meet(values: Iterable) -> bool:
    """Whether there are tensors of float32 beside those of 16 bits."""
    dtypes = {format_of(each) for each in leaves(values)}
    return "float32" in dtypes and not dtypes.isdisjoint(formats.LOW)


def wide(value: Any) -> Any:
    """Returns a tensor in float32, if it has 16 bits; lists and tuples with those."""
    if type(value) in (list, tuple):
        return type(value)(map(wide, value))
    return tf.cast(value, "float32") if format_of(value) in formats.LOW else value


def wide_argument(value: Any) -> Any:
    """Returns what `wide` does, and float32 for a dtype of 16 bits."""
    is_dtype = isinstance(value, tf.DType) and value.name in formats.LOW
    return tf.float32 if is_dtype else wide(value)


# ---- Second tries ----


_now = threading.local()


def running() -> contextlib.AbstractContextManager[None]:
    """Scopes a second try; in it, single operators have one of their own."""
    return hooks.replaced([(_now, "is_running", True)])


def can_run(name: str, values: Iterable) -> bool:
    """Whether a function of `tf` may be called again in float32.

    Not if it asserts a format, and not if it calls the user's functions: a body that is
    traced again would have its effects twice.

    Args:
      name: The function's name.
      values: Its arguments.
    """
    arguments = [*leaves(values)]
    calls_others = any(callable(x) and not isinstance(x, type) for x in arguments)
    asserts = name.startswith(("assert_type", "assert_same_float_dtype"))
    return bool(low_formats(arguments)) and not calls_others and not asserts


def alone(function: Callable, *arguments: Any) -> Any:
    """Calls what TensorFlow calls by itself, such as a function of a gradient.

    Whatever the user called, it is not called again for an error in there.
    """
    return function(*arguments)


def functions_around(operators: bool = True) -> int:
    """Returns how many functions have a second try, up to the user's code.

    None in a second try.

    Args:
      operators: Whether those that add an operator to a graph count.
    """
    frame, tries = sys._getframe(1), 0
    if getattr(_now, "is_running", False):
        return 0
    while frame and (file := frame.f_code.co_filename).startswith(_WITHIN):
        if frame.f_code is alone.__code__:
            break
        if frame.f_code.co_name == "op_dispatch_handler":  # Around a function of `tf`.
            tries += _handles(frame.f_locals)
        elif operators and "gen_" in file and "dispatch" in frame.f_code.co_names:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            tries += can_run("", (frame.f_locals.get(name) for name in names))
        frame = frame.f_back
    return tries


def _handles(frame_locals):
    name = getattr(frame_locals.get("dispatch_target"), "__name__", "")
    values = [*frame_locals.get("args", ()), *frame_locals.get("kwargs", {}).values()]
    return name.startswith("convert_to_tensor") or can_run(name, values)


# ---- Reports ----


def reason(values: Iterable) -> str:
    """Says why: float32 and 16 bits meet, or 16 bits alone fail."""
    named = " and ".join(low_formats(values))
    return f"float32 and {named} meet" if meet(values) else f"no {named}"


def note(why: str, operator: str) -> None:
    """Tells of a line that computes in float32, the first time."""
    file, line = user_code.line()
    text = f"{file}:{line}: {why} in {operator}"
    if text not in LINES:
        LINES.add(text)
        logging.warning("%s: computed in float32", text)
