"""Runs an optimizer's update only if its gradients are finite: check, unscale, gate.

Keras 3.15 decides on the first replica's gradients before they are summed, so that an
overflow on any other is applied to all (`LossScaleOptimizer._tf_apply`). Here they are
summed first: each replica and worker decides on the same bits, and no collective is
left inside a branch. All ways to gate have the same result:

| traced for | update | why |
|---|---|---|
| eager; a graph | branch of `tf.cond` | works for every optimizer and gradient |
| a graph, one CPU | branch of `tf.cond`, compiled by XLA | one pass, not 10 |
| the same, Adam | branch of `tf.cond`, a kernel a variable | nothing to compile |
| a graph, one GPU | one program, every assignment masked | one launch |
| the same, accumulated | one for a micro-batch, one for a window | `accumulating` |
| XLA | every assignment masked | a branch would copy every slot |
| replicas | branch of one `tf.cond`, around all | updates merge replicas |
| replicas in XLA, on GPUs | each its own branch | nothing merges there |

Those that are compiled or masked are for Keras' own optimizers on one device
(`compiled`); the figures behind them are those of `results/loss_scale`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.keras_patches import keras_optimizers, replicas
from tfamp.updates import adam, compiled

_SUPPORTED = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def unscale(grads: Sequence, variables: Sequence, scale) -> list:
    """Returns each gradient divided by the loss scale, in float32 (or float64).

    That of a variable that Keras overwrites with it (float8 scales) is left alone.
    """
    return [
        grad
        if grad is None or keras_optimizers.overwrites_with_gradient(variable)
        else keras_optimizers.map_values(lambda x: _divide_f32(x, scale), grad)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _divide_f32(grad, scale):
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

    if graph_context.one_device(values) != "CPU":
        return exact()
    sums = tf.stack([_sum_f32(value) for value in values])
    clear = tf.logical_and(tf.reduce_all(tf.math.is_finite(sums)), scale >= 1)
    return tf.cond(clear, lambda: tf.constant(True), exact)


def _sum_f32(value):
    value = tf.cast(value, tf.float32)  # A float16 sum would often overflow.
    if graph_context.in_xla() and len(value.shape) > 1:
        value = tf.reduce_sum(value, axis=0)  # XLA vectorizes this one, on a CPU.
    return tf.reduce_sum(value)


def check_context(optimizer, created_under) -> None:
    """Raises RuntimeError where an update cannot be gated for all replicas at once."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`apply` must be called in the function that is given to `strategy.run`. "
            "Received: a call in a cross-replica context."
        )
    strategy = tf.distribute.get_strategy()
    if strategy is not created_under:
        raise RuntimeError(
            f"The optimizer was created under {_name(created_under)} and is applied "
            f"under {_name(strategy)}. Create and compile inside `strategy.scope()`."
        )
    if tf.distribute.has_strategy() and not isinstance(strategy, _SUPPORTED):
        names = ", ".join(each.__name__ for each in _SUPPORTED)
        raise RuntimeError(
            f"Loss scaling works under {names}, or without a strategy. Received: "
            f"{_name(strategy)}. mixed_bfloat16 needs no loss scaling."
        )
    merging = not graph_context.replicas_without_merging()
    if strategy.num_replicas_in_sync > 1 and merging and graph_context.in_xla():
        raise RuntimeError(
            "XLA over several replicas needs GPUs, whose collectives it can compile. "
            f"Received: {_name(strategy)}. Use `jit_compile=False`."
        )
    if replicas.must_agree():
        for member in keras_optimizers.member_optimizers(optimizer):
            replicas.check_averages(member)


def _name(strategy):
    name = type(strategy).__name__
    return "no strategy" if name.startswith("_Default") else name


class GatedUpdate(NamedTuple):
    """An update that happens only if its gradients are finite, in four functions.

    Attributes:
      check: Function of the scaled gradients: are they finite? Bool [].
      update: Function of them that assigns to the trained variables and those of the
        inner optimizer alone.
      record_skip: Function of them, and of what `check` said: records a step that is
        skipped, and does nothing for one that is not.
      settle: Function of what `check` said, afterwards.
    """

    check: Callable[[Sequence], Any]
    update: Callable[[Sequence], Any]
    record_skip: Callable[[Sequence, Any], Any]
    settle: Callable[[Any], Any]


def take(
    step: GatedUpdate,
    grads: Sequence,
    variables: Sequence,
    optimizer,
    jit_compile,
    summed,
):
    """Takes a step of the built inner `optimizer`, or skips it; on all replicas alike.

    Args:
      step: What to do.
      grads: The scaled gradients.
      variables: Their variables.
      optimizer: The inner optimizer.
      jit_compile: That of `LossScaleOptimizer`.
      summed: Whether the gradients are summed over the replicas already.
    """
    if replicas.must_agree():
        _gate_replicas(step, grads, variables, optimizer, summed)
        return
    way = _way(optimizer, grads, variables, jit_compile)
    if way == "masked":
        _masked(step, grads, variables, optimizer)
    elif way == "program":
        compiled.call(
            lambda grads: _masked(step, grads, variables, optimizer), grads, variables
        )
    elif way == "windows":
        _gate_windows(step, grads, variables, optimizer)
    else:
        finite, apply = step.check(grads), step.update
        if way == "kernel":

            def apply(grads):
                with adam.in_one_kernel(optimizer):
                    step.update(grads)

        elif way == "branch":

            def apply(grads):
                compiled.call(step.update, grads, variables)

        replicas.branch(
            finite, apply, lambda grads: step.record_skip(grads, False), grads
        )
        step.settle(finite)


def _masked(step, grads, variables, optimizer):
    finite = step.check(grads)
    with keras_optimizers.masked_assignments(optimizer, variables, finite):
        step.update(grads)
    step.record_skip(grads, finite)
    step.settle(finite)


def _gate_windows(step, grads, variables, optimizer):
    finite = compiled.call(step.check, grads, variables)
    masked = keras_optimizers.masked_assignments(optimizer, variables, finite)
    with masked, compiled.accumulating(optimizer, finite):
        step.update(grads)

    def after(grads):
        step.record_skip(grads, finite)
        step.settle(finite)

    compiled.call(after, grads, variables)


def _gate_replicas(step, grads, variables, optimizer, summed):
    def skip(grads):
        step.record_skip(grads, False)

    if replicas.accumulates(optimizer):
        if summed:  # What each replica adds to its accumulators is summed again.
            count = tf.distribute.get_strategy().num_replicas_in_sync
            grads = unscale(grads, variables, float(count))
        finite = replicas.all_agree(step.check(grads))
        scope = replicas.summing_once(optimizer)
    else:
        grads = grads if summed else replicas.sum_gradients(grads, variables)
        finite = step.check(grads)
        scope = keras_optimizers.without_gradient_reduction(optimizer)
    with scope:
        if graph_context.replicas_without_merging():
            with keras_optimizers.held_iterations(optimizer) as counters:
                replicas.branch(finite, step.update, skip, grads)
            for counter in counters:
                counter.assign_add(tf.cast(finite, counter.dtype))
        else:
            finite = replicas.branch(finite, step.update, skip, grads)
    step.settle(finite)


def _way(optimizer, grads, variables, jit_compile):
    """Returns how an update on one device is gated: see the table above.

    "auto" compiles what is known to work and to be faster, that is Keras' own
    optimizers and schedules, and on a GPU only while `enable` has updates compiled,
    whose user may have turned XLA off; True, wherever it can; False, nowhere.
    """
    if not jit_compile or not tf.inside_function() or tf.distribute.has_strategy():
        return "plain"
    accumulates = replicas.accumulates(optimizer)
    if graph_context.in_xla():
        foreign = keras_optimizers.foreign_part(optimizer, variables)
        # Else a branch, which XLA compiles as well.
        return "masked" if not accumulates and not foreign else "plain"
    any_kind = jit_compile is True
    possible = not compiled.reason_against(optimizer, variables, any_kind)
    if graph_context.one_device() == "GPU":
        if not any_kind:
            possible = compiled.wanted(optimizer, variables)
        return ("windows" if accumulates else "program") if possible else "plain"
    # The branch on the accumulation's last micro-batch copies every slot again.
    sparse = any(isinstance(grad, tf.IndexedSlices) for grad in grads)
    if not possible or sparse or accumulates:
        return "plain"
    in_kernel = not any_kind and adam.updates_all(optimizer, variables)
    return "kernel" if in_kernel else "branch"
