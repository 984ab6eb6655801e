"""Operators of the user's code that 16 bits fail, or lose the gradients of."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

LOW, in_both = helpers.LOW, helpers.in_both
value_and_gradient = helpers.value_and_gradient
X = tf.random.stateless_normal((4, 16), (1, 2))
layers = keras.layers


# ---- Operators without a kernel ----


def squares(x):
    return tf.reshape(x, (-1, 4, 4)) + 3 * tf.eye(4, dtype=x.dtype)


def boxes(x):
    low = tf.sigmoid(x[:, :2])
    return tf.concat([low, low + tf.cast(0.4, x.dtype)], 1)


def crops(x):
    images = tf.reshape(x, (4, 4, 4, 1))
    return tf.image.crop_and_resize(images, boxes(x), tf.range(4), (2, 2))


def chosen(x):
    return tf.gather(x, tf.image.non_max_suppression(boxes(x), x[:, 0], 2))


def log_gamma(x):
    return tf.raw_ops.Lgamma(x=tf.nn.softplus(x) + 1)


def turned(x):
    """Its gradient refuses bfloat16."""
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.reshape(x, (4, 4, 4, 1)),
        transforms=tf.constant([[1.0, 0.2, 0, 0, 1, 0, 0, 0]]),
        output_shape=[4, 4],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )


ALONE = {
    "rfft": lambda x: tf.abs(tf.signal.rfft(x)),
    "stft": lambda x: tf.abs(tf.signal.stft(x, 8, 4)),
    "dct": lambda x: tf.signal.dct(x),
    "complex": lambda x: tf.abs(tf.complex(x, 2 * x)),
    "crop_and_resize": crops,
    "non_max_suppression": chosen,
    "fake_quant": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -4, 4),
    "lgamma": lambda x: tf.math.lgamma(tf.nn.softplus(x) + 1),
    "raw lgamma": log_gamma,
    "digamma": lambda x: tf.math.digamma(tf.nn.softplus(x) + 1),
    "igamma": lambda x: tf.math.igamma(tf.nn.softplus(x), tf.nn.softplus(x) + 1),
    "erfinv": lambda x: tf.math.erfinv(0.5 * tf.tanh(x)),
    "inverse": lambda x: tf.linalg.inv(squares(x)),
    "solve": lambda x: tf.linalg.solve(squares(x), tf.reshape(x, (4, 4, 4))),
    "logdet": lambda x: tf.linalg.logdet(squares(x) @ squares(x)),
    "keras.ops.det": lambda x: keras.ops.det(squares(x)),
    "keras.ops.norm": lambda x: keras.ops.norm(squares(x), ord=2, axis=(1, 2)),
    "ragged": lambda x: tf.math.lgamma(tf.RaggedTensor.from_tensor(x * x + 1)).values,
    "stft of Keras": lambda x: keras.ops.stft(x, 8, 4, 8)[0],
    "eigenvalues": lambda x: tf.abs(tf.linalg.eigvals(squares(x))) + 0 * x[0, 0],
    "stft with a window": lambda x: tf.abs(
        tf.signal.stft(x, 8, 4, window_fn=tf.signal.hamming_window)
    ),
    "rotation": turned,
    "lrn": lambda x: tf.nn.lrn(tf.reshape(x, (1, 4, 4, 4))),
    "max_pool3d": lambda x: tf.nn.max_pool3d(
        tf.reshape(x, (1, 4, 4, 4, 1)), 2, 2, "SAME"
    ),
}


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", ALONE)
def test_what_16_bits_do_not_have_is_computed_in_float32(name, how, mode):
    low = tf.cast(X, LOW[mode])
    run = value_and_gradient(ALONE[name])
    expected, slope = run(tf.cast(low, "float32"))
    tfamp.enable(mode, on_unsupported="warn")
    found, gradient = helpers.RUNNERS[how](run)(low)
    np.testing.assert_allclose(
        tf.cast(found, "float32"), expected, rtol=0.02, atol=0.05
    )
    assert gradient is not None and gradient.dtype == LOW[mode]
    tolerance = 0.02 * float(tf.reduce_max(tf.abs(slope)))
    dense = [tf.cast(tf.convert_to_tensor(x), "float32") for x in (gradient, slope)]
    np.testing.assert_allclose(*dense, rtol=0.05, atol=tolerance)


@in_both
def test_a_lambda_of_such_operators_trains_and_each_is_told_once(mode, caplog):
    tfamp.enable(mode, on_unsupported="warn")
    spectrum = layers.Lambda(lambda x: tf.abs(tf.signal.rfft(x)))
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16), spectrum])
    model.add(layers.Dense(1))
    with caplog.at_level("WARNING"):
        losses = helpers.fit(model, X, X[:, :1], keras.optimizers.SGD(1e-4), epochs=2)
    assert np.isfinite(losses).all()
    said = tfamp.status().formats_meet
    assert f"no {LOW[mode].name} in rfft" in said and said.count(" in rfft") == 1


def kept(x):
    lengths = 9 * tf.sigmoid(x[:, 0])
    return x * tf.sequence_mask(lengths, tf.constant(16, x.dtype), x.dtype)


COUNTED = {
    "range": lambda x: x * tf.range(x.shape[-1], dtype=x.dtype) / 16,
    "sequence_mask": kept,
}


@pytest.mark.issue("tensorflow#113143", "tensorflow#122049")
@in_both
@pytest.mark.parametrize("name", COUNTED)
def test_a_range_of_16_bits_trains_under_xla(name, mode):
    def losses():
        keras.utils.set_random_seed(0)
        body = [layers.Dense(16), layers.Lambda(COUNTED[name]), layers.Dense(1)]
        model = keras.Sequential([keras.Input((16,)), *body])
        given = {"jit_compile": True, "epochs": 4}
        return helpers.fit(model, X, X[:, :1], keras.optimizers.SGD(0.01), **given)

    expected = losses()
    tfamp.enable(mode, on_unsupported="warn")
    np.testing.assert_allclose(losses(), expected, rtol=0.02)


def twice_pooled(pool, shape):
    run = value_and_gradient(lambda x: pool(tf.reshape(x, shape), 2, 2, "SAME") ** 2)
    return lambda x: run(x)[1]


def bounded(x):
    mean, one = x[:, 0], tf.ones_like(x[:, 0])
    drawn = tf.raw_ops.ParameterizedTruncatedNormal(
        shape=[4, 16], means=mean, stdevs=one, minvals=mean - one, maxvals=mean + one
    )
    return x + 0 * drawn


NOT_BY_XLA = {
    "bounded": bounded,
    "max_pool2d": twice_pooled(tf.nn.max_pool2d, (4, 4, 4, 1)),
    "max_pool3d": twice_pooled(tf.nn.max_pool3d, (1, 4, 4, 4, 1)),
    "categorical": lambda x: (
        x * tf.cast(keras.random.categorical(x, 1, seed=1) >= 0, x.dtype)
    ),
    "truncated_normal": lambda x: (
        x + 0 * tf.random.truncated_normal([16], 0, 1, x.dtype)
    ),
}


@in_both
@pytest.mark.parametrize("name", NOT_BY_XLA)
def test_what_xla_has_in_float32_alone_is_computed_so(name, mode):
    low = tf.cast(X, LOW[mode])
    run = value_and_gradient(NOT_BY_XLA[name])
    expected, slope = run(tf.cast(low, "float32"))
    tfamp.enable(mode, on_unsupported="warn")
    found, gradient = helpers.RUNNERS["xla"](run)(low)
    assert gradient.dtype == LOW[mode]
    for pair in ((found, expected), (gradient, slope)):
        both = [tf.cast(x, "float32") for x in pair]
        np.testing.assert_allclose(*both, rtol=0.05, atol=0.05)


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_an_assertion_of_values_meets_two_formats(how, mode):
    def checked(x):
        tf.debugging.assert_near(x, tf.cast(x, "float32"))
        return x

    tfamp.enable(mode, on_unsupported="warn")
    assert helpers.RUNNERS[how](checked)(tf.cast(X, LOW[mode])).dtype == LOW[mode]


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: tf.debugging.assert_type(x, tf.float32), "float32"),
        (tf.linalg.inv, "must be square|must be equal, but are 4 and 16"),
    ],
    ids=["an assertion of a format", "an operator that fails in float32, too"],
)
def test_what_is_to_fail_says_so_itself(function, says, how):
    tfamp.enable("mixed_bfloat16", on_unsupported="warn")
    kinds = TypeError, ValueError, tf.errors.InvalidArgumentError
    with pytest.raises(kinds, match=says):
        helpers.RUNNERS[how](function)(tf.cast(X, "bfloat16"))


# ---- Functions that make masks for their inputs' format ----


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])  # XLA has no sampler.
@pytest.mark.parametrize("name", ["sampled_softmax_loss", "nce_loss"])
def test_a_sampled_loss_is_finite_where_a_label_is_sampled(name, how, mode):
    def loss(x):
        kernel, bias, labels = x[:, :4], x[:, 0], tf.constant([[0], [1], [2], [3]])
        function = getattr(tf.nn, name)
        return function(kernel, bias, tf.cast(labels, "int64"), x[:, :4], 4, 4)

    tfamp.enable(mode, on_unsupported="warn")
    run = value_and_gradient(loss)
    found, gradient = helpers.RUNNERS[how](run)(tf.cast(X, LOW[mode]))
    assert np.isfinite(found).all()
    assert np.isfinite(tf.cast(gradient, "float32")).all()


LARGEST = float(np.finfo("float32").max)
MASKED = {
    "number first": lambda x, mask: x - 1e9 * mask,
    "NumPy's": lambda x, mask: x - np.float32(1e9) * mask,
    "an integer": lambda x, mask: x - np.int64(10**9) * mask,
    "an array": lambda x, mask: x - np.array(1e9) * mask,
    "a list": lambda x, mask: x - [1e9] * 16 * mask,
    "the format's least": lambda x, mask: x + mask * x.dtype.min,
    "float32's least": lambda x, mask: x - mask * LARGEST,
    "epsilon first": lambda x, mask: 1e-12 + x * 0,
}


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_finite_as_in_float32(name, how, mode):
    tfamp.enable(mode, on_unsupported="warn")
    low, mask = tf.cast(X, LOW[mode]), tf.cast(X > 0, LOW[mode])
    masked = helpers.RUNNERS[how](MASKED[name])(low, mask)
    wide = [tf.cast(x, "float32") for x in (low, mask)]
    expected = MASKED[name](*wide)
    if name == "the format's least":
        expected = wide[0] + wide[1] * float(low.dtype.min)
    np.testing.assert_allclose(tf.cast(masked, "float32"), expected, rtol=0.01)


# ---- Gradients ----

RESIZED = {
    "bicubic": dict(method="bicubic"),
    "antialias": dict(method="bilinear", antialias=True),
    "lanczos": dict(method="lanczos3"),
    "gaussian": dict(method="gaussian"),
    "mitchell": dict(method="mitchellcubic"),
}


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", RESIZED)
def test_resizing_has_the_gradients_of_float32(name, how, mode):
    def resized(x):
        return tf.image.resize(tf.reshape(x, (1, 4, 4, 4)), (6, 6), **RESIZED[name])

    low = tf.cast(X, LOW[mode])
    run = value_and_gradient(resized)
    _, slope = run(tf.cast(low, "float32"))
    tfamp.enable(mode, on_unsupported="warn")
    _, gradient = helpers.RUNNERS[how](run)(low)
    assert gradient.dtype == LOW[mode]
    np.testing.assert_allclose(tf.cast(gradient, "float32"), slope, atol=0.03)


@tf.custom_gradient
def binarized(x):
    """With the usual mask, which is float32."""
    return tf.sign(x), lambda slope: slope * tf.cast(tf.abs(x) < 1, tf.float32)


def looped(x):
    step = lambda i, y: (i + 1, tf.tanh(y))  # noqa: E731
    return tf.while_loop(lambda i, y: i < 2, step, (0, x))[1]


BELOW = {"nothing": tf.identity, "function": tf.function(lambda x: tf.tanh(x) * x)}
BELOW |= {"loop": tf.function(looped)}
BELOW |= {"its like": tf.function(lambda x: binarized(x) * x)}


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("name", BELOW)
def test_a_gradient_of_ones_own_may_be_float32(name, how, mode):
    low = tf.cast(X, LOW[mode])
    run = value_and_gradient(lambda x: binarized(BELOW[name](x)))
    _, slope = run(tf.cast(low, "float32"))
    tfamp.enable(mode, on_unsupported="warn")
    found, gradient = helpers.RUNNERS[how](run)(low)
    assert found.dtype == gradient.dtype == LOW[mode]
    np.testing.assert_allclose(tf.cast(gradient, "float32"), slope, atol=0.02)


@in_both
def test_a_gradient_of_ones_own_that_fails_is_called_once(mode):
    calls = []

    @tf.custom_gradient
    def failing(x):
        def gradient(slope):
            calls.append(slope)
            raise TypeError("the user's own")

        return 2 * x, gradient

    tfamp.enable(mode, on_unsupported="warn")
    run = value_and_gradient(tf.function(lambda x: failing(x) + 1))
    with pytest.raises(TypeError, match="the user's own"):
        run(tf.cast(X, LOW[mode]))
    assert len(calls) == 1


@in_both
def test_a_gradient_that_is_handed_to_a_tape_may_be_float32(mode):
    tfamp.enable(mode, on_unsupported="warn")
    low = tf.cast(X, LOW[mode])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(low)
        y = BELOW["function"](low)
    alone = tape.gradient(y, low, output_gradients=tf.ones([4, 16]))
    listed = tape.gradient([y, y], [low], output_gradients=[tf.ones([4, 16])] * 2)
    assert alone.dtype == listed[0].dtype == LOW[mode]
    np.testing.assert_array_equal(2 * alone, listed[0])


@in_both
def test_a_derivative_in_forward_mode_may_lack_a_kernel(mode):
    """In float16 a host has the operator, and not its derivative."""
    low = tf.cast(1 + X * X, LOW[mode])
    tfamp.enable(mode, on_unsupported="warn")
    one = tf.ones_like(low)
    with tf.autodiff.ForwardAccumulator(low, one) as forward:
        with tf.autodiff.ForwardAccumulator(low, one) as inner:
            y = tf.math.lgamma(low)
        slope = inner.jvp(y)
    expected = tf.math.polygamma(1.0, tf.cast(low, "float32"))
    found = tf.cast(forward.jvp(slope), "float32")
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.01)


@in_both
def test_a_gradient_that_is_none_in_float32_stays_none(mode):
    low = tf.cast(X, LOW[mode])
    tfamp.enable(mode, on_unsupported="warn")
    for function in (tf.floor, tf.stop_gradient, tf.round):
        assert value_and_gradient(function)(low)[1] is None


def functional():
    inputs = keras.Input((8, 8, 1))
    features = layers.Conv2D(4, 3, activation="relu", name="last")(inputs)
    outputs = layers.Dense(3)(layers.Flatten()(features))
    model = keras.Model(inputs, outputs)
    return keras.Model(model.inputs, [model.get_layer("last").output, model.output])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.last, self.flat = layers.Conv2D(4, 3, activation="relu"), layers.Flatten()
        self.head = layers.Dense(3)

    def call(self, x):
        features = self.last(x)
        return features, self.head(self.flat(features))


def class_activation(model, images):
    with tf.GradientTape() as tape:
        features, scores = model(images)
        best = scores[:, 0] + 0.5 * tf.reduce_mean(features, (1, 2, 3))
        plain = scores[:, 0]
        both = tf.stack([best, plain])
    return tape.gradient(both, features), features


@in_both
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("make", [functional, Subclassed], ids=["functional", "own"])
def test_a_gradient_by_what_a_model_returns_is_that_of_float32(make, how, mode):
    images = tf.random.stateless_normal((2, 8, 8, 1), (1, 2))

    def run():
        keras.utils.set_random_seed(0)
        model = make()
        model(images)
        called = helpers.RUNNERS[how](lambda x: class_activation(model, x))
        return called(images)

    expected, _ = run()
    tfamp.enable(mode, on_unsupported="warn")
    found, features = run()
    assert found.dtype == features.dtype == "float32"
    largest = float(tf.reduce_max(tf.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.02 * largest)


# ---- Loops and branches ----


class Cell(layers.Layer):
    """Adds time constants of a `tf.Variable`, and noise, to a state."""

    state_size = output_size = 8

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))
        self.rate = tf.Variable(tf.fill((8,), 0.5))

    def call(self, x, states):
        new = tf.tanh(x @ self.kernel) + 1e-3 * tf.random.stateless_normal((8,), (1, 2))
        state = self.rate * states[0] + (1 - self.rate) * new
        return state, [state]


@in_both
@pytest.mark.parametrize(
    "keywords", helpers.names_of([{}, {"jit_compile": True}], [{}])
)
def test_a_cell_that_meets_float32_trains(mode, keywords):
    def losses():
        keras.utils.set_random_seed(0)
        body = [keras.Input((4, 4)), layers.RNN(Cell()), layers.Dense(1)]
        data = tf.reshape(X, (4, 4, 4)), X[:, :1], keras.optimizers.SGD(0.1)
        return helpers.fit(keras.Sequential(body), *data, epochs=4, **keywords)

    expected = losses()
    tfamp.enable(mode, on_unsupported="warn")
    np.testing.assert_allclose(losses(), expected, rtol=0.02)


def by_while(h, f):
    return tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + f), [0, h])[1]


def by_autograph(h, f):
    state = h
    for _ in tf.range(3):
        state = state + f
    return state


def by_autograph_while(h, f):
    state, i = h, 0
    while i < tf.size(h) - 13:
        state = state * f
        i += 1
    return state


def by_array(h, f):
    array = tf.TensorArray(h.dtype, 4)
    for i in range(4):
        array = array.write(i, h[i] + f)
    array = array.scatter([0, 1], array.stack()[:2] + f)
    return tf.TensorArray(h.dtype, 4).unstack(array.stack() + f).stack()


LOOPS = {
    "while_loop": by_while,
    "autograph for": by_autograph,
    "autograph while": by_autograph_while,
    "array": by_array,
    "scan": lambda h, f: tf.scan(lambda s, x: s * f + x, h),
    "foldl": lambda h, f: tf.foldl(lambda s, x: s * f + x, h),
    "foldr": lambda h, f: tf.foldr(lambda s, x: s * f + x, h),
    "map_fn": lambda h, f: tf.map_fn(lambda x: x + f, h),
    "map of a function": lambda h, f: tf.map_fn(tf.math.erfinv, 0.1 * h),
    "keras.ops.while_loop": lambda h, f: keras.ops.while_loop(
        lambda i, s: i < 3, lambda i, s: (i + 1, s + f), (0, h)
    )[1],
    "keras.ops.fori_loop": lambda h, f: keras.ops.fori_loop(
        0, 3, lambda i, s: s + f, h
    ),
    "keras.ops.scan": lambda h, f: keras.ops.scan(lambda s, x: (s * f + x, s), h[0], h)[
        0
    ],
}


def from_zeros(h, f):
    step = lambda i, s: (i + 1, h[i] * 2)  # noqa: E731
    return tf.while_loop(lambda i, s: i < 3, step, (0, f))[1]


def until_near(h, f):
    error = f + 9
    while error > 0.1:
        h = h / 2
        error = tf.reduce_max(tf.abs(h))
    return error


def in_float32_array(h, f):
    array = tf.TensorArray(tf.float32, 4)
    for i in range(4):
        array = array.write(i, 2 * h[i])
    return array.scatter([0], h[:1]).stack()


# Loops whose state, or array, begins in float32, and gets 16 bits.
BEGUN = {
    "while_loop": from_zeros,
    "autograph": until_near,
    "array": in_float32_array,
    "split": lambda h, f: tf.TensorArray(tf.float32, 2).split(h, [2, 2]).concat(),
    "scan": lambda h, f: tf.scan(lambda s, x: x * 2, h, f),
    "foldl": lambda h, f: tf.foldl(lambda s, x: x * 2, h, f),
    "map_fn": lambda h, f: tf.map_fn(
        lambda x: x * 2, h, fn_output_signature=tf.float32
    ),
    "keras.ops.scan": lambda h, f: keras.ops.scan(lambda s, x: (x * 2, s), f, h)[1],
}


STATES = {
    **{f"low {name}": (loop, None) for name, loop in LOOPS.items()},
    **{f"float32 {name}": (loop, "float32") for name, loop in BEGUN.items()},
}


@in_both
@pytest.mark.parametrize("name", STATES)
def test_a_loops_state_keeps_the_format_that_it_begins_in(name, mode):
    (loop, wide), dtype = STATES[name], LOW[mode]
    low, half = tf.cast(tf.tanh(X), dtype)[:, 0], tf.constant(0.5)
    expected = tf.function(loop)(tf.cast(low, "float32"), half)
    tfamp.enable(mode, on_unsupported="warn")
    run = tf.function(lambda h, f: value_and_gradient(lambda x: loop(x, f))(h))
    result, gradient = run(low, half)
    assert (result.dtype, gradient.dtype) == (wide or dtype, dtype)
    rtol = 0.02 if wide else 0.05
    np.testing.assert_allclose(tf.cast(result, "float32"), expected, rtol=rtol)


@in_both
def test_branches_of_two_formats_return_float32_and_are_traced_once(mode):
    tfamp.enable(mode, on_unsupported="warn")
    low, wide, traced = tf.cast(X, LOW[mode]), X, []

    def first():
        traced.append("first")
        return low

    @tf.function
    def switched(i):
        return tf.switch_case(i, [first, lambda: low + wide, lambda: wide])

    @tf.function
    def nested(i):
        return tf.cond(i > 1, lambda: switched(i), lambda: {"a": low}["a"])

    @tf.function
    def by_if(i):
        if i > 1:
            y = low * wide
        else:
            y = low
        return y

    @tf.function
    def with_break(i):
        y = low
        for j in tf.range(3):
            if j > i:
                break
            y = y * wide
        return y

    for i in map(tf.constant, range(3)):
        assert switched(i).dtype == nested(i).dtype == by_if(i).dtype == "float32"
        assert with_break(i).dtype == LOW[mode]
    assert traced == ["first"]


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_branches_of_other_formats_fail_as_ever(how):
    tfamp.enable("mixed_bfloat16", on_unsupported="warn")
    low, calls = tf.cast(X, "bfloat16"), []

    def failing():
        calls.append("called")
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        run = lambda: tf.switch_case(tf.constant(1), [lambda: low, failing])  # noqa: E731
        helpers.RUNNERS[how](run)()
    assert len(calls) == 1
    with pytest.raises(TypeError, match="int32|type"):
        tf.function(tf.cond)(tf.constant(True), lambda: low, lambda: tf.constant(1))


# ---- What still fails ----


class Strict(layers.Layer):
    """Takes float32 alone, by its own check, as a library may."""

    def call(self, x):
        if x.dtype != "float32":
            raise TypeError(f"float32 is needed, not {x.dtype}")
        return x


def strict():
    return Strict(name="strict")


@in_both
@pytest.mark.parametrize(
    "make",
    [
        strict,
        lambda: layers.Lambda(Strict().call, name="strict"),
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(4), strict()]),
    ],
    ids=["layer", "Lambda", "in a model"],
)
def test_an_error_about_16_bits_names_the_override(make, mode):
    tfamp.enable(mode, on_unsupported="warn")
    with pytest.raises((TypeError, NotImplementedError)) as raised:
        make()(layers.Dense(4)(keras.Input((4,))))
    (note,) = raised.value.__notes__
    assert "'strict' computes in" in note and "overrides={'strict': 'float32'}" in note
    tfamp.enable(mode, on_unsupported="warn", overrides={"strict": "float32"})
    assert make()(layers.Dense(4)(keras.Input((4,)))).shape == (None, 4)


@in_both
def test_a_dtype_that_is_asked_for_is_float32_with_the_rest(mode):
    tfamp.enable(mode, on_unsupported="warn")
    rate = tf.cast(1 + X * X, LOW[mode])
    drawn = [
        tf.random.stateless_gamma(rate.shape, (1, 2), rate, dtype=rate.dtype),
        tf.random.poisson([], rate, dtype=rate.dtype),
        tf.random.normal(rate.shape, rate, tf.ones([]), dtype=rate.dtype),
    ]
    assert all(np.isfinite(tf.cast(each, "float32")).all() for each in drawn)
