"""Fused kernels against float64 and Keras, in graphs, forward and backward."""

import functools
import math

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfamp import formats
from tfamp.kernels import fused

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
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


def value_and_gradient(function, x, upstream):
    """Both in one graph, as training computes them."""

    @tf.function
    def both(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, x, upstream)

    return [np.asarray(part, "float64") for part in both(x, upstream)]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_its_gradient_are_right_to_half_a_unit(name, dtype):
    x = every_value(dtype)
    upstream = np.ones_like(x)
    y, gradient = value_and_gradient(
        functools.partial(fused.activation, name), x, upstream
    )
    expected_y, expected_gradient = reference(name, x.astype("float64"))
    # Rounded once; and the errors of float32's `erf`, `tanh` and `exp`.
    single = 2 * formats.float_format("float32").epsilon
    relative = formats.float_format(dtype).epsilon / 2 + single
    absolute = 5e-7 if name == "gelu" else 2e-6
    np.testing.assert_allclose(y, expected_y, rtol=1.01 * relative, atol=absolute)
    np.testing.assert_allclose(
        gradient, expected_gradient, rtol=1.01 * relative, atol=4e-6
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_passes_nan_on_and_takes_any_shape(name):
    x = tf.constant([[[1.0, float("nan")], [2.0, -1.0]]], tf.bfloat16)
    function = functools.partial(fused.activation, name)
    for part in value_and_gradient(function, x, tf.ones_like(x)):
        np.testing.assert_array_equal(np.isnan(part), [[[False, True], [False, False]]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_normalization_and_its_gradients_equal_float64(dtype):
    generator = np.random.default_rng(0)
    x = tf.cast(generator.normal(3.0, 2.0, (4, 5, 32)), dtype)
    upstream = tf.cast(generator.normal(size=(4, 5, 32)), dtype)
    gamma = tf.constant(generator.normal(1, 0.1, 32), tf.float32)
    beta = tf.constant(generator.normal(size=32), tf.float32)

    def gradients(function, *inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        return y, *tape.gradient(y, inputs, tf.cast(upstream, y.dtype))

    def plain(x, gamma, beta):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-6) * gamma + beta

    wide = [tf.cast(t, tf.float64) for t in (x, gamma, beta)]
    expected = gradients(plain, *wide)
    compiled = tf.function(
        lambda *inputs: gradients(
            lambda *i: fused.layer_normalization(*i, 1e-6), *inputs
        )
    )
    found = compiled(x, gamma, beta)
    assert [t.dtype.name for t in found] == [dtype, dtype, "float32", "float32"]
    unit = formats.float_format(dtype).epsilon
    single = formats.float_format("float32").epsilon
    for got, want, tolerance in zip(
        found, expected, (unit, unit, 64 * single, 64 * single), strict=True
    ):
        scale = np.abs(want).max()
        np.testing.assert_allclose(
            np.asarray(got, "float64"),
            want,
            rtol=tolerance,
            atol=max(tolerance, 16 * single) * scale,
        )


def drop(x, rate, seed=(1, 2)):
    seed = tf.constant(seed, tf.int32)
    return tf.function(lambda x: fused.dropout(x, rate, seed))(x)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dropout_drops_the_share_that_is_asked_for(rate, dtype):
    count = 2**21
    y = np.asarray(drop(tf.ones([count], dtype), rate), "float64")
    dropped = np.mean(y == 0)
    # Five deviations of a binomial share.
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    kept = 1 / (1 - rate)
    unit = formats.float_format(dtype).epsilon
    np.testing.assert_allclose(np.unique(y[y != 0]), [kept], rtol=unit)


def test_dropout_depends_on_the_seed_alone():
    x = tf.ones([7, 9], tf.bfloat16)  # 63: not a multiple of what a word holds.
    first, again, other = drop(x, 0.5), drop(x, 0.5), drop(x, 0.5, seed=(1, 3))
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first != other))


def test_dropouts_gradient_is_zero_just_where_the_output_is():
    x = tf.ones([64, 33], tf.bfloat16)
    y, gradient = value_and_gradient(
        lambda x: fused.dropout(x, 0.3, tf.constant([5, 6])), x, x
    )
    np.testing.assert_array_equal(y, gradient)
    assert 0 < np.mean(y == 0) < 1


def test_second_derivative_of_an_activation():
    x = tf.constant([0.5], tf.float32)

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = fused.activation("silu", x)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    step = 1e-4
    slopes = [reference("silu", np.array([0.5 + d]))[1] for d in (-step, step)]
    expected = (slopes[1] - slopes[0]) / (2 * step)
    np.testing.assert_allclose(second(x), expected, rtol=1e-4)


PLACED = {
    "gelu": lambda x: fused.activation("gelu_tanh", x),
    "layer normalization": lambda x: fused.layer_normalization(
        x, tf.ones([4]), tf.zeros([4]), 1e-3
    ),
    "dropout": lambda x: fused.dropout(x, 0.5, tf.constant([1, 2])),
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("place", ["branch", "loop"])
def test_gradient_in_a_branch_and_a_loop(name, place):
    function = PLACED[name]
    x = tf.cast(np.random.default_rng(0).normal(size=(3, 2, 4)), tf.float32)

    def branch(x):
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: function(x), lambda: 2 * x)

    def loop(x):
        return tf.map_fn(function, x)

    def unrolled(x):
        return tf.stack([function(part) for part in tf.unstack(x)])

    placed, plain = (branch, function) if place == "branch" else (loop, unrolled)
    found, expected = (value_and_gradient(f, x, x) for f in (placed, plain))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.any(expected[1] != 0)


@pytest.mark.parametrize("name", PLACED)
def test_batches_of_unknown_size_give_the_same(name):
    x = tf.cast(np.random.default_rng(0).normal(size=(37, 4)), tf.float32)
    expected = value_and_gradient(PLACED[name], x, x)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = PLACED[name](x)
        assert y.shape.as_list() == [None, 4]
        return y, tape.gradient(y, x, x)

    for got, want in zip(both(x), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert [part.shape for part in both(x[:0])] == [(0, 4), (0, 4)]


def test_padded_sizes_are_few_and_not_much_larger():
    counts = np.arange(1, 3000)
    padded = np.array([int(fused._padded_size(n)) for n in counts[::7]])
    assert np.all(padded >= counts[::7])
    assert np.all(padded <= 1.25 * counts[::7] + 1)
    assert len(set(padded)) <= 4 * 12


def test_gelu_has_no_tail():
    x = tf.constant([-3e4, -1e30, -5.7, float("-inf")])
    np.testing.assert_array_equal(fused.activation("gelu", x), [0, 0, 0, 0])


def test_rows_of_padding_leave_no_nan_with_an_epsilon_of_0():
    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.bfloat16)])
    def gradients(x):
        gamma, beta = tf.ones([16]), tf.zeros([16])
        with tf.GradientTape() as tape:
            tape.watch([x, gamma])
            y = fused.layer_normalization(x, gamma, beta, 0.0)
        return y, *tape.gradient(y, [x, gamma], y)

    x = np.random.default_rng(0).normal(size=(9, 16))  # Padded to 10 rows.
    found = gradients(tf.cast(x, tf.bfloat16))
    for each in found:
        assert np.isfinite(np.asarray(each, "float32")).all()
    y = np.asarray(found[0], "float64")
    np.testing.assert_allclose((y**2).mean(1), 1, rtol=2e-2)
    np.testing.assert_allclose(found[2], (y**2).sum(0), rtol=2e-2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_mode_works_on_what_was_never_traced_before(name):
    fused._compiled_activation.cache_clear()
    call = functools.partial(fused.activation, name)
    x, tangent = tf.constant([-2.0, 0.5, 3.0], tf.float16), tf.ones([3], tf.float16)

    @tf.function
    def both(x):
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
        return accumulator.jvp(y), tape.gradient(y, x)

    forward, backward = both(x)
    np.testing.assert_allclose(forward, backward, rtol=2e-3)


# ---- Adam ----


def test_update_equals_keras_over_many_steps():
    generator = np.random.default_rng(0)
    start = generator.normal(size=(6, 3)).astype("float32")
    theirs = keras.Variable(start)
    adam = keras.optimizers.Adam(1e-2, beta_1=0.8, beta_2=0.95, epsilon=1e-4)
    adam.build([theirs])
    ours, momentum, velocity = (tf.Variable(v) for v in (start, 0 * start, 0 * start))

    @tf.function
    def update(gradient, step):
        fused.apply_adam([ours, momentum, velocity], gradient, step, 1e-2, adam)

    for step in range(1, 31):
        gradient = tf.constant(generator.normal(size=(6, 3)), tf.float32)
        adam.apply([gradient], [theirs])
        update(gradient, tf.constant(step))
    np.testing.assert_allclose(ours, theirs.value, rtol=1e-5)
    for mine, keras_own in ((momentum, adam._momentums), (velocity, adam._velocities)):
        # Sums of terms of both signs and of about 1.
        np.testing.assert_allclose(mine, keras_own[0].value, rtol=1e-5, atol=1e-6)
