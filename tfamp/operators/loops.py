"""Loops and branches whose state or results have two formats.

A loop's state keeps the format that it began with, as a gradient keeps that of its
input: a recurrent cell that adds noise in float32 to a state of 16 bits returns it in
16 bits. The branches of a condition have one result, and float32 wins.
"""

from typing import Any

import tensorflow as tf

from tfamp.facts import formats
from tfamp.operators import again


def while_loop(original):
    """For `tf.while_loop`, and what is made of it: maps, scans, recurrent layers."""

    def while_loop(cond, body, loop_vars, *args, **kwargs):
        def keeps(*state):
            return _like(body(*state), state)

        return original(cond, keeps, loop_vars, *args, **kwargs)

    return while_loop


def autograph_loop(original):
    """For a loop of Python's that AutoGraph makes one of TensorFlow's."""

    def loop(test, body, get_state, set_state, symbol_names, opts):
        def keeps():
            before = get_state()
            body()
            set_state(_like(get_state(), before))

        return original(test, keeps, get_state, set_state, symbol_names, opts)

    return loop


def _like(state, before):
    """Returns a state with what was of 16 bits, and has become float32, cast back."""
    new, old = tf.nest.flatten(state), tf.nest.flatten(before)
    if len(new) != len(old):
        return state  # TensorFlow says what is wrong.
    if not any(_widens(*pair) for pair in zip(new, old, strict=True)):
        return state
    kept = [
        tf.cast(x, y.dtype) if _widens(x, y) else x
        for x, y in zip(new, old, strict=True)
    ]
    return tf.nest.pack_sequence_as(state, kept)


def _widens(x, y):
    low = isinstance(y, tf.Tensor) and y.dtype.name in formats.LOW
    return low and isinstance(x, tf.Tensor) and x.dtype == tf.float32


def switch_case(original):
    """For `tf.switch_case`: `tf.cond` is asked for another result by TensorFlow."""

    def switch_case(branch_index, branch_fns, default=None, name="switch_case"):
        given = branch_index, branch_fns, default, name
        try:
            return original(*given)
        except (TypeError, ValueError) as error:
            failure = error
        try:
            return original(*(_in_float32(each) for each in given))
        except (TypeError, ValueError):
            raise failure from None

    return switch_case


def cond(pred: Any, true_fn: Any, false_fn: Any, *_, name: Any = None, **__) -> Any:
    """Returns what `tf.cond` does where one branch returns float32, one 16 bits.

    Raises:
      TypeError, ValueError: That of `tf.cond`, if it is not for that.
    """
    return tf.cond(pred, _in_float32(true_fn), _in_float32(false_fn), name=name)


def _in_float32(branches):
    """Returns branches, a function or a structure of them, that return float32."""
    if isinstance(branches, dict):
        return {key: _in_float32(each) for key, each in branches.items()}
    if isinstance(branches, list | tuple):
        return type(branches)(map(_in_float32, branches))
    if not callable(branches):
        return branches
    return lambda: tf.nest.map_structure(again.wide, branches())
