"""Patches Keras, and calls private names of its optimizers.

`keras_kernels` and `row_gradients` patch by `patches.Hook`, too; no other module does.

Each name is given with the Keras version it was read in and is guarded by
tests/test_keras_contract.py. `model_structure` reads private names of models.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfamp import patches

Around = Callable[[keras.Model, bool], contextlib.AbstractContextManager | None]


_hooks: list[patches.Hook] = []


def install(
    transform: patches.OptimizerTransform,
    check: Callable[[Any], None],
    rule: patches.CompileRule = lambda model, arguments: None,
    around_first_step: Around = lambda model, is_new: None,
    before_use: Callable[[keras.layers.Layer], None] | None = None,
) -> None:
    """Passes each compiled model's optimizer through `transform` from now on.

    Keras' own automatic loss scaling is turned off for those calls, so that an
    optimizer is never scaled twice; `compile(auto_scale_loss=False)` is left
    alone. The optimizer that Keras records in the model's compile configuration
    is the transformed one. Installing again replaces all functions.

    Args:
      transform: Function of (model, optimizer) that returns an optimizer; called
        only with an optimizer, never with None.
      check: Function of a model, called when its training step is first made, or
        after the first step of a model that is not built before.
      rule: Function of (model, arguments of `compile` by name); it may change the
        arguments, and raise before anything is compiled.
      around_first_step: Function of (model, whether its training function is new),
        called whenever training starts; returns a context for the next step, or None.
      before_use: Function of a layer, called whenever one is about to be built or
        called; None: no layer is watched.
    """
    remove()
    _hooks.append(patches.hook_compile(transform, rule))
    for name, make in (
        ("make_train_function", lambda old: _train_hook(old, check, around_first_step)),
    ):
        _hooks.append(patches.Hook(patches.trainer_class(name), name, make))
    if before_use is not None:
        # Keras 3.15: `__call__` casts inputs before it builds; composites call `build`.
        for name in ("__call__", "_open_name_scope"):
            layer = keras.layers.Layer
            _hooks.append(
                patches.Hook(layer, name, lambda old: _before(old, before_use))
            )
        _hooks.append(patches.Hook(keras.Model, "build_from_config", _in_own_scope))
        for owner in _HOLDERS:
            _hooks.append(_ClassHook(owner, "from_config", _with_unbuilt_parts))


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    while _hooks:
        _hooks.pop().remove()


def _before(original, before_use):
    def method(layer, *args, **kwargs):
        before_use(layer)
        return original(layer, *args, **kwargs)

    return method


# Keras 3.15 builds what it loads from the inside out, each layer in no name scope, so
# that a loaded layer lacks the names around it in its path. These build their parts.
_HOLDERS = (
    keras.Sequential,
    keras.layers.Wrapper,
    keras.layers.Bidirectional,
    keras.layers.RNN,
    keras.layers.StackedRNNCells,
)
_PARTS = ("layers", "layer", "backward_layer", "cell", "cells")


class _ClassHook(patches.Hook):
    """A class method in place of one of Keras'."""

    def __init__(self, owner: type, name: str, make: Callable):
        self._stored = vars(owner)[name]
        setattr(owner, name, self._stored.__func__)
        super().__init__(owner, name, make)
        self.method = classmethod(self.method)
        setattr(owner, name, self.method)

    def remove(self):
        self.active = False
        if vars(self.owner).get(self.name) is self.method:
            setattr(self.owner, self.name, self._stored)


def _with_unbuilt_parts(original):
    def from_config(cls, config, *args, **kwargs):
        own = issubclass(cls, keras.Sequential)
        builds = config.get("build_input_shape") if own else _is_keras(cls)
        if builds:
            config = {k: _unbuilt(v) if k in _PARTS else v for k, v in config.items()}
        return original(cls, config, *args, **kwargs)

    return from_config


def _is_keras(cls):
    return cls.__module__.startswith("keras.")


def _unbuilt(part):
    if isinstance(part, list | tuple):
        return type(part)(map(_unbuilt, part))
    # Other keys are of a class that builds itself by more than shapes.
    shapes = isinstance(part, dict) and list(part.get("build_config") or ())
    if shapes not in (["input_shape"], ["shapes_dict"]):
        return part
    return {key: value for key, value in part.items() if key != "build_config"}


def _in_own_scope(original):
    def build_from_config(model, *args, **kwargs):
        with model._open_name_scope():  # Keras 3.15; `build` opens it, `call` does not.
            return original(model, *args, **kwargs)

    return build_from_config


def _train_hook(original, check, around_first_step):
    def make_train_function(self, *args, **kwargs):
        is_new = self.train_function is None
        original(self, *args, **kwargs)
        if is_new and self.built:
            check(self)
        # Without a strategy, Keras 3.15 builds a model while it traces the step.
        later = check if is_new and not self.built else None
        if not getattr(self.train_function, "is_first_step", False):
            context = around_first_step(self, is_new)
            if later is not None or context is not None:
                self.train_function = _first_step(self, context, later)
        return self.train_function

    return make_train_function


def _first_step(model, context, check):
    """Returns a training function that puts Keras' own back after one call."""
    function = model.train_function

    def first_step(iterator):
        if model.train_function is first_step:
            model.train_function = function
        with context or contextlib.nullcontext():
            logs = function(iterator)
        if check is not None:
            check(model)
        return logs

    first_step.is_first_step = True  # pyright: ignore[reportFunctionMemberAccess]
    return first_step
