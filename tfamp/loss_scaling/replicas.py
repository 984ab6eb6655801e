"""One decision for all replicas of a `tf.distribute` strategy: apply, or skip.

Keras 3.15 decides on the first replica's gradients before they are summed, so that
an overflow on any other replica is applied to all (`LossScaleOptimizer._tf_apply`).
Here the gradients are summed first. What is decided on is then the same, bit for
bit, on each replica and each worker, and no collective is left inside a branch that
one replica might take and another not.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfamp import graph_context
from tfamp.loss_scaling import keras_optimizers, update

_SUPPORTED = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def must_agree() -> bool:
    """Whether there may be other replicas, whose gradients count too."""
    return tf.distribute.has_strategy() and not isinstance(
        tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy
    )


def check_context(optimizer, created_under) -> None:
    """Raises RuntimeError where an update cannot be gated for all replicas at once.

    Args:
      optimizer: The inner optimizer.
      created_under: The strategy that it was created under.
    """
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
    if not must_agree():
        return
    for member in keras_optimizers.member_optimizers(optimizer):
        # Keras 3.15 merges replicas in a branch for these, which TensorFlow refuses.
        for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
            if value := getattr(member, option):
                raise RuntimeError(
                    f"Keras' `{option}` does not work over several replicas, with or "
                    f"without loss scaling. Received: {option}={value} of "
                    f"{type(member).__name__}. Accumulate in a training loop of your "
                    "own, and use `keras.callbacks.SwapEMAWeights` for averages."
                )


def _name(strategy):
    name = type(strategy).__name__
    return "no strategy" if name.startswith("_Default") else name


def sum_gradients(grads: Sequence, variables: Sequence) -> list:
    """Returns the gradients summed over all replicas, in their own dtype.

    The gradient of a variable that Keras overwrites with it (float8 scales) is not
    summed; where it is not finite on any replica it becomes NaN on all.

    Args:
      grads: One replica's gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.
    """
    local = [keras_optimizers.overwrites_with_gradient(each) for each in variables]
    given = [
        _count_bad(grad) if is_local else grad
        for grad, is_local in zip(grads, local, strict=True)
        if grad is not None
    ]
    context = tf.distribute.get_replica_context()
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, given) if given else ())
    summed = [None if grad is None else next(sums) for grad in grads]
    return [
        tf.where(total > 0, tf.constant(float("nan"), grad.dtype), grad)
        if is_local and grad is not None
        else total
        for grad, total, is_local in zip(grads, summed, local, strict=True)
    ]


def _count_bad(grad):
    return tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.float32))


def gate_together(step: update.Step, grads: Sequence, optimizer) -> None:
    """Takes a step on every replica, or on none.

    Args:
      step: What each replica does; its functions use no collective.
      grads: This replica's gradients, summed: the same on all.
      optimizer: The inner optimizer, which `step.update` applies.
    """
    with keras_optimizers.without_gradient_reduction(optimizer):
        if graph_context.replicas_without_merging():  # XLA on GPUs.
            _gate_alone(step, grads, optimizer)
        else:
            _gate_merged(step, grads)


def _gate_alone(step, grads, optimizer):
    """Each replica decides, all alike, and updates by itself."""
    finite = step.check(grads)
    with keras_optimizers.held_iterations(optimizer) as counters:
        update.branch(finite, step.update, step.skip, grads)
    for counter in counters:
        counter.assign_add(tf.cast(finite, counter.dtype))
    step.settle(finite)


def _gate_merged(step, grads):
    def decide(strategy, grads):
        def on_all(function):
            def run(grads):
                return strategy.extended.call_for_each_replica(function, args=(grads,))

            return run

        checked = strategy.experimental_local_results(on_all(step.check)(grads))
        finite = tf.reduce_all(checked)
        # Not in a replica context: a branch there must not merge replicas, and
        # Keras' updates do.
        update.branch(finite, on_all(step.update), on_all(step.skip), grads)
        step.settle(finite)

    tf.distribute.get_replica_context().merge_call(decide, args=(grads,))
