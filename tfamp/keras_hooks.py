"""The only place that patches Keras or calls private names of its optimizers.

Each name is given with the Keras version it was read in and is guarded by
tests/test_keras_contract.py. `model_structure` reads private names of models.
"""

import functools
import inspect
from collections.abc import Callable

import keras

OptimizerTransform = Callable[[keras.Model, object], object]

_original_compile = None


def trainer_class() -> type:
    """Returns the class that defines `compile` for every Keras model.

    The attribute must be replaced there and nowhere below: on loading, Keras
    (<= 3.15) compares `model.__class__.compile` with it to tell whether a user
    overrode `compile`, and silently leaves a model uncompiled if so.
    """
    return next(base for base in keras.Model.__mro__ if "compile" in vars(base))


def install_compile_hook(transform: OptimizerTransform) -> None:
    """Passes each compiled model's optimizer through `transform` from now on.

    Keras' own automatic loss scaling is turned off for those calls, so that an
    optimizer is never scaled twice; `compile(auto_scale_loss=False)` is left
    alone. The optimizer that Keras records in the model's compile configuration
    is the transformed one. Installing again replaces the transform.

    Args:
      transform: Function of (model, optimizer) that returns an optimizer; called
        only with an optimizer, never with None.
    """
    global _original_compile
    remove_compile_hook()
    trainer = trainer_class()
    original = trainer.compile
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["auto_scale_loss"]:
            optimizer = keras.optimizers.get(given["optimizer"])
            if optimizer is not None:
                given["optimizer"] = transform(given["self"], optimizer)
            given["auto_scale_loss"] = False
        return original(*call.args, **call.kwargs)

    _original_compile = original
    trainer.compile = compile


def remove_compile_hook() -> None:
    """Puts Keras' own `compile` back; idempotent."""
    global _original_compile
    if _original_compile is not None:
        trainer_class().compile = _original_compile
        _original_compile = None


def overwrites_with_gradient(variable) -> bool:
    """Whether Keras writes the gradient itself into a variable (float8 scales)."""
    return getattr(variable, "overwrite_with_gradient", False)  # Keras 3.15


def drop_accumulation_window(optimizer) -> None:
    """Forgets the micro-batches that an optimizer has accumulated.

    The micro-batch counter goes back to the start of the window, so that the next
    window is a whole one; `optimizer.iterations` does not move.

    Args:
      optimizer: A built Keras optimizer; nothing is done unless it has
        `gradient_accumulation_steps`.
    """
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return
    optimizer._backend_reset_gradient_accumulators()  # Keras 3.15
    counter = optimizer._iterations  # Keras 3.15; counts micro-batches
    counter.assign(keras.ops.floor_divide(counter, steps) * steps)
