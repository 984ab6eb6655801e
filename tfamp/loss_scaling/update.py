"""Runs an optimizer's update only if its gradients are finite: check, unscale, gate.

All ways to gate have the same result:

| traced for | update | why |
|---|---|---|
| eager; a graph | branch of `tf.cond` | works for every optimizer and gradient |
| a graph | branch of `tf.cond`, compiled by XLA | one fused pass, not 10 kernels |
| XLA | every assignment masked | a branch would copy every slot |
| replicas | branch of `tf.cond`; see `replicas` | one decision for all |

The second and third are for dense gradients of Keras' own optimizers on one device;
the figures behind them are those of `benchmarks/loss_scale_step.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import graph_context
from tfamp.loss_scaling import keras_optimizers


def unscale(grads: Sequence, variables: Sequence, scale) -> list:
    """Returns each gradient divided by the loss scale, in float32 (or float64).

    That of a variable that Keras overwrites with it (float8 scales) is left alone.
    """
    return [
        grad
        if grad is None or keras_optimizers.overwrites_with_gradient(variable)
        else _divide_f32(grad, scale)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _divide_f32(grad, scale):
    if isinstance(grad, tf.IndexedSlices):
        values = _divide_f32(grad.values, scale)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    if grad.dtype == tf.float64:
        return grad / tf.cast(scale, tf.float64)
    # Not times 1 / scale, which is subnormal, and flushed to 0, above 2**126.
    return tf.cast(grad, tf.float32) / scale


def all_finite(grads: Sequence, scale):
    """Returns whether every gradient is finite once unscaled; exact.

    Below a scale of 1 a finite gradient may overflow when it is unscaled: that counts.
    On a CPU the sum of each gradient is looked at first: one pass that vectorizes,
    where testing each element takes two. A finite sum has finite terms; any other
    may be an overflow of finite ones, and is then decided exactly.

    Args:
      grads: Tensors, `tf.IndexedSlices` (their `values` count) or None.
      scale: Float32 scalar.
    """
    values = [
        grad.values if isinstance(grad, tf.IndexedSlices) else grad
        for grad in grads
        if grad is not None
    ]
    if not values:
        return tf.constant(True)

    def exact():
        finite = [tf.math.is_finite(_divide_f32(value, scale)) for value in values]
        return tf.reduce_all([tf.reduce_all(each) for each in finite])

    if not graph_context.on_one_cpu(values):
        return exact()
    sums = tf.stack([_sum_f32(value) for value in values])
    clear = tf.logical_and(tf.reduce_all(tf.math.is_finite(sums)), scale >= 1)
    return tf.cond(clear, lambda: tf.constant(True), exact)


def _sum_f32(value):
    value = tf.cast(value, tf.float32)  # A float16 sum would often overflow.
    if graph_context.in_xla() and len(value.shape) > 1:
        value = tf.reduce_sum(value, axis=0)  # XLA vectorizes this one, on a CPU.
    return tf.reduce_sum(value)


class Step(NamedTuple):
    """A step of loss scaling in four functions.

    Attributes:
      check: Function of the scaled gradients: are they finite? Bool [].
      update: Function of them that assigns to the trained variables and those of the
        inner optimizer alone.
      skip: Function of them, in place of `update`.
      settle: Function of what `check` said, afterwards.
    """

    check: Callable[[Sequence], Any]
    update: Callable[[Sequence], Any]
    skip: Callable[[Sequence], Any]
    settle: Callable[[Any], Any]


def gate(
    step: Step,
    grads: Sequence,
    variables: Sequence,
    optimizer: keras.optimizers.Optimizer,
    jit_compile,
) -> None:
    """Takes a step of the built inner `optimizer` on one replica, or skips it."""
    finite, apply = step.check(grads), step.update
    if _can_compile(optimizer, grads, variables, jit_compile):
        if graph_context.in_xla():
            with keras_optimizers.masked_assignments(optimizer, variables, finite):
                step.update(grads)
            apply = _nothing
        else:
            (first,) = keras_optimizers.native(variables[:1])
            apply = _compiled_on(first.device, step.update)
    branch(finite, apply, step.skip, grads)
    step.settle(finite)


def branch(finite, apply: Callable, skip: Callable, grads) -> None:
    """Calls one of two functions of the gradients: the first if `finite`."""
    tf.cond(finite, lambda: _nothing(apply(grads)), lambda: _nothing(skip(grads)))


def _nothing(*_):
    return tf.constant(0)  # Both branches must return the same.


def _compiled_on(device, update):
    def apply(grads):
        @tf.function(jit_compile=True)
        def compiled():
            update(grads)

        with tf.device(device):  # It need not be that of the step.
            compiled()

    return apply


def _can_compile(optimizer, grads, variables, jit_compile):
    """Whether XLA can compile the update, and it is better for it.

    "auto": only where it is known to work and to be faster, that is for Keras' own
    optimizers and schedules, and not in a plain graph on a GPU, whose user may have
    turned XLA off; True: wherever it can; False: nowhere.
    """
    if not jit_compile or not tf.inside_function() or tf.distribute.has_strategy():
        return False
    members = keras_optimizers.member_optimizers(optimizer)
    sparse = any(isinstance(grad, tf.IndexedSlices) for grad in grads)
    # The branch on the accumulation's last micro-batch copies every slot again.
    accumulates = any(member.gradient_accumulation_steps for member in members)
    if sparse or accumulates or graph_context.watched():
        return False
    known = all(keras_optimizers.is_stock(member, variables) for member in members)
    if graph_context.in_xla():
        return known  # Else a branch, which XLA compiles as well.
    written = keras_optimizers.native([*variables, *optimizer.variables])
    # XLA flushes subnormals, and an epsilon of 1e-7 is one in float16.
    known = known and all(v.dtype not in (tf.float16, tf.bfloat16) for v in written)
    kinds = ("CPU", "GPU") if jit_compile is True else ("CPU",)
    possible = graph_context.xla_supports({v.device for v in written}, kinds)
    wanted = known or jit_compile is True
    # Not every kernel of XLA is deterministic.
    return possible and wanted and not graph_context.deterministic()
