"""Adam's update of a variable by TensorFlow's own kernel, for a CPU.

There it is one pass over memory, where Keras' optimizer has some ten operators.
"""

import contextlib
import functools
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_patches import hooks, keras_optimizers

_KINDS = keras.optimizers.Adam, keras.optimizers.AdamW


def in_one_kernel(optimizer) -> contextlib.AbstractContextManager[None]:
    """While an update is traced, Adam and AdamW update each variable in one kernel.

    Subclasses keep their own, and so do the variables that the kernel is not for.

    Args:
      optimizer: A Keras optimizer of any kind.
    """
    step = optimizer, "update_step", functools.partial(_step, optimizer)
    return hooks.replaced([step] if type(optimizer) in _KINDS else [])


def updates_all(optimizer, variables: Sequence) -> bool:
    """Returns whether `in_one_kernel` has the kernel update every variable.

    Args:
      optimizer: A Keras optimizer of any kind, built.
      variables: What it updates.
    """
    return type(optimizer) in _KINDS and all(
        _is_for(optimizer, _with_slots(optimizer, each)) for each in variables
    )


def _with_slots(adam, variable):
    index = adam._get_variable_index(variable)
    each = variable, adam._momentums[index], adam._velocities[index]
    return keras_optimizers.native(each)


def _step(adam, gradient, variable, learning_rate):
    gradient = keras_optimizers.whole(gradient)
    variables = _with_slots(adam, variable)
    # Keras squares the rows of one index apart; the kernel, their sum.
    if isinstance(gradient, tf.IndexedSlices) or not _is_for(adam, variables):
        type(adam).update_step(adam, gradient, variable, learning_rate)
    else:
        apply_adam(variables, gradient, adam.iterations + 1, learning_rate, adam)


def _is_for(adam, variables):
    """Whether a variable and its two slots may be updated by the kernel.

    Not where `1 - beta` keeps no four digits, as TensorFlow takes it: in float32.
    """
    betas = adam.beta_1, adam.beta_2
    return (
        not adam.amsgrad
        and all(math.isclose(1 - np.float32(b), 1 - b, rel_tol=1e-4) for b in betas)
        and all(v.dtype == tf.float32 for v in variables)
    )


def apply_adam(variables: Sequence, gradient, step, learning_rate, adam) -> None:
    """Updates a variable and its two averages in place, as Keras does up to rounding.

    Args:
      variables: The variable, its momentum and its velocity: float32, of one shape.
      gradient: The same shape. Sparse rows are made dense: the averages of the other
        rows decay, too.
      step: Scalar, counted from 1.
      learning_rate: Scalar.
      adam: A `keras.optimizers.Adam`, for its settings.

    References:
      Kingma and Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980
    """
    variable, momentum, velocity = variables
    step = tf.cast(step, tf.float32)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=momentum.handle,
        v=velocity.handle,
        beta1_power=tf.pow(tf.cast(adam.beta_1, tf.float32), step),
        beta2_power=tf.pow(tf.cast(adam.beta_2, tf.float32), step),
        lr=tf.cast(learning_rate, tf.float32),
        beta1=adam.beta_1,
        beta2=adam.beta_2,
        epsilon=adam.epsilon,
        grad=tf.cast(tf.convert_to_tensor(gradient), tf.float32),
    )
