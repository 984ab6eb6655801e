"""What goes into a model's layers unrounded, and what comes out of it in float32.

Keras rounds a layer's inputs to the layer's format wherever they come in, a model's
own border included, and hands outputs of 16 bits to losses, metrics and `predict`.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.facts import formats
from tfamp.keras_patches import hooks
from tfamp.precision import float32_layers

# An attribute of a rounded tensor, as Keras keeps masks: the tensor before.
_EXACT = "_tfamp_exact"
CHOSEN: weakref.WeakSet = weakref.WeakSet()  # Layers made with a dtype of their own.
_warned: weakref.WeakSet = weakref.WeakSet()


# ---- In ----


def _init(original):
    from keras.src.saving import serialization_lib

    def init(layer, *args, **kwargs):
        low = keras.config.dtype_policy().compute_dtype in formats.LOW
        if low and kwargs.get("dtype") is None:
            if float32_layers.made_in_float32(layer):
                kwargs["dtype"] = "float32"
        original(layer, *args, **kwargs)
        # None: no file is being loaded, which gives each layer its dtype.
        if low and kwargs.get("dtype") and serialization_lib.in_safe_mode() is None:
            CHOSEN.add(layer)

    return init


def _convert_input(original):
    def convert_input(policy, x, autocast, dtype):
        if isinstance(x, np.ndarray | np.generic):
            x = tf.constant(x)  # Which no one changes later.
        given = _unrounded(x) if dtype == "float32" else x
        return _marked(original(policy, given, autocast, dtype), given)

    return convert_input


def _marked(rounded, exact):
    if isinstance(rounded, tf.Tensor) and isinstance(exact, tf.Tensor):
        if rounded is not exact and rounded.dtype.name in formats.LOW:
            setattr(rounded, _EXACT, exact)
    return rounded


def _unrounded(x):
    """Returns the tensor that was rounded to `x`; its gradient is that of `x`."""
    exact = getattr(x, _EXACT, None)
    if exact is None:
        return x

    @tf.custom_gradient
    def unrounded(rounded):
        return tf.identity(exact), lambda upstream: tf.cast(upstream, rounded.dtype)

    found = unrounded(x)
    if (mask := getattr(x, "_keras_mask", None)) is not None:
        found._keras_mask = mask
    return found


def _data_layer_call(original):
    def call(layer, inputs, *args, **kwargs):
        exact = keras.tree.map_structure(_unrounded, inputs)
        low = any(map(_is_rounded, keras.tree.flatten(exact)))
        if low and layer.compute_dtype not in formats.LOW and layer not in _warned:
            _warned.add(layer)
            warnings.warn(
                f"Layer '{layer.name}' gets values that were rounded to 16 bits before "
                "it, as years and prices must not be. Put it before other layers, or "
                "name those in overrides={...: 'float32'}.",
                stacklevel=4,
            )
        return original(layer, exact, *args, **kwargs)

    return call


def _is_rounded(x):
    return isinstance(x, tf.Tensor) and x.dtype.name in formats.LOW


def _convert_inputs_to_tensors(original):
    def convert_inputs_to_tensors(model, inputs):
        exact = list(map(_unrounded, inputs))
        return list(map(_marked, original(model, exact), exact))

    return convert_inputs_to_tensors


def _embedding_call(original):
    def call(layer, inputs):
        ids = _unrounded(inputs)
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if dtype in formats.LOW:
            # All integers up to two to the power of the bits of the significand.
            exact = 2 / formats.float_format(dtype).epsilon
            if layer.input_dim - 1 > exact:
                raise ValueError(
                    f"Ids of {dtype} are rounded above {exact:.0f}. Received: {dtype} "
                    f"ids for layer {layer.path!r} of {layer.input_dim} rows. Pass "
                    "integers, or keep the model or layer that they come through in "
                    "float32."
                )
        return original(layer, ids)

    return call


INPUTS = hooks.HookGroup(
    __init__=_init,
    convert_input=_convert_input,
    __call__=_data_layer_call,
    _convert_inputs_to_tensors=_convert_inputs_to_tensors,
    call=_embedding_call,
)

# ---- Out ----


def widened(outputs: Any) -> Any:
    """Returns a model's outputs with those of 16 bits in float32; others as they are.

    Args:
      outputs: Tensors in any structure, or None.
    """
    return keras.tree.map_structure(_wide, outputs)


def _wide(value):
    dtype = getattr(value, "dtype", None)
    if dtype is None or keras.backend.standardize_dtype(dtype) not in formats.LOW:
        return value
    wide = keras.ops.cast(value, "float32")
    if (mask := getattr(value, "_keras_mask", None)) is not None:
        wide._keras_mask = mask  # By which losses and metrics leave out what it hides.
    return wide


@contextlib.contextmanager
def widening(model: keras.Model) -> Iterator[None]:
    """Meanwhile, what a model returns is widened, if `OUTPUTS` is installed."""
    before, call = vars(model).get("call"), model.call

    @functools.wraps(call)
    def wide(*args, **kwargs):
        return widened(call(*args, **kwargs))

    if OUTPUTS.in_force():
        vars(model)["call"] = wide
    try:
        yield
    finally:
        vars(model).pop("call", None)
        if before is not None:
            vars(model)["call"] = before


class _Widened:
    """A model's function that runs inside `widening`; otherwise that function."""

    def __init__(self, model, function):
        self._model, self._function = model, function

    def __call__(self, *args, **kwargs):
        with widening(self._model):
            return self._function(*args, **kwargs)

    def get_concrete_function(self, *args, **kwargs):
        with widening(self._model):
            return self._function.get_concrete_function(*args, **kwargs)


def _make_function(original):
    def make_function(model, step_function):
        return _Widened(model, original(model, step_function))

    return make_function


def _make_predict_function(original):
    def make_predict_function(model, *args, **kwargs):
        before = model.predict_function
        original(model, *args, **kwargs)
        if model.predict_function is not before:
            model.predict_function = _Widened(model, model.predict_function)
        return model.predict_function

    return make_predict_function


def _of_outputs(original):
    """For `f(model, x=None, y=None, y_pred=None, ...)`."""

    def function(model, x=None, y=None, y_pred=None, *args, **kwargs):
        return original(model, x, y, widened(y_pred), *args, **kwargs)

    return function


OUTPUTS = hooks.HookGroup(
    _make_function=_make_function,
    make_predict_function=_make_predict_function,
    compute_loss=_of_outputs,
    compute_metrics=_of_outputs,
)
