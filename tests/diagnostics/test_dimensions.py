"""Sizes are named as the user chose them, whatever the product makes of them."""

import keras
import pytest
import tensorflow as tf

from tfamp.diagnostics import alignment, collect

layers = keras.layers
BATCH = 4


def products_of(shape, make, dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    model = keras.Model(inputs, make(inputs))
    spec = tf.TensorSpec([BATCH, *shape], dtype)
    return collect.collect(model, spec, BATCH).products


def attention(kind, *sizes, **keywords):
    return lambda x: kind(*sizes, **keywords)(x, x)


MHA, GQA = layers.MultiHeadAttention, layers.GroupQueryAttention
IN = ("input features", 20, 1)
CASES = {
    # make, {dimensions that some product has}
    "LSTM": (layers.LSTM(30), {IN, ("units", 30, 4), ("units", 30, 1)}),
    "GRU": (layers.GRU(50), {IN, ("units", 50, 3), ("units", 50, 1)}),
    "GRU, gates apart": (layers.GRU(50, implementation=1), {IN, ("units", 50, 1)}),
    "SimpleRNN": (layers.SimpleRNN(50), {IN, ("units", 50, 1)}),
    "Dense": (layers.Dense(60), {IN, ("units", 60, 1)}),
    "heads": (
        attention(MHA, 4, 15),
        {IN, ("key_dim", 15, 4), ("key_dim", 15, 1), ("units", 20, 1)}
        | {("sequence length", 9, 1)},
    ),
    "heads of another value": (
        attention(MHA, 4, 15, value_dim=10),
        {IN, ("key_dim", 15, 4), ("key_dim", 15, 1), ("value_dim", 10, 4)}
        | {("value_dim", 10, 1), ("sequence length", 9, 1), ("units", 20, 1)},
    ),
    "grouped heads": (
        attention(GQA, 15, 4, 2),
        {IN, ("head_dim", 15, 4), ("head_dim", 15, 2), ("head_dim", 15, 1)}
        | {("sequence length", 9, 1), ("units", 20, 1)},
    ),
    "einsum of heads": (
        layers.EinsumDense("abc,cde->abde", (None, 2, 7)),
        {IN, ("units", 7, 2)},
    ),
    "einsum with an ellipsis": (
        layers.EinsumDense("...x,xy->...y", (7,)),
        {IN, ("units", 7, 1)},
    ),
}


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_dimensions(make, expected):
    found = {tuple(d) for p in products_of((9, 20), make) for d in p.dimensions}
    found -= {("batch size", BATCH, 1)}
    assert found == expected


ADVICE = {
    "GRU": (layers.GRU(50), [("units", 50, 56)]),
    "LSTM": (layers.LSTM(30), [("units", 30, 32)]),
    "heads": (attention(MHA, 4, 15), [("key_dim", 15, 16)]),
    "two heads": (attention(MHA, 2, 60), [("key_dim", 60, 64)]),
}


@pytest.mark.parametrize(("make", "expected"), ADVICE.values(), ids=ADVICE)
def test_padded_size_is_one_that_the_layer_can_have(make, expected):
    products = products_of((16, 24), make)
    misses = alignment.find_misses(products, "bfloat16")
    found = [x[:3] for x in misses if x.role != "batch size"]
    assert found == expected


class Einsum(layers.Layer):
    """A product of activations by an equation."""

    def __init__(self, equation, other):
        super().__init__()
        self.equation, self.other = equation, other

    def call(self, x):
        return tf.einsum(self.equation, x, tf.ones((BATCH, *self.other)))


@pytest.mark.parametrize(
    ("equation", "shape", "other", "sizes"),
    [
        ("...ij,...jk->...ik", (3, 5, 6), (3, 6, 7), (5, 7, 6, BATCH * 3)),
        ("...ij,...jk->...ik", (3, 5, 6), (1, 6, 7), (15, 7, 6, BATCH)),
        ("...ij,...jk->...ik", (1, 5, 6), (3, 6, 7), (5, 21, 6, BATCH)),
        ("b...j,bjk->...bk", (3, 5, 6), (6, 7), (15, 7, 6, BATCH)),
    ],
    ids=["both", "right repeated", "left repeated", "inside"],
)
def test_ellipsis_stands_for_what_is_there(equation, shape, other, sizes):
    (product,) = products_of(shape, Einsum(equation, other))
    assert (product.m, product.n, product.k, product.repeats) == sizes
