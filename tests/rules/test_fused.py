"""Fused kernels against float64 and Keras, in graphs, forward and backward."""

import functools
import math

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfamp.facts import formats
from tfamp.kernels import fused
from tfamp.updates import adam as tensorflows_adam
from tfamp.updates import sizes

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
SINGLE = formats.float_format("float32").epsilon
_erf = np.vectorize(math.erf)


def reference(name, x):
    """Value and derivative in float64."""
    if name == "gelu":
        density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        share = 0.5 * (1 + _erf(x / math.sqrt(2)))
        return x * share, share + x * density
    if name == "silu":
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(-x))
        return x * share, share * (1 + x * (1 - share))
    scale = math.sqrt(2 / math.pi)
    inner = np.tanh(scale * (x + 0.044715 * x**3))
    slope = scale * (1 + 3 * 0.044715 * x**2) * (1 - inner**2)
    return 0.5 * x * (1 + inner), 0.5 * (1 + inner) + 0.5 * x * slope


def every_value(dtype, largest=1e4):
    """All values of a 16-bit format up to `largest`; a grid in float32."""
    if dtype == "float32":
        return np.linspace(-largest, largest, 4001, dtype="float32")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    values = np.arange(2**16, dtype="uint16").view(kind)
    with np.errstate(invalid="ignore"):
        return values[np.abs(values.astype("float64")) <= largest]


def normal(*shape, dtype="float32", mean=0.0, deviation=1.0):
    generator = np.random.default_rng(len(shape))
    return tf.cast(generator.normal(mean, deviation, shape), dtype)


def with_gradients(function, *inputs, upstream=None, signature=None):
    """The output, and the gradients of all inputs, in one graph as training has them.

    Without an upstream gradient it is the output.
    """

    @tf.function(input_signature=signature)
    def both(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        given = y if upstream is None else tf.cast(upstream, y.dtype)
        return y, *tape.gradient(y, inputs, given)

    return both(*inputs)


def wide(tensors):
    return [np.asarray(each, "float64") for each in tensors]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_its_gradient_are_right_to_half_a_unit(name, dtype):
    x = every_value(dtype)
    function = functools.partial(fused.activation, name)
    found = wide(with_gradients(function, x, upstream=np.ones_like(x)))
    # Rounded once; and the errors of float32's `erf`, `tanh` and `exp`.
    relative = 1.01 * (formats.float_format(dtype).epsilon / 2 + 2 * SINGLE)
    absolute = 5e-7 if name == "gelu" else 2e-6, 4e-6
    for got, want, atol in zip(
        found, reference(name, x.astype("float64")), absolute, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=relative, atol=atol)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_passes_nan_on_and_takes_any_shape(name):
    x = tf.constant([[[1.0, float("nan")], [2.0, -1.0]]], tf.bfloat16)
    for part in wide(with_gradients(functools.partial(fused.activation, name), x)):
        np.testing.assert_array_equal(np.isnan(part), [[[False, True], [False, False]]])


def test_gelu_has_no_tail():
    x = tf.constant([-3e4, -1e30, -5.7, float("-inf")])
    np.testing.assert_array_equal(fused.activation("gelu", x), [0, 0, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_normalization_and_its_gradients_equal_float64(dtype):
    x = normal(4, 5, 32, dtype=dtype, mean=3.0, deviation=2.0)
    gamma, beta = normal(32, mean=1.0, deviation=0.1), normal(32)
    upstream = normal(4, 5, 32, dtype=dtype)

    def plain(x, gamma, beta):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-6) * gamma + beta

    def ours(x, gamma, beta):
        return fused.layer_normalization(x, gamma, beta, 1e-6)

    doubles = [tf.cast(each, tf.float64) for each in (x, gamma, beta)]
    expected = wide(with_gradients(plain, *doubles, upstream=upstream))
    found = with_gradients(ours, x, gamma, beta, upstream=upstream)
    assert [t.dtype.name for t in found] == [dtype, dtype, "float32", "float32"]
    unit = formats.float_format(dtype).epsilon
    for got, want, tolerance in zip(
        wide(found), expected, (unit, unit, 64 * SINGLE, 64 * SINGLE), strict=True
    ):
        atol = max(tolerance, 16 * SINGLE) * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=atol)


def test_rows_of_padding_leave_no_nan_with_an_epsilon_of_0():
    y, _, of_gamma = wide(
        with_gradients(
            lambda x, gamma: fused.layer_normalization(x, gamma, tf.zeros([16]), 0.0),
            *(normal(9, 16, dtype="bfloat16"), tf.ones([16])),  # Padded to 10 rows.
            signature=[tf.TensorSpec([None, 16], tf.bfloat16), tf.TensorSpec([16])],
        )
    )
    np.testing.assert_allclose((y**2).mean(1), 1, rtol=2e-2)
    np.testing.assert_allclose(of_gamma, (y**2).sum(0), rtol=2e-2)


# ---- Dropout ----


def drop(x, rate, seed=(1, 2)):
    seed = tf.constant(seed, tf.int32)
    return tf.function(lambda x: fused.dropout(x, rate, seed))(x)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dropout_drops_the_share_that_is_asked_for(rate, dtype):
    count = 2**21
    y = np.asarray(drop(tf.ones([count], dtype), rate), "float64")
    # Five deviations of a binomial share.
    within = 5 * math.sqrt(rate * (1 - rate) / count)
    assert abs(np.mean(y == 0) - rate) < within
    unit = formats.float_format(dtype).epsilon
    np.testing.assert_allclose(np.unique(y[y != 0]), [1 / (1 - rate)], rtol=unit)


def test_dropout_depends_on_the_seed_alone():
    x = tf.ones([7, 9], tf.bfloat16)  # 63: not a multiple of what a word holds.
    first, again, other = drop(x, 0.5), drop(x, 0.5), drop(x, 0.5, seed=(1, 3))
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first != other))


def test_dropouts_gradient_is_zero_just_where_the_output_is():
    x = tf.ones([64, 33], tf.bfloat16)
    seed = tf.constant([5, 6])
    function = functools.partial(fused.dropout, rate=0.3, seed=seed)
    y, gradient = wide(with_gradients(function, x, upstream=x))
    np.testing.assert_array_equal(y, gradient)
    assert 0 < np.mean(y == 0) < 1


SEEDS = [(0, 0), (0, 1), (1, 0), (1337, 5), (1337, 6), (7, 10**6), (2**31, 2**31)]


def test_bits_of_every_seed_are_even_and_differ_from_their_neighbors():
    """Each figure is a sum of many: five deviations are one in millions."""
    count, before = 2**19, None

    @tf.function(jit_compile=True)
    def draw(seed):
        return fused._random_bits(tf.cast(seed, tf.uint64), count)

    for seed in SEEDS:
        bits = np.asarray(draw(tf.constant(seed, tf.int64)))
        share = bits / 2**32
        for rate in (0.001, 0.1, 0.5):
            within = 5 * math.sqrt(rate * (1 - rate) / count)
            assert abs(np.mean(share < rate) - rate) < within, seed
        others = [share[lag:] for lag in (1, 2, 64, 768)]
        others += [] if before is None else [before, before[1:]]
        for other in others:
            together = np.corrcoef(share[: len(other)], other)[0, 1]
            assert abs(together) < 5 / math.sqrt(len(other)), seed
        before = share


# ---- Where they are called ----

PLACED = {
    "gelu": lambda x: fused.activation("gelu_tanh", x),
    "layer normalization": lambda x: fused.layer_normalization(
        x, tf.ones([4]), tf.zeros([4]), 1e-3
    ),
    "dropout": lambda x: fused.dropout(x, 0.5, tf.constant([1, 2])),
}


def check_same(found, expected):
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.any(np.asarray(expected[1]) != 0)


@pytest.mark.parametrize("name", PLACED)
def test_gradient_in_a_branch_and_a_loop(name):
    function, x = PLACED[name], normal(3, 2, 4)

    def branch(x):
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: function(x), lambda: 2 * x)

    def loop(x):
        return tf.map_fn(function, x)

    def unrolled(x):
        return tf.stack([function(part) for part in tf.unstack(x)])

    check_same(with_gradients(branch, x), with_gradients(function, x))
    check_same(with_gradients(loop, x), with_gradients(unrolled, x))


@pytest.mark.parametrize("name", PLACED)
def test_batches_of_unknown_size_give_the_same(name):
    x, shapes = normal(37, 4), []

    def function(x):
        y = PLACED[name](x)
        shapes.append(y.shape.as_list())
        return y

    signature = [tf.TensorSpec([None, 4])]
    found = with_gradients(function, x, signature=signature)
    check_same(found, with_gradients(PLACED[name], x))
    assert shapes == [[None, 4]]
    empty = with_gradients(PLACED[name], x[:0], signature=signature)
    assert [part.shape for part in empty] == [(0, 4), (0, 4)]


def test_padded_sizes_are_few_and_not_much_larger():
    counts = np.arange(1, 3000, 7)
    padded = np.array([int(sizes.padded_size(n)) for n in counts])
    assert np.all(padded >= counts)
    assert np.all(padded <= 1.25 * counts + 1)
    assert len(set(padded)) <= 4 * 12


def test_second_derivative_of_an_activation():
    def slope(x):
        return with_gradients(functools.partial(fused.activation, "silu"), x)[1]

    x, step = np.float32([0.5]), 1e-4
    # `slope` is silu * silu' where silu is its own upstream gradient.
    value, first = reference("silu", x.astype("float64"))
    slopes = [reference("silu", x + d)[1] for d in (-step, step)]
    second = (slopes[1] - slopes[0]) / (2 * step)
    found = with_gradients(slope, tf.constant(x), upstream=np.ones(1))[1]
    np.testing.assert_allclose(found, value * second + first**2, rtol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_mode_works_on_what_was_never_traced_before(name):
    fused._compiled_activation.cache_clear()
    x, tangent = tf.constant([-2.0, 0.5, 3.0], tf.float16), tf.ones([3], tf.float16)

    @tf.function
    def both(x):
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fused.activation(name, x)
        return accumulator.jvp(y), tape.gradient(y, x)

    forward, backward = both(x)
    np.testing.assert_allclose(forward, backward, rtol=2e-3)


def test_adam_equals_keras_over_many_steps():
    start = np.asarray(normal(6, 3))
    theirs = keras.Variable(start)
    adam = keras.optimizers.Adam(1e-2, beta_1=0.8, beta_2=0.95, epsilon=1e-4)
    adam.build([theirs])
    ours = [tf.Variable(v) for v in (start, 0 * start, 0 * start)]

    @tf.function
    def update(gradient, step):
        tensorflows_adam.apply_adam(ours, gradient, step, 1e-2, adam)

    generator = np.random.default_rng(0)
    for step in range(1, 31):
        gradient = tf.constant(generator.normal(size=(6, 3)), tf.float32)
        adam.apply([gradient], [theirs])
        update(gradient, tf.constant(step))
    expected = [theirs, adam._momentums[0], adam._velocities[0]]
    for found, want in zip(ours, expected, strict=True):
        # Sums of terms of both signs and of about 1.
        np.testing.assert_allclose(found, want.value, rtol=1e-5, atol=1e-6)
