"""Records each call of a model's layers, and makes a call again on other values.

In a graph: the tensors of a record belong to the `tf.function` that made it. What runs
inside a loop or a branch has a graph of its own, and belongs to the layer around it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.inspect import structure, traces


class Call:
    """One call of a layer, or of an operation of a functional model.

    What a layer computes itself is a function of what it is given and what the layers
    that it calls return (`taken`); its results are what it returns and what it gives to
    those layers (`made`).

    Attributes:
      owner: The layer or operation.
      path: Its path in the model, as `describe_layers` gives it.
      number: Which of the calls of its owner this is, from 0.
      is_shared: Whether its owner has other calls, too.
      arguments: (args, kwargs) with tensors that are this call's alone.
      sources: The tensors that those were before.
      children: The calls that it made.
      seeds: The states of its random seeds before.
      outputs: What it returned.
    """

    def __init__(self, owner: keras.Operation, path: str, number: int, given: Any):
        self.owner, self.path, self.number = owner, path, number
        self.is_shared = number > 0
        self.sources = given
        self.arguments = keras.tree.map_structure(_own, given)
        self.children: list[Call] = []
        self.seeds = [tf.identity(seed.value) for seed in seeds_of(owner)]
        self.outputs: Any = None

    @property
    def inner(self) -> int:
        """How many calls it led to, those of its children included."""
        return sum(1 + each.inner for each in self.children)

    @property
    def taken(self) -> list[tf.Tensor]:
        """The floating tensors that it computes from."""
        return floats([self.arguments, *(each.outputs for each in self.children)])

    @property
    def made(self) -> list[tf.Tensor]:
        """The floating tensors that it computes."""
        return floats([self.outputs, *(each.arguments for each in self.children)])

    @property
    def weights(self) -> list[tf.Variable]:
        """The weights that it trains itself, not those of layers in it."""
        if not isinstance(self.owner, keras.layers.Layer):
            return []
        own = structure.own_weights(self.owner)
        return [weight.value for weight in own if weight.trainable]

    @property
    def only_chains(self) -> bool:
        """Whether it does nothing but pass tensors to layers and return theirs."""
        known = {id(x) for x in keras.tree.flatten(self.sources)}
        known |= {id(x) for x in keras.tree.flatten(self.arguments)}
        for each in self.children:
            known |= {id(x) for x in keras.tree.flatten(each.outputs)}
        results = [self.outputs, *(each.sources for each in self.children)]
        return all(id(x) in known for x in floats(results))


class Recorder:
    """Watches a model's layers and operations, as long as it is installed.

    Attributes:
      calls: Completed calls, in the order of completion: layers before those around.
    """

    def __init__(self, model: keras.Model, tape: tf.GradientTape | None = None):
        self._tape = tape
        self._paths = paths_of(model)
        self._graph: Any = None
        self._counts: dict[int, int] = {}
        self._open: list[Call] = []
        self._looped: set[int] = set()  # Owners that a loop or branch called.
        self._repeats = False  # Whether a call is made again.
        self._left: list[tuple[Call, Any]] = []  # Its children to come, and outputs.
        self.calls: list[Call] = []

    @contextlib.contextmanager
    def installed(self, collect_losses: bool = False) -> Iterator[None]:
        """Scopes the watching; afterwards all is as before.

        Args:
          collect_losses: Whether layers that add losses find them there.
        """
        owners = [owner for owner, _ in self._paths.values()]
        layers = [each for each in owners if isinstance(each, keras.layers.Layer)]
        with traces.unchanged(layers), contextlib.ExitStack() as undo:
            for owner in owners:
                original = getattr(owner.call, "python_function", owner.call)
                # Past Keras, which would look for layers and variables in it.
                object.__setattr__(owner, "call", self._watched(owner, original))
                if not isinstance(owner, keras.layers.Layer):
                    undo.callback(object.__delattr__, owner, "call")
            self._graph = tf.compat.v1.get_default_graph()
            # Seeds, statistics and losses of these calls go nowhere.
            undo.enter_context(keras.StatelessScope(collect_losses=collect_losses))
            yield

    def again(self, call: Call, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Computes what a layer makes itself, on other values.

        Args:
          call: A call that was recorded, here or in another format.
          values: What its `taken` are now.

        Returns:
          What its `made` are then.
        """
        arguments = keras.tree.flatten([call.arguments])
        # Attention takes the mask off its arguments, which are copies of `sources`.
        masked = floats([call.sources, *(each.outputs for each in call.children)])
        given = map(with_mask_of, values, masked)
        replaced = [next(given) if _is_float(x) else x for x in arguments]
        args, kwargs = keras.tree.pack_sequence_as([call.arguments], replaced)[0]
        inner = []
        for child in call.children:
            flat = keras.tree.flatten([child.outputs])
            flat = [next(given) if _is_float(x) else x for x in flat]
            inner.append((child, keras.tree.pack_sequence_as([child.outputs], flat)[0]))
        for seed, state in zip(seeds_of(call.owner), call.seeds, strict=True):
            seed.assign(state)
        self._repeats, self._left, self._passed = True, [(call, None), *inner], []
        try:
            outputs = call.owner(*args, **kwargs)
        finally:
            self._repeats = False
        return [*floats([outputs]), *self._passed]

    def _watched(self, owner, original):
        def call(*args, **kwargs):
            inside = tf.compat.v1.get_default_graph() is not self._graph
            if inside:
                self._looped.add(id(owner))
                return original(*args, **kwargs)
            if self._repeats:
                return self._repeat(owner, original, args, kwargs)
            return self._record(owner, original, args, kwargs)

        return call

    def _record(self, owner, original, args, kwargs):
        number = self._counts.get(id(owner), 0)
        self._counts[id(owner)] = number + 1
        record = Call(owner, self._paths[id(owner)][1], number, (args, kwargs))
        for each in self.calls:
            each.is_shared |= each.owner is owner
        if self._open:
            self._open[-1].children.append(record)
        self._open.append(record)
        try:
            if self._tape is not None:
                for tensor in floats(record.arguments):
                    self._tape.watch(tensor)
            args, kwargs = record.arguments
            record.outputs = original(*args, **kwargs)
        finally:
            self._open.pop()
        if self._tape is not None:
            for tensor in floats(record.outputs):
                self._tape.watch(tensor)
        # Keras calls a cell once outside of its loop, to see what it returns.
        looped = [x for x in record.children if id(x.owner) in self._looped]
        for each in looped:
            record.children.remove(each)
            del self.calls[
                self.calls.index(each) - each.inner : self.calls.index(each) + 1
            ]
        self.calls.append(record)
        return record.outputs

    def _repeat(self, owner, original, args, kwargs):
        if self._left and self._left[0][0].owner is owner:
            _, outputs = self._left.pop(0)
            if outputs is not None:
                self._passed += floats([args, kwargs])
                return outputs
        return original(*args, **kwargs)


def paths_of(model: keras.Model) -> dict[int, tuple[keras.Operation, str]]:
    """Returns {id: (owner, path)} of a model's layers and of the operations in it."""
    found: dict[int, tuple[keras.Operation, str]] = {}
    for layer, path, _ in structure.walk(model):
        if isinstance(layer, keras.layers.InputLayer):
            continue
        found[id(layer)] = (layer, path)
    for layer, path, holders in structure.walk(model):
        for each in getattr(layer, "operations", ()):
            inside = f"{path}/{each.name}" if holders else each.name
            if not isinstance(each, keras.layers.InputLayer):
                found.setdefault(id(each), (each, inside))
    return found


def seeds_of(owner: keras.Operation) -> list[keras.Variable]:
    """Returns the states of the random seeds that a layer has itself."""
    if not isinstance(owner, keras.layers.Layer):
        return []
    held = {id(v) for v in owner.weights}
    held |= {id(v) for each in structure.children(owner) for v in each.variables}
    others = [v for v in owner.variables if id(v) not in held]
    return [v for v in others if "seed" in v.path]


def floats(nested: Any) -> list[tf.Tensor]:
    """Returns the floating tensors in a structure, flat."""
    return [x for x in keras.tree.flatten(nested) if _is_float(x)]


def _is_float(x):
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


def _own(x):
    if not _is_float(x):
        return x
    return with_mask_of(tf.identity(x), x)


def with_mask_of(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns the first tensor, with the mask of the other one, if it has one."""
    if (mask := getattr(other, "_keras_mask", None)) is not None:
        x._keras_mask = mask
    return x
