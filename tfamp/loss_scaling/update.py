"""Runs an optimizer's update only if its gradients are finite: check, unscale, gate.

Three ways to gate, all with the same result:

| traced for | update | why |
|---|---|---|
| eager; a graph | branch of `tf.cond` | works for every optimizer and gradient |
| a graph | branch of `tf.cond`, compiled by XLA | one fused pass, not 10 kernels |
| XLA | every assignment masked | a branch would copy every slot |

The last two are for dense gradients of Keras' own optimizers on one device; the
figures behind them are those of `benchmarks/loss_scale_step.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp import graph_context as tracing
from tfamp.loss_scaling import keras_optimizers


def as_gradient(value):
    """Returns None and `tf.IndexedSlices` as they are, anything else as a tensor."""
    if value is None or isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)


def unscale(grads: Sequence, variables: Sequence, scale) -> list:
    """Returns each gradient divided by the loss scale, in float32 (or float64).

    Args:
      grads: Tensors, `tf.IndexedSlices` (kept sparse) or None.
      variables: Their variables. The gradient of one that Keras overwrites with it
        (float8 scales) is returned as it is.
      scale: Float32 scalar.
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

    Below a scale of 1 a finite gradient may overflow when it is unscaled: that
    counts. `tf.IndexedSlices` are checked on their `values`, without densifying.

    On a CPU the sum of each gradient is looked at first: one pass that vectorizes,
    where testing each element takes two. A finite sum has finite terms; a sum that
    is not finite may be an overflow of finite ones, and is then decided exactly.

    Args:
      grads: Tensors, `tf.IndexedSlices` or None.
      scale: Float32 scalar.

    Returns:
      Bool tensor of shape [].
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

    if not tracing.on_one_cpu(values):
        return exact()
    sums = tf.stack([_sum_f32(value) for value in values])
    clear = tf.logical_and(tf.reduce_all(tf.math.is_finite(sums)), scale >= 1)
    return tf.cond(clear, lambda: tf.constant(True), exact)


def _sum_f32(value):
    value = tf.cast(value, tf.float32)  # A float16 sum would often overflow.
    if tracing.in_xla() and len(value.shape) > 1:
        value = tf.reduce_sum(value, axis=0)  # XLA vectorizes this one, on a CPU.
    return tf.reduce_sum(value)


def gate(
    finite,
    update: Callable[[], Any],
    skip: Callable[[], Any],
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence,
    compilable: bool,
) -> None:
    """Runs `update` if `finite`, else `skip`; nothing of a skipped update stays.

    Args:
      finite: Bool scalar.
      update: Function of no argument that assigns to `variables` and to those of
        the optimizer, and to no other.
      skip: Function of no argument.
      optimizer: The optimizer that `update` applies.
      variables: The trained variables.
      compilable: Whether XLA can, and may, compile `update`; see `can_compile`.
    """
    if compilable and tracing.in_xla():
        with keras_optimizers.masked_assignments(optimizer, variables, finite):
            update()
        tf.cond(finite, _nothing, lambda: _nothing(skip()))
    elif compilable:
        tf.cond(
            finite,
            lambda: _nothing(_compile_on(variables, update)),
            lambda: _nothing(skip()),
        )
    else:
        tf.cond(finite, lambda: _nothing(update()), lambda: _nothing(skip()))


def _compile_on(variables, update):
    # Where the variables are, which need not be the device of the step.
    with tf.device(keras_optimizers.native(variables[0]).device):
        return tf.function(update, jit_compile=True)()


def _nothing(*_):
    return tf.constant(0)


def can_compile(optimizer, grads: Sequence, variables: Sequence, jit_compile) -> bool:
    """Whether the update can be compiled by XLA, and is better for it.

    Args:
      optimizer: A built Keras optimizer.
      grads: Its gradients.
      variables: Their variables.
      jit_compile: "auto": only where it is known to work and to be faster, that is
        for Keras' own optimizers and schedules, and not in a plain graph on a GPU,
        whose user may have turned XLA off; True: wherever it can; False: nowhere.
    """
    if not jit_compile or not tf.inside_function() or tf.distribute.has_strategy():
        return False
    if any(isinstance(grad, tf.IndexedSlices) for grad in grads) or tracing.watched():
        return False
    members = keras_optimizers.member_optimizers(optimizer)
    # The branch on the accumulation's last micro-batch copies every slot again.
    if any(member.gradient_accumulation_steps for member in members):
        return False
    known = all(keras_optimizers.is_stock(member, variables) for member in members)
    if tracing.in_xla():
        return known  # Else a branch, which XLA compiles as well.
    written = [*map(keras_optimizers.native, [*variables, *optimizer.variables])]
    # XLA flushes subnormals, and an epsilon of 1e-7 is one in float16.
    known = known and all(v.dtype not in (tf.float16, tf.bfloat16) for v in written)
    kinds = ("CPU", "GPU") if jit_compile is True else ("CPU",)
    possible = tracing.xla_supports({v.device for v in written}, kinds)
    # Not every kernel of XLA is deterministic.
    return possible and (known or jit_compile is True) and not tracing.deterministic()
