"""Loss scaling in a `train_step` of a model's own, which need not ask for it.

While such a step runs, `tf.GradientTape.gradient` differentiates the loss times the
scale of `model.optimizer`, and returns true gradients, in float32: what clips, logs or
applies them sees no scale. Where they are not finite they are zeros, so that a step
that writes them to weights does no harm. `apply`, of any optimizer, skips the update
then, and moves that scale. Left alone are

| what | why |
|---|---|
| a step that reads a scale, as `scale_loss` does | it scales by itself |
| a gradient that a tape around it records | it is scaled by that tape's own |
| a gradient by no variable; Jacobians | no mean over a batch: scaled, it overflows |
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.facts import names, user_code
from tfamp.keras_patches import hooks, keras_optimizers, patches
from tfamp.loss_scaling import input_gradients, skipped_loss
from tfamp.updates import gate

_VARIABLES = (tf.Variable, keras.Variable)
_LARGEST = 2.0**15  # The largest power of two of float16, for a loss in float16.
_TAPE = inspect.getsourcefile(tf.GradientTape)


class _Taken(NamedTuple):
    """Gradients that a step has taken.

    Attributes:
      finite: Whether they were finite: bool []. Else they are zeros.
      grads: The gradients, as the step has them.
    """

    finite: Any
    grads: list


class Step:
    """A run, or a trace, of a `train_step` in one thread.

    Attributes:
      optimizer: The `LossScaleOptimizer` of the model, whose scale is used.
      read: The ids of optimizers whose scale was read, and that have not applied since.
      graph: The graph that it is traced in; None if it runs eagerly.
      taken: The `_Taken` of its gradients.
      unapplied: Those of `taken` since the last `apply`.
      has_applied: Whether an optimizer has applied any.
    """

    def __init__(self, optimizer: Any):
        self.optimizer, self.read, self.graph = optimizer, set(), _graph()
        self.taken: list[_Taken] = []
        self.unapplied: list[_Taken] = []
        self.has_applied = False

    def take(self, grads: Sequence, sources: Sequence) -> list:
        """Returns gradients, or zeros if they are not finite, and notes which."""
        if self.graph is not _graph():  # Of a branch: `apply` may be outside of it.
            return [*grads]
        finite = gate.all_finite(grads, 1.0)
        pairs = zip(grads, sources, strict=True)
        taken = _Taken(finite, [_or_zeros(grad, x, finite) for grad, x in pairs])
        self.taken.append(taken)
        self.unapplied.append(taken)
        return taken.grads

    def end(self) -> None:
        """Moves the scale, if the step has applied its gradients by itself."""
        if self.taken and not self.has_applied and not tf.distribute.has_strategy():
            self.optimizer.settle(tf.reduce_all([x.finite for x in self.taken]))


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _or_zeros(grad, source, finite):
    if grad is None or keras_optimizers.overwrites_with_gradient(source):
        return grad
    return keras_optimizers.map_values(
        lambda x: tf.where(finite, x, tf.zeros([], x.dtype)), grad
    )


class _Now(threading.local):
    step: Step | None = None  # The innermost.
    suspended = False


_now = _Now()


def _running(step, suspended=False) -> contextlib.AbstractContextManager[None]:
    return hooks.replaced([(_now, "step", step), (_now, "suspended", suspended)])


def suspended() -> contextlib.AbstractContextManager[None]:
    """Scopes what an optimizer does in `apply`: nothing of it is looked at."""
    return _running(None, suspended=True)


def updates(optimizer: Any) -> int:
    """Returns how many updates were made under the scale of an optimizer.

    Args:
      optimizer: A `LossScaleOptimizer`.
    """
    return sum(int(x.iterations.numpy()) for x in [optimizer, *optimizer.beside])


def mark_read(optimizer: Any) -> bool:
    """Notes that a step reads an optimizer's scale, and so scales by itself.

    Returns:
      Whether a step runs.
    """
    if _now.step is not None:
        _now.step.read.add(id(optimizer))
    return _now.step is not None


def settled_by(optimizer: Any) -> Callable[[Any], None] | None:
    """Returns what updates the loss scale, if the running step has unscaled gradients.

    Else None: then `apply` unscales them.

    Args:
      optimizer: The `LossScaleOptimizer` that applies.
    """
    step = _now.step
    if step is None:
        return None
    if id(optimizer) in step.read:
        step.read.remove(id(optimizer))
        return None

    def settle(finite):
        for each in {id(x): x for x in (optimizer, step.optimizer)}.values():
            each.settle(finite)

    return settle


def check(grads: Sequence, scale: Callable[[], Any]) -> Callable[[Sequence], Any]:
    """Returns what tells whether the gradients of an update are finite: bool [].

    Those count that are given, and of a step that runs all since its last update.

    Args:
      grads: What is applied.
      scale: Function that returns their scale.
    """
    step, noted = _now.step, []
    if step is not None:
        ids = {id(grad) for grad in grads}
        given = [x for x in step.taken if any(id(grad) in ids for grad in x.grads)]
        noted = list({id(x): x.finite for x in (*step.unapplied, *given)}.values())
        step.unapplied, step.has_applied = [], True

    def is_finite(grads):
        finite = gate.all_finite(grads, scale())
        return tf.reduce_all([finite, *noted]) if noted else finite

    return is_finite


@hooks.around
def scaled(original, model, *args, **kwargs):
    """For a `train_step` of a class's own, which scales then."""
    optimizer = getattr(model, "optimizer", None)
    step = Step(optimizer) if hasattr(optimizer, "usable_scale") else None
    with _running(step, suspended=step is None):
        # It may be a `tf.function`, which binds the model.
        results = original.__get__(model, type(model))(*args, **kwargs)
    if step is not None:
        step.end()
    return results


@hooks.around
def _gradient(
    original,
    tape,
    target,
    sources,
    output_gradients=None,
    unconnected_gradients=tf.UnconnectedGradients.NONE,
):
    step, upstream = _now.step, output_gradients
    if step is None or step.read or not _scales(tape, target, sources):
        grads = original(tape, target, sources, upstream, unconnected_gradients)
        if not (_now.step or _now.suspended or _has_variables(sources)):
            input_gradients.look(tf.nest.flatten(grads))
        return grads
    scale = step.optimizer.usable_scale()
    if any(x.dtype == tf.float16 for x in tf.nest.flatten(target)):
        scale = tf.minimum(scale, _LARGEST)
    skipped_loss.note(target)
    seeds = _seeds(target, upstream, scale)
    with suspended():  # Functions with gradients of their own may take some, too.
        grads = original(tape, target, sources, seeds, unconnected_gradients)
    return _true(step, grads, sources, scale)


def _scales(tape, target, sources):
    """Whether a gradient is one that is left to us; see the table above."""
    if sys._getframe(3).f_code.co_filename == _TAPE:  # A Jacobian.
        return False
    targets = tf.nest.flatten(target)
    floats = all(isinstance(x, tf.Tensor) and x.dtype.is_floating for x in targets)
    if not floats or not _has_variables(sources):
        return False
    inside = tape.stop_recording() if tape._recording else contextlib.nullcontext()
    with inside:  # So that only tapes around it count.
        return not names.resolve(patches.RECORDS)()


def _has_variables(sources):
    return any(isinstance(x, _VARIABLES) for x in tf.nest.flatten(sources))


def _seeds(target, upstream, scale):
    targets = tf.nest.flatten(target)
    seeds = [None] * len(targets) if upstream is None else tf.nest.flatten(upstream)
    scaled = [
        tf.cast(scale, x.dtype)
        * (tf.ones_like(x) if seed is None else tf.convert_to_tensor(seed, x.dtype))
        for x, seed in zip(targets, seeds, strict=True)
    ]
    return tf.nest.pack_sequence_as(target, scaled)


def _true(step, grads, sources, scale):
    flat = tf.nest.flatten(sources)
    flat_grads = tf.nest.flatten(grads)
    unscaled = step.take(gate.unscale(flat_grads, flat, scale), flat)
    true = [
        # That of a tensor has its format, as ever.
        wide if wide is None or isinstance(x, _VARIABLES) else tf.cast(wide, grad.dtype)
        for wide, grad, x in zip(unscaled, flat_grads, flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, true)


@hooks.around
def _apply(original, optimizer, grads, trainable_variables=None):
    step = _now.step
    if step is None or step.read:
        if not (step or _now.suspended or tf.distribute.has_strategy()):
            _tell_of_loops()
        return original(optimizer, grads, trainable_variables)
    gate.check_context(optimizer, optimizer._distribution_strategy)
    grads, variables = keras_optimizers.pairs(optimizer, grads, trainable_variables)
    if not grads:
        return None
    step.optimizer.beside.add(optimizer)
    loss = skipped_loss.last()
    gated = gate.GatedUpdate(
        check=check(grads, lambda: 1.0),
        update=lambda grads: original(optimizer, grads, variables),
        record_skip=lambda grads, finite: step.optimizer.skipped_loss.record(
            loss, finite
        ),
        settle=step.optimizer.settle,
    )
    with suspended():
        gate.take(gated, grads, variables, optimizer, "auto", summed=False)


def _tell_of_loops():
    """Says, once, that a loop of the user's own applies what was never scaled."""
    text = (
        "the loss was not scaled, so small gradients of float16 layers underflow. "
        "Wrap the optimizer, `optimizer = tfamp.wrap_optimizer(optimizer)`, and "
        "differentiate `loss = optimizer.scale_loss(loss)`."
    )
    if not user_code.is_told(text):
        *inner, _ = user_code.frames()
        if all(frame.name != "train_step" for frame in inner):  # Keras' own, of `fit`.
            user_code.log(text)


class _Hooks(hooks.HookGroup):
    def add(self, kind: type) -> None:
        """Hooks the `train_step` of a model's class, too, if it is the user's own."""
        owner = hooks.owner_of(kind, "train_step")
        if not owner.__module__.startswith("keras."):
            self.add_to(kind, "train_step", scaled)

    def scales(self, model: keras.Model) -> bool:
        """Whether the `train_step` of a compiled model scales its loss by itself."""
        owner = hooks.owner_of(type(model), "train_step")
        added = any(hook.owner is owner for _, hook in self._hooks)
        return added and hasattr(model.optimizer, "usable_scale")


HOOKS = _Hooks(gradient=_gradient, step_apply=_apply)
