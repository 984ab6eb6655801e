"""Private names of Keras' optimizers, each with the version it was read in.

Guarded by tests/upstream/test_keras_contract.py.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

_masking = threading.RLock()


def overwrites_with_gradient(variable) -> bool:
    """Whether Keras writes the gradient itself into a variable (float8 scales)."""
    return getattr(variable, "overwrite_with_gradient", False)  # Keras 3.15


def native(variable) -> tf.Variable:
    """Returns the TensorFlow variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def member_optimizers(optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that apply gradients: a `MultiOptimizer`'s, or itself."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def is_stock(optimizer, variables: Sequence) -> bool:
    """Whether an update consists of Keras' own code, which XLA is known to compile.

    That is: the optimizer, its schedule, and the constraints of the variables.
    """
    rate = optimizer._learning_rate  # Keras 3.15
    parts = [optimizer, *(getattr(v, "constraint", None) for v in variables)]
    if not isinstance(rate, keras.Variable):
        parts.append(rate)
    return all(p is None or type(p).__module__.startswith("keras.") for p in parts)


@contextlib.contextmanager
def masked_assignments(optimizer, variables: Sequence, mask) -> Iterator[None]:
    """While an update is traced, its assignments keep the old value if not `mask`.

    Keras' optimizers assign in several ways (their own `assign`, the variable's for
    weight decay, constraints and counters); all end in these methods of the
    TensorFlow variable, which are replaced on the objects for that time.

    Args:
      optimizer: A built Keras optimizer of stock kind.
      variables: The trained variables.
      mask: Bool scalar tensor.
    """
    written = map(native, [*variables, *optimizer.variables])
    unique = {id(variable): variable for variable in written}.values()
    with _masking:  # Another thread's trace would be given this one's mask.
        try:
            for variable in unique:
                _mask_variable(variable, mask)
            yield
        finally:
            for variable in unique:
                for name in ("assign", "assign_add", "assign_sub"):
                    vars(variable).pop(name, None)


def _mask_variable(variable, mask):
    original = variable.assign

    def assign(value, **kwargs):
        value = tf.cast(value, variable.dtype)
        return original(tf.where(mask, value, variable.read_value()), **kwargs)

    def assign_add(delta, **kwargs):
        return assign(variable + tf.cast(delta, variable.dtype), **kwargs)

    def assign_sub(delta, **kwargs):
        return assign(variable - tf.cast(delta, variable.dtype), **kwargs)

    # On the object: the class is every other model's too.
    variable.assign, variable.assign_add = assign, assign_add
    variable.assign_sub = assign_sub


@contextlib.contextmanager
def held_iterations(optimizer) -> Iterator[list[keras.Variable]]:
    """While an update is traced, it does not count itself.

    Keras counts by the first replica's value, for which TensorFlow merges replicas:
    not possible in a branch of a replica's own.

    Yields:
      The counters that would have been increased by one.
    """
    members = {id(each): each for each in [optimizer, *member_optimizers(optimizer)]}
    counters = [member._iterations for member in members.values()]  # Keras 3.15
    try:
        for counter in counters:
            object.__setattr__(counter, "assign_add", lambda value: None)
        yield counters
    finally:
        for counter in counters:
            vars(counter).pop("assign_add", None)


@contextlib.contextmanager
def without_gradient_reduction(optimizer) -> Iterator[None]:
    """While an update is traced, Keras does not sum the gradients over replicas."""
    members = member_optimizers(optimizer)
    try:
        for member in members:
            # Keras 3.15; on the object, so that other optimizers are untouched.
            object.__setattr__(member, "_all_reduce_sum_gradients", list)
        yield
    finally:
        for member in members:
            vars(member).pop("_all_reduce_sum_gradients", None)


def drop_accumulation_window(optimizer) -> None:
    """Forgets the micro-batches that an optimizer has accumulated.

    The micro-batch counter goes back to the start of the window, so that the next
    window is a whole one; `optimizer.iterations` does not move.

    Args:
      optimizer: A built Keras optimizer; nothing is done unless it has
        `gradient_accumulation_steps`.
    """
    for member in member_optimizers(optimizer):
        steps = member.gradient_accumulation_steps
        if steps:
            member._backend_reset_gradient_accumulators()  # Keras 3.15
            counter = member._iterations  # Keras 3.15; counts micro-batches
            counter.assign(keras.ops.floor_divide(counter, steps) * steps)
