"""Gradients that TensorFlow and Keras get wrong are right where 16 bits are in use."""

import bias_errors
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

# Half a unit in the last place of bfloat16 is 2**-9; the rest is the sum's.
TOLERANCE = 1e-2
BF16 = tf.bfloat16
# Models of the mode before are meant to keep it.
pytestmark = pytest.mark.filterwarnings("ignore:.*were built before")


EVERY_LAYER = [*bias_errors.LAYERS, *bias_errors.RECURRENT]
CELLS = [
    (name, f"{how}, graph") for name in EVERY_LAYER for how in ("policy", "rewrite")
]
CELLS += [(name, "policy, XLA") for name in ("Dense", "Conv2D", "LSTM")]


@pytest.fixture
def installed():
    with helpers.enabled("mixed_bfloat16"):
        yield


def gradient(x, bias, upstream=None, **keywords):
    """The gradient of a bias that is added to x."""
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = tf.nn.bias_add(x, bias, **keywords)
    return tape.gradient(y, bias, upstream)


def operations(dtype=BF16):
    """The operations by type in a bias gradient that is traced now."""
    arguments = tf.ones((4, 3), dtype), tf.ones((3,), dtype)
    graph = tf.function(gradient).get_concrete_function(*arguments).graph
    return {operation.type: operation for operation in graph.get_operations()}


# ---- Where they are ----


@pytest.mark.parametrize(
    ("mode", "keywords", "right"),
    [
        ("float32", {}, False),
        ("mixed_bfloat16", {}, True),
        ("mixed_float16", {}, True),
        ("float32", {"overrides": {"head": "mixed_bfloat16"}}, True),
        ("mixed_bfloat16", {"graph_rewrite": True}, True),
    ],
    ids=["float32", "bfloat16", "float16", "override", "graph rewrite"],
)
def test_stock_keras_in_float32_and_put_right_with_16_bits(mode, keywords, right):
    apply = keras.Optimizer.apply
    with helpers.enabled(mode, **keywords) as status:
        assert ("summed in float32" in status.bias_gradients) == right
        assert "Keras'" in status.embedding_gradients
        assert ("BiasAddGrad" in operations()) == (not right)
        # Replaced for compiled updates, in all modes but stock Keras' float32.
        assert (keras.Optimizer.apply is apply) == (not right)
    assert "TensorFlow's" in tfamp.status().bias_gradients
    assert "Keras'" in tfamp.status().embedding_gradients
    assert "BiasAddGrad" in operations() and keras.Optimizer.apply is apply


def test_they_end_with_a_change_to_float32_and_with_an_error():
    with helpers.enabled("mixed_bfloat16"):
        tfamp.enable("float32")
        assert "BiasAddGrad" in operations()
    with pytest.raises(ValueError, match="overrides"):
        tfamp.enable("mixed_bfloat16", overrides={"(": "float32"})
    assert "BiasAddGrad" in operations()


def test_a_traced_function_keeps_its_gradient():
    x, bias = tf.ones((4096, 1), BF16), tf.zeros((1,), BF16)
    function = tf.function(gradient)
    with helpers.enabled("mixed_bfloat16"):
        assert float(function(x, bias)[0]) == 4096
    assert float(function(x, bias)[0]) == 4096


# ---- Biases ----


@pytest.mark.issue("tensorflow#86378")
@pytest.mark.parametrize(("name", "column"), CELLS)
def test_bias_gradient_is_the_sum_of_the_upstream_gradient(name, column):
    try:
        assert bias_errors.error(name, column) < TOLERANCE
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError) as error:
        if "channels first" not in name or "NHWC" not in str(error):
            raise
        pytest.skip("this CPU has no convolution with channels first")


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_other_dtypes_keep_tensorflows_gradient(installed, dtype):
    assert "BiasAddGrad" in operations(dtype)


@pytest.mark.parametrize("shape", [(4096, 2), (None, 2), (8, 16, 32, 2), None])
@pytest.mark.parametrize("jit", [False, True])
def test_shapes_known_only_when_it_runs(installed, shape, jit):
    spec, bias = tf.TensorSpec(shape, BF16), tf.zeros((2,), BF16)
    function = tf.function(
        lambda x, upstream: gradient(x, bias, upstream), [spec] * 2, jit_compile=jit
    )
    ones = tf.ones(shape if shape and None not in shape else (4096, 2), BF16)
    total = int(tf.size(ones)) / 2
    np.testing.assert_array_equal(tf.cast(function(ones, ones), "float32"), [total] * 2)


def test_channels_first(installed):
    x, bias = tf.ones((7, 3, 90, 9), BF16), tf.zeros((3,), BF16)
    got = tf.cast(gradient(x, bias, data_format="NCHW"), "float32")
    np.testing.assert_allclose(got, np.full(3, 7 * 90 * 9), rtol=2.0**-8)


def test_second_derivatives(installed):
    x, bias = tf.ones((16, 2), BF16), tf.fill((2,), tf.cast(3.0, BF16))
    with tf.GradientTape() as outer:
        outer.watch(bias)
        with tf.GradientTape() as inner:
            inner.watch(bias)
            y = tf.nn.bias_add(x, bias) ** 2
        first = inner.gradient(y, bias)
    second = outer.gradient(first, bias)
    for found, expected in ((first, 128.0), (second, 32.0)):
        np.testing.assert_array_equal(tf.cast(found, "float32"), [expected] * 2)


def test_float32_is_used_where_there_is_a_gpu(installed, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    assert operations()["Sum"].inputs[0].dtype == tf.float32
    assert gradient(tf.ones((4, 3), BF16), tf.ones((3,), BF16)).dtype == BF16


def test_saved_model_holds_the_plain_addition(installed, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    helpers.fit(model, np.ones((4, 2)), np.ones((4, 3)))
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    definition = loaded.signatures["serving_default"].graph.as_graph_def()
    functions = definition.library.function
    nodes = [*definition.node, *(n for f in functions for n in f.node_def)]
    assert "BiasAdd" in {node.op for node in nodes}


# ---- Embeddings ----

ROWS = ([[1.0, 2.0], [3.0, -2.5], [1.0, 1.0]], [1, 1, 2], [4, 2])
DENSE = [[0.0, 0.0], [4.0, -0.5], [1.0, 1.0], [0.0, 0.0]]


def train(optimizer, gradient, steps=4):
    variable = keras.Variable(np.ones((4, 2), "float32"))
    optimizer.build([variable])
    for _ in range(steps):
        optimizer.apply([gradient], [variable])
    return np.asarray(variable)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "name", ["momentum", "AdamW", "RMSprop", "global clipping", "accumulation"]
)
def test_rows_count_as_their_sum_on_request(name, scaled):
    def made():
        inner = helpers.OPTIMIZERS[name]()
        return tfamp.LossScaleOptimizer(inner, 1.0, dynamic=False) if scaled else inner

    with helpers.enabled("float32", sum_embedding_gradients=True):
        dense = train(made(), tf.constant(DENSE))
        assert np.all(dense[1:3] != 1)
        found = train(made(), tf.IndexedSlices(*map(tf.constant, ROWS)))
    np.testing.assert_allclose(found, dense, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "jit"),
    [
        *(("float32", False), ("mixed_bfloat16", True), ("mixed_float16", False)),
        *helpers.whole_runs(
            [("float32", True), ("mixed_bfloat16", False), ("mixed_float16", True)]
        ),
    ],
)
def test_models_move_as_with_a_one_hot_product(mode, jit):
    """A dense layer over one-hot vectors has the gradient of an embedding, dense."""
    ids = np.array([[1, 1, 1, 2], [0, 1, 2, 2]])
    one_hot = np.eye(3, dtype="float32")[ids]
    start = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")

    def fit(first, inputs):
        model = keras.Sequential([first, keras.layers.GlobalAveragePooling1D()])
        model.build(inputs.shape)
        model.layers[0].set_weights([start])
        adam = keras.optimizers.Adam(0.05, global_clipnorm=0.1)
        helpers.fit(model, inputs, np.ones((2, 4)), adam, jit_compile=jit, epochs=4)
        return model.layers[0].get_weights()[0]

    with helpers.enabled(mode, sum_embedding_gradients=True):
        embedded = fit(keras.layers.Embedding(3, 4), ids)
        product = fit(keras.layers.Dense(4, use_bias=False), one_hot)
    np.testing.assert_allclose(embedded, product, atol=0.02)  # Rounds to 16 bits.
    assert np.abs(embedded - start).max() > 0.1


def test_a_mode_leaves_the_optimizer_as_it_is():
    """Adam's second moment of an embedding whose rows occur several times."""
    ids = np.array([[1, 1, 1, 2], [0, 1, 2, 2]])

    def velocities(mode, **keywords):
        keras.utils.set_random_seed(0)
        with helpers.enabled(mode, **keywords):
            stack = keras.layers.Embedding(3, 4), keras.layers.GlobalAveragePooling1D()
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *stack])
            adam = keras.optimizers.Adam(0.05)
            helpers.fit(model, ids, np.ones((2, 4)), adam)
            return np.array(adam._velocities[0])

    stock = velocities("float32")
    summed = velocities("float32", sum_embedding_gradients=True)
    assert np.max(summed / stock) > 1.5
    for mode in ("mixed_bfloat16", "mixed_float16"):
        np.testing.assert_allclose(velocities(mode), stock, rtol=0.05)
        found = velocities(mode, sum_embedding_gradients=True)
        np.testing.assert_allclose(found, summed, rtol=0.05)
