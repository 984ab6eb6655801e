"""Patches Keras, and calls private names of its optimizers.

`keras_kernels` and `row_gradients` patch by `Hook`, too; no other module does.

Each name is given with the Keras version it was read in and is guarded by
tests/test_keras_contract.py. `model_structure` reads private names of models.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

OptimizerTransform = Callable[[keras.Model, object], object]
CompileRule = Callable[[keras.Model, dict[str, Any]], None]
Around = Callable[[keras.Model, bool], contextlib.AbstractContextManager | None]


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


_hooks: list[Hook] = []
_masking = threading.RLock()


def trainer_class(name: str = "compile") -> type:
    """Returns the class that defines a method for every Keras model.

    The attribute must be replaced there and nowhere below: on loading, Keras
    (<= 3.15) compares `model.__class__.compile` with it to tell whether a user
    overrode `compile`, and silently leaves a model uncompiled if so.
    """
    return next(base for base in keras.Model.__mro__ if name in vars(base))


def install(
    transform: OptimizerTransform,
    check: Callable[[Any], None],
    rule: CompileRule = lambda model, arguments: None,
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
    _check_signature(trainer_class().compile)
    remove()
    for name, make in (
        ("compile", lambda old: _compile_hook(old, transform, rule)),
        ("make_train_function", lambda old: _train_hook(old, check, around_first_step)),
    ):
        _hooks.append(Hook(trainer_class(name), name, make))
    if before_use is not None:
        # Keras 3.15: `__call__` casts inputs before it builds; composites call `build`.
        for name in ("__call__", "_open_name_scope"):
            _hooks.append(
                Hook(keras.layers.Layer, name, lambda old: _before(old, before_use))
            )
        _hooks.append(Hook(keras.Model, "build_from_config", _in_own_scope))
        for owner in _HOLDERS:
            _hooks.append(_ClassHook(owner, "from_config", _with_unbuilt_parts))


def _check_signature(compile_):
    if "auto_scale_loss" not in inspect.signature(compile_).parameters:
        raise RuntimeError(
            "Keras' `compile` was replaced by a function that hides its arguments. "
            f"Received: {compile_!r}. Give it `functools.wraps`, or replace it after "
            "tfamp.enable()."
        )


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    while _hooks:
        _hooks.pop().remove()


@contextlib.contextmanager
def transforming(transform: OptimizerTransform) -> Iterator[None]:
    """Passes the optimizer of each model compiled meanwhile through `transform`.

    In place of what `install` does in `compile`, which stands again afterwards; its
    other hooks stay. An optimizer for which `compile(auto_scale_loss=False)` asks is
    passed on, too.
    """
    _check_signature(trainer_class().compile)
    paused = [hook for hook in _hooks if hook.active and hook.name == "compile"]
    for hook in paused:
        hook.active = False
    mine = Hook(
        trainer_class(),
        "compile",
        lambda old: _compile_hook(old, transform, always=True),
    )
    try:
        yield
    finally:
        mine.remove()
        for hook in paused:
            hook.active = True


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


class _ClassHook(Hook):
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


def _compile_hook(original, transform, rule=None, always=False):
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
