"""`compile` of every model: what it gets, and its optimizer; and its first step."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp import records
from tfamp.keras_patches import hooks, patches

OptimizerTransform = Callable[[keras.Model, object], object]
_forced: list[OptimizerTransform] = []  # Of `transforming`, the last one counts.
_compile_hook: hooks.Hook | None = None


def hook_compile(
    transform: OptimizerTransform, rule: Callable[[keras.Model, dict[str, Any]], None]
) -> hooks.Hook:
    """Passes the optimizer of each compiled model through `transform`.

    Keras' own automatic loss scaling is turned off for those calls, so that an
    optimizer is never scaled twice; `compile(auto_scale_loss=False)` is left alone.

    Args:
      transform: Function of (model, optimizer) that returns an optimizer.
      rule: Function of (model, arguments of `compile` by name); it may change them,
        and raise before anything is compiled.

    Raises:
      RuntimeError: If another replacement of `compile` hides its arguments.
    """
    global _compile_hook
    signature = inspect.signature(patches.trainer_class().compile)
    if "auto_scale_loss" not in signature.parameters:
        raise RuntimeError(
            "Keras' `compile` was replaced by a function that hides its arguments. "
            f"Received: {patches.trainer_class().compile!r}. Give it "
            "`functools.wraps`, or replace it after tfamp.enable()."
        )

    @hooks.around
    def compile(original, *args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model, arguments = call.arguments["self"], call.arguments
        if arguments["optimizer"] is not None:
            arguments["optimizer"] = keras.optimizers.get(arguments["optimizer"])
        optimizer, asks = arguments["optimizer"], arguments["jit_compile"] is True
        # A file says so where Keras had chosen it.
        records.of(model).wants_xla = asks and not is_being_made(model)
        rule(model, arguments)
        if arguments["auto_scale_loss"] or _forced:
            if optimizer is not None:
                wanted = _forced[-1] if _forced else transform
                arguments["optimizer"] = wanted(model, optimizer)
            arguments["auto_scale_loss"] = False
        return original(*call.args, **call.kwargs)

    _compile_hook = hooks.Hook(patches.trainer_class(), "compile", compile)
    return _compile_hook


@contextlib.contextmanager
def transforming(transform: OptimizerTransform) -> Iterator[None]:
    """Passes the optimizer of each model compiled meanwhile through `transform`.

    In place of the transform of `hook_compile`, whose rule stays. An optimizer for
    which `compile(auto_scale_loss=False)` asks is passed on, too.
    """
    with contextlib.ExitStack() as stack:
        if _compile_hook is None or not _compile_hook.active:
            mine = hook_compile(transform, lambda model, arguments: None)
            stack.callback(mine.remove)
        _forced.append(transform)
        stack.callback(_forced.pop)
        yield


def keras_own_compile() -> Callable:
    """Returns the `compile` of Keras' models, without what replaces it."""
    replaced = patches.trainer_class().compile
    return inspect.unwrap(replaced, stop=lambda x: not hasattr(x, "hook"))


def is_being_made(model: keras.Model) -> bool:
    """Whether the model's constructor, or Keras that loads it, compiles it.

    What it will be a part of may not be there yet: it is checked when it trains.
    """
    for frame, _ in traceback.walk_stack(None):
        arguments = frame.f_code.co_varnames
        if frame.f_code.co_name in ("__init__", "compile_from_config") and arguments:
            if frame.f_locals.get(arguments[0]) is model:
                return True
    return False


def run_once(model: keras.Model, look: Any, then: Callable[[], None] | None) -> None:
    """Has the next training step, and no other, run in a context, and something after.

    Args:
      model: A model that has its training function.
      look: The context; None for none.
      then: What to call after the step; None for nothing.
    """
    function = model.train_function

    def step(iterator):
        model.train_function = function
        try:
            with look or contextlib.nullcontext():
                logs = function(iterator)
            if then is not None:
                then()
        except BaseException as error:
            if not isinstance(error, StopIteration | tf.errors.OutOfRangeError):
                model.train_function = None  # The next `fit` is a first one again.
            raise
        return logs

    step.then_function = function  # pyright: ignore[reportFunctionMemberAccess]
    model.train_function = step
