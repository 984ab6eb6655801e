"""Functions in place of Keras' own, and Keras' own again: the one way to patch Keras.

Each name is given with the Keras version it was read in and is guarded by
tests/upstream/test_keras_contract.py.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

OptimizerTransform = Callable[[keras.Model, object], object]
CompileRule = Callable[[keras.Model, dict[str, Any]], None]


class Hook:
    """A function in place of one of Keras'; once inactive, it only calls that one.

    Args:
      owner: Class or module.
      name: Name of the function in it.
      make: Function of the original that returns what replaces it.
    """

    def __init__(self, owner, name: str, make: Callable):
        self.owner, self.name, self.active = owner, name, True
        self.original = vars(owner)[name]
        hooked = make(self.original)

        @functools.wraps(self.original)
        def method(*args, **kwargs):
            function = hooked if self.active else self.original
            return function(*args, **kwargs)

        self.method = method
        setattr(owner, name, method)

    def remove(self):
        """Puts the original back, unless another patch lies over this one."""
        self.active = False
        # Else somebody has put a method of theirs over this one: it stays.
        if vars(self.owner).get(self.name) is self.method:
            setattr(self.owner, self.name, self.original)


def trainer_class(name: str = "compile") -> type:
    """Returns the class that defines a method for every Keras model.

    The attribute must be replaced there and nowhere below: on loading, Keras
    (<= 3.15) compares `model.__class__.compile` with it to tell whether a user
    overrode `compile`, and silently leaves a model uncompiled if so.
    """
    return next(base for base in keras.Model.__mro__ if name in vars(base))


def check_signature(compile_: Callable) -> None:
    """Raises RuntimeError if a replaced `compile` hides its arguments."""
    if "auto_scale_loss" not in inspect.signature(compile_).parameters:
        raise RuntimeError(
            "Keras' `compile` was replaced by a function that hides its arguments. "
            f"Received: {compile_!r}. Give it `functools.wraps`, or replace it after "
            "tfamp.enable()."
        )


_compile_hooks: list[Hook] = []


@contextlib.contextmanager
def transforming(transform: OptimizerTransform) -> Iterator[None]:
    """Passes the optimizer of each model compiled meanwhile through `transform`.

    In place of what `install` does in `compile`, which stands again afterwards; its
    other hooks stay. An optimizer for which `compile(auto_scale_loss=False)` asks is
    passed on, too.
    """
    check_signature(trainer_class().compile)
    paused = [hook for hook in _compile_hooks if hook.active]
    for hook in paused:
        hook.active = False
    mine = Hook(
        trainer_class(),
        "compile",
        lambda old: _with_transform(old, transform, always=True),
    )
    try:
        yield
    finally:
        mine.remove()
        for hook in paused:
            hook.active = True


def _with_transform(original, transform, rule=None, always=False):
    signature = inspect.signature(original)

    def compile(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if rule is not None:
            rule(given["self"], given)
        if given["auto_scale_loss"] or always:
            optimizer = keras.optimizers.get(given["optimizer"])
            if optimizer is not None:
                given["optimizer"] = transform(given["self"], optimizer)
            given["auto_scale_loss"] = False
        return original(*call.args, **call.kwargs)

    return compile


def hook_compile(transform: OptimizerTransform, rule: CompileRule) -> Hook:
    """Passes the optimizer of each compiled model through `transform`; see `Hook`.

    Keras' own automatic loss scaling is turned off for those calls, so that an
    optimizer is never scaled twice; `compile(auto_scale_loss=False)` is left alone.

    Args:
      transform: Function of (model, optimizer) that returns an optimizer.
      rule: Function of (model, arguments of `compile` by name); it may change them,
        and raise before anything is compiled.
    """
    check_signature(trainer_class().compile)
    hook = Hook(
        trainer_class(), "compile", lambda old: _with_transform(old, transform, rule)
    )
    _compile_hooks[:] = [hook]
    return hook
