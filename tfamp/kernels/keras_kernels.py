"""Has Keras' layers and optimizers run the fused kernels, where they are faster.

Patches by `patches.Hook`. Each name is given with the Keras
version it was read in and is guarded by tests/test_keras_contract.py.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src import backend as _backend  # Keras 3.15
from keras.src import ops as _ops
from keras.src.backend.common import global_state as _global_state
from keras.src.optimizers import base_optimizer as _base_optimizer
from keras.src.random import seed_generator as _seed_generator

from tfamp import graph_context as tracing
from tfamp import patches
from tfamp.kernels import fused_adam, fused_ops
from tfamp.loss_scaling import keras_optimizers

NAMES = (
    "dropout",
    "GELU",
    "SiLU",
    "layer normalization",
    "Adam's update where the loss is not scaled",
)
_LOW = (tf.bfloat16, tf.float16)
_inference = threading.local()
_hooks: list[patches.Hook] = []


def install() -> None:
    """Puts the fused kernels into what Keras traces from now on; idempotent.

    Only in graphs that run on one CPU, and not under XLA, which fuses by itself; in
    layers that train, and in `evaluate` and `predict`, so that an exported model has
    TensorFlow's own operations (unless it calls layers with `training=True`).
    Everything else calls Keras' own function.
    """
    if _hooks:
        return
    for owner, name, make in _places():
        _hooks.append(patches.Hook(owner, name, make))


def remove() -> None:
    """Puts Keras' own functions back; idempotent. Traced functions keep the kernels."""
    while _hooks:
        _hooks.pop().remove()


def installed() -> bool:
    """Whether the kernels are in what is traced now."""
    return bool(_hooks)


def usable() -> bool:
    """Whether this host and strategy are ones that the kernels are for."""
    return tracing.on_one_cpu([])


def _places() -> list[tuple[object, str, Callable]]:
    """(owner, name, function of the original that returns the replacement)."""
    trainer = patches.trainer_class
    return [
        (_backend.nn, "gelu", _gelu),
        (_backend.nn, "silu", _silu),
        (_backend.random, "dropout", _dropout),
        (_ops, "layer_normalization", _layer_normalization),
        (keras.optimizers.Adam, "update_step", _update_step),
        (_base_optimizer, "clip_by_global_norm", _clip_by_global_norm),
        (trainer("make_test_function"), "make_test_function", _marked("test")),
        (trainer("make_predict_function"), "make_predict_function", _marked("predict")),
    ]


def _gelu(original):
    def gelu(x, approximate=True):
        if not _applies(x):
            return original(x, approximate)
        return fused_ops.gelu(x, approximate)

    return gelu


def _silu(original):
    def silu(x):
        return fused_ops.silu(x) if _applies(x) else original(x)

    return silu


def _dropout(original):
    def dropout(inputs, rate, noise_shape=None, seed=None):
        if (
            not _applies(inputs)
            or not 2**-16 <= rate <= 1 - 2**-16
            or not _is_noise_shape(noise_shape, inputs.shape)
        ):
            return original(inputs, rate, noise_shape, seed)
        # One draw, as in the original: later layers get the same seeds.
        drawn = tf.cast(_seed_generator.draw_seed(seed), tf.int32)
        if noise_shape is not None:
            pairs = zip(noise_shape, inputs.shape, strict=True)
            noise_shape = [own if size is None else size for size, own in pairs]
        return fused_ops.dropout(inputs, rate, noise_shape, drawn)

    return dropout


def _is_noise_shape(given, shape):
    """Whether decisions are shared in a way that the kernel knows."""
    if given is None:
        return True
    known = isinstance(given, list | tuple) and shape.is_fully_defined()
    return known and len(given) == len(shape)


def _layer_normalization(original):
    def layer_normalization(x, gamma=None, beta=None, axis=-1, epsilon=None, **kwargs):
        plain = not kwargs.get("rms_scaling", False)
        if (
            plain
            and _applies(x)
            and _is_last(axis, len(x.shape))
            and all(_is_feature_weight(w, x) for w in (gamma, beta))
            and isinstance(epsilon, float | int | None)
        ):
            weights = [tf.convert_to_tensor(w) for w in (gamma, beta)]
            epsilon = keras.config.epsilon() if epsilon is None else epsilon
            return fused_ops.layer_normalization(x, *weights, epsilon)
        return original(x, gamma, beta, axis, epsilon, **kwargs)

    return layer_normalization


def _is_last(axis, rank):
    axes = list(axis) if isinstance(axis, list | tuple) else [axis]
    return rank > 0 and axes in ([-1], [rank - 1])


def _is_feature_weight(weight, x):
    known = isinstance(weight, keras.Variable | tf.Tensor)
    return known and weight.dtype == "float32" and tuple(weight.shape) == x.shape[-1:]


def _update_step(original):
    def update_step(optimizer, gradient, variable, learning_rate):
        index = optimizer._get_variable_index(variable)  # Keras 3.15
        slots = optimizer._momentums[index], optimizer._velocities[index]
        variables = [keras_optimizers.native(v) for v in (variable, *slots)]
        if not _updates(optimizer, variables):
            return original(optimizer, gradient, variable, learning_rate)
        return fused_adam.apply(
            *variables,
            gradient,
            step=optimizer.iterations + 1,
            learning_rate=learning_rate,
            beta_1=optimizer.beta_1,
            beta_2=optimizer.beta_2,
            epsilon=optimizer.epsilon,
        )

    return update_step


def _clip_by_global_norm(original):
    def clip_by_global_norm(value_list, clip_norm):
        if not _in_graph([v for v in value_list if v is not None]):
            return original(value_list, clip_norm)
        return fused_adam.clip_by_global_norm(value_list, clip_norm)

    return clip_by_global_norm


def _marked(name):
    """Has `evaluate` or `predict` trace its function as inference that is not saved."""

    def make(original):
        def make_function(model, *args, **kwargs):
            original(model, *args, **kwargs)
            function = getattr(model, f"{name}_function")
            if not hasattr(function, "is_marked"):
                setattr(model, f"{name}_function", _InInference(function))
            return getattr(model, f"{name}_function")

        return make_function

    return make


class _InInference:
    """A function that is marked while it is called; otherwise that function."""

    is_marked = True

    def __init__(self, function):
        self._function = function

    def __call__(self, *args, **kwargs):
        with _mark():
            return self._function(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._function, name)


@contextlib.contextmanager
def _mark() -> Iterator[None]:
    outer = getattr(_inference, "on", False)
    _inference.on = True
    try:
        yield
    finally:
        _inference.on = outer


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
    context = _global_state.get_global_attribute("current_call_ctx")  # Keras 3.15
    return context is not None and bool(context.get_value("training"))


def _updates(optimizer, variables) -> bool:
    """Whether a variable and its two slots are updated by the fused kernel.

    Not where assignments are masked, or a subclass has its own: the kernel writes past
    them. Nor where TensorFlow would take `1 - beta` of a rounded beta.
    """
    stock = type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)
    return (
        stock
        and not optimizer.amsgrad
        and fused_adam.is_precise(optimizer.beta_1)
        and fused_adam.is_precise(optimizer.beta_2)
        and not any("assign" in vars(v) for v in variables)
        and all(v.dtype == tf.float32 for v in variables)
        and len({v.device for v in variables}) == 1
        and _in_graph(variables)
    )


def _in_graph(values) -> bool:
    return (
        not tf.executing_eagerly()
        and tracing.on_one_cpu(values)
        and not tracing.in_xla()
        and not tracing.watched()
    )
