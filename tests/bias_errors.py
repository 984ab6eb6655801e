"""Bias gradients in bfloat16 against the float64 sum of the same upstream gradient.

Every stock Keras layer that adds a bias, under the dtype policy and the graph rewrite,
in graph mode and under XLA. The error is relative, in the Euclidean norm.

The upstream gradient of a layer's output is given, with values that bfloat16 holds
exactly. In a recurrent layer it arises inside: there every row of the input has a
one-hot part of its own, whose kernel is zero and whose kernel gradient is, row by row,
the gradient that the bias sums.
"""

import functools

import helpers
import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
LAYERS = {
    "Dense": (lambda: layers.Dense(64), (4096, 32)),
    "EinsumDense": (
        lambda: layers.EinsumDense("abc,cd->abd", (64, 32), bias_axes="d"),
        (64, 64, 16),
    ),
    "Conv1D": (lambda: layers.Conv1D(16, 3), (64, 64, 8)),
    "Conv2D": (lambda: layers.Conv2D(16, 3), (64, 16, 16, 8)),
    "Conv2D, channels first": (
        lambda: layers.Conv2D(16, 3, data_format="channels_first"),
        (64, 8, 16, 16),
    ),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(16, 3), (64, 16, 16, 8)),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3), (64, 16, 16, 8)),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(16, 3), (64, 16, 16, 8)),
    "Conv3D": (lambda: layers.Conv3D(16, 3), (16, 8, 8, 8, 8)),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(16, 3), (16, 8, 8, 8, 8)),
}
BATCH, TIME, UNITS, FEATURES = 64, 32, 16, 8
RECURRENT = {
    name: functools.partial(cls, UNITS, return_sequences=True)
    for name, cls in (
        ("LSTM", layers.LSTM),
        ("GRU", layers.GRU),
        ("SimpleRNN", layers.SimpleRNN),
    )
}


# Column: keywords of `tfamp.enable`, and whether XLA compiles.
COLUMNS = {
    "policy, graph": ({}, False),
    "policy, XLA": ({}, True),
    "rewrite, graph": ({"graph_rewrite": True}, False),
}


def error(name, column):
    """Returns the relative error of a layer's bias gradient."""
    keywords, jit = COLUMNS[column]
    keras.utils.set_random_seed(0)
    case = recurrent if name in RECURRENT else given
    with helpers.enabled("mixed_bfloat16", **keywords):
        got, want = case(name, jit)
    got, want = np.ravel(got).astype(np.float64), np.ravel(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def given(name, jit):
    """Returns the bias gradient and the sum of the given upstream gradient."""
    make, shape = LAYERS[name]
    layer, x = make(), tf.random.normal(shape)
    upstream = exact(tf.random.normal(layer(x).shape) + 1.0)
    identity = tf.Variable(tf.eye(upstream.shape[-1]))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = weighted_sum(layer(x), identity, upstream)
        # All of them: what is around the bias gradient is then as in training.
        wanted = [layer.bias.value, [w.value for w in layer.weights], x]
        return tape.gradient(loss, wanted)

    channels = 1 if "first" in name else len(shape) - 1
    axes = tuple(i for i in range(len(shape)) if i != channels)
    return run(gradient, jit, x)[0], upstream.numpy().astype(np.float64).sum(axes)


def weighted_sum(y, identity, upstream):
    """Returns a loss whose gradient in `y` is `upstream`, by way of a product.

    The rewrite goes by what stands around an operation: a gradient that comes from
    the next layer's product is in bfloat16 there, as in a network. `identity` is a
    variable, so that the product is not optimized away.
    """
    matrix = tf.cast(identity, y.dtype)
    z = tf.matmul(tf.reshape(y, [-1, y.shape[-1]]), matrix)
    return tf.reduce_sum(tf.cast(z, tf.float32) * tf.reshape(upstream, tf.shape(z)))


def exact(values):
    """Returns float32 values that bfloat16 holds."""
    return tf.cast(tf.cast(values, tf.bfloat16), tf.float32)


def recurrent(name, jit):
    """Returns the bias gradient and the sum of what the layer itself sends there."""
    layer, rows = RECURRENT[name](), BATCH * TIME
    marks = tf.one_hot(tf.reshape(tf.range(rows), (BATCH, TIME)), rows)
    x = tf.concat([marks, tf.random.normal((BATCH, TIME, FEATURES))], -1)
    layer(x)
    weights = {weight.name: weight for weight in layer.weights}
    kernel = weights["kernel"].numpy()
    kernel[:rows] = 0.0
    weights["kernel"].assign(kernel)
    upstream = exact(tf.random.normal((BATCH, TIME, UNITS)) + 1.0)
    identity = tf.Variable(tf.eye(UNITS))

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = weighted_sum(layer(x), identity, upstream)
        return tape.gradient(loss, [weights["bias"].value, weights["kernel"].value])

    bias, kernel = run(gradients, jit, x)
    bias = bias[0] if len(bias.shape) == 2 else bias  # A GRU's input and inner bias.
    return bias, kernel.numpy()[:rows].astype(np.float64).sum(0)


def run(function, jit, x):
    """Calls a function in a graph (False) or under XLA (True)."""
    return tf.function(function, jit_compile=jit)(x)
