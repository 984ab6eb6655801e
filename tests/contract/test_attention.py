"""Long attention in linear memory: the same numbers as Keras', at any length."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

LENGTH, KEYS = 1100, 1000  # No multiples of anything.
RNG = np.random.default_rng(0)
# Of sums of a thousand in any order, over the largest.
TOLERANCE = KEYS**0.5 * tfamp.float_format("float32").epsilon


def drawn(*shape, dtype="float32"):
    return tf.cast(RNG.normal(size=shape), dtype)


def masked(share, *shape):
    return tf.constant(RNG.random(shape) < share)


# No key of the second example: its queries see the mean of all values.
PADDED = tf.sequence_mask([100, 0], KEYS)[:, None, None]
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": masked(0.5, 2, 1, LENGTH, KEYS)},
    "mask of each head": {"mask": masked(0.5, 4, LENGTH, KEYS)},
    "padding": {"mask": PADDED},
    "padding, causal": {"mask": PADDED, "is_causal": True},
    "bias": {"bias": drawn(1, 4, LENGTH, KEYS)},
    "bias of keys": {"bias": drawn(2, 1, 1, KEYS), "is_causal": True},
    "bias of all heads, mask": {"bias": drawn(LENGTH, KEYS), "mask": PADDED},
    "scale": {"scale": 0.5},
    "under XLA": {"mask": PADDED, "is_causal": True, "jit": True},
}


def inputs(length=LENGTH, keys=KEYS, heads=4, dtype="float32"):
    shapes = (2, length, 4, 8), (2, keys, heads, 8), (2, keys, heads, 6)
    return [drawn(*shape, dtype=dtype) for shape in shapes]


def attended(given, jit=False, **options):
    """The output, and the gradients of all that are float."""
    bias = {"bias": options["bias"]} if "bias" in options else {}

    @tf.function(jit_compile=jit)
    def run(given, bias):
        with tf.GradientTape() as tape:
            tape.watch([given, bias])
            output = keras.ops.dot_product_attention(*given, **{**options, **bias})
            loss = tf.reduce_sum(tf.sin(tf.cast(output, tf.float64)))
        return [output, *tf.nest.flatten(tape.gradient(loss, [given, bias]))]

    return run(given, bias)


def agree(found, expected, tolerance=TOLERANCE):
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(tf.cast(each, tf.float64)) for each in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


def used(function, *given):
    """Whether a graph of it goes over blocks."""
    graph = tf.function(function).get_concrete_function(*given).graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return bool({node.op for node in nodes} & {"While", "StatelessWhile"})


@pytest.mark.issue("keras#19418", "keras-hub#1265", "keras-hub#2046")
@pytest.mark.parametrize(
    "case", helpers.names_of(CASES, device=["plain", "padding, causal", "under XLA"])
)
def test_outputs_and_gradients_are_keras(case):
    given, options = inputs(), {**CASES[case]}
    jit = options.pop("jit", False)
    expected = attended(given, **options)
    with helpers.enabled_without_tf32("mixed_bfloat16"):
        agree(attended(given, jit, **options), expected)
        assert used(lambda *x: keras.ops.dot_product_attention(*x, **options), *given)


def test_grouped_heads_are_repeated():
    query, key, value = inputs(heads=2)
    repeated = [tf.repeat(x, 2, axis=2) for x in (key, value)]
    expected = keras.ops.dot_product_attention(query, *repeated)
    with helpers.enabled("mixed_bfloat16"):
        found = keras.ops.dot_product_attention(query, key, value)
    agree([found], [expected])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_errors_are_no_larger_than_keras(dtype, causal):
    given, options = inputs(dtype=dtype), {"is_causal": causal}
    exact = attended([tf.cast(x, tf.float64) for x in given], **options)

    def errors():
        found = zip(attended(given, **options), exact, strict=True)
        return [float(tf.norm(tf.cast(x, tf.float64) - y)) for x, y in found]

    keras_own = errors()
    with helpers.enabled("mixed_bfloat16"):
        own = errors()
    assert all(x <= 1.1 * y for x, y in zip(own, keras_own, strict=True)), own


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_gradients_of_gradients_are_keras(wrap):
    given = inputs()

    def penalty():
        with tf.GradientTape() as outer:
            outer.watch(given)
            with tf.GradientTape() as tape:
                tape.watch(given)
                output = keras.ops.dot_product_attention(*given, is_causal=True)
                loss = tf.reduce_sum(output**3)
            norm = sum(tf.reduce_sum(x**2) for x in tape.gradient(loss, given))
        return outer.gradient(norm, given)

    expected = wrap(lambda: penalty())()
    with helpers.enabled("mixed_bfloat16"):
        agree(wrap(lambda: penalty())(), expected, 4 * TOLERANCE)


LAYERS = {
    "heads": lambda **more: keras.layers.MultiHeadAttention(4, 8, **more),
    "grouped": lambda **more: keras.layers.GroupQueryAttention(8, 4, 2, **more),
}
CALLS = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    # Some queries see no key.
    "mask": {"attention_mask": masked(0.01, 2, LENGTH, LENGTH)},
}


@pytest.fixture(params=LAYERS)
def make(request):
    return lambda **more: LAYERS[request.param](dtype="float32", seed=0, **more)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("rate", [0.0, 0.5], ids=["plain", "dropout"])
def test_layers_are_keras(make, rate, call):
    layer, x = make(dropout=rate), drawn(2, LENGTH, 16)
    expected = layer(x, x, **call)
    with helpers.enabled("mixed_bfloat16"):
        agree([layer(x, x, **call)], [expected])
        assert used(lambda x: layer(x, x, **call), x)


def test_dropout_repeats_its_numbers_in_the_gradient(make):
    layer, x, value = make(dropout=0.5, use_bias=False), drawn(2, LENGTH, 16), None

    @tf.function
    def run(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            output = layer(x, value, key=x, training=True)
        return output, tape.gradient(output, value, output)

    value = drawn(2, LENGTH, 16)
    with helpers.enabled("mixed_bfloat16"):
        outputs, gradients = zip(*(run(value) for _ in range(20)), strict=True)
        whole = layer(x, value, key=x)
    for output, gradient in zip(outputs, gradients, strict=True):
        # The output is linear in the values.
        product = float(tf.reduce_sum(gradient * value))
        assert product == pytest.approx(float(tf.reduce_sum(output**2)), rel=1e-4)
    assert len({float(tf.norm(x)) for x in outputs}) == len(outputs)
    spread = np.std(outputs, 0).mean()
    off = np.abs(np.mean(outputs, 0) - whole).mean()
    assert 0.1 * spread < off < 3 * spread / len(outputs) ** 0.5


def test_return_of_scores_is_keras():
    layer, x = LAYERS["heads"](dtype="float32"), drawn(2, LENGTH, 16)
    with helpers.enabled("mixed_bfloat16"):
        _, scores = layer(x, x, return_attention_scores=True)
    assert scores.shape == (2, 4, LENGTH, LENGTH)


@pytest.mark.issue("keras#19418")
@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
def test_flash_attention_works(mode):
    with helpers.enabled(mode):
        layer = LAYERS["heads"](flash_attention=True)
        inner = keras.Input((None, 16))  # Of unknown length, too.
        model = keras.Model(inner, layer(inner, inner))
        assert np.isfinite(model.predict(drawn(2, LENGTH, 16), verbose=0)).all()
        given = inputs()
        assert used(flash, *given)
        found = flash(*given), flash(*inputs(8, 8))
        assert used(keras.ops.dot_product_attention, *given) == (mode != "float32")
    agree(found[:1], [keras.ops.dot_product_attention(*given)])
    with pytest.raises(ValueError, match="not supported in tensorflow"):
        flash(*given)


def flash(*given):
    return keras.ops.dot_product_attention(*given, flash_attention=True)


@pytest.mark.parametrize(
    ("length", "keywords"),
    [(256, {}), (LENGTH, {"fused_kernels": False})],
    ids=["short", "switched off"],
)
def test_nothing_changes_below_the_length_or_switched_off(length, keywords):
    given = inputs(length, length)
    expected = keras.ops.dot_product_attention(*given)
    with helpers.enabled("mixed_bfloat16", **keywords) as status:
        np.testing.assert_array_equal(keras.ops.dot_product_attention(*given), expected)
        assert not used(keras.ops.dot_product_attention, *given)
    assert "1024" in status.attention
    assert ("flash_attention=True" in status.attention) == bool(keywords)
    assert tfamp.status().attention == "Keras'"


@pytest.mark.training
def test_a_model_trains_on_replicas_and_is_exported(tmp_path):
    x = drawn(4, LENGTH, 16)
    with helpers.enabled("mixed_bfloat16"):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            inner = keras.Input((LENGTH, 16))
            hidden = LAYERS["heads"](dropout=0.1)(inner, inner, use_causal_mask=True)
            model = keras.Model(inner, keras.layers.Dense(1)(hidden))
            model.compile("adam", "mse")
        history = model.fit(x, x[..., :1], epochs=2, verbose=0).history["loss"]
        assert history[1] < history[0]
        tfamp.export(model, tmp_path / "model", sample_inputs=x)
        expected = model.predict(x, verbose=0)
    served = tf.saved_model.load(tmp_path / "model")
    agree([served.serve(x)], [expected], 0.02)
