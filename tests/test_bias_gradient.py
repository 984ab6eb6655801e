"""Bias gradients in bfloat16, and TensorFlow's private registry of gradients."""

import importlib.util
import inspect
import pathlib
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops as tensorflow_ops

import tfamp
from tfamp.kernels import bias_gradient

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
# Half a unit in the last place of bfloat16 is 2**-9; the rest is the sum's.
TOLERANCE = 1e-2


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


@pytest.fixture
def installed():
    bias_gradient.install()
    yield
    bias_gradient.remove()


@pytest.mark.parametrize("column", OURS)
@pytest.mark.parametrize("name", EVERY_LAYER)
def test_bias_gradient_is_the_sum_of_the_upstream_gradient(name, column):
    assert benchmark.error(name, column) < TOLERANCE


def test_plain_keras_is_wrong_on_a_cpu():
    """The reason for all of this; may go when TensorFlow mends it."""
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("measured on CPUs")
    assert benchmark.error("Dense", "plain policy, graph") > 0.1
    assert benchmark.error("Conv2DTranspose", "plain rewrite, graph") > 0.1


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


def test_enable_installs_and_disable_removes():
    original = tensorflow_ops.gradient_registry.lookup("BiasAdd")
    assert not bias_gradient.installed()
    for mode in ("float32", "mixed_bfloat16"):
        assert "rightly" in tfamp.enable(mode).bias_gradients
        assert bias_gradient.installed()
    tfamp.disable()
    assert "TensorFlow's" in tfamp.status().bias_gradients
    assert tensorflow_ops.gradient_registry.lookup("BiasAdd") is original


def test_a_failing_enable_leaves_tensorflows_gradient():
    with pytest.raises(ValueError, match="overrides"):
        tfamp.enable("mixed_bfloat16", overrides={"(": "float32"})
    assert not bias_gradient.installed()


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


def test_saved_model_holds_the_plain_addition(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfamp.enable("mixed_bfloat16")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
        model.export(tmp_path / "exported", verbose=False)
        tfamp.disable()
    loaded = tf.saved_model.load(tmp_path / "exported")
    concrete = loaded.signatures["serving_default"]
    names = {node.op for node in concrete.graph.as_graph_def().node}
    for function in concrete.graph.as_graph_def().library.function:
        names |= {node.op for node in function.node_def}
    assert "BiasAdd" in names


def test_contract_the_registry_hands_out_what_stands_in_it():
    registry = tensorflow_ops.gradient_registry
    entry = registry._registry["BiasAdd"]
    assert entry["type"] is registry.lookup("BiasAdd")
    source = inspect.getsource(type(registry).lookup)
    assert "_registry[name][_TYPE_TAG]" in source
