"""What goes into a model's layers unrounded, and what comes out of it in float32.

Keras rounds a layer's inputs to the layer's format wherever they come in, a model's
own border included, and hands outputs of 16 bits to losses, metrics and `predict`.
"""

import keras
import tensorflow as tf

from tfamp import formats, patches
from tfamp.precision import assign, float32_layers

# An attribute of a rounded tensor, as Keras keeps masks: the tensor before.
_EXACT = "_tfamp_exact"


# ---- In ----


def _init(original):
    def init(layer, *args, **kwargs):
        if kwargs.get("dtype") is None and float32_layers.made_in_float32(layer):
            kwargs["dtype"] = "float32"
        original(layer, *args, **kwargs)

    return init


def _convert_input(original):
    def convert_input(policy, x, autocast, dtype):
        wide = dtype == "float32"
        given = getattr(x, _EXACT, x) if wide else x
        return _marked(original(policy, given, autocast, dtype), given)

    return convert_input


def _marked(rounded, exact):
    if isinstance(rounded, tf.Tensor) and rounded.dtype.name in assign.LOW:
        if rounded is not exact:
            setattr(rounded, _EXACT, exact)
    return rounded


def _data_layer_call(original):
    def call(layer, inputs, *args, **kwargs):
        exact = keras.tree.map_structure(lambda x: getattr(x, _EXACT, x), inputs)
        return original(layer, exact, *args, **kwargs)

    return call


def _convert_inputs_to_tensors(original):
    def convert_inputs_to_tensors(model, inputs):
        exact = [getattr(x, _EXACT, x) for x in inputs]
        return list(map(_marked, original(model, exact), exact))

    return convert_inputs_to_tensors


def _embedding_call(original):
    def call(layer, inputs):
        ids = getattr(inputs, _EXACT, inputs)
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if dtype in assign.LOW:
            # All integers up to two to the power of the bits of the significand.
            exact = 2 / formats.float_format(dtype).epsilon
            if layer.input_dim - 1 > exact:
                raise ValueError(
                    f"Ids of {dtype} are rounded above {exact:.0f}. Received: {dtype} "
                    f"ids for layer {layer.path!r} of {layer.input_dim} rows. Pass "
                    "integers, or give the layer that makes them dtype='float32'."
                )
        return original(layer, ids)

    return call


INPUTS = patches.HookGroup(
    __init__=_init,
    convert_input=_convert_input,
    __call__=_data_layer_call,
    _convert_inputs_to_tensors=_convert_inputs_to_tensors,
    call=_embedding_call,
)

# ---- Out ----


def widened(outputs):
    """Returns a model's outputs with those of 16 bits in float32; others as they are.

    Args:
      outputs: Tensors in any structure, or None.
    """
    return keras.tree.map_structure(_wide, outputs)


def _wide(value):
    dtype = getattr(value, "dtype", None)
    low = dtype is not None and keras.backend.standardize_dtype(dtype) in assign.LOW
    return keras.ops.cast(value, "float32") if low else value


def _of_outputs(original):
    """For `f(model, x=None, y=None, y_pred=None, ...)`."""

    def function(model, x=None, y=None, y_pred=None, *args, **kwargs):
        return original(model, x, y, widened(y_pred), *args, **kwargs)

    return function


def _predict_step(original):
    def predict_step(model, data):
        return widened(original(model, data))

    return predict_step


OUTPUTS = patches.HookGroup(
    _compute_loss=_of_outputs,
    compute_loss=_of_outputs,
    compute_metrics=_of_outputs,
    predict_step=_predict_step,
)
