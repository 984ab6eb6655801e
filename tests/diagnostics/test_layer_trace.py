"""What is counted of functions and loops, and that a trace leaves nothing behind."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.diagnostics import collect, function_bodies
from tfamp.precision import policy

layers = keras.layers
BATCH = 4


def facts_of(model, *shape, dtype="float32"):
    return collect.collect(model, tf.TensorSpec([BATCH, *shape], dtype), BATCH)


def lstm_flops(steps, inputs, units, gates=4):
    return steps * 2 * BATCH * (inputs + units) * gates * units


# ---- Recurrent layers ----


class Cell(layers.Layer):
    """A cell that is made of other layers."""

    def __init__(self, inner):
        super().__init__()
        self.state_size, self.inner = 8, inner

    def build(self, shape):
        self.inner.build((None, *self._inner_shape(shape)))

    def call(self, x, states):
        y = self.inner(self._joined(x, states[0]))
        return y, [y]

    def _inner_shape(self, shape):
        return [shape[-1] + 8]

    def _joined(self, x, state):
        return keras.ops.concatenate([x, state], -1)


class SequenceCell(Cell):
    """A cell that runs a recurrent layer over five steps in each of its own."""

    def _inner_shape(self, shape):
        return [5, shape[-1] + 8]

    def _joined(self, x, state):
        joined = keras.ops.concatenate([x, state], -1)
        return keras.ops.repeat(joined[:, None], 5, axis=1)


RECURRENT = {
    "one step": (1, lambda: layers.LSTM(6), lstm_flops(1, 4, 6)),
    "one unrolled step": (1, lambda: layers.LSTM(6, unroll=True), lstm_flops(1, 4, 6)),
    "stacked cells": (
        10,
        lambda: layers.RNN([layers.LSTMCell(6), layers.GRUCell(5)]),
        lstm_flops(10, 4, 6) + lstm_flops(10, 6, 5, gates=3),
    ),
    "a cell of layers": (
        10,
        lambda: layers.RNN(Cell(layers.Dense(8))),
        10 * 2 * BATCH * 12 * 8,
    ),
    "a recurrent layer in a cell": (
        10,
        lambda: layers.RNN(SequenceCell(layers.GRU(8))),
        10 * lstm_flops(5, 12, 8, gates=3),
    ),
}


@pytest.mark.parametrize(("steps", "make", "flops"), RECURRENT.values(), ids=RECURRENT)
def test_steps_of_recurrent_layers(steps, make, flops):
    model = keras.Sequential([keras.Input((steps, 4)), make()])
    assert facts_of(model, steps, 4).flops == flops


# ---- Functions and loops ----


class Compiled(keras.Model):
    """A model whose `call` was traced before."""

    def __init__(self):
        super().__init__(name="compiled")
        self.inner = layers.Dense(3)

    @tf.function
    def call(self, x):
        return tf.matmul(self.inner(x), tf.ones((3, 5), x.dtype))


def test_function_that_was_traced_before():
    model = Compiled()
    model(np.zeros((BATCH, 4), "float32"))
    facts = facts_of(model, 4)
    assert facts.flops == 2 * BATCH * (4 * 3 + 3 * 5)
    assert facts.all_counted and facts.notes == ()


class Twice(layers.Layer):
    """A function that is traced once and called twice, one in another."""

    def call(self, x):
        @tf.function(autograph=False)
        def inner(y):
            return tf.matmul(y, tf.transpose(y))

        @tf.function(autograph=False)
        def outer(y):
            return inner(y) + inner(y)

        return outer(x) + outer(x)


def test_function_counts_as_often_as_it_is_called():
    model = keras.Sequential([keras.Input((6,)), Twice(name="twice")])
    facts = facts_of(model, 6)
    assert facts.flops == 4 * 2 * BATCH * BATCH * 6
    assert {p.layer.split("/")[-1] for p in facts.products} == {"twice"}


class Loop(layers.Layer):
    """A loop whose length the graph does not tell."""

    def __init__(self, has_products):
        super().__init__(name="loop")
        self.has_products = has_products

    def call(self, x):
        def body(index, y):
            if self.has_products:
                y = keras.ops.matmul(y, keras.ops.ones((6, 6), y.dtype))
            return y + 1

        return keras.ops.fori_loop(0, 5, body, x)


def test_loop_of_open_length_is_told():
    model = keras.Sequential([keras.Input((6,)), Loop(True)], name="net")
    facts = facts_of(model, 6)
    assert facts.flops == 2 * BATCH * 6 * 6
    assert facts.notes == (
        "a loop in 'net/loop' is counted once: its length is not known",
    )
    model = keras.Sequential([keras.Input((6,)), Loop(False)])
    assert facts_of(model, 6).notes == ()


class Python(layers.Layer):
    """Computes where no graph shows it."""

    def call(self, x):
        y = tf.numpy_function(lambda z: z, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


def quantized():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)], name="net")
    model.quantize("int8")
    return model


UNCOUNTED = {
    "integers": (quantized, "a product of integers in 'net'"),
    "Python": (
        lambda: keras.Sequential([keras.Input((6,)), Python()], name="net"),
        "what a Python function computes in 'net/python",
    ),
}


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize(("make", "note"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_what_is_not_counted_is_told(make, note):
    facts = facts_of(make(), 6)
    assert facts.flops == 0 and not facts.all_counted
    assert facts.notes[0].startswith(note)
    assert facts.notes[0].endswith("is not counted")


def test_bodies_are_the_graphs_that_were_traced():
    """TensorFlow 2.21 keeps them under a private name."""
    traced = []

    def body(index, x):
        traced.append(tf.compat.v1.get_default_graph())
        return index + 1, tf.matmul(x, x)

    @tf.function(autograph=False)
    def function(x):
        return tf.while_loop(lambda i, x: i < 3, body, [0, x])

    graph = function.get_concrete_function(tf.TensorSpec([2, 2])).graph
    (loop,) = [o for o in graph.get_operations() if o.type in function_bodies.REPEATING]
    assert list(function_bodies.bodies(loop)) == traced[-1:]


# ---- What a trace leaves ----


class Losing(keras.Model):
    """Adds a loss and keeps what it computed."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2")
        self.kept = None

    def call(self, x):
        self.kept = self.inner(x)
        self.add_loss(tf.reduce_mean(self.kept))
        self.late = self.kept * 2
        return self.kept


def test_losses_and_tensors_of_a_trace_are_taken_out():
    model = Losing()
    model(np.ones((BATCH, 4), "float32"))
    before, kept, late = [float(x) for x in model.losses], model.kept, model.late
    facts_of(model, 4)
    assert [float(x) for x in model.losses] == before and len(before) == 3
    assert model.kept is kept and model.late is late
    del model.late
    facts_of(model, 4)
    assert not hasattr(model, "late")


def test_attributes_of_every_layer_are_what_they_were():
    """Keras 3.15 notes dropout masks in a cell, and XLA off in a layer of cuDNN."""
    model = keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5)),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(2, activity_regularizer="l1"),
        ]
    )

    def state():
        return [(id(x), dict(vars(x))) for x in model._flatten_layers()]

    before = state()
    facts_of(model, 5, 4)
    for (_, old), (_, new) in zip(before, state(), strict=True):
        assert old.keys() == new.keys()
        assert [name for name in old if old[name] is not new[name]] == []
    assert model.losses == []


@pytest.mark.parametrize("traces", [False, True], ids=["calls", "traces"])
def test_another_thread_uses_the_model_meanwhile(traces):
    with policy.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((5, 8))
        model = keras.Model(inputs, layers.LSTM(8)(layers.Dense(8)(inputs)))
    expected, stop, failures = facts_of(model, 5, 8), threading.Event(), []
    batch, spec = np.ones((BATCH, 5, 8), "float32"), tf.TensorSpec([BATCH, 5, 8])

    def use():
        while not stop.is_set():
            try:
                if traces:
                    tf.function(lambda x: model(x)).get_concrete_function(spec)
                else:
                    model(batch)
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=use)
    thread.start()
    try:
        found = [facts_of(model, 5, 8) for _ in range(6)]
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert found == [expected] * 6
