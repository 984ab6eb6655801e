"""One decision for all replicas of a `tf.distribute` strategy: apply, or skip.

Keras 3.15 decides on the first replica's gradients before they are summed, so that
an overflow on any other replica is applied to all (`LossScaleOptimizer._tf_apply`).
Here the gradients are summed first. What is decided on is then the same, bit for
bit, on each replica and each worker, and no collective is left inside a branch that
one replica might take and another not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp import graph_context as tracing
from tfamp.loss_scaling import keras_optimizers

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
            "`apply` must be called in a replica context. Call it in the function "
            "that is given to `strategy.run`."
        )
    strategy = tf.distribute.get_strategy()
    if strategy is not created_under:
        raise RuntimeError(
            f"The optimizer was created under {_name(created_under)} and is applied "
            f"under {_name(strategy)}. Create model and optimizer, and compile, "
            "inside `strategy.scope()`."
        )
    if tf.distribute.has_strategy() and not isinstance(strategy, _SUPPORTED):
        names = ", ".join(each.__name__ for each in _SUPPORTED)
        raise RuntimeError(
            f"Loss scaling works under {names}, or without a strategy. Received: "
            f"{_name(strategy)}. mixed_bfloat16 needs no loss scaling."
        )
    several = strategy.num_replicas_in_sync > 1
    if several and tracing.in_xla() and not tracing.replicas_without_merging():
        raise RuntimeError(
            "XLA over several replicas needs GPUs: TensorFlow has no compiled "
            f"collectives for other devices. Received: {_name(strategy)} of "
            f"{strategy.num_replicas_in_sync} replica(s). Use "
            "`compile(jit_compile=False)`, or `tf.function(jit_compile=False)`."
        )
    if must_agree():
        _check_branches(optimizer)


def _check_branches(optimizer):
    """Keras 3.15 merges replicas in a branch for these, which TensorFlow refuses."""
    for member in keras_optimizers.member_optimizers(optimizer):
        for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
            if getattr(member, option):
                raise RuntimeError(
                    f"Keras' `{option}` does not work over several replicas, with "
                    f"or without loss scaling. Received: {option}="
                    f"{getattr(member, option)} of {type(member).__name__}. "
                    "Accumulate in a custom training loop, and use "
                    "`keras.callbacks.SwapEMAWeights` for averages."
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
    local = [
        grad is not None and keras_optimizers.overwrites_with_gradient(variable)
        for grad, variable in zip(grads, variables, strict=True)
    ]
    given = [
        _count_bad(grad) if is_local else grad
        for grad, is_local in zip(grads, local, strict=True)
        if grad is not None
    ]
    context = tf.distribute.get_replica_context()
    summed = iter(
        context.all_reduce(tf.distribute.ReduceOp.SUM, given) if given else ()
    )
    reduced = [None if grad is None else next(summed) for grad in grads]
    return [
        tf.where(total > 0, tf.constant(float("nan"), grad.dtype), grad)
        if is_local
        else total
        for grad, total, is_local in zip(grads, reduced, local, strict=True)
    ]


def _count_bad(grad):
    return tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.float32))


def gate_together(
    check: Callable[[Sequence], Any],
    update: Callable[[Sequence], Any],
    skip: Callable[[Callable], Any],
    settle: Callable[[Any], Any],
    grads: Sequence,
    optimizer,
) -> None:
    """Runs `update` on every replica, or on none.

    Args:
      check: Function of one replica's summed gradients: are they finite?
      update: Function of one replica's summed gradients; uses no collective.
      skip: Function of a function that maps a function of the gradients to its
        result on one replica; called once, in place of the updates.
      settle: Function of the decision, called once, afterwards.
      grads: This replica's gradients, summed: the same on all.
      optimizer: The inner optimizer, which `update` applies.
    """
    if tracing.replicas_without_merging():  # XLA on GPUs: each replica by itself.
        finite = check(grads)
        with keras_optimizers.held_iterations(optimizer) as counters:
            tf.cond(
                finite,
                lambda: _nothing(update(grads)),
                lambda: _nothing(skip(lambda function: function(grads))),
            )
        for counter in counters:
            counter.assign_add(tf.cast(finite, counter.dtype))
        settle(finite)
        return

    def decide(strategy, grads):
        def on_all(function):
            return strategy.extended.call_for_each_replica(function, args=(grads,))

        def on_one(function):
            return strategy.experimental_local_results(on_all(function))[0]

        finite = tf.reduce_all(strategy.experimental_local_results(on_all(check)))
        # Not in a replica context: a branch there must not merge replicas, and
        # Keras' updates do.
        tf.cond(
            finite,
            lambda: _nothing(on_all(update)),
            lambda: _nothing(skip(on_one)),
        )
        settle(finite)

    tf.distribute.get_replica_context().merge_call(decide, args=(grads,))


def _nothing(*_):
    return tf.constant(0)
