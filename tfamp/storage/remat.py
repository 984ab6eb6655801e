"""Computes a function again in the backward pass, instead of keeping what it held.

Keras' own way on TensorFlow, `tf.recompute_grad`, takes no keywords in a graph, updates
what a layer updates twice, and keeps everything under XLA. Here

| step | what |
|---|---|
| forward | runs unrecorded, and changes no Keras variable meanwhile |
| after it | the values that it read are noted, then variables get their new ones |
| backward | runs it again, on the noted values and inputs, and differentiates |

So both runs have the same seeds and statistics, and these are updated once. Only what a
tape records is computed again: predictions, evaluations and exports run as ever.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import graph_context, names
from tfamp.inspect import calls, traces
from tfamp.keras_patches import hooks, patches
from tfamp.storage import stored

# What `Layer.__call__` sets around `call`.
_CONTEXT, _AUTOCAST = "current_call_ctx", "autocast_scope"


def rematerialized(function: Callable) -> Callable:
    """Returns a function that keeps its inputs, and nothing else, for gradients.

    Args:
      function: A layer, a method of one, or a function of tensors. Gradients flow to
        the tensors in its arguments and to Keras variables.
    """

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def call(*args, **kwargs):
        has_all = all(map(names.resolve, patches.REMAT))
        is_recorded = has_all and names.resolve(patches.RECORDS)()
        if not is_recorded or traces.is_tracing() or not _is_built(function):
            return function(*args, **kwargs)
        return _Block(function, args, kwargs).run()

    return call


def _layer_of(function):
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, keras.layers.Layer) else None


def _is_built(function):
    """Whether a layer and those in it are built: a block makes no variables."""
    layer = _layer_of(function)
    return layer is None or all(x.built for x in names.flatten_layers(layer))


class _Values(keras.StatelessScope):
    """Keeps what is assigned to Keras variables from them, and notes what is read."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self.read: dict[int, keras.Variable] = {}
        self.assigned: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None:
            self.read[id(variable)] = variable
            if self.original_scope is not None:
                value = self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update):
        variable, value = update
        if variable.trainable and value.dtype.is_floating:
            # Who reads it next differentiates by the variable.
            before = self.get_current_value(variable)
            value = value if before is None else _assigned(before, value)
        super().add_update((variable, value))
        self.assigned[id(variable)] = variable, value


@tf.custom_gradient
def _assigned(before, value):
    return tf.identity(value), lambda upstream: (upstream, None)


class _Block:
    """One call of a function, while a tape records."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any]):
        self.function, self.structure = function, (args, kwargs)
        self.arguments = tf.nest.flatten(self.structure, expand_composites=True)
        self.read: list[tuple[keras.Variable, tf.Tensor, tf.Tensor]] = []
        self.others: list[tf.Variable] = []  # Read, and of TensorFlow alone.
        self.name = tf.get_current_name_scope()
        self._get, self._set = map(names.resolve, patches.GLOBALS)
        self._around = {name: self._get(name) for name in (_CONTEXT, _AUTOCAST)}

    def run(self) -> Any:
        """Returns what the function returns; gradients of it compute it again."""
        args, kwargs = self.structure
        watches, stops = map(names.resolve, (patches.WATCHES, patches.STOPS))
        with watches() as watcher, stops(), _Values() as scope:
            outputs = self.function(*args, **kwargs)
        with self._within({_AUTOCAST: None}):  # Weights as they are, without a cast.
            keras_ids = {id(x) for v in scope.read.values() for x in _parts(v.value)}
            watched = watcher.watched_variables()
            self.others = [x for x in watched if id(x) not in keras_ids]
            for variable in scope.read.values():
                low = isinstance(variable, stored.StoredVariable)  # In bfloat16.
                value = variable.natives[0] if low else variable.value
                # Twice, see `_late`.
                two = tf.convert_to_tensor(value), tf.convert_to_tensor(value)
                self.read.append((variable, *two))
            for variable, value in scope.assigned.values():
                variable.assign(value)
        flat = tf.nest.flatten(outputs, expand_composites=True)
        results = iter(self._recorded(calls.floats([*flat, *scope.losses])))
        flat = [
            calls.with_mask_of(next(results), x) if calls.is_float(x) else x
            for x in flat
        ]
        if losses := list(results):
            layer = _layer_of(self.function) or self._around[_CONTEXT].entry_layer
            layer.add_loss(losses)
        return tf.nest.pack_sequence_as(outputs, flat, expand_composites=True)

    def _recorded(self, outputs: list[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns the tensors that were made, as results of one recorded operation."""
        others = list(map(tf.convert_to_tensor, self.others))
        operands = [*self.arguments, *(value for _, value, _ in self.read), *others]
        inputs = [*self.arguments, *(x for *_, x in self.read), *others]
        tensors = [i for i, x in enumerate(operands) if isinstance(x, tf.Tensor)]
        sources = [i for i in tensors if calls.is_float(operands[i])]

        def gradients(values, upstream):
            again = list(operands)
            for i, value in zip(tensors, values, strict=True):
                again[i] = calls.with_mask_of(value, operands[i])
            # These cannot be read by value: gradients are by them as they are then.
            again[len(operands) - len(self.others) :] = self.others
            with tf.GradientTape() as tape:
                tape.watch(by := [again[i] for i in sources])
                results = self._again(again)
            return tape.gradient(results, by, upstream)

        def backward(*upstream):
            dense = [tf.convert_to_tensor(x) for x in upstream]
            values = [operands[i] for i in tensors]
            return _late(gradients, values, dense, [x for _, x, _ in self.read])

        if not outputs:
            return []
        block = tf.custom_gradient(lambda *_: (outputs, backward))
        return block(*(inputs[i] for i in sources))

    def _again(self, operands):
        """Runs the function on values that were kept; returns the tensors it makes."""
        count = len(self.arguments)
        flat, values = operands[:count], operands[count : count + len(self.read)]
        args, kwargs = tf.nest.pack_sequence_as(
            self.structure, flat, expand_composites=True
        )
        scope = _Values()
        for (variable, *_), value in zip(self.read, values, strict=True):
            keras.StatelessScope.add_update(scope, (variable, value))
        # The names decide in which order a graph's optimizer sums: they sort as before.
        with self._within(self._around), tf.name_scope(f"{self.name}./"), scope:
            outputs = self.function(*args, **kwargs)
        flat = tf.nest.flatten(outputs, expand_composites=True)
        return calls.floats([*flat, *scope.losses])

    @contextlib.contextmanager
    def _within(self, values: dict[str, Any]) -> Iterator[None]:
        """Scopes what Keras keeps under some of these names."""
        before = {name: self._get(name) for name in values}
        try:
            for name, value in values.items():
                self._set(name, value)
            yield
        finally:
            for name, value in before.items():
                self._set(name, value)


def _parts(value):
    """Returns a variable's value as it is watched: by replica, if there are several."""
    return [value, *getattr(value, "values", ())]


# ---- Not before the backward pass ----


def _late(gradients, values, upstream, read):
    """Returns `gradients(values, upstream)`, computed once `upstream` is there.

    And once `read` is: updates by these gradients must not overtake what was read. The
    edges by which TensorFlow sees to that are dropped when a graph is optimized, if a
    path that goes through an `IdentityN` implies them; then that is split. Keras joins
    gradients by one, `tf.custom_gradient` joins outputs and inputs: hence two reads.

    By a control edge, which XLA drops: there the values come from a conditional that is
    always taken, though no compiler can tell, so that what is computed from them is not
    merged with the forward pass.
    """
    if tf.executing_eagerly():
        return gradients([tf.identity(x) for x in values], upstream)
    if not graph_context.in_xla():
        with tf.control_dependencies([*upstream, *read]):
            values = [tf.identity(x) for x in values]
        return gradients(values, upstream)
    first = tf.reduce_min(tf.reshape(upstream[0], [-1])[:1])
    always = ~(tf.minimum(tf.cast(first, "float32"), 0.0) > 0.0)  # Also for NaN.
    values = tf.cond(
        always,
        lambda: [tf.identity(x) for x in values],
        lambda: [tf.zeros_like(x) for x in values],
    )
    return gradients(values, upstream)


HOOKS = hooks.HookGroup(remat=lambda original: rematerialized)
