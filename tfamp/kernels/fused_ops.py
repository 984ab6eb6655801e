"""Dropout, activations and layer normalization in 16 bits, one compiled kernel each.

On a CPU, TensorFlow runs these as chains of elementwise operations, and its bfloat16
and float16 kernels convert each element to float32 and back, in every link of the
chain. Here XLA compiles the chain into one pass over memory that computes in float32
and rounds once, forward and backward. The matrix products stay with oneDNN, whose
16-bit kernels XLA does not have.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

_DRAWN_BITS = 16  # Random bits for an element of dropout.


def gelu(x: tf.Tensor, approximate: bool = True) -> tf.Tensor:
    """Returns the Gaussian error linear unit, computed in float32 and rounded once.

    ```
    exact        x * (1 + erf(x / sqrt(2))) / 2
    approximate  x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) / 2
    ```

    Args:
      x: Float tensor of any shape.
      approximate: Whether to take the second form.

    Returns:
      A tensor of the same shape and dtype.

    References:
      Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016,
      https://arxiv.org/abs/1606.08415
    """
    return _elementwise("gelu_tanh" if approximate else "gelu", x)


def silu(x: tf.Tensor) -> tf.Tensor:
    """Returns `x * sigmoid(x)`, computed in float32 and rounded once.

    Args:
      x: Float tensor of any shape.

    Returns:
      A tensor of the same shape and dtype.
    """
    return _elementwise("silu", x)


def _gelu(x):
    # By `erf`, which is faster than `erfc`; the result is right to 5e-7. XLA's never
    # quite reaches -1, which would grow with x: from here on less than that is left.
    y = x * (0.5 * tf.math.erf(x * 0.5**0.5) + 0.5)
    return tf.where(x < -5.6, 0.0, y)


def _gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    return x * (0.5 * tf.tanh(inner) + 0.5)


def _silu(x):
    return x * tf.sigmoid(x)


def _gelu_slope(x):
    density = 0.3989422804014327 * tf.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    y = 0.5 * tf.math.erf(x * 0.5**0.5) + 0.5 + x * density
    return tf.where(x < -5.6, 0.0, y)


def _gelu_tanh_slope(x):
    t = tf.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x)
    # Not x * x * x of a large number times nothing: 1 - t * t is 0 from 10 on.
    inner = tf.where(tf.abs(x) < 10.0, inner, 0.0)
    return 0.5 * t + 0.5 + 0.5 * x * (1.0 - t * t) * inner


def _silu_slope(x):
    s = tf.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


# Each with its derivative. By hand: a tape in a function that is traced while a
# `tf.autodiff.ForwardAccumulator` is active records nothing (TensorFlow 2.21).
_FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "silu": (_silu, _silu_slope),
}


def _elementwise(name, x):
    forward, backward = _compiled_elementwise(name, x.dtype)

    @tf.custom_gradient
    def apply(x):
        flat = _padded(tf.reshape(x, [-1]), x)

        def gradient(upstream):
            upstream = _padded(tf.reshape(upstream, [-1]), x)
            return _like(backward(_here(flat), upstream), x)

        return _like(forward(flat), x), gradient

    return apply(x)


@functools.cache
def _compiled_elementwise(name, dtype):
    """Returns the compiled function and its compiled gradient, over flat tensors."""
    function, slope = _FUNCTIONS[name]
    spec = tf.TensorSpec([None], dtype)

    @_compiled(name, spec)
    def forward(x):
        return tf.cast(function(tf.cast(x, tf.float32)), dtype)

    @_compiled(f"{name}_gradient", spec, spec)
    def backward(x, upstream):
        of_x = slope(tf.cast(x, tf.float32)) * tf.cast(upstream, tf.float32)
        return tf.cast(of_x, dtype)

    return forward, backward


def _compiled(name, *signature):
    """One trace for all shapes; XLA compiles each size of tensor once."""
    compiled = functools.partial(
        tf.function, input_signature=signature, autograph=False, jit_compile=True
    )

    def decorate(function):
        function.__name__ = name  # What a profile shows.
        return compiled(function)

    return decorate


def _here(tensor):
    """Returns a tensor of the forward pass for use in the gradient's graph.

    In a branch of `tf.cond` that graph is another, to which an operation brings the
    tensor, but not a call of a compiled function (TensorFlow 2.21).
    """
    return tf.identity(tensor)


def _padded(rows, x):
    """Pads the first dimension with zeros, unless the shape of x is known.

    XLA compiles each size anew, for tenths of a second, and keeps what it compiled. So
    batches of any size come to four sizes between a power of 2 and the next.
    """
    if x.shape.is_fully_defined():
        return rows
    count = tf.shape(rows)[0]
    paddings = [[0, _padded_size(count) - count]] + [[0, 0]] * (len(rows.shape) - 1)
    return tf.pad(rows, paddings)


def _padded_size(count):
    """Returns the next of four steps between powers of 2: int32 scalar."""
    logarithm = tf.math.log(tf.cast(tf.maximum(count, 1), tf.float64)) / math.log(2)
    step = tf.bitwise.left_shift(1, tf.maximum(tf.cast(logarithm, tf.int32) - 2, 0))
    return (count + step - 1) // step * step


def _like(padded, x):
    """Returns flat elements, or rows, in the shape of another tensor."""
    if not x.shape.is_fully_defined():
        flat = len(padded.shape) == 1
        padded = padded[: tf.size(x) if flat else tf.size(x) // x.shape[-1]]
    shaped = tf.reshape(padded, tf.shape(x))
    shaped.set_shape(x.shape)
    return shaped


def layer_normalization(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Normalizes over the last axis, in float32, and rounds once.

    ```
    normalized = (x - mean(x)) / sqrt(variance(x) + epsilon)
    y = normalized * gamma + beta
    ```

    Where that divides 0 by 0, with an epsilon of 0, the result is 0 and not NaN.

    For the gradient it keeps x, the means and the inverse deviations, and no
    intermediate tensor of the size of x.

    Args:
      x: Float tensor [..., features], features known.
      gamma, beta: float32 [features].
      epsilon: Added to the variance.

    Returns:
      A tensor of the shape and dtype of x.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", 2016,
      https://arxiv.org/abs/1607.06450
    """
    forward, backward = _compiled_normalization(x.dtype)
    epsilon = tf.constant(epsilon, tf.float32)

    @tf.custom_gradient
    def apply(x, gamma, beta):
        rows = _padded(tf.reshape(x, [-1, x.shape[-1]]), x)
        y, mean, inverse = forward(rows, gamma, beta, epsilon)

        def gradient(upstream):
            upstream = _padded(tf.reshape(upstream, [-1, x.shape[-1]]), x)
            kept = map(_here, (rows, gamma, mean, inverse))
            of_x, *others = backward(*kept, upstream)
            return _like(of_x, x), *others

        return _like(y, x), gradient

    return apply(x, gamma, beta)


@functools.cache
def _compiled_normalization(dtype):
    rows, column = tf.TensorSpec([None, None], dtype), tf.TensorSpec([None, 1])
    feature, scalar = tf.TensorSpec([None]), tf.TensorSpec([])

    @_compiled("layer_normalization", rows, feature, feature, scalar)
    def forward(x, gamma, beta, epsilon):
        wide = tf.cast(x, tf.float32)
        mean = tf.reduce_mean(wide, -1, keepdims=True)
        centered = wide - mean
        variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
        spread = variance + epsilon
        # 0 in rows of padding where epsilon is 0; infinity times 0 would be NaN.
        inverse = tf.where(spread > 0, tf.math.rsqrt(spread), 0.0)
        return tf.cast(centered * inverse * gamma + beta, dtype), mean, inverse

    signature = rows, feature, column, column, rows

    @_compiled("layer_normalization_gradient", *signature)
    def backward(x, gamma, mean, inverse, upstream):
        normalized = (tf.cast(x, tf.float32) - mean) * inverse
        upstream = tf.cast(upstream, tf.float32)
        of_gamma = tf.reduce_sum(upstream * normalized, 0)
        of_beta = tf.reduce_sum(upstream, 0)
        inner = upstream * gamma
        shared = tf.reduce_mean(inner, -1, keepdims=True)
        along = tf.reduce_mean(inner * normalized, -1, keepdims=True)
        of_x = inverse * (inner - shared - normalized * along)
        return tf.cast(of_x, dtype), of_gamma, of_beta

    return forward, backward


def dropout(
    x: tf.Tensor, rate: float, noise_shape: Sequence[int] | None, seed: tf.Tensor
) -> tf.Tensor:
    """Sets a share of the elements to zero, and scales the others up.

    The share is right to 2**-16. `tf.nn.experimental.stateless_dropout` draws its
    uniform numbers in the dtype of x: in bfloat16 they are multiples of 1/128, so that
    a rate of 0.1 drops 13/128 = 10.2 %, and one of 0.001 drops 0.8 %.

    Args:
      x: Float tensor of any shape.
      rate: Share to drop, in (0, 1).
      noise_shape: Sizes, as many as x has dimensions; one of 1 shares its decisions.
        Those of x are known then. None: the shape of x.
      seed: int32 [2]. The same seed drops the same elements.

    Returns:
      A tensor of the shape and dtype of x.
    """
    threshold = round(rate * 2**_DRAWN_BITS)
    if noise_shape is None:
        rows = _padded(tf.reshape(x, [-1]), x)
        bits = _random_bits(tf.size(rows), seed)
    else:
        rows = x
        bits = tf.reshape(_random_bits(math.prod(noise_shape), seed), noise_shape)
    kernel = _compiled_dropout(threshold, x.dtype, len(rows.shape))

    @tf.custom_gradient
    def apply(rows):
        return kernel(rows, bits), lambda upstream: kernel(upstream, _here(bits))

    y = apply(rows)
    if noise_shape is None:
        return _like(y, x)
    y.set_shape(x.shape)
    return y


@functools.cache
def _compiled_dropout(threshold, dtype, rank):
    drawn = tf.TensorSpec([None] * rank, tf.uint16)
    scale = 2**_DRAWN_BITS / (2**_DRAWN_BITS - threshold)  # 1 / what is kept

    @_compiled("dropout", tf.TensorSpec([None] * rank, dtype), drawn)
    def kernel(x, bits):
        kept = bits >= tf.constant(threshold, tf.uint16)
        return tf.where(kept, tf.cast(tf.cast(x, tf.float32) * scale, dtype), 0)

    return kernel


def _random_bits(count, seed):
    """Returns uint16 [count], uniform over all values."""
    # Drawn as uint64 and split outside of XLA, where that costs nothing.
    words = _compiled_draw()(tf.zeros([(count + 3) // 4], tf.bool), seed)
    return tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:count]


@functools.cache
def _compiled_draw():
    signature = tf.TensorSpec([None], tf.bool), tf.TensorSpec([2], tf.int32)

    @_compiled("random_bits", *signature)
    def draw(like, seed):
        # XLA wants to know the size when it compiles: it takes it from a tensor's
        # shape. ThreeFry takes half of Philox' time here.
        return tf.random.stateless_uniform(
            tf.shape(like), seed, None, None, tf.uint64, alg="threefry"
        )

    return draw
