"""What Keras' optimizers are inside, and what is replaced while one is traced."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp import checks
from tfamp.keras_patches import hooks

_masking = threading.RLock()
_SCATTERS = "scatter_update", "scatter_add", "scatter_sub"
# Of an optimizer of Keras; here they belong to the inner one.
_DEFAULTS = {
    **dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm")),
    **dict.fromkeys(("loss_scale_factor", "gradient_accumulation_steps")),
    **{"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None},
}


def overwrites_with_gradient(variable) -> bool:
    """Whether Keras writes the gradient itself into a variable (float8 scales)."""
    return getattr(variable, "overwrite_with_gradient", False)  # Keras 3.15


def native(variables: Sequence) -> list[tf.Variable]:
    """Returns the TensorFlow variables of Keras variables: one or more of each."""
    natives = []
    for v in variables:  # Those of `tfamp.storage.stored` have `natives`.
        plain = v.value if isinstance(v, keras.Variable) else v
        natives += getattr(v, "natives", (plain,))
    return natives


def in_float32(gradients: Sequence) -> list:
    """Returns gradients in float32; those that are None stay so."""
    return [g if g is None else tf.cast(g, tf.float32) for g in gradients]


def whole(gradient: Any) -> Any:
    """Returns summed rows of an embedding as a whole: of unknown number, XLA has none.

    Rows that are there several times stay: Adam squares each, in Keras.
    """
    rows = isinstance(gradient, tf.IndexedSlices) and gradient.indices
    summed = tf.is_symbolic_tensor(rows) and rows.op.type == "Unique"
    return tf.convert_to_tensor(gradient) if summed else gradient


def map_values(function: Callable, gradient: Any) -> Any:
    """Returns a gradient with what a function makes of its numbers; rows stay rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def member_optimizers(optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that apply gradients: a `MultiOptimizer`'s, or itself."""
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # From Keras 3.15 on.
    return list(optimizer.optimizers) if isinstance(optimizer, several) else [optimizer]


def foreign_part(optimizer, variables: Sequence) -> Any:
    """Returns what of an update is not Keras' own code, or ours; None if all is.

    That is: the optimizers, their schedules, and the constraints of the variables. XLA
    is known to compile Keras' own.
    """
    parts = [getattr(v, "constraint", None) for v in variables]
    for each in member_optimizers(optimizer):
        rate = vars(each).get("_learning_rate", foreign_part)  # Keras 3.15; else: no.
        parts += [each] if isinstance(rate, keras.Variable) else [each, rate]
    ours = "keras.", "tfamp."
    return next((p for p in parts if p and not _module(p).startswith(ours)), None)


def _module(part):
    return (part if inspect.isfunction(part) else type(part)).__module__


def pairs(optimizer, grads: Sequence, variables: Sequence | None) -> tuple[list, list]:
    """Returns gradients as tensors, and their variables; builds the optimizer.

    Args:
      optimizer: A Keras optimizer.
      grads: Its gradients: what converts to tensors, or None.
      variables: Their variables; None: those that it was built for.

    Raises:
      ValueError: If there is not one variable for each gradient.
    """
    as_tensor = tf.compat.v1.convert_to_tensor_or_indexed_slices
    grads = [None if grad is None else as_tensor(grad) for grad in grads]
    if not grads:
        return [], []
    variables = list(variables or optimizer._trainable_variables)
    if len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient (or None) for each variable; an optimizer that "
            "is not built needs `trainable_variables`. Received: "
            f"{len(grads)} gradients and {len(variables)} variables."
        )
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
    return grads, variables


@contextlib.contextmanager
def masked_assignments(optimizer, variables: Sequence, mask) -> Iterator[None]:
    """While an update is traced, its assignments keep the old value if not `mask`.

    Keras' optimizers assign in several ways (their own `assign`, the variable's for
    weight decay, constraints and counters); all end in these methods of the
    TensorFlow variable. Masking each variable once, after the update, would make XLA
    copy the slots.
    """
    written = {id(v): v for v in native([*variables, *optimizer.variables])}
    with _masking:  # Another thread's trace would be given this one's mask.
        masked = [each for v in written.values() for each in _masked(v, mask)]
        with hooks.replaced(masked):
            yield


def _masked(variable, mask):
    original = {name: getattr(variable, name) for name in ("assign", *_SCATTERS)}

    def assign(value, **kwargs):
        value = tf.cast(value, variable.dtype)
        return original["assign"](
            tf.where(mask, value, variable.read_value()), **kwargs
        )

    def assign_add(delta, **kwargs):
        return assign(variable + tf.cast(delta, variable.dtype), **kwargs)

    def assign_sub(delta, **kwargs):
        return assign(variable - tf.cast(delta, variable.dtype), **kwargs)

    def scatter(name, nothing):
        def masked(rows, **kwargs):
            old = tf.cast(nothing(rows.indices), rows.dtype)
            values = tf.where(mask, rows.values, old)
            slices = tf.IndexedSlices(values, rows.indices, rows.dense_shape)
            return original[name](slices, **kwargs)

        return variable, name, masked

    return [
        *((variable, x.__name__, x) for x in (assign, assign_add, assign_sub)),
        scatter("scatter_update", lambda x: tf.gather(variable.read_value(), x)),
        scatter("scatter_add", lambda _: -0.0),  # 0.0 would turn -0.0.
        scatter("scatter_sub", lambda _: 0.0),
    ]


@contextlib.contextmanager
def held_iterations(optimizer) -> Iterator[list[keras.Variable]]:
    """While an update is traced, it does not count itself.

    Keras counts by the first replica's value, for which TensorFlow merges replicas:
    not possible in a branch of a replica's own. Yields the counters.
    """
    members = {id(each): each for each in [optimizer, *member_optimizers(optimizer)]}
    counters = [member._iterations for member in members.values()]  # Keras 3.15
    with hooks.replaced(
        [(each, "assign_add", lambda value: None) for each in counters]
    ):
        yield counters


def without_gradient_reduction(optimizer) -> contextlib.AbstractContextManager[None]:
    """While an update is traced, Keras does not sum the gradients over replicas."""
    name = "_all_reduce_sum_gradients"  # Keras 3.15
    return hooks.replaced([(each, name, list) for each in member_optimizers(optimizer)])


def check_defaults(keywords: dict[str, Any], own: Iterable[str]) -> None:
    """Raises unless these are Keras' defaults, which files of older releases hold.

    Args:
      keywords: Of the constructor of `LossScaleOptimizer`, without its own.
      own: Names of its own.
    """
    for name, value in keywords.items():
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Received: "
                f"{name}={value!r}. Set Keras' optimizer arguments on "
                f"`inner_optimizer`.{checks.nearest(name, own)}"
            )


def check_inner(optimizer: Any) -> None:
    """Raises unless it is an optimizer that does not scale the loss yet."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`inner_optimizer` already scales the loss. Received: {optimizer!r}."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer. Received: "
            f"{optimizer!r}. For a name use `tfamp.wrap_optimizer`."
        )
