"""Dropout, activations and layer normalization, one kernel each, for a CPU.

There TensorFlow runs the layers as chains of elementwise operations, and its 16-bit
kernels convert each element to float32 and back, in every link of the chain. Here XLA
compiles the chain into one pass over memory that computes in float32 and rounds once,
forward and backward. The matrix products stay with oneDNN, whose 16-bit kernels XLA
does not have. Adam's update is `updates.adam`.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfamp.kernels import clusters
from tfamp.updates import sizes

_DRAWN_BITS = 16  # Random bits for an element of dropout.


def activation(name: str, x: tf.Tensor) -> tf.Tensor:
    """Returns an activation, computed in float32 and rounded once.

    ```
    gelu       x * (1 + erf(x / sqrt(2))) / 2
    gelu_tanh  x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) / 2
    silu       x * sigmoid(x)
    ```

    Args:
      name: One of these.
      x: Float tensor of any shape; so is what is returned.

    References:
      Hendrycks and Gimpel, "Gaussian Error Linear Units", arxiv.org/abs/1606.08415
    """
    forward, backward = _compiled_activation(name, x.dtype)
    return _apply(lambda flat: (_here(forward, x)(flat), [flat]), backward, [-1], x)


# Each returns the value and the derivative. By hand: `tf.gradients` of gelu_tanh took
# 1.3 to 1.6 times as long, and a tape in a function that is traced while a
# `tf.autodiff.ForwardAccumulator` is active records nothing (2.21).


def _gelu(x):
    # By `erf`, which is faster than `erfc`; the result is right to 5e-7. XLA's never
    # quite reaches -1, which would grow with x: from here on less than that is left.
    share = 0.5 * tf.math.erf(x * 0.5**0.5) + 0.5
    density = 0.3989422804014327 * tf.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    value, slope = x * share, share + x * density
    return tf.where(x < -5.6, 0.0, value), tf.where(x < -5.6, 0.0, slope)


def _gelu_tanh(x):
    t = tf.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))  # sqrt(2 / pi)
    inner = 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x)
    # Not x * x * x of a large number times nothing: 1 - t * t is 0 from 10 on.
    inner = tf.where(tf.abs(x) < 10.0, inner, 0.0)
    share = 0.5 * t + 0.5
    return x * share, share + 0.5 * x * (1.0 - t * t) * inner


def _silu(x):
    share = tf.sigmoid(x)
    return x * share, share * (1.0 + x * (1.0 - share))


_ACTIVATIONS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


# One trace for all shapes; XLA compiles each size of tensor once.
_compiled = functools.partial(tf.function, autograph=False, jit_compile=True)


@functools.cache
def _compiled_activation(name, dtype):
    """Returns the compiled function and its compiled gradient, over flat tensors."""
    function, spec = _ACTIVATIONS[name], tf.TensorSpec([None], dtype)

    @_compiled(input_signature=[spec])
    def activation(x):
        return tf.cast(function(tf.cast(x, tf.float32))[0], dtype)

    @_compiled(input_signature=[spec, spec])
    def activation_gradient(x, upstream):
        slope = function(tf.cast(x, tf.float32))[1]
        return (tf.cast(slope * tf.cast(upstream, tf.float32), dtype),)

    return activation, activation_gradient


def _apply(forward: Callable, backward: Callable, shape, x, *weights) -> tf.Tensor:
    """Applies compiled functions to x in another shape: its elements, or its rows.

    `forward` takes x and the weights, and returns the output and what `backward` takes
    before the upstream gradient; that returns the gradients of x and of the weights.
    """

    @tf.custom_gradient
    def apply(x, *weights):
        y, saved = forward(_padded(tf.reshape(x, shape), x), *weights)

        def gradient(upstream):
            # Into the graph of a branch of `tf.cond`, an operation brings a tensor, but
            # a call of a compiled function does not (TensorFlow 2.21).
            here = map(tf.identity, saved)
            upstream = _padded(tf.reshape(upstream, shape), x)
            of_x, *others = _here(backward, x)(*here, upstream)
            return _like(of_x, x), *others

        return _like(y, x), gradient

    return apply(x, *weights)


def _here(compiled, x):
    """Returns a compiled function; its operators, where they become programs anyway."""
    return compiled.python_function if clusters.is_clustering(x) else compiled


def _padded(rows, x):
    """Pads the first dimension, unless the shape of x is known."""
    return rows if x.shape.is_fully_defined() else sizes.padded(rows)


def _like(padded, x):
    """Returns flat elements, or rows, in the shape of another tensor."""
    if not x.shape.is_fully_defined():
        padded = tf.reshape(padded, [-1])[: tf.size(x)]
    shaped = tf.reshape(padded, tf.shape(x))
    shaped.set_shape(x.shape)
    return shaped


def layer_normalization(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float | tf.Tensor
) -> tf.Tensor:
    """Normalizes over the last axis, in float32, and rounds once.

    ```
    normalized = (x - mean(x)) / sqrt(variance(x) + epsilon)
    y = normalized * gamma + beta
    ```

    Where that divides 0 by 0, with an epsilon of 0, the result is 0 and not NaN.

    Args:
      x: Float tensor [..., features], features known; so is what is returned.
      gamma, beta: float32 [features].
      epsilon: Added to the variance.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", 2016, arxiv.org/abs/1607.06450
    """
    compiled, backward = _compiled_normalization(x.dtype)
    epsilon = tf.cast(epsilon, tf.float32)

    def forward(rows, gamma, beta):
        y, mean, inverse = _here(compiled, x)(rows, gamma, beta, epsilon)
        return y, [rows, gamma, mean, inverse]

    return _apply(forward, backward, [-1, x.shape[-1]], x, gamma, beta)


@functools.cache
def _compiled_normalization(dtype):
    rows, column = tf.TensorSpec([None, None], dtype), tf.TensorSpec([None, 1])
    feature = tf.TensorSpec([None])

    @_compiled(input_signature=[rows, feature, feature, tf.TensorSpec([])])
    def layer_normalization(x, gamma, beta, epsilon):
        wide = tf.cast(x, tf.float32)
        mean = tf.reduce_mean(wide, -1, keepdims=True)
        centered = wide - mean
        variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
        spread = variance + epsilon
        # 0 in rows of padding where epsilon is 0; infinity times 0 would be NaN.
        inverse = tf.where(spread > 0, tf.math.rsqrt(spread), 0.0)
        return tf.cast(centered * inverse * gamma + beta, dtype), mean, inverse

    @_compiled(input_signature=[rows, feature, column, column, rows])
    def layer_normalization_gradient(x, gamma, mean, inverse, upstream):
        normalized = (tf.cast(x, tf.float32) - mean) * inverse
        upstream = tf.cast(upstream, tf.float32)
        of_gamma = tf.reduce_sum(upstream * normalized, 0)
        of_beta = tf.reduce_sum(upstream, 0)
        inner = upstream * gamma
        shared = tf.reduce_mean(inner, -1, keepdims=True)
        along = tf.reduce_mean(inner * normalized, -1, keepdims=True)
        of_x = inverse * (inner - shared - normalized * along)
        return tf.cast(of_x, dtype), of_gamma, of_beta

    return layer_normalization, layer_normalization_gradient


def dropout(
    x: tf.Tensor,
    rate: float,
    seed: tf.Tensor,
    noise_shape: Sequence[int] | None = None,
) -> tf.Tensor:
    """Sets a share of the elements to zero, and scales the others up.

    The share is right to 2**-16. `tf.nn.experimental.stateless_dropout` draws its
    uniform numbers in the dtype of x: in bfloat16 they are multiples of 1/128, so that
    a rate of 0.1 drops 13/128 = 10.2 %.

    Args:
      x: Float tensor of any shape; so is what is returned.
      rate: Share to drop, in (0, 1).
      seed: int32 or int64 [2].
      noise_shape: That of the decisions, which is broadcast to that of x; None: its
        own. Another one only where `clusters.is_clustering`.
    """
    if clusters.is_clustering(x):
        return _drawn_again(x, rate, seed, noise_shape or x.shape)
    seed = tf.cast(seed, tf.int32)
    kernel = _compiled_dropout(round(rate * 2**_DRAWN_BITS), x.dtype)

    def forward(flat):
        # Drawn as uint64 and split outside of XLA, for free.
        count = tf.size(flat)
        words = _draw(tf.zeros([(count + 3) // 4], tf.bool), seed)
        bits = tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:count]
        return kernel(bits, flat)[0], [bits]

    return _apply(forward, kernel, [-1], x)


def _drawn_again(x, rate, seed, noise_shape):
    """Dropout of elementwise operators alone: the backward pass draws the bits again.

    So they take no memory, and one pass with what is before and after it.
    """
    seed = tf.cast(seed, tf.uint64)
    threshold = tf.constant(round(rate * 2**32), tf.uint64)

    def masked(values):
        bits = tf.reshape(_random_bits(seed, math.prod(noise_shape)), noise_shape)
        scaled = tf.cast(values, tf.float32) * (1 / (1 - rate))
        return tf.where(bits >= threshold, tf.cast(scaled, values.dtype), 0)

    @tf.custom_gradient
    def drop(x):
        return masked(x), masked

    return drop(x)


def _random_bits(seed, count):
    """Returns 32 random bits for each of `count` elements: uint64 [count].

    References:
      Widynski, "Squares: A Fast Counter-Based RNG", 2020, arxiv.org/abs/2004.06278.
      Keys of its form are few; these are of two Weyl sequences, and odd.
    """
    word = functools.partial(tf.constant, dtype=tf.uint64)
    half = word(32)
    key = seed[0] * word(0x9E3779B97F4A7C16) + seed[1] * word(0xD1342543DE82EF96)
    key = key + word(0xBF58476D1CE4E5B9)  # Odd, and many digits for seeds of 0, too.
    first = x = tf.cast(tf.range(count, dtype=tf.int64), tf.uint64) * key
    for more in (first, first + key, first):
        x = x * x + more
        swapped = tf.bitwise.right_shift(x, half), tf.bitwise.left_shift(x, half)
        x = tf.bitwise.bitwise_or(*swapped)
    return tf.bitwise.right_shift(x * x + first + key, half)


@functools.cache
def _compiled_dropout(threshold, dtype):
    scale = 2**_DRAWN_BITS / (2**_DRAWN_BITS - threshold)  # 1 / what is kept

    bits, elements = tf.TensorSpec([None], tf.uint16), tf.TensorSpec([None], dtype)

    @_compiled(input_signature=[bits, elements])
    def dropout(bits, x):
        keep_mask = bits >= tf.constant(threshold, tf.uint16)
        return (tf.where(keep_mask, tf.cast(tf.cast(x, tf.float32) * scale, dtype), 0),)

    return dropout


@_compiled(
    input_signature=[tf.TensorSpec([None], tf.bool), tf.TensorSpec([2], tf.int32)]
)
def _draw(like, seed):
    # XLA wants to know the size when it compiles: it takes it from a tensor's shape.
    # ThreeFry takes half of Philox' time here.
    return tf.random.stateless_uniform(
        tf.shape(like), seed, None, None, tf.uint64, alg="threefry"
    )
