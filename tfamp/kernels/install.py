"""Has Keras' layers run the fused kernels, where they are faster.

Only in graphs that run on one CPU or one GPU, and not under XLA, which fuses by itself;
in layers that train, and in each step of `fit`, `evaluate` and `predict`, so that an
exported model has TensorFlow's own operations (unless it calls layers with
`training=True`). Everything else calls Keras' own function.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfamp.facts import formats, graph_context
from tfamp.keras_patches import hooks
from tfamp.kernels import clusters, fused, product_gradient

# Where the kernels run: on a CPU for 16 bits, of which TensorFlow's operators convert
# each element; on a GPU for fewer launches.
_FORMATS = {"CPU": formats.LOW, "GPU": (*formats.LOW, "float32")}


def or_keras_own(function: Callable) -> Callable:
    """Returns what makes a hook: where `function` is not for it, the original runs."""

    @hooks.around
    def replacement(original, *args, **kwargs):
        result = function(*args, **kwargs)
        return original(*args, **kwargs) if result is NotImplemented else result

    return replacement


def _gelu(x, approximate=True):
    name = "gelu_tanh" if approximate else "gelu"
    return fused.activation(name, x) if _applies(x) else NotImplemented


def _silu(x):
    return fused.activation("silu", x) if _applies(x) else NotImplemented


def _dropout(inputs, rate, noise_shape=None, seed=None):
    if not 2**-16 <= rate <= 1 - 2**-16 or not _applies(inputs):
        return NotImplemented
    if noise_shape is not None:
        if not clusters.is_clustering(inputs) or len(noise_shape) != inputs.shape.rank:
            return NotImplemented
        pairs = zip(noise_shape, inputs.shape, strict=True)
        noise_shape = [size if dim is None else dim for dim, size in pairs]
        if not all(isinstance(x, int) for x in noise_shape):
            return NotImplemented
    from keras.src.random import seed_generator

    # One draw, as in the original: later layers get the same seeds.
    return fused.dropout(inputs, rate, seed_generator.draw_seed(seed), noise_shape)


def _layer_normalization(x, gamma=None, beta=None, axis=-1, epsilon=None, **kwargs):
    if (
        any(kwargs.values())  # RMS scaling, in some releases.
        or not _applies(x)
        or tf.nest.flatten(axis) not in ([-1], [len(x.shape) - 1])
        or not all(_is_of_features(weight, x) for weight in (gamma, beta))
    ):
        return NotImplemented
    gamma, beta = tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)
    epsilon = keras.config.epsilon() if epsilon is None else epsilon
    return fused.layer_normalization(x, gamma, beta, epsilon)


def _is_of_features(weight, x):
    return (
        isinstance(weight, keras.Variable | tf.Tensor)
        and weight.dtype == "float32"
        and tuple(weight.shape) == x.shape[-1:]
    )


def _applies(x) -> bool:
    """Whether a layer's tensor goes through a fused kernel."""
    return (
        isinstance(x, tf.Tensor)
        and (trains() or _in_step_of_a_model())
        # XLA compiles each size anew: lengths that vary would compile for ever.
        and x.shape.rank is not None
        and all(size is not None for size in x.shape[1:])
        and not tf.executing_eagerly()
        and x.dtype.name in _FORMATS.get(graph_context.one_device([x]), ())
        and not graph_context.in_xla()
        and not graph_context.watched()
        and not graph_context.is_for_a_rest()
    )


def trains() -> bool:
    """Whether the layers that are called now train."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return bool(getattr(context, "training", False))


def _in_step_of_a_model() -> bool:
    """Whether `fit`, `evaluate` or `predict` trace a step, by Keras' names for it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "name", "").startswith(("one_step_on_", "multi_step_on_")):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


HOOKS = hooks.HookGroup(
    dropout=or_keras_own(_dropout),
    gelu=or_keras_own(_gelu),
    silu=or_keras_own(_silu),
    layer_normalization=or_keras_own(_layer_normalization),
    product_lookup=hooks.of_gradient("BatchMatMulV2", product_gradient.of_product),
)
