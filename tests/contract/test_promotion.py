"""Where float32 and 16 bits meet in an operator of TensorFlow, float32 wins."""

import inspect
import re

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

LOW, in_both = helpers.LOW, helpers.in_both
WIDE = tf.constant(np.random.default_rng(1).uniform(0.1, 1.1, (4, 4)), tf.float32)
NARROW = tf.constant(np.random.default_rng(0).uniform(0.1, 1.1, (4, 4)), tf.float32)
ROWS = tf.constant([0, 2])


def branching(h, f):
    if tf.reduce_sum(f) > 0:
        y = h + f
    else:
        y = f
    return y


# Functions of `h`, of 16 bits, and `f`, of float32.
OPERATORS = {
    "+": lambda h, f: h + f,
    "reversed -": lambda h, f: f - h,
    "/": lambda h, f: h / f,
    "**": lambda h, f: f**h,
    "@": lambda h, f: h @ f,
    ">": lambda h, f: tf.cast(h > f, "float32") + 0 * f,
    "noise": lambda h, f: h + 0 * tf.random.normal([4, 4]) + 0 * f,
    "variable": lambda h, f: h * tf.Variable(tf.ones([4, 4])) + 0 * f,
    "matmul": lambda h, f: tf.matmul(h, f, transpose_b=True),
    "matvec": lambda h, f: tf.linalg.matvec(h, f),
    "tensordot": lambda h, f: tf.tensordot(h, f, 1),
    "einsum": lambda h, f: tf.einsum("ij,jk->ik", h, f),
    "concat": lambda h, f: tf.concat([h, f], 0),
    "stack": lambda h, f: tf.stack([h, f]),
    "add_n": lambda h, f: tf.add_n([h, f]),
    "where": lambda h, f: tf.where(f > 0.7, h, f),
    "maximum": lambda h, f: tf.maximum(h, f),
    "squared difference": lambda h, f: tf.math.squared_difference(h, f),
    "clip": lambda h, f: tf.clip_by_value(h, 0.1 * f, f),
    "bias": lambda h, f: tf.nn.bias_add(h, f[0]),
    "convolution": lambda h, f: tf.nn.conv1d(h[None], f[None], 1, "SAME"),
    "cross entropy": lambda h, f: tf.nn.softmax_cross_entropy_with_logits(h, f),
    "gather": lambda h, f: tf.gather(h, ROWS) * tf.gather(f, ROWS),
    "scatter": lambda h, f: tf.tensor_scatter_nd_update(h, ROWS[:, None], f[:2]),
    "branch": branching,
    "list": lambda h, f: tf.convert_to_tensor([h, f]),
    "sum of a list": lambda h, f: keras.ops.sum([h, f], axis=0),
    "cond": lambda h, f: tf.cond(f[0, 0] > 0.5, lambda: h * 2, lambda: f),
    "keras.ops.cond": lambda h, f: keras.ops.cond(f[0, 0] > 2, lambda: h, lambda: f),
    "float32 diagonal": lambda h, f: tf.linalg.LinearOperatorDiag(f[0]).matmul(h),
    "matrix of 16 bits": lambda h, f: tf.linalg.LinearOperatorFullMatrix(h).matmul(f),
    "vectorized_map": lambda h, f: tf.vectorized_map(
        lambda row: tf.tensordot(row, f, 1), h
    ),
}
EAGER_MADE = {"variable"}  # A `tf.function` makes variables once.


@pytest.mark.issue("tensorflow#49460")
@in_both
@pytest.mark.parametrize("how", helpers.RUNNERS)
@pytest.mark.parametrize("name", helpers.names_of(OPERATORS, device=["@"]))
def test_operators_compute_in_float32(name, how, mode):
    """Values and gradients are float32's of the same numbers, each in its format."""
    if how != "eager" and name in EAGER_MADE:
        pytest.skip("makes a variable")
    low, zero = tf.cast(NARROW, LOW[mode]), tf.UnconnectedGradients.ZERO
    run = helpers.value_and_gradient(OPERATORS[name], unconnected_gradients=zero)
    expected, slopes = run(tf.cast(low, "float32"), WIDE)
    with helpers.enabled_without_tf32(mode):
        found, gradients = helpers.RUNNERS[how](run)(low, WIDE)
    # Eagerly one branch alone is called, and what it returns has its own format.
    alone = how == "eager" and name in {"cond", "keras.ops.cond"}
    branch = {"cond": LOW[mode], "keras.ops.cond": tf.float32}.get(name)
    assert found.dtype == (branch if alone else tf.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, slope, dtype in zip(
        gradients, slopes, (LOW[mode], "float32"), strict=True
    ):
        assert gradient.dtype == dtype
        dense = [tf.cast(tf.convert_to_tensor(x), "float32") for x in (gradient, slope)]
        np.testing.assert_allclose(*dense, rtol=0.02, atol=0.02)


ERRORS = {
    "shapes": lambda h, f: tf.concat([h, f[:, :2]], 0),
    "shapes of one format": lambda h, f: tf.concat([f, f[:, :2]], 0),
    "a product of one format": lambda h, f: tf.matmul(f, f[:2]),
    "float64": lambda h, f: f + tf.cast(f, "float64"),
    "two of 16 bits": lambda h, f: tf.cast(f, "bfloat16") + tf.cast(f, "float16"),
    "strings": lambda h, f: f + tf.constant("a"),
    "integers": lambda h, f: f + ROWS[0],
}


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", ERRORS)
def test_what_is_an_error_in_float32_stays_tensorflows_own(name, how):
    low = tf.cast(NARROW, "bfloat16")

    def said(h):
        with pytest.raises((TypeError, ValueError, tf.errors.OpError)) as raised:
            helpers.RUNNERS[how](ERRORS[name])(h, WIDE)
        text = re.sub(r"\d+", "0", str(raised.value))
        return raised.type, text.split(" [Op:")[0].split("File ")[0]

    # Of shapes, the error is that of float32 beside float32.
    expected = said(tf.cast(low, "float32") if name == "shapes" else low)
    tfamp.enable("mixed_bfloat16")
    assert said(low) == expected


def test_nothing_is_replaced_in_float32_or_after_disable():
    low = tf.cast(NARROW, "bfloat16")
    with helpers.enabled("mixed_bfloat16"):
        assert (low + WIDE).dtype == "float32"
    for mode in ("float32", None):
        if mode:
            tfamp.enable(mode)
        with pytest.raises(tf.errors.InvalidArgumentError, match="was expected to be"):
            low + WIDE
        tfamp.disable()


class Sampling(keras.layers.Layer):
    """Adds noise in float32 to what it gets in 16 bits."""

    def call(self, x):
        return x + 0.01 * tf.random.normal(tf.shape(x))


def test_each_place_is_said_once_with_the_users_line(caplog):
    tfamp.enable("mixed_bfloat16")
    body = [keras.layers.Dense(8), Sampling(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *body])
    model.compile("sgd", "mse")
    with caplog.at_level("WARNING"):
        for _ in range(2):
            model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    lines, first = inspect.getsourcelines(Sampling.call)
    line = first + len(lines) - 1
    said = [x.getMessage() for x in caplog.records if " meet in " in x.getMessage()]
    assert said == [
        f"{__file__}:{line}: float32 and bfloat16 meet in AddV2: computed in float32"
    ]


class Memory(keras.layers.Layer):
    """Holds a `tf.Variable`, a mask and positions in float32, and mixes them in."""

    def build(self, shape):
        self.scale = tf.Variable(tf.ones(shape[-1]))
        self.codes = self.add_weight(shape=(8, shape[-1]), name="codes")

    def call(self, x):
        positions = tf.cast(tf.range(tf.shape(x)[-1]), "float32")
        x = tf.concat([x * self.scale, x + 0.01 * positions], -1)
        near = tf.matmul(x[:, : self.codes.shape[1]], self.codes, transpose_b=True)
        return tf.where(near > 1e6, 0.0, tf.concat([x, near], -1)[:, :8])


@pytest.mark.device
@in_both
@pytest.mark.parametrize(
    "keywords",
    helpers.names_of([{}, {"run_eagerly": True}, {"jit_compile": True}], [{}]),
)
def test_layers_of_ones_own_train_as_in_float32(mode, keywords):
    def loss(mode):
        keras.utils.set_random_seed(0)
        with helpers.enabled(mode):
            body = [keras.layers.Dense(8), Memory(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *body])
            x = np.random.default_rng(0).normal(size=(32, 4))
            sgd = keras.optimizers.SGD(0.01)
            return helpers.fit(model, x, x[:, :1], sgd, epochs=3, **keywords)

    np.testing.assert_allclose(loss(mode), loss("float32"), rtol=0.02)


def by_python(v, f):
    return tf.ensure_shape(tf.py_function(lambda x: x, [f], v.dtype), [4, 4])


# Functions of `v`, a `tf.Variable` of 16 bits or of float32, and `f`, of the other.
STORED = {
    "assign": lambda v, f: v.assign(f),
    "a sum": lambda v, f: v.assign(0.9 * v + tf.reduce_mean(tf.cast(f, v.dtype)) + f),
    "assign_sub": lambda v, f: v.assign_sub(f),
    "scatter": lambda v, f: v.scatter_nd_update([[0], [1], [2], [3]], f),
    "slices": lambda v, f: v.scatter_add(tf.IndexedSlices(f, tf.range(4))),
    "convert": lambda v, f: v.assign(tf.convert_to_tensor(f, v.dtype)),
    "py_function": lambda v, f: v.assign(by_python(v, f)),
}


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        *((name, dtype, mode) for mode, dtype in LOW.items() for name in STORED),
        *((x, tf.float32, "mixed_bfloat16") for x in STORED if x != "py_function"),
    ],
)
def test_what_is_stored_is_cast(name, how, dtype, mode):
    """As Keras' own modes do: what has 16 bits there was never float32."""
    given = WIDE if dtype != "float32" else tf.cast(NARROW, LOW[mode])
    variable, wide = (tf.Variable(tf.zeros([4, 4], x)) for x in (dtype, "float32"))
    STORED[name](wide, tf.cast(given, "float32"))
    tfamp.enable(mode, on_unsupported="warn")

    def store(f):
        STORED[name](variable, f)
        return tf.identity(variable)

    found = helpers.RUNNERS[how](store)(given)
    assert found.dtype == dtype
    rtol = 1e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(tf.cast(found, "float32"), wide, rtol=rtol)


@in_both
@pytest.mark.parametrize("wanted", ["float32", "low"])
def test_a_signature_of_another_format_has_its_arguments_cast(wanted, mode):
    low = tf.cast(NARROW, LOW[mode])
    dtype, given = (LOW[mode], WIDE) if wanted == "low" else ("float32", low)
    helper = tf.function(tf.nn.gelu, [tf.TensorSpec([None, 4], dtype)])
    tfamp.enable(mode, on_unsupported="warn")
    run = helpers.value_and_gradient(helper)
    for how in ("eager", "graph"):
        found, gradient = helpers.RUNNERS[how](run)(given)
        assert found.dtype == dtype and gradient.dtype == given.dtype
    with pytest.raises(TypeError, match="Can not cast"):
        helper(tf.cast(WIDE, "float64"))


# ---- Numbers that float16 cannot hold ----

# Functions of `h`, in float16; of small numbers, and of 0.
NUMBERS = {
    "+": lambda h: h + 1e-10,
    "*": lambda h: h * 1e-10,
    "/": lambda h: h / (h + 1e-8),
    "log": lambda h: tf.math.log(h + 1e-10),
    "mask": lambda h: tf.nn.softmax(h + (1.0 - tf.cast(h > 0, h.dtype)) * -1e9),
    "where": lambda h: tf.where(h > 0, h, -1e9),
    "maximum": lambda h: tf.maximum(h, 1e-12),
    "clip": lambda h: tf.clip_by_value(h, 1e-10, 1.0),
    "l2_normalize": lambda h: tf.math.l2_normalize(h, axis=-1),
    "epsilon": lambda h: tf.math.l2_normalize(h, -1, epsilon=1e-12),
    "keras.ops.log": lambda h: keras.ops.log(keras.ops.add(h, 1e-10)),
    "keras.ops.maximum": lambda h: keras.ops.maximum(h, 1e-12),
    "keras.ops.clip": lambda h: keras.ops.clip(h, 1e-10, 1.0),
    "keras.ops.where": lambda h: keras.ops.where(h > 0, h, -1e9),
}


@pytest.mark.parametrize("how", ["graph", "xla"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_float16_cannot_hold_make_an_operator_float32(name, how):
    low = tf.constant([[1e-4, 2e-4], [0.0, 1.0]], "float16")
    wanted = NUMBERS[name](tf.cast(low, "float32"))
    tfamp.enable("mixed_float16")
    found = helpers.RUNNERS[how](NUMBERS[name])(low)
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


FITTING = {
    "numbers that it holds": lambda h: tf.maximum(h, 1e-7) + 60000.0 - 0.5,
    "infinity": lambda h: tf.where(h > 0, h, float("-inf")),
    "asked for": lambda h: h + tf.constant(1e-12, "float16"),
    "cast": lambda h: h + tf.cast(1e-12, h.dtype),
}


@pytest.mark.parametrize("how", helpers.RUNNERS)
@pytest.mark.parametrize("name", FITTING)
def test_other_numbers_change_nothing(name, how):
    tfamp.enable("mixed_float16")
    low = tf.constant([[1e-4, 2e-4]], "float16")
    assert helpers.RUNNERS[how](FITTING[name])(low).dtype == "float16"


def test_status_has_the_places_of_this_session():
    assert tfamp.enable("mixed_float16").formats_meet == "none seen"
    low = tf.cast(NARROW, "float16")
    tf.function(lambda: tf.maximum(low, 1e-12) + WIDE)()
    assert low + WIDE is not None
    said = tfamp.status().formats_meet
    assert f"{__file__}:" in said
    assert "1e-12 is lost in float16 in maximum" in said
    assert "float32 and float16 meet in AddV2" in said
    tfamp.disable()
    assert tfamp.enable("mixed_bfloat16").formats_meet == "none seen"
