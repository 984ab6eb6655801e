"""One decision for all replicas of a `tf.distribute` strategy: apply, or skip.

Keras 3.15 decides on the first replica's gradients before they are summed, so that
an overflow on any other replica is applied to all (`LossScaleOptimizer._tf_apply`).
Here they are summed first: each replica and worker decides on the same bits, and no
collective is left inside a branch.
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

    That of a variable that Keras overwrites with it (float8 scales) stays, unless it
    is not finite on some replica: then it is so on all.

    Args:
      grads: One replica's gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.
    """
    given = [grad for grad in grads if grad is not None]
    context = tf.distribute.get_replica_context()
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, given) if given else ())

    def summed(grad, variable):
        total = next(sums)
        if keras_optimizers.overwrites_with_gradient(variable):
            return tf.where(tf.math.is_finite(total), grad, total)
        return total

    pairs = zip(grads, variables, strict=True)
    return [None if grad is None else summed(grad, v) for grad, v in pairs]


def gate_together(step: update.Step, grads: Sequence, optimizer) -> None:
    """Takes a step of the inner `optimizer` on every replica, or on none.

    Args:
      step: What each replica does; its functions use no collective.
      grads: This replica's gradients, summed: the same on all.
      optimizer: The inner optimizer.
    """
    with keras_optimizers.without_gradient_reduction(optimizer):
        if not graph_context.replicas_without_merging():
            _gate_merged(step, grads)
            return
        # XLA on GPUs: each replica decides, all alike, and updates by itself.
        finite = step.check(grads)
        with keras_optimizers.held_iterations(optimizer) as counters:
            update.branch(finite, step.update, step.skip, grads)
    for counter in counters:
        counter.assign_add(tf.cast(finite, counter.dtype))
    step.settle(finite)


def _gate_merged(step, grads):
    def decide(strategy, grads):
        def on_all(function):
            return lambda grads: strategy.extended.call_for_each_replica(
                function, args=(grads,)
            )

        checked = strategy.experimental_local_results(on_all(step.check)(grads))
        finite = tf.reduce_all(checked)
        # Not in a replica context: a branch there must not merge replicas, and
        # Keras' updates do.
        update.branch(finite, on_all(step.update), on_all(step.skip), grads)
        step.settle(finite)

    tf.distribute.get_replica_context().merge_call(decide, args=(grads,))
