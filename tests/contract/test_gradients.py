"""Gradients that TensorFlow and Keras get wrong are right where 16 bits are in use."""

import contextlib
import importlib.util
import pathlib
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
# Half a unit in the last place of bfloat16 is 2**-9; the rest is the sum's.
TOLERANCE = 1e-2
# Models of the mode before are meant to keep it.
pytestmark = pytest.mark.filterwarnings("ignore:.*were built before")


def load_benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        path = BENCHMARKS / "bias_gradients.py"
        spec = importlib.util.spec_from_file_location("bias_gradients", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("environment", None)
    return module


benchmark = load_benchmark()
EVERY_LAYER = [*benchmark.LAYERS, *benchmark.RECURRENT]
OURS = [column for column in benchmark.COLUMNS if column.startswith("tfamp")]


@contextlib.contextmanager
def enabled(mode, **keywords):
    try:
        yield tfamp.enable(mode, **keywords)
    finally:
        tfamp.disable()


@pytest.fixture
def installed():
    with enabled("mixed_bfloat16"):
        yield


# ---- Where they are ----


def operations():
    """Types of the operations in a bias gradient of bfloat16 that is traced now."""

    @tf.function
    def gradient(x, bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.nn.bias_add(x, bias)
        return tape.gradient(y, bias)

    x, bias = tf.ones((4, 3), tf.bfloat16), tf.ones((3,), tf.bfloat16)
    graph = gradient.get_concrete_function(x, bias).graph
    return {operation.type for operation in graph.get_operations()}


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
    with enabled(mode, **keywords) as status:
        assert ("rightly" in status.bias_gradients) == right
        assert ("summed first" in status.embedding_gradients) == right
        assert ("BiasAddGrad" in operations()) == (not right)
        assert (keras.Optimizer.apply is apply) == (not right)
    assert "TensorFlow's" in tfamp.status().bias_gradients
    assert "Keras'" in tfamp.status().embedding_gradients
    assert "BiasAddGrad" in operations() and keras.Optimizer.apply is apply


def test_they_end_with_a_change_to_float32_and_with_an_error():
    with enabled("mixed_bfloat16"):
        tfamp.enable("float32")
        assert "BiasAddGrad" in operations()
    with pytest.raises(ValueError, match="overrides"):
        tfamp.enable("mixed_bfloat16", overrides={"(": "float32"})
    assert "BiasAddGrad" in operations()


# ---- Biases ----


@pytest.mark.parametrize("column", OURS)
@pytest.mark.parametrize("name", EVERY_LAYER)
def test_bias_gradient_is_the_sum_of_the_upstream_gradient(name, column):
    assert benchmark.error(name, column) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_other_dtypes_keep_tensorflows_gradient(installed, dtype):
    x, bias = tf.ones((4, 3), dtype), tf.ones((3,), dtype)

    @tf.function
    def gradient(x, bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.nn.bias_add(x, bias)
        return tape.gradient(y, bias)

    graph = gradient.get_concrete_function(x, bias).graph
    assert "BiasAddGrad" in [op.type for op in graph.get_operations()]
    np.testing.assert_array_equal(gradient(x, bias), np.full(3, 4.0))


@pytest.mark.parametrize("shape", [(4096, 2), (None, 2), (8, 16, 32, 2), None])
@pytest.mark.parametrize("jit", [False, True])
def test_shapes_known_only_when_it_runs(installed, shape, jit):
    full = (4096, 2) if shape is None or None in shape else shape

    @tf.function(
        jit_compile=jit, input_signature=[tf.TensorSpec(shape, tf.bfloat16)] * 2
    )
    def gradient(x, upstream):
        bias = tf.zeros((2,), tf.bfloat16)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.nn.bias_add(x, bias)
        return tape.gradient(y, bias, upstream)

    ones = tf.ones(full, tf.bfloat16)
    got = gradient(ones, ones)
    np.testing.assert_array_equal(tf.cast(got, tf.float32), np.prod(full) / 2 + [0, 0])


def test_channels_first(installed):
    bias = tf.zeros((3,), tf.bfloat16)
    x = tf.ones((7, 3, 90, 9), tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = tf.nn.bias_add(x, bias, data_format="NCHW")
    got = tf.cast(tape.gradient(y, bias), tf.float32)
    np.testing.assert_allclose(got, np.full(3, 7 * 90 * 9), rtol=2.0**-8)


def test_second_derivatives(installed):
    bias = tf.fill((2,), tf.cast(3.0, tf.bfloat16))
    x = tf.ones((16, 2), tf.bfloat16)
    with tf.GradientTape() as outer:
        outer.watch(bias)
        with tf.GradientTape() as inner:
            inner.watch(bias)
            y = tf.nn.bias_add(x, bias) ** 2
        first = inner.gradient(y, bias)
    np.testing.assert_array_equal(tf.cast(first, tf.float32), [128.0, 128.0])
    second = outer.gradient(first, bias)
    np.testing.assert_array_equal(tf.cast(second, tf.float32), [32.0, 32.0])


def test_float32_is_used_where_there_is_a_gpu(installed, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    x = tf.ones((4, 3), tf.bfloat16)

    @tf.function
    def gradient(bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.nn.bias_add(x, bias)
        return tape.gradient(y, bias)

    bias = tf.ones((3,), tf.bfloat16)
    graph = gradient.get_concrete_function(bias).graph
    (total,) = [op for op in graph.get_operations() if op.type == "Sum"]
    assert total.inputs[0].dtype == tf.float32
    assert gradient(bias).dtype == tf.bfloat16


def test_a_traced_function_keeps_its_gradient():
    tfamp.enable("mixed_bfloat16")
    layer = keras.layers.Dense(2)
    x = tf.ones((4096, 1))
    layer(x)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, layer.bias.value)

    assert float(gradient()[0]) == 4096.0
    tfamp.disable()
    assert float(gradient()[0]) == 4096.0


def test_saved_model_holds_the_plain_addition(installed, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
        model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    definition = loaded.signatures["serving_default"].graph.as_graph_def()
    functions = definition.library.function
    nodes = [*definition.node, *(n for f in functions for n in f.node_def)]
    assert "BiasAdd" in {node.op for node in nodes}


# ---- Embeddings ----

ROWS = ([[1.0, 2.0], [3.0, -2.5], [1.0, 1.0]], [1, 1, 2], [4, 2])
DENSE = [[0.0, 0.0], [4.0, -0.5], [1.0, 1.0], [0.0, 0.0]]
OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.1, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.1, **k),
    "rmsprop": lambda **k: keras.optimizers.RMSprop(0.1, **k),
    "loss scale": lambda **k: tfamp.LossScaleOptimizer(
        keras.optimizers.Adam(0.1, **k), initial_scale=1.0, dynamic=False
    ),
}


def train(optimizer, gradient, steps=4):
    variable = keras.Variable(np.ones((4, 2), "float32"))
    optimizer.build([variable])
    for _ in range(steps):
        optimizer.apply([gradient], [variable])
    return np.asarray(variable)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "keywords",
    [{}, {"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "clipped", "accumulated"],
)
def test_rows_count_as_their_sum(installed, name, keywords):
    made = OPTIMIZERS[name]
    dense = train(made(**keywords), tf.constant(DENSE))
    assert np.all(dense[1:3] != 1)
    found = train(made(**keywords), tf.IndexedSlices(*map(tf.constant, ROWS)))
    np.testing.assert_allclose(found, dense, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "XLA"])
def test_models_move_as_with_a_one_hot_product(installed, jit):
    """A dense layer over one-hot vectors has the gradient of an embedding, dense."""
    ids = np.array([[1, 1, 1, 2], [0, 1, 2, 2]])
    one_hot = np.eye(3, dtype="float32")[ids]
    start = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")

    def fit(first, inputs):
        model = keras.Sequential([first, keras.layers.GlobalAveragePooling1D()])
        model.build(inputs.shape)
        model.layers[0].set_weights([start])
        adam = keras.optimizers.Adam(0.05, global_clipnorm=0.1)
        model.compile(adam, "mse", jit_compile=jit)
        model.fit(inputs, np.ones((2, 4)), epochs=4, verbose=0)
        return model.layers[0].get_weights()[0]

    embedded = fit(keras.layers.Embedding(3, 4), ids)
    product = fit(keras.layers.Dense(4, use_bias=False), one_hot)
    np.testing.assert_allclose(embedded, product, atol=0.02)  # Rounds to bfloat16.
    assert np.abs(embedded - start).max() > 0.1
