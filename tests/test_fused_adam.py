"""The fused update and clipping against Keras' own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from tfamp.kernels import fused_adam


def test_update_equals_keras_over_many_steps():
    generator = np.random.default_rng(0)
    start = generator.normal(size=(6, 3)).astype("float32")
    theirs = keras.Variable(start)
    adam = keras.optimizers.Adam(1e-2, beta_1=0.8, beta_2=0.95, epsilon=1e-4)
    adam.build([theirs])
    ours, momentum, velocity = (tf.Variable(v) for v in (start, 0 * start, 0 * start))

    @tf.function
    def update(gradient, step):
        fused_adam.apply(
            ours,
            momentum,
            velocity,
            gradient,
            step=step,
            learning_rate=1e-2,
            beta_1=0.8,
            beta_2=0.95,
            epsilon=1e-4,
        )

    for step in range(1, 31):
        gradient = tf.constant(generator.normal(size=(6, 3)), tf.float32)
        adam.apply([gradient], [theirs])
        update(gradient, tf.constant(step))
    np.testing.assert_allclose(ours, theirs.value, rtol=1e-5)
    for mine, keras_own in ((momentum, adam._momentums), (velocity, adam._velocities)):
        # Sums of terms of both signs and of about 1.
        np.testing.assert_allclose(mine, keras_own[0].value, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_added_up_and_the_other_rows_decay():
    variable, momentum, velocity = (tf.Variable(tf.ones([3, 2])) for _ in range(3))
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([3, 2]))
    fused_adam.apply(
        variable,
        momentum,
        velocity,
        rows,
        step=tf.constant(1),
        learning_rate=0.1,
        beta_1=0.9,
        beta_2=0.99,
        epsilon=1e-7,
    )
    np.testing.assert_allclose(momentum[:, 0], [0.9, 0.9 + 0.2, 0.9], rtol=1e-6)
    np.testing.assert_allclose(velocity[:, 0], [0.99, 0.99 + 0.04, 0.99], rtol=1e-6)


VALUES = {
    "above": [3.0, -4.0],
    "below": [0.3, 0.4],
    "nan": [float("nan"), 1.0],
    "infinite": [float("inf"), 1.0],
    "zero": [0.0, 0.0],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_clipping_equals_keras(values):
    both = tf.constant([values, values])  # Two rows of one index.
    rows = tf.IndexedSlices(both, tf.constant([1, 1]), tf.constant([2, 2]))
    gradients = [tf.constant(values), None, rows]
    expected = base_optimizer.clip_by_global_norm(gradients, 1.0)
    found = fused_adam.clip_by_global_norm(gradients, 1.0)
    assert found[1] is None
    assert isinstance(found[2], tf.IndexedSlices)
    for got, want in zip(found[::2], expected[::2], strict=True):
        # Rows without a gradient stay 0 where Keras' become NaN with all others.
        got, want = tf.convert_to_tensor(got)[-1], tf.convert_to_tensor(want)[-1]
        np.testing.assert_allclose(got, want, rtol=1e-6)
