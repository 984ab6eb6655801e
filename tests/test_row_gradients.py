"""Rows of one index in an embedding's gradient are summed before they are squared."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.kernels import row_gradients

ROWS = ([[1.0, 2.0], [3.0, -2.5], [1.0, 1.0]], [1, 1, 2], [4, 2])
DENSE = [[0.0, 0.0], [4.0, -0.5], [1.0, 1.0], [0.0, 0.0]]
OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.1, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.1, **k),
    "rmsprop": lambda **k: keras.optimizers.RMSprop(0.1, **k),
}


def rows():
    return tf.IndexedSlices(*map(tf.constant, ROWS))


def train(optimizer, gradient, steps=4):
    variable = keras.Variable(np.ones((4, 2), "float32"))
    optimizer.build([variable])
    for _ in range(steps):
        optimizer.apply([gradient], [variable])
    return np.asarray(variable)


@pytest.fixture
def installed():
    row_gradients.install()
    yield
    row_gradients.remove()


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
    found = train(made(**keywords), rows())
    np.testing.assert_allclose(found, dense, rtol=1e-6)


def test_keras_squares_them_apart():
    """The reason for the module; when this fails, it may no longer be needed."""
    made = OPTIMIZERS["adam"]
    dense, found = train(made(), tf.constant(DENSE)), train(made(), rows())
    assert np.abs(found - dense).max() > 0.01


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "XLA"])
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
        model.compile(adam, "mse", jit_compile=jit)
        model.fit(inputs, np.ones((2, 4)), epochs=4, verbose=0)
        return model.layers[0].get_weights()[0]

    with tfamp.control.enabled(mode) as status:
        assert "summed" in status.embedding_gradients
        embedded = fit(keras.layers.Embedding(3, 4), ids)
        product = fit(keras.layers.Dense(4, use_bias=False), one_hot)
    tolerance = 1e-5 if mode == "float32" else 0.02  # Products round to bfloat16.
    np.testing.assert_allclose(embedded, product, atol=tolerance)
    assert np.abs(embedded - start).max() > 0.1


@pytest.mark.parametrize("xla", [False, True], ids=["graph", "XLA"])
def test_sums_keep_shape_none_and_dense(xla):
    @tf.function(jit_compile=xla)
    def function():
        first, none, second = row_gradients.sum_rows([rows(), None, tf.ones([2])])
        assert none is None
        return tf.convert_to_tensor(first), second

    first, second = function()
    np.testing.assert_array_equal(first, DENSE)
    np.testing.assert_array_equal(second, [1, 1])


def test_install_and_remove_are_idempotent():
    owner = row_gradients._base_optimizer.BaseOptimizer
    before = owner.apply
    row_gradients.install()
    row_gradients.install()
    assert row_gradients.installed()
    row_gradients.remove()
    row_gradients.remove()
    assert owner.apply is before
