"""Two ways in which stock Keras' loss scaling loses a run, and ours does not.

Each test trains twice, with `keras.optimizers.LossScaleOptimizer` and with ours.
What stock Keras does is asserted as well: when a release mends it, the test says so.
That of NaN on one replica alone is in test_optimizer_replicas.py.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

NAN, INF = float("nan"), float("inf")
STOCK, OURS = keras.optimizers.LossScaleOptimizer, tfamp.LossScaleOptimizer
RUNNERS = helpers.RUNNERS


def train(optimizer, weights, runner="graph"):
    """Returns a function: a factor of the loss -> one step on `sum(factor * w)`."""
    optimizer.build(weights)

    @RUNNERS[runner]
    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(factor * w.value) for w in weights])
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [w.value for w in weights])
        optimizer.apply(grads, weights)

    return lambda factor: step(tf.constant(factor, "float32"))


@pytest.mark.issue("NVIDIA/DeepLearningExamples#543")
@pytest.mark.parametrize("runner", ["graph", "xla"])
def test_clean_step_after_a_thousand_of_nan(runner):
    """Stock Keras' scale is 0 by then; 0 / 0 is NaN, and every weight becomes it."""
    ends = {}
    for kind in (STOCK, OURS):
        weights = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
        optimizer = kind(keras.optimizers.SGD(0.5))
        step = train(optimizer, weights, runner)
        for _ in range(1000):
            step(NAN)
        for weight, first in zip(weights, ([1.0, 2.0], 3.0), strict=True):
            np.testing.assert_array_equal(weight, first)
        scale = float(optimizer.dynamic_scale)
        step(1.0)
        ends[kind] = scale, [weight.numpy().tolist() for weight in weights]
    np.testing.assert_equal(ends[STOCK], (0.0, [[NAN, NAN], NAN]))
    assert ends[OURS] == (2.0**-14, [[0.5, 1.5], 2.5])


@pytest.mark.issue("google/flax#2547")
@pytest.mark.parametrize("runner", ["graph", "xla"])
def test_growth_for_two_hundred_intervals_of_one_step(runner):
    """Stock Keras' scale is infinite after 113, and half of it still is: for good.

    From then on it skips every step, and no gradient was at fault.
    """
    taken, weights = {}, {}
    for kind in (STOCK, OURS):
        weight = keras.Variable(0.0)
        optimizer = kind(keras.optimizers.SGD(1.0), 2.0**15, dynamic_growth_steps=1)
        step = train(optimizer, [weight], runner)
        for _ in range(200):
            step(2.0**-20)
        scale = float(optimizer.dynamic_scale)
        for _ in range(100):
            step(2.0**-20)
        assert float(optimizer.dynamic_scale) == scale
        assert scale == (INF if kind is STOCK else 2.0**24)
        taken[kind], weights[kind] = int(optimizer.iterations), float(weight)
    assert taken == {STOCK: 113, OURS: 300}
    assert weights == {kind: -steps * 2.0**-20 for kind, steps in taken.items()}
