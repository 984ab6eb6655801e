"""Traces a model once, without running it: which layer adds which operation.

The graph is that of one forward pass with `training=True`. Each operation belongs to
the innermost layer whose `call` added it; what Keras does before a `call`, such as
casting the inputs, belongs to the layer around it. Nothing is executed and no variable
is touched.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

_tracing = threading.RLock()


class Call(NamedTuple):
    """A call of a layer.

    Attributes:
      layer: The layer.
      graph: The graph that was being traced: of the model, or of a loop's body.
      first: Index of the first operation that the call added.
      last: Index after the last one.
      repeats: How often it runs: time steps of the recurrent layers around it; for a
        recurrent layer itself, its time steps.
      output_shape: Shape of its first output.
    """

    layer: keras.layers.Layer
    graph: tf.Graph
    first: int
    last: int
    repeats: int
    output_shape: list[int | None]


class Trace(NamedTuple):
    """What was traced.

    Attributes:
      calls: Calls of layers; inner ones before those around them.
      owners: Operation -> (innermost layer, how often it runs).
      takers: Cast of an input -> the layer that takes it.
      outputs: Tensors of the graph that the model returns.
    """

    calls: list[Call]
    owners: dict[tf.Operation, tuple[keras.layers.Layer, int]]
    takers: dict[tf.Operation, keras.layers.Layer]
    outputs: list[tf.Tensor]


def trace(
    model: keras.Model, layers: Sequence[keras.layers.Layer], specs: Any
) -> Trace:
    """Traces a forward pass.

    Args:
      model: A built model.
      layers: The model and all layers in it.
      specs: `tf.TensorSpec`s, structured as the model's inputs.

    Returns:
      A `Trace`.

    Raises:
      ValueError: If the model cannot be traced with such inputs.
    """
    with _recording(layers) as recorder:
        function = tf.function(lambda x: model(x, training=True), autograph=False)
        try:
            concrete = function.get_concrete_function(specs)
        except Exception as error:
            raise ValueError(
                f"Model {model.name!r} cannot be traced with inputs "
                f"{keras.tree.map_structure(str, specs)}: {error} Pass `inputs`, a "
                "batch as the model takes it."
            ) from error
    owners = _find_owners(recorder.calls)
    for op in concrete.graph.get_operations():
        owners.setdefault(op, (model, 1))
    return Trace(recorder.calls, owners, recorder.takers, list(concrete.outputs))


def _find_owners(calls):
    owners: dict[tf.Operation, tuple[keras.layers.Layer, int]] = {}
    operations: dict[int, list[tf.Operation]] = {}
    for call in calls:  # Inner calls end before those around them.
        key = id(call.graph)
        if key not in operations:
            operations[key] = call.graph.get_operations()
        repeats = 1 if isinstance(call.layer, keras.layers.RNN) else call.repeats
        for op in operations[key][call.first : call.last]:
            owners.setdefault(op, (call.layer, repeats))
    return owners


@contextlib.contextmanager
def _recording(layers) -> Iterator["_Recorder"]:
    """While a model is traced, its layers' `call` is watched, on the objects alone."""
    recorder, replaced = _Recorder(), []
    with _tracing:  # Another thread would restore this one's methods.
        try:
            for layer in layers:
                replaced.append((layer, vars(layer).get("call")))
                # Past Keras, which would look for layers and variables in it.
                object.__setattr__(layer, "call", recorder.wrap(layer))
            yield recorder
        finally:
            for layer, before in replaced:
                vars(layer).pop("call", None)
                if before is not None:
                    object.__setattr__(layer, "call", before)


class _Recorder:
    """Notes which operations the calls of layers add."""

    def __init__(self):
        self.calls: list[Call] = []
        self.takers: dict[tf.Operation, keras.layers.Layer] = {}
        self._loops: list[tuple[tf.Graph, int]] = []  # Recurrent layers around.

    def wrap(self, layer):
        original = layer.call

        @functools.wraps(original)
        def call(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            first = len(graph.get_operations())
            self._note_casts(layer, (args, kwargs))
            outer = self._repeats(graph)
            steps = _time_steps(layer, args, kwargs)
            self._loops.append((graph, steps))
            try:
                outputs = original(*args, **kwargs)
            finally:
                self._loops.pop()
            last, shape = len(graph.get_operations()), _first_shape(outputs)
            self.calls.append(Call(layer, graph, first, last, outer * steps, shape))
            return outputs

        return call

    def _repeats(self, graph):
        """How often what is traced now runs, for the recurrent layers around it.

        Their body is traced in a graph of its own. What they call before it only tells
        the shape of the result (Keras 3.15) and never runs.
        """
        if self._loops and self._loops[-1][1] > 1 and self._loops[-1][0] is graph:
            return 0
        return math.prod(steps for where, steps in self._loops if where is not graph)

    def _note_casts(self, layer, arguments):
        for value in keras.tree.flatten(arguments):
            if tf.is_symbolic_tensor(value) and value.op.type == "Cast":
                self.takers.setdefault(value.op, layer)


def _time_steps(layer, args, kwargs):
    if not isinstance(layer, keras.layers.RNN) or layer.unroll:
        return 1
    sequence = keras.tree.flatten((args, kwargs))[0]
    return sequence.shape[1] or 1


def _first_shape(outputs):
    shapes = [getattr(value, "shape", None) for value in keras.tree.flatten(outputs)]
    known = [shape for shape in shapes if shape is not None]
    return list(known[0]) if known else []
