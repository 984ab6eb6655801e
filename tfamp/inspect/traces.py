"""A trace of a model in which the calls of its layers are watched."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.inspect import structure


def trace(
    model: keras.Model, specs: Any, note: Callable, training: bool = False
) -> tf.Graph:
    """Traces a model, and watches its layers' calls; executes and changes nothing.

    Args:
      model: A built model.
      specs: `tf.TensorSpec`s, structured as the model's inputs.
      note: Function of (layer, its inputs, its outputs), lists of tensors; it is called
        after each call of a layer or model, of inner ones first.
      training: What the model is called with.

    Returns:
      The graph.
    """
    layers = [place.layer for place in structure.walk(model)]
    with unchanged(layers):
        for layer in layers:
            # Past Keras, which would look for layers and variables in it.
            object.__setattr__(layer, "call", _noted(layer, note))
        forward = tf.function(lambda x: model(x, training=training), autograph=False)
        return forward.get_concrete_function(specs).graph


def _noted(layer, note):
    # The tensors of a `tf.function` are of a graph of its own.
    original = getattr(layer.call, "python_function", layer.call)

    def call(*args, **kwargs):
        returned = original(*args, **kwargs)
        note(layer, _tensors((args, kwargs)), _tensors(returned))
        return returned

    return call


def _tensors(nested):
    return [x for x in keras.tree.flatten(nested) if tf.is_symbolic_tensor(x)]


@contextlib.contextmanager
def unchanged(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Scopes a trace: afterwards no layer holds a tensor, a loss or a `call` of it."""
    kept = [(layer, layer.built, dict(vars(layer))) for layer in layers]
    # Keras 3.15 has no public setter of what `add_loss` and activity regularizers add;
    # guarded by tests/contract/test_audit.py.
    for layer, *_ in kept:
        held = {name: vars(layer).get(name) for name in ("_losses", "_loss_ids")}
        held = {name: x for name, x in held.items() if x is not None}
        vars(layer).update({name: copy.copy(x) for name, x in held.items()})
    try:
        yield
    finally:
        for layer, was_built, attributes in kept:
            if layer.built and not was_built:  # What the trace built stays.
                made = vars(layer).keys() - {"call", "_losses", "_loss_ids"}
                attributes |= {name: vars(layer)[name] for name in made}
            vars(layer).clear()
            vars(layer).update(attributes)
