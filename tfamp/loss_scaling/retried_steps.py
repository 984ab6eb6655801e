"""Steps that are taken again, on the same batch, while the loss scale is sought.

The loss scale begins at 2**15, far too high for a loss that is a sum. Backing off by
halves would lose a batch each time. So a step of `fit` or `train_on_batch` whose
gradients are not finite, though its loss is, is undone and taken again:

| updates so far | the scale |
|---|---|
| none | / 16, until the gradients are finite or it is at its minimum |
| none, and they are finite | * 2, as long as they are: growth takes 2000 steps each |
| 1 to 15, after such a search | / 2: it fits one batch, and the next may be larger |

Then, and after a first step that fits, Keras' function runs as ever. If the loss is not
finite, or the gradients are not at any scale, layers may be healed (`healed`), and the
step is taken again as a first one; so it is in the 16 steps after an epoch that skipped
most of its steps, or its last 8. Everything
that the step wrote is undone: weights, slots, statistics, metrics, random seeds and
counters, of every model in it. What it did on the host (prints, `tf.py_function`)
happens again.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import user_code
from tfamp.keras_patches import xla_steps
from tfamp.loss_scaling import train_steps
from tfamp.loss_scaling.loss_scale_optimizer import LossScaleOptimizer
from tfamp.updates import saved_values

_MOST = 16  # Retries of a run, and after each healing.
_LOWER, _HIGHER, _NEXT = 2.0**-4, 2.0, 2.0**-1
_SETTLED = 16  # Updates after which a scale that was sought is left to its rule.
_MOST_DIAGNOSES = 3  # Of steps that nothing can be healed for.
_STUCK = 8  # Steps that are skipped in a row, where a scale does not help.

Heal = Callable[[Any], bool]  # Of a batch: whether layers were healed.


class RetriedSteps:
    """A model's training function while its loss scale is sought; see the module.

    Args:
      model: The model.
      function: Its training function, which is called from then on.
      heal: What looks into a step that fits at no scale.
      as_first: For this many further steps, an overflow is treated as one in the first
        step, whatever was updated before.
    """

    def __init__(
        self, model: keras.Model, function: Callable, heal: Heal, as_first: int = 0
    ):
        self._model, self._function, self._heal = model, function, heal
        self._as_first, self._saved, self._without = as_first, None, ()
        self._graph = tf.function(
            lambda batch: function(iter([batch])), autograph=False
        )

    def __call__(self, data: Iterator) -> Any:
        """Takes the next steps, as the function of Keras that this stands for."""
        if not self._as_first and not _searches(self._model):
            if self._model.train_function is self:
                self._model.train_function = self._function
            return self._function(data)
        outputs, steps = None, self
        spec = data.element_spec if isinstance(data, tf.data.Iterator) else None
        for batch in itertools.islice(data, self._model.steps_per_execution):
            # Of `train_on_batch`: arrays, and None for no weights.
            if not hasattr(data, "element_spec"):
                while batch[-1] is None:
                    batch = batch[:-1]
                if any(x is None for x in batch):  # Weights, but no targets.
                    outputs = steps._function(iter([batch]))
                    continue
                batch = tf.nest.map_structure(_tensor, batch)
            outputs = steps.take(batch, spec)
            if isinstance(self._model.train_function, RetriedSteps):
                steps = self._model.train_function  # Of a model that was healed.
        if outputs is None:
            raise StopIteration
        return outputs

    def take(self, batch: Any, spec: Any) -> Any:
        """Takes a step on one batch, until it fits; returns what Keras' function does.

        Example: a first step whose gradients fit up to a scale of 100. It overflows at
        32768, 2048 and 128, and fits at 8; so it does at 16, 32 and 64, which stays, as
        128 is known to overflow.

        Args:
          batch: The batch, tensors in any structure.
          spec: The `element_spec` of its dataset; None for a batch of several
            replicas, or of `train_on_batch`.
        """
        optimizer, self._saved = self._model.optimizer, None
        is_first = self._as_first > 0 or not train_steps.updates(optimizer)
        self._as_first = max(self._as_first - 1, 0)
        self._without = () if is_first else _gated(optimizer)
        first = float(optimizer.usable_scale())
        before = optimizer.retried_steps
        outputs, fits = self._attempt(batch, spec)
        if fits:
            return outputs
        self._as_first = 0
        if not optimizer.skipped_loss.was_finite():
            return self._diagnose(batch, spec, outputs)
        # A static scale is the only one that can be tried.
        lowest = optimizer.config.min_scale if optimizer.config.dynamic else first
        lower = _LOWER if is_first else _NEXT
        scale = failed = first
        while not fits and scale > lowest and _has_tries(optimizer):
            failed, scale = scale, max(scale * lower, lowest)
            outputs, fits = self._attempt(batch, spec, scale)
        if not fits:
            if scale < first:
                outputs, _ = self._attempt(batch, spec, first)
            # At any scale, as where infinity goes through a tanh: its gradient is NaN.
            return self._diagnose(batch, spec, outputs) if scale <= lowest else outputs
        while scale * _HIGHER < failed and _has_tries(optimizer):
            outputs, fits = self._attempt(batch, spec, scale * _HIGHER)
            if not fits:
                outputs, _ = self._attempt(batch, spec, scale)
                break
            scale *= _HIGHER
        if is_first:
            user_code.log(
                f"Model '{self._model.name}': the loss scale begins at {scale:g}, not "
                f"at {first:g}, where gradients overflow. The batch was taken "
                f"{1 + optimizer.retried_steps - before} times, and no batch is lost."
            )
        return outputs

    def _diagnose(self, batch, spec, outputs):
        """Has layers healed and takes a step again, if that is what it needs."""
        optimizer, strategy = self._model.optimizer, self._model.distribute_strategy
        if optimizer.diagnoses >= _MOST_DIAGNOSES:
            return outputs
        optimizer.diagnoses += 1
        several = getattr(strategy.extended, "_in_multi_worker_mode", lambda: False)()
        if several or not self._heal(_whole(batch, strategy)):
            return outputs
        self._saved.restore()
        scale = max(float(optimizer.usable_scale()), optimizer.initial_scale)
        optimizer.state().scale.assign(scale)
        optimizer.retried_steps += 1
        optimizer.retried_until_healed = optimizer.retried_steps
        self._model.make_train_function()  # It was forgotten.
        again = RetriedSteps(self._model, _plain(self._model), self._heal, as_first=1)
        optimizer.diagnoses = 0
        self._model.train_function = again
        return again.take(batch, spec)

    def _attempt(self, batch, spec, scale=None):
        """Takes one step; with a scale, undoes the last one and sets that scale first.

        Returns what the step returns, and whether it fits: whether it was not skipped.
        """
        optimizer = self._model.optimizer
        if scale is not None:
            self._saved.restore()
            optimizer.state().scale.assign(scale)
            optimizer.retried_steps += 1
        before = int(optimizer.skipped_steps.numpy())
        if self._model.run_eagerly:
            self._save(_handles(self._model))
            outputs = self._function(iter([batch]))
        elif isinstance(self._function, xla_steps.Steps):
            spec = spec or tf.nest.map_structure(tf.type_spec_from_value, batch)
            outputs = self._function.step(batch, spec, self._call)
        elif spec is not None and (traced := _traced(self._function)):
            data = _iterator(batch, spec)  # No other trace than for those to come.
            self._save(traced.get_concrete_function(data).captured_inputs)
            outputs = self._function(data)
        else:
            outputs = self._call(self._graph, batch)
        return outputs, int(optimizer.skipped_steps.numpy()) == before

    def _call(self, graph, batch):
        self._save(graph.get_concrete_function(batch).captured_inputs)
        return graph(batch)

    def _save(self, captured):
        if self._saved is None:
            self._saved = saved_values.SavedValues(captured, self._without)


def _traced(function):
    """Returns the `tf.function` of an iterator in a function of Keras, or None."""
    if not inspect.isfunction(function):
        return None
    # Keras 3.15 has it in a closure only; without it a step is traced twice.
    held = inspect.getclosurevars(function).nonlocals.get("multi_step_on_iterator")
    return held if hasattr(held, "get_concrete_function") else None


def _iterator(batch, spec):
    """Returns an iterator over one batch, of a type for which a step was traced."""
    data = tf.data.Dataset.from_tensors(batch)
    variant = tf.data.experimental.to_variant(data)
    return iter(tf.data.experimental.from_variant(variant, spec))


def _tensor(x):
    kinds = tf.Tensor, tf.SparseTensor, tf.RaggedTensor
    return x if isinstance(x, kinds) else tf.convert_to_tensor(x)


def _handles(model):
    """Returns the handles of variables that an eager step may write."""
    optimizer = model.optimizer
    if not optimizer.built and model.built:  # Else the step makes slots of its own.
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    holders = [model, optimizer, *optimizer.beside]
    values = [getattr(v, "value", v) for x in holders for v in x.variables]
    each = [getattr(v, "values", (v,)) for v in values]  # Of several replicas.
    return list({id(v): v.handle for values in each for v in values}.values())


def _gated(optimizer):
    """Returns the ids of handles that a skipped step of an optimizer leaves alone."""
    if tf.distribute.has_strategy():
        return ()
    inner = optimizer.inner_optimizer
    trained = inner._trainable_variables if inner.built else ()
    return {id(each.value.handle) for each in (*inner.variables, *trained)}


def _searches(model):
    """Whether the loss scale of a model is still to be found."""
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer) or not optimizer.config.dynamic:
        return False
    most = _SETTLED - 1 if optimizer.retried_steps else 0
    return (
        optimizer.diagnoses < _MOST_DIAGNOSES and train_steps.updates(optimizer) <= most
    )


def _has_tries(optimizer):
    spent = optimizer.retried_steps - optimizer.retried_until_healed
    return spent < _MOST - 1  # One more may be needed to go back.


def _plain(model):
    function = model.train_function
    function = getattr(function, "then_function", function)  # Of a first step.
    return function._function if isinstance(function, RetriedSteps) else function


def _whole(batch, strategy):
    """Returns a batch of all replicas as one."""

    def joined(x):
        parts = strategy.experimental_local_results(x)
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

    return tf.nest.map_structure(joined, batch)


def watch(model: keras.Model, heal: Heal, skips_most: bool = False) -> None:
    """Has a model's training function retry its next steps, if they may need it.

    Args:
      model: The model.
      heal: Looks into the batch of a step that fits at no scale.
      skips_most: Whether most steps of its last epoch were skipped.
    """
    function, optimizer = model.train_function, model.optimizer
    if function is None or isinstance(function, RetriedSteps):
        return
    if (
        not isinstance(optimizer, LossScaleOptimizer)
        or optimizer.diagnoses >= _MOST_DIAGNOSES
    ):
        return
    if model.run_eagerly and train_steps.HOOKS.scales(model):
        return  # Nobody knows what such a step writes.
    in_a_row = int(optimizer.consecutive_skipped_steps.numpy())
    is_stuck = skips_most or in_a_row >= _STUCK
    if is_stuck or _searches(model):
        as_first = _SETTLED * is_stuck
        model.train_function = RetriedSteps(model, function, heal, as_first)
