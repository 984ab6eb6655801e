"""Which layers compute a model's outputs, found in a trace of it."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfamp.precision import assign, model_inputs

OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"


def follows(layer: keras.layers.Layer, holder: keras.layers.Layer) -> bool:
    """Whether Keras runs a layer by the precision of the one that holds it.

    Read in Keras 3.15: `TimeDistributed` calls `layer.call` in its own autocast
    scope; recurrent layers cast what goes into and out of their cell; attention
    layers leave out their softmax and dropout where a fused kernel does both.
    """
    kinds = keras.layers
    if isinstance(holder, kinds.TimeDistributed | kinds.RNN | kinds.StackedRNNCells):
        return True
    return _is_attention(holder) and isinstance(layer, kinds.Softmax | kinds.Dropout)


def _is_attention(layer):
    kinds = keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
    return isinstance(layer, kinds)


def output_layers(model: keras.Model) -> dict[int, str]:
    """Returns {id of a layer: why it stays in float32} from a trace of the model.

    Parameter-free layers (activation, reshape, dropout) pass on what the layers
    before them compute; both belong to the output.

    Args:
      model: A built model; it is traced in inference, and not changed.

    Raises:
      ExportError: If the inputs are not known, or the model does not take them.
    """
    returned: dict[tuple, list] = {}
    specs = model_inputs.specs(model)
    with model_inputs.explained(model, "cannot be traced"), _recorded(model, returned):
        function = tf.function(lambda x: model(x, training=False), autograph=False)
        graph = function.get_concrete_function(specs).graph
    found: dict[int, str] = {}
    queue = [tensor for tensor in graph.outputs if tensor.dtype.is_floating]
    visited = set()
    while queue:
        tensor = queue.pop()
        layers = returned.get(_key(tensor), [])
        stops = [layer for layer in layers if _computes(layer)]
        if _key(tensor) not in visited and not stops:
            queue += tensor.op.inputs
        visited.add(_key(tensor))
        plain = [x for x in layers if x not in stops and not assign.children(x)]
        found |= {id(layer): PASSES_OUTPUT for layer in plain}
        found |= {id(layer): OUTPUT for layer in stops}
    return found


def _computes(layer):
    """Whether a layer has weights of its own, or runs its inner layers as its own."""
    if isinstance(layer, keras.Model):
        return False
    inner = assign.children(layer)
    if any(follows(each, layer) for each in inner):
        return not _is_attention(layer)
    return bool(layer._trainable_variables or layer._non_trainable_variables)


def _key(tensor):
    return id(tensor.graph), tensor.name


@contextlib.contextmanager
def _recorded(model, returned) -> Iterator[None]:
    """While a model is traced, notes which layers returned each tensor."""
    layers = [place.layer for place in assign.walk(model)]
    before = [(layer, vars(layer).get("call")) for layer in layers]

    def recording(layer, original):
        def call(*args, **kwargs):
            outputs = original(*args, **kwargs)
            for tensor in keras.tree.flatten(outputs):
                if tf.is_symbolic_tensor(tensor):
                    returned.setdefault(_key(tensor), []).append(layer)
            return outputs

        return call

    try:
        for layer in layers:
            # The tensors of a `tf.function` are of a graph of its own.
            traced = assign.is_traced(layer.call)
            call = layer.call.python_function if traced else layer.call
            vars(layer)["call"] = recording(layer, call)
        yield
    finally:
        for layer, call in before:
            vars(layer).pop("call")
            if call is not None:
                vars(layer)["call"] = call
