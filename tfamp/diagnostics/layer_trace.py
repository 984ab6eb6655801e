"""Traces a model once, without running it: which layer adds which operation.

The graph is that of one forward pass with `training=True`. Each operation belongs to
the innermost layer whose `call` added it; what Keras does before a `call`, such as
casting the inputs, belongs to the layer around it. What functions and loops run belongs
to the layer that calls them, if to no layer in them. Nothing is executed and no
variable is touched. Python code in a `call` of the user's own runs, as in any trace.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.diagnostics import function_bodies

_tracing = threading.RLock()

# What Keras 3.15 notes in a layer during a call, beside tensors and losses; guarded by
# tests/diagnostics/test_layer_trace.py.
_NOTED = ("_called", "_dropout_mask", "_recurrent_dropout_mask", "supports_jit")


class Call(NamedTuple):
    """A call of a layer.

    Attributes:
      layer: The layer.
      graph: The graph that was being traced: of the model, or of a loop's body.
      first: Index of the first operation that the call added.
      last: Index after the last one.
      repeats: How often it runs: time steps of the recurrent layers around it.
      steps: Time steps of a recurrent layer's own loop; 1 for others.
    """

    layer: keras.layers.Layer
    graph: tf.Graph
    first: int
    last: int
    repeats: int
    steps: int


class Trace(NamedTuple):
    """What was traced.

    Attributes:
      calls: Calls of layers; inner ones before those around them.
      owners: Operation -> (innermost layer, how often it runs).
      takers: Cast of an input -> the layer that takes it.
      outputs: Tensors of the graph that the model returns.
      open_loops: Loops whose number of rounds is not known: taken as 1.
    """

    calls: list[Call]
    owners: dict[tf.Operation, tuple[keras.layers.Layer, int]]
    takers: dict[tf.Operation, keras.layers.Layer]
    outputs: list[tf.Tensor]
    open_loops: list[tf.Operation]


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
                "batch as the model takes it, or such batches in `dataset`."
            ) from error
    calls = _innermost(recorder.calls)
    owners = {
        op: (calls[op].layer, calls[op].repeats) if op in calls else (model, 1)
        for op in concrete.graph.get_operations()
    }
    open_loops = _add_bodies(owners, calls)
    outputs = list(concrete.outputs)
    return Trace(recorder.calls, owners, recorder.takers, outputs, open_loops)


def _innermost(calls):
    """Operation -> the innermost call that added it."""
    found: dict[tf.Operation, Call] = {}
    operations: dict[int, list[tf.Operation]] = {}
    for call in calls:  # Inner calls end before those around them.
        key = id(call.graph)
        if key not in operations:
            operations[key] = call.graph.get_operations()
        for op in operations[key][call.first : call.last]:
            found.setdefault(op, call)
    return found


def _add_bodies(owners, calls):
    """Adds the operations in functions and loops; returns the loops of open length."""
    open_loops = []

    def visit(op, layer, times):
        if op.type in function_bodies.REPEATING:
            call = calls.get(op)
            if call is not None and _loops(call.layer):
                times *= call.steps
            else:
                open_loops.append(op)
        for graph in function_bodies.bodies(op):
            for inner in graph.get_operations():
                call = calls.get(inner)
                runs = 0 if call is not None and not call.repeats else times
                owner = layer if call is None else call.layer
                owner, before = owners.get(inner, (owner, 0))
                owners[inner] = (owner, before + runs)
                visit(inner, owner, runs)

    for op, (layer, times) in list(owners.items()):
        visit(op, layer, times)
    return open_loops


@contextlib.contextmanager
def _recording(layers) -> Iterator["_Recorder"]:
    """While a model is traced, its layers' `call` is watched, on the objects alone."""
    recorder = _Recorder()
    with unchanged(layers):
        for layer in layers:
            # Past Keras, which would look for layers and variables in it.
            object.__setattr__(layer, "call", recorder.wrap(layer))
        yield recorder


@contextlib.contextmanager
def unchanged(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Scopes a trace: afterwards no layer holds a tensor or a loss of it.

    Args:
      layers: A model and all layers in it.
    """
    with _tracing:  # Another thread would restore this one's methods.
        before = [_Before(layer) for layer in layers]
        try:
            yield
        finally:
            for each in before:
                each.restore()


class _Before:
    """What a layer held before the trace."""

    def __init__(self, layer):
        self._layer = layer
        self._attributes = dict(vars(layer))
        # Keras 3.15 has no public setter of what `add_loss` and activity regularizers
        # add; guarded by tests/diagnostics/test_layer_trace.py.
        self._losses, self._loss_ids = list(layer._losses), set(layer._loss_ids)

    def restore(self):
        """Takes out what the trace left: the watched `call`, losses, tensors."""
        held, before = vars(self._layer), self._attributes
        for name, value in list(held.items()):
            if name not in before and self._was_left(name, value):
                del held[name]
            elif value is not before.get(name) and self._was_left(name, value):
                held[name] = before[name]
        for kept, now in (
            (self._losses, self._layer._losses),
            (self._loss_ids, self._layer._loss_ids),
        ):
            now.clear()
            now.extend(kept) if isinstance(now, list) else now.update(kept)

    def _was_left(self, name, value):
        if name == "call" or name in _NOTED:
            return True
        return any(map(tf.is_symbolic_tensor, keras.tree.flatten(value)))


class _Recorder:
    """Notes which operations the calls of layers add."""

    def __init__(self):
        self.calls: list[Call] = []
        self.takers: dict[tf.Operation, keras.layers.Layer] = {}
        # Of the recurrent layers around: where they were called, how often they step.
        self._loops: list[tuple[tf.Graph, int]] = []
        self._thread = threading.get_ident()

    def wrap(self, layer):
        original = layer.call

        @functools.wraps(original)
        def call(*args, **kwargs):
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)  # Somebody else uses the model.
            return self._watch(layer, original, args, kwargs)

        return call

    def _watch(self, layer, original, args, kwargs):
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        self._note_casts(layer, (args, kwargs))
        repeats, loops = self._repeats(graph), _loops(layer)
        steps = _time_steps(args, kwargs) if loops else 1
        if loops:
            self._loops.append((graph, repeats * steps))
        try:
            return original(*args, **kwargs)
        finally:
            if loops:
                self._loops.pop()
            last = len(graph.get_operations())
            self.calls.append(Call(layer, graph, first, last, repeats, steps))

    def _repeats(self, graph):
        """How often what is traced now runs, for the recurrent layers around it.

        Their body is traced in a graph of its own. What they call before it only tells
        the shape of the result (Keras 3.15) and never runs.
        """
        if not self._loops:
            return 1
        where, times = self._loops[-1]
        return 0 if where is graph else times

    def _note_casts(self, layer, arguments):
        for value in keras.tree.flatten(arguments):
            if tf.is_symbolic_tensor(value) and value.op.type == "Cast":
                self.takers.setdefault(value.op, layer)


def _loops(layer):
    return isinstance(layer, keras.layers.RNN) and not layer.unroll


def _time_steps(args, kwargs):
    sequence = keras.tree.flatten((args, kwargs))[0]
    return sequence.shape[1] or 1
