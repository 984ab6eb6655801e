"""Gradients of several replicas: summed before they are clipped, once a window.

Keras 3.15 sums them in the branch for a window's last micro-batch, where TensorFlow
refuses to merge replicas. Here the replicas are merged around that branch:

| `gradient_accumulation_steps` | each replica | all of them |
|---|---|---|
| every micro-batch | adds its gradients to its own accumulators | |
| a window's last one | | sum these, then clip and update, as on one device |

An accumulator reads, and is saved, as the sum over the replicas; what is restored is
divided among them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.keras_patches import hooks, keras_optimizers

_NAME = "gradient_accumulator"  # In the names of Keras 3.15's variables.


def must_agree() -> bool:
    """Whether there may be other replicas, whose gradients count too."""
    return tf.distribute.has_strategy() and not isinstance(
        tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy
    )


def accumulates(optimizer) -> bool:
    """Whether a Keras optimizer, or one in it, accumulates gradients."""
    members = keras_optimizers.member_optimizers(optimizer)
    return any(each.gradient_accumulation_steps for each in members)


def check_averages(optimizer) -> None:
    """Raises RuntimeError if an optimizer's averages would overwrite the weights."""
    if value := optimizer.ema_overwrite_frequency:
        # Keras 3.15 merges replicas in a branch for it, which TensorFlow refuses.
        raise RuntimeError(
            "Keras' `ema_overwrite_frequency` does not work over several replicas, "
            "with or without loss scaling. Received: ema_overwrite_frequency="
            f"{value} of {type(optimizer).__name__}. Use "
            "`keras.callbacks.SwapEMAWeights`."
        )


def all_agree(holds):
    """Returns whether something holds on all replicas: bool tensor []."""
    failed = tf.cast(tf.logical_not(holds), tf.float32)
    context = tf.distribute.get_replica_context()
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, failed), 0.0)


def communication_options(strategy: tf.distribute.Strategy) -> Any:
    """Returns the `CommunicationOptions` that a strategy was made with; else None."""
    return getattr(strategy.extended, "_communication_options", None)  # TF 2.21.


def sum_gradients(grads: Sequence, variables: Sequence) -> list:
    """Returns the gradients summed over all replicas, if there are several.

    Each in its own dtype.

    That of a variable that Keras overwrites with it (float8 scales) stays, unless it
    is not finite on some replica: then it is so on all.

    Args:
      grads: One replica's gradients: tensors, `tf.IndexedSlices` or None.
      variables: Their variables.
    """
    if not must_agree():
        return list(grads)
    tensors = [grad for grad in grads if grad is not None]
    context = tf.distribute.get_replica_context()
    # Where TensorFlow 2.21 merges no calls, on GPUs, it forgets the strategy's own.
    how = tf.distribute.ReduceOp.SUM, tensors, communication_options(context.strategy)
    sums = iter(context.all_reduce(*how) if tensors else ())

    def summed(grad, variable):
        total = next(sums)
        if keras_optimizers.overwrites_with_gradient(variable):
            return tf.where(tf.math.is_finite(total), grad, total)
        return total

    pairs = zip(grads, variables, strict=True)
    return [None if grad is None else summed(grad, v) for grad, v in pairs]


def branch(holds, apply: Callable, otherwise: Callable, grads: Sequence = ()):
    """Calls one function of gradients or another on each replica, the same on all.

    Where replicas merge, the branch is around all of them: one in a replica context
    must not merge them, and Keras' updates do.

    Args:
      holds: Whether to call `apply`, and not `otherwise`; the same on all replicas.
      apply: Function of `grads`.
      otherwise: Function of `grads`, too.
      grads: One replica's.

    Returns:
      `holds`, as one tensor of all replicas.
    """

    def decide(strategy, holds, grads):
        def on_all(function):
            return strategy.extended.call_for_each_replica(function, args=(grads,))

        holds = tf.reduce_all(strategy.experimental_local_results(holds))
        _branch(holds, lambda: on_all(apply), lambda: on_all(otherwise))
        return holds

    if must_agree() and not graph_context.replicas_without_merging():
        context = tf.distribute.get_replica_context()
        return context.merge_call(decide, args=(holds, grads))
    _branch(holds, lambda: apply(grads), lambda: otherwise(grads))
    return holds


def _branch(holds, apply, otherwise):
    def with_nothing(function):  # Both branches must return the same.
        return lambda: (function(), tf.constant(0))[1]

    tf.cond(holds, with_nothing(apply), with_nothing(otherwise))


def summing_once(optimizer):
    """While an update is traced, an optimizer sums the gradients as in the table."""
    name = "_backend_apply_gradients"  # Keras 3.15
    members = keras_optimizers.member_optimizers(optimizer)
    return hooks.replaced([(x, name, functools.partial(_apply, x)) for x in members])


def accumulators_apart():
    """Scopes the building of an optimizer: each replica's accumulators are its own."""

    def create(next_creator, **keywords):
        if must_agree() and _NAME in (keywords.get("name") or ""):
            keywords["synchronization"] = tf.VariableSynchronization.ON_READ
            keywords["aggregation"] = tf.VariableAggregation.SUM
        return next_creator(**keywords)

    return tf.variable_creator_scope(create)


def _apply(optimizer, grads, variables):
    """What Keras' `_backend_apply_gradients` does, in a replica context."""
    check_averages(optimizer)
    if optimizer.gradient_accumulation_steps:
        accumulate(optimizer, grads, variables)
    else:
        _update(optimizer, grads, variables)
        if optimizer.use_ema:
            _average(optimizer)


def _run(function, grads, variables):
    return function(grads)


def accumulate(
    optimizer,
    grads: Sequence,
    variables: Sequence,
    run: Callable[[Callable, Sequence, Sequence], Any] = _run,
    holds: Any = True,
) -> None:
    """Adds gradients to those of a window, and updates at its last micro-batch.

    Args:
      optimizer: A Keras optimizer that accumulates.
      grads: One replica's gradients of this micro-batch.
      variables: Their variables.
      run: Calls a function of gradients, with them, and their variables.
      holds: Whether this micro-batch counts.
    """
    steps, index = optimizer.gradient_accumulation_steps, optimizer._get_variable_index
    sums = [optimizer._accumulated_gradients[index(v)].value for v in variables]

    def add(grads):
        for total, grad in zip(sums, grads, strict=True):
            total.assign_add(tf.cast(tf.convert_to_tensor(grad), total.dtype))

    def update(_):
        _update(optimizer, [total / steps for total in sums], variables)
        optimizer._backend_reset_gradient_accumulators()

    nothing = [None] * len(variables)
    run(add, grads, variables)
    is_last = tf.logical_and((optimizer._iterations + 1) % steps == 0, holds)
    branch(is_last, lambda _: run(update, nothing, variables), lambda _: None)
    if optimizer.use_ema:  # After each micro-batch, as in Keras.
        run(lambda _: _average(optimizer), nothing, variables)


def _average(optimizer):
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def _update(optimizer, grads, variables):
    grads = sum_gradients(grads, variables)
    with keras_optimizers.without_gradient_reduction(optimizer):
        grads = optimizer._clip_gradients(grads)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(grads, variables, optimizer.learning_rate)


@hooks.around
@tf.autograph.experimental.do_not_convert
def _summing_once(original, optimizer, grads, trainable_variables):
    alone = not must_agree() or tf.distribute.in_cross_replica_context()
    if alone or not optimizer.gradient_accumulation_steps:
        return original(optimizer, grads, trainable_variables)
    return _apply(optimizer, grads, trainable_variables)


@hooks.around
def _accumulators_apart(original, optimizer, variables):
    with accumulators_apart():
        return original(optimizer, variables)


HOOKS = hooks.HookGroup(
    _backend_apply_gradients=_summing_once, build=_accumulators_apart
)


# Keras 3.15 builds the metrics and the loss from the first batch of a dataset that it
# has distributed, and averages that batch over the replicas: an error if their parts
# are not of one size, and always over several workers. Guarded by
# tests/upstream/test_keras_contract.py.
_BUILD = "_maybe_symbolic_build"


def prepare_fit(strategy: tf.distribute.Strategy, model, example, workers: int) -> None:
    """Does beforehand what Keras' `fit` and `evaluate` fail to do over replicas.

    Gradients are summed before they are clipped. The metrics and the loss are built
    from an example of this process. Over several workers each result of a step gets a
    dimension, over which Keras 3.15 averages the replicas' results; it fails to average
    scalars.

    Args:
      strategy: The strategy.
      model: A compiled model; changed in place.
      example: A batch of one example.
      workers: How many processes there are.
    """
    _sum_gradients_first(model.optimizer)
    with strategy.scope():
        getattr(model, _BUILD)(data_batch=example)
    setattr(model, _BUILD, lambda iterator=None, data_batch=None: None)
    if workers > 1:
        for name in ("train_step", "test_step"):
            setattr(model, name, _with_dimension(getattr(model, name)))


def _with_dimension(step):
    def wrapped(data):
        return keras.tree.map_structure(lambda v: tf.reshape(v, [1]), step(data))

    return wrapped


def _sum_gradients_first(optimizer):
    """Makes the optimizer clip the gradient of the whole batch.

    Keras 3.15 clips each replica's gradient before they are summed; each is of a
    part of the batch and has been divided by the number of replicas. With the sum
    first, the number of replicas does not change the training.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or accumulates(optimizer):
        return  # Sums first by itself.
    apply = optimizer.apply

    def sum_and_apply(grads, trainable_variables):
        summed = sum_gradients(list(grads), trainable_variables)
        with keras_optimizers.without_gradient_reduction(optimizer):
            return apply(summed, trainable_variables)

    optimizer.apply = sum_and_apply
