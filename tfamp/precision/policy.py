"""The only writer of Keras' global dtype policy and TensorFlow's TF32 flag."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfamp.facts import formats, modes, user_code


class PrecisionState(NamedTuple):
    """The two globals: Keras' dtype policy and whether TF32 may be used."""

    dtype_policy: keras.dtype_policies.DTypePolicy
    tensor_float_32: bool


_former: list[keras.DTypePolicy] = []  # Those that were global until tfamp set another.


def read() -> PrecisionState:
    """Returns the globals as they stand (the policy of the calling thread)."""
    return PrecisionState(
        keras.config.dtype_policy(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )


def was_global(policy: keras.DTypePolicy) -> bool:
    """Whether a layer with this policy took the global one, of before `enable` say.

    Of two policies of one name: a layer that was given a `dtype` has its own object.
    """
    return any(policy is each for each in _former)


def write(state: PrecisionState) -> None:
    """Sets the globals, for example to what `read` returned before."""
    if not was_global(now := keras.config.dtype_policy()):
        _former.append(now)
    keras.config.set_dtype_policy(state.dtype_policy)
    tf.config.experimental.enable_tensor_float_32_execution(state.tensor_float_32)


def state_of(mode: modes.Mode) -> PrecisionState:
    """Returns the globals as a mode asks for them."""
    return PrecisionState(keras.dtype_policies.get(mode.policy), mode.tensor_float_32)


@contextlib.contextmanager
def policy_scope(mode: str) -> Iterator[modes.Mode]:
    """Sets the precision of layers that are constructed inside the scope.

    For a part of a model, or a model that another script trains. `tfamp.enabled` scopes
    all that `enable` does, training included.

    Keras layers read the dtype policy when they are constructed, not when they are
    called, so a model built inside keeps its precision outside. Train it under
    `tfamp.enable`: otherwise bias gradients in bfloat16 are TensorFlow's, which are
    wrong on a CPU, and float16 gets Keras' loss scaling, or none. Keras' policy belongs
    to the calling thread; the TF32 flag belongs to the process.

    Args:
      mode: "float32", "tf32", "mixed_bfloat16", "mixed_float16" or "float8".

    Yields:
      The `Mode`.

    Raises:
      ValueError: If there is no such mode; nothing is changed.

    Example:
      with tfamp.policy_scope("mixed_bfloat16"):
          model = build_model()
    """
    chosen = modes.get_mode(mode)
    with scope(state_of(chosen)):
        yield chosen


@contextlib.contextmanager
def scope(state: PrecisionState) -> Iterator[None]:
    """Scopes the globals; afterwards they are as before, also after an error."""
    before = read()
    try:
        write(state)
        yield
    finally:
        write(before)


def warn_of_floatx() -> None:
    """Warns if losses and metrics are computed in 16 bits."""
    if (floatx := keras.config.floatx()) in formats.LOW:
        user_code.warn(
            f"Losses and metrics are computed in {floatx}, which loses counts and "
            f"overflows: keras.config.floatx() is {floatx!r}. Call "
            "keras.config.set_floatx('float32') before this; layers get the mode "
            "either way."
        )
