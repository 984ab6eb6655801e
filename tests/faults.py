"""Models with a layer that loses precision in 16 bits, and where it is."""

import keras
import numpy as np
from keras import ops

WIDTH = 16


@keras.saving.register_keras_serializable("faults")
class Overflow(keras.layers.Layer):
    """A norm whose squares are above 65504: inputs and outputs fit."""

    def call(self, x):
        norm = ops.sqrt(ops.mean(ops.square(x * 3000.0), -1, keepdims=True))
        return x * 3000.0 / (norm + 1e-3)


@keras.saving.register_keras_serializable("faults")
class Cancellation(keras.layers.Layer):
    """What is left of a small number beside a large one."""

    def call(self, x):
        return (x + 1000.0) - 1000.0


@keras.saving.register_keras_serializable("faults")
class Mask(keras.layers.Layer):
    """A mask of -1e9, which is infinite in float16; and 0 times infinite is NaN."""

    def call(self, x):
        hidden = ops.cast(ops.arange(x.shape[-1]) > 7, x.dtype)
        return ops.softmax(x + hidden * ops.cast(-1e9, x.dtype)) * x.shape[-1]


@keras.saving.register_keras_serializable("faults")
class Variance(keras.layers.Layer):
    """A variance as the difference of two large numbers."""

    def call(self, x):
        x = x + 30.0
        mean = ops.mean(x, -1, keepdims=True)
        variance = ops.mean(x * x, -1, keepdims=True) - mean * mean
        return (x - mean) / ops.sqrt(ops.maximum(variance, 1e-3))


@keras.saving.register_keras_serializable("faults")
class Sum(keras.layers.Layer):
    """A mean over 100,000 values by a sum of them, above 65504."""

    def call(self, x):
        count = 100_000 // x.shape[-1]
        many = ops.tile(ops.abs(x) + 1.0, (1, count))
        return x * ops.sum(many, -1, keepdims=True) / (count * x.shape[-1])


@keras.saving.register_keras_serializable("faults")
class RunningSum(keras.layers.Layer):
    """A mean over 100,000 values by their running sum, rounded at each of them."""

    def call(self, x):
        count = 100_000 // x.shape[-1]
        many = ops.tile(ops.abs(x) / 100_000, (1, count))
        return x * ops.cumsum(many, -1)[:, -1:]


@keras.saving.register_keras_serializable("faults")
class GradientUnderflow(keras.layers.Layer):
    """The identity, whose gradient is on its way 1e8 times smaller."""

    def call(self, x):
        @ops.custom_gradient
        def identity(x):
            def backward(*args, upstream=None):
                (upstream,) = args or (upstream,)
                for factor in (1e-4, 1e-4, 1e4, 1e4):  # Clipped: not one product.
                    upstream = ops.clip(upstream * factor, -6e4, 6e4)
                return upstream

            return x + 0.0, backward

        return identity(x)


FLOAT16 = (Overflow, Cancellation, Mask, Variance, Sum, GradientUnderflow)
FAULTS = [
    *(("mixed_float16", fault) for fault in FLOAT16),
    *(("mixed_bfloat16", fault) for fault in (Cancellation, Variance, RunningSum)),
]


def functional(fault):
    """A chain of layers."""
    x = inputs = keras.Input((WIDTH,))
    x = keras.layers.Dense(WIDTH, "tanh", name="first")(x)
    x = fault(name="fault")(x)
    x = keras.layers.Dense(WIDTH, "tanh", name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(x), name="chain")


class Subclassed(keras.Model):
    """Layers that a `call` of its own chains, with an addition of its own."""

    def __init__(self, fault):
        super().__init__(name="subclassed")
        self.first = keras.layers.Dense(WIDTH, "tanh", name="first")
        self.fault = fault(name="fault")
        self.second = keras.layers.Dense(WIDTH, "tanh", name="second")
        self.head = keras.layers.Dense(4, name="head")

    def call(self, x):
        x = self.first(x)
        return self.head(self.second(ops.add(x, self.fault(x))))


def subclassed(fault):
    """A model of a class of its own."""
    model = Subclassed(fault)
    model(np.zeros((1, WIDTH), "float32"))
    return model


def nested(fault):
    """A model in a model, called twice."""
    inner_inputs = keras.Input((WIDTH,))
    y = keras.layers.Dense(WIDTH, "tanh", name="first")(inner_inputs)
    inner = keras.Model(inner_inputs, fault(name="fault")(y), name="inner")
    inputs = keras.Input((WIDTH,))
    y = keras.layers.Dense(WIDTH, "tanh", name="second")(inner(inner(inputs)))
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(y), name="outer")


def recurrent(fault):
    """A recurrent layer before and behind it."""
    x = inputs = keras.Input((3, WIDTH))
    x = keras.layers.LSTM(WIDTH, name="first")(x)
    x = fault(name="fault")(x)
    x = keras.layers.RepeatVector(2, name="repeat")(x)
    x = keras.layers.GRU(WIDTH, name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(x), name="recurrent")


KINDS = (functional, subclassed, nested, recurrent)


def batch(model, size=32, seed=0):
    """Inputs and targets that fit one of these models."""
    random = np.random.default_rng(seed)
    length = (3,) if model.name == "recurrent" else ()
    x = random.normal(size=(size, *length, WIDTH)).astype("float32")
    return x, random.normal(size=(size, 4)).astype("float32")
