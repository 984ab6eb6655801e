"""Records each call of a model's layers, and makes a call again on other values.

In a graph: the tensors of a record belong to the `tf.function` that made it. What runs
inside a loop or a branch has a graph of its own, and belongs to the layer around it.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.inspect import structure, traces


class Call:
    """One call of a layer, or of an operation of a functional model.

    What a layer computes itself is a function of what it is given and what the layers
    that it calls return (`inputs`); its `results` are what it returns and what it gives
    to those layers.

    Attributes:
      owner: The layer or operation.
      path: Its path in the model, as `describe_layers` gives it.
      number: Index among the calls of its owner, from 0.
      arguments: (args, kwargs) with tensors that are this call's alone.
      sources: The tensors that those were before.
      children: The calls that it made.
      seeds: The states of its random seeds before.
      outputs: What it returned.
    """

    def __init__(self, owner: keras.Operation, path: str, number: int, sources: Any):
        self.owner, self.path, self.number = owner, path, number
        self.sources = sources
        self.arguments = keras.tree.map_structure(_own, sources)
        self.children: list[Call] = []
        self.seeds = [tf.identity(seed.value) for seed in seeds_of(owner)]
        self.outputs: Any = None

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The floating tensors that it computes from."""
        return floats([self.arguments, *(each.outputs for each in self.children)])

    @property
    def results(self) -> list[tf.Tensor]:
        """The floating tensors that it computes."""
        return floats([self.outputs, *(each.arguments for each in self.children)])

    @property
    def weights(self) -> list[tf.Variable]:
        """The weights that it trains itself, not those of layers in it."""
        if not isinstance(self.owner, keras.layers.Layer):
            return []
        return [v.value for v in structure.own_weights(self.owner) if is_trained(v)]

    @property
    def only_chains(self) -> bool:
        """Whether it does nothing but pass tensors to layers and return theirs."""
        taken = [self.sources, self.arguments, *(x.outputs for x in self.children)]
        ids = {id(x) for x in keras.tree.flatten(taken)}
        results = [self.outputs, *(each.sources for each in self.children)]
        return all(id(x) in ids for x in floats(results))


class Unwritten(keras.StatelessScope):
    """Scopes calls of layers: what they write goes nowhere."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns what was written; of a regularized weight else its own value."""
        value = super().get_current_value(variable)
        # Keras (<= 3.15) hands this to a weight's regularizer, also if it is None.
        regularizer = getattr(variable, "regularizer", None)
        return variable._value if value is None and regularizer else value


def is_trained(variable: keras.Variable) -> bool:
    """Whether it has a gradient; float8's scales are given their values as one."""
    overwrites = getattr(variable, "overwrite_with_gradient", False)
    return variable.trainable and not overwrites


class Recorder:
    """Watches a model's layers and operations, as long as it is installed.

    Args:
      model: A model.
      tape: A tape that is to watch what the calls take and return.
    """

    def __init__(self, model: keras.Model, tape: tf.GradientTape):
        self._tape = tape
        self._paths = paths_of(model)
        self._graph: Any = None
        self._counts: dict[int, int] = {}
        # Completed calls: those by the user, and those by each call that runs now.
        self._completed: list[list[Call]] = [[]]
        self._looped: set[int] = set()  # Owners that a loop or branch called.
        # Of a call that is made again: it and its children to come, with their outputs.
        self._left: list[tuple[Call, Any]] | None = None
        self._passed: list[tf.Tensor] = []  # What it has given to its children.

    @property
    def calls(self) -> list[Call]:
        """The completed calls, in the order of completion: inner ones first."""
        return [*_inner_first(self._completed[0])]

    @contextlib.contextmanager
    def installed(
        self, collect_losses: bool = False, is_stateless: bool = True
    ) -> Iterator[None]:
        """Scopes the watching; afterwards all is as before.

        Args:
          collect_losses: Whether layers that add losses find them there.
          is_stateless: Whether what the calls write goes nowhere.
        """
        owners = [owner for owner, _ in self._paths.values()]
        with traces.unchanged(owners):
            for owner in owners:
                traces.watch(owner, functools.partial(self._watched, owner))
            self._graph = tf.compat.v1.get_default_graph()
            # Seeds, statistics and losses of these calls go nowhere.
            scope = Unwritten(collect_losses=collect_losses)
            with scope if is_stateless else contextlib.nullcontext():
                yield

    def again(self, call: Call, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Computes what a layer makes itself, on other values.

        Args:
          call: A call that was recorded, here or in another format.
          values: What its `inputs` are now.

        Returns:
          What its `results` are then.
        """
        # Attention takes the mask off its arguments, which are copies of `sources`.
        masked = floats([call.sources, *(each.outputs for each in call.children)])
        tensors = map(with_mask_of, values, masked)
        args, kwargs = _refilled(call.arguments, tensors)
        inner = [(each, _refilled(each.outputs, tensors)) for each in call.children]
        for seed, state in zip(seeds_of(call.owner), call.seeds, strict=True):
            seed.assign(state)
        self._left, self._passed = [(call, None), *inner], []
        try:
            outputs = call.owner(*args, **kwargs)
        finally:
            self._left = None
        return [*floats([outputs]), *self._passed]

    def _watched(self, owner, original):
        def call(*args, **kwargs):
            if tf.compat.v1.get_default_graph() is not self._graph:
                self._looped.add(id(owner))
                return original(*args, **kwargs)
            if self._left is not None:
                return self._repeat(owner, original, args, kwargs)
            return self._record(owner, original, args, kwargs)

        return call

    def _record(self, owner, original, args, kwargs):
        number = self._counts.get(id(owner), 0)
        self._counts[id(owner)] = number + 1
        record = Call(owner, self._paths[id(owner)][1], number, (args, kwargs))
        self._tape.watch(floats(record.arguments))
        self._completed.append(record.children)
        try:
            args, kwargs = record.arguments
            record.outputs = original(*args, **kwargs)
        finally:
            self._completed.pop()
        self._tape.watch(floats(record.outputs))
        # Keras calls a cell once outside of its loop, to see what it returns.
        record.children = [
            x for x in record.children if id(x.owner) not in self._looped
        ]
        self._completed[-1].append(record)
        return record.outputs

    def _repeat(self, owner, original, args, kwargs):
        if self._left and self._left[0][0].owner is owner:
            _, outputs = self._left.pop(0)
            if outputs is not None:
                self._passed += floats([args, kwargs])
                return outputs
        return original(*args, **kwargs)


def _inner_first(calls):
    for each in calls:
        yield from _inner_first(each.children)
        yield each


def paths_of(model: keras.Model) -> dict[int, tuple[keras.Operation, str]]:
    """Returns {id: (owner, path)} of a model's layers and of the operations in it."""
    places = structure.walk(model)
    owners: Any = {id(place.layer): (place.layer, place.path) for place in places}
    for layer, path, holders in places:
        for each in getattr(layer, "operations", ()):
            inside = f"{path}/{each.name}" if holders else each.name
            owners.setdefault(id(each), (each, inside))
    return {
        key: each
        for key, each in owners.items()
        if not isinstance(each[0], keras.layers.InputLayer)
    }


def seeds_of(owner: keras.Operation) -> list[keras.Variable]:
    """Returns the states of the random seeds that a layer has itself."""
    if not isinstance(owner, keras.layers.Layer):
        return []
    held = {id(v) for v in owner.weights}
    held |= {id(v) for each in structure.children(owner) for v in each.variables}
    return [v for v in owner.variables if id(v) not in held and "seed" in v.path]


def floats(nested: Any) -> list[tf.Tensor]:
    """Returns the floating tensors in a structure, flat."""
    return [x for x in keras.tree.flatten(nested) if is_float(x)]


def is_float(x: Any) -> bool:
    """Returns whether it is a floating tensor."""
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


def _refilled(nested, values):
    """Returns a structure with other floating tensors, in the order of `floats`."""
    return keras.tree.map_structure(
        lambda x: next(values) if is_float(x) else x, nested
    )


def _own(x):
    return with_mask_of(tf.identity(x), x) if is_float(x) else x


def with_mask_of(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns the first tensor, with the mask of the other one, if it has one."""
    if (mask := getattr(other, "_keras_mask", None)) is not None:
        x._keras_mask = mask
    return x
