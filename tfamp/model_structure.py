"""Reads how a Keras model is made up: its layers, inputs, graph and states."""

from collections.abc import Callable
from typing import Any

import keras

# Keras 3.15 exports no name for the class of `keras.Model(inputs, outputs)`;
# guarded by tests/test_export.py, like `_run_through_graph` and `_flatten_layers`.
from keras.src.models.functional import Functional


def flatten_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layer and all layers in it, each once, parents first."""
    return layer._flatten_layers()


def is_plain_functional(operation: Any) -> bool:
    """Whether the operation is a model that computes just what its graph shows."""
    # A class with a `call` of its own computes something more.
    return isinstance(operation, Functional) and _calls_as(operation, Functional)


def is_plain_sequential(operation: Any) -> bool:
    """Whether the operation is a model that just calls its layers in turn."""
    is_sequential = isinstance(operation, keras.Sequential)
    return is_sequential and _calls_as(operation, keras.Sequential)


def _calls_as(operation, cls):
    return type(operation).call is cls.call


def run_graph(model: Any, inputs: Any, replace: Callable, call: Callable) -> Any:
    """Runs a functional model's graph on other inputs with other operations.

    Args:
      model: A functional model.
      inputs: Symbolic tensors, structured as the model's.
      replace: Takes an operation of the graph; returns the one to call instead.
      call: Takes that one and the arguments of the call; returns the outputs.

    Returns:
      Symbolic tensors, structured as the model's outputs.
    """
    return model._run_through_graph(inputs, operation_fn=replace, call_fn=call)


def recurrent_states(layer: keras.layers.Layer) -> list[Any]:
    """Returns a stateful recurrent layer's states, which Keras counts nowhere."""
    states = getattr(layer, "states", None) if _is_stateful(layer) else None
    return [] if states is None else keras.tree.flatten(states)


def _is_stateful(layer):
    return bool(getattr(layer, "stateful", False))


def declared_inputs(model: keras.Model) -> Any:
    """Returns the symbolic inputs of a functional or sequential model, else None.

    A sequential model without an input layer declares the batch size of its first
    call; that is forgotten here, unless a recurrent layer keeps a state for it.
    """
    if isinstance(model, Functional):
        return model.input
    # A sequential model has no `inputs` before it is built.
    if not isinstance(model, keras.Sequential) or not hasattr(model, "inputs"):
        return None
    tensor = model.inputs[0]
    stateful = any(map(_is_stateful, flatten_layers(model)))
    batch = tensor.shape[0] if stateful else None
    shape = (batch, *tensor.shape[1:])
    return keras.KerasTensor(shape, tensor.dtype, tensor.sparse, name=tensor.name)
