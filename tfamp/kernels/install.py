"""Has Keras' layers and optimizers run the fused kernels, where they are faster.

Only in graphs that run on one CPU, and not under XLA, which fuses by itself; in layers
that train, and in `evaluate` and `predict`, so that an exported model has TensorFlow's
own operations (unless it calls layers with `training=True`). Everything else calls
Keras' own function.
"""

import math
import threading

import keras
import numpy as np
import tensorflow as tf

from tfamp import graph_context, patches
from tfamp.kernels import fused

_LOW = (tf.bfloat16, tf.float16)
_inference = threading.local()


def usable() -> bool:
    """Whether this host and strategy are ones that the kernels are for."""
    return graph_context.on_one_cpu([])


def _gelu(original):
    def gelu(x, approximate=True):
        if not _applies(x):
            return original(x, approximate)
        return fused.activation("gelu_tanh" if approximate else "gelu", x)

    return gelu


def _silu(original):
    def silu(x):
        return fused.activation("silu", x) if _applies(x) else original(x)

    return silu


def _dropout(original):
    def dropout(inputs, rate, noise_shape=None, seed=None):
        inside = 2**-16 <= rate <= 1 - 2**-16
        if noise_shape is not None or not inside or not _applies(inputs):
            return original(inputs, rate, noise_shape, seed)
        from keras.src.random import seed_generator

        # One draw, as in the original: later layers get the same seeds.
        drawn = tf.cast(seed_generator.draw_seed(seed), tf.int32)
        return fused.dropout(inputs, rate, drawn)

    return dropout


def _layer_normalization(original):
    def layer_normalization(x, gamma=None, beta=None, axis=-1, epsilon=None, **kwargs):
        if (
            kwargs.get("rms_scaling", False)
            or not _applies(x)
            or tf.nest.flatten(axis) not in ([-1], [len(x.shape) - 1])
            or not all(_is_of_features(weight, x) for weight in (gamma, beta))
            or not isinstance(epsilon, float | int | None)
        ):
            return original(x, gamma, beta, axis, epsilon, **kwargs)
        gamma, beta = tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)
        epsilon = keras.config.epsilon() if epsilon is None else epsilon
        return fused.layer_normalization(x, gamma, beta, epsilon)

    return layer_normalization


def _is_of_features(weight, x):
    known = isinstance(weight, keras.Variable | tf.Tensor)
    return known and weight.dtype == "float32" and tuple(weight.shape) == x.shape[-1:]


def _update_step(original):
    def update_step(optimizer, gradient, variable, learning_rate):
        index = optimizer._get_variable_index(variable)
        each = variable, optimizer._momentums[index], optimizer._velocities[index]
        variables = [v.value if isinstance(v, keras.Variable) else v for v in each]
        if not _updates(optimizer, variables):
            return original(optimizer, gradient, variable, learning_rate)
        step = optimizer.iterations + 1
        return fused.apply_adam(variables, gradient, step, learning_rate, optimizer)

    return update_step


def _clip_by_global_norm(original):
    def clip_by_global_norm(value_list, clip_norm):
        if not _in_graph([v for v in value_list if v is not None]):
            return original(value_list, clip_norm)
        return fused.clip_by_global_norm(value_list, clip_norm)

    return clip_by_global_norm


def _marked(name):
    """Has `evaluate` or `predict` trace its function as inference that is not saved."""

    def make(original):
        def make_function(model, *args, **kwargs):
            original(model, *args, **kwargs)
            function = getattr(model, name)
            if not isinstance(function, _InInference):
                setattr(model, name, _InInference(function))
            return getattr(model, name)

        return make_function

    return make


class _InInference:
    """A function that is marked while it is called; otherwise that function."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args, **kwargs):
        outer, _inference.on = getattr(_inference, "on", False), True
        try:
            return self._function(*args, **kwargs)
        finally:
            _inference.on = outer

    def __getattr__(self, name):
        return getattr(self._function, name)


def _applies(x) -> bool:
    """Whether a layer's tensor goes through a fused kernel."""
    return (
        getattr(x, "dtype", None) in _LOW
        and isinstance(x, tf.Tensor)
        and (_trains() or getattr(_inference, "on", False))
        # XLA compiles each size anew: lengths that vary would compile for ever.
        and x.shape.rank is not None
        and all(size is not None for size in x.shape[1:])
        and _in_graph([x])
    )


def _trains() -> bool:
    """Whether the layers that are called now train."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return bool(getattr(context, "training", False))


def _updates(optimizer, variables) -> bool:
    """Whether a variable and its two slots are updated by the fused kernel.

    Not where assignments are masked, or a subclass has its own: the kernel writes past
    them. Nor where `1 - beta` keeps no four digits, as TensorFlow takes it: in float32.
    """
    betas = optimizer.beta_1, optimizer.beta_2
    return (
        type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)
        and not optimizer.amsgrad
        and all(isinstance(beta, float) and 0 < beta < 1 for beta in betas)
        and all(math.isclose(1 - np.float32(b), 1 - b, rel_tol=1e-4) for b in betas)
        and not any("assign" in vars(v) for v in variables)
        and all(v.dtype == tf.float32 for v in variables)
        and len({v.device for v in variables}) == 1
        and _in_graph(variables)
    )


def _in_graph(values) -> bool:
    return (
        not tf.executing_eagerly()
        and graph_context.on_one_cpu(values)
        and not graph_context.in_xla()
        and not graph_context.watched()
    )


HOOKS = patches.HookGroup(
    dropout=_dropout,
    gelu=_gelu,
    silu=_silu,
    layer_normalization=_layer_normalization,
    update_step=_update_step,
    clip_by_global_norm=_clip_by_global_norm,
    make_test_function=_marked("test_function"),
    make_predict_function=_marked("predict_function"),
)
