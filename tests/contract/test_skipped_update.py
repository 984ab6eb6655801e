"""What is finite, and that a skipped update leaves nothing behind, however it runs."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

NAN, INF = float("nan"), float("inf")
LARGEST = float(np.finfo("float32").max)
RUNNERS = helpers.RUNNERS
OPT = keras.optimizers

# ---- What is finite ----

GRADIENTS = {
    "clean": ([1.0, -2.0], True),
    "inf": ([1.0, INF], False),
    "-inf": ([-INF, 1.0], False),
    "nan": ([NAN, 1.0], False),
    "inf and -inf": ([INF, -INF], False),
    "largest": ([LARGEST, LARGEST], True),  # Their sum is infinite.
    "largest and NaN": ([LARGEST, LARGEST, NAN], False),
    "empty": ([], True),
}


def is_applied(gradients, scale, runner):
    """Whether a step with these gradients, as they are scaled, is taken."""
    weights = [keras.Variable(tf.zeros(each.shape)) for each in gradients]
    made = tfamp.LossScaleOptimizer(OPT.SGD(), scale)
    made.build(weights)
    RUNNERS[runner](lambda g: made.apply(g, weights))(gradients)
    return not int(made.skipped_steps)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_finite_is_decided_exactly(runner, name):
    values, expected = GRADIENTS[name]
    for shape in ([len(values)], [1, len(values), 1]):
        grads = [tf.ones([2]), tf.reshape(tf.constant(values, tf.float32), shape)]
        assert is_applied(grads, 2.0, runner) is expected


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("value", "expected"), [(LARGEST / 2, True), (LARGEST, False)])
def test_gradient_that_overflows_when_unscaled_is_not_finite(runner, value, expected):
    assert is_applied([tf.constant([1.0, value])], 0.5, runner) is expected


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_float_dtype_is_checked_in_its_own_range(runner, dtype):
    largest = tf.cast(tf.fill([4], tf.as_dtype(dtype).max), dtype)
    infinite = tf.concat([largest, tf.constant([INF], dtype)], 0)
    assert is_applied([largest], 1.0, runner)
    assert not is_applied([infinite], 1.0, runner)


# ---- Nothing of a skipped update stays ----


@pytest.mark.parametrize("runner", RUNNERS)
def test_variable_that_keras_overwrites_gets_its_gradient_untouched(runner):
    """As the scales of float8 layers do."""
    weight, scale = keras.Variable([1.0]), keras.Variable([1.0])
    scale.overwrite_with_gradient = True
    made = tfamp.LossScaleOptimizer(OPT.SGD(1.0), initial_scale=8.0)
    made.build([weight, scale])

    @RUNNERS[runner]
    def step(gradient, overwritten):
        made.apply([gradient * made.loss_scale.value, overwritten], [weight, scale])

    step(tf.constant([0.5]), tf.constant([3.0]))
    assert (float(weight[0]), float(scale[0])) == (0.5, 3.0)
    for bad in ([NAN], [2.0]), ([0.5], [INF]):
        step(*map(tf.constant, bad))
        assert (float(weight[0]), float(scale[0])) == (0.5, 3.0)
    assert int(made.skipped_steps) == 2


class Scattering(OPT.SGD):
    """Writes in a way that a mask on `assign` does not see."""

    def update_step(self, gradient, variable, learning_rate):
        every = tf.range(tf.size(gradient))
        variable.scatter_sub(tf.IndexedSlices(gradient, every))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_optimizer_of_the_user_is_gated_however_it_writes(runner, jit_compile):
    weight = keras.Variable([1.0, 2.0])
    made = tfamp.LossScaleOptimizer(Scattering(1.0), 2.0, jit_compile=jit_compile)
    made.build([weight])
    step = RUNNERS[runner](lambda gradient: made.apply([gradient], [weight]))
    step(tf.constant([NAN, 2.0]))
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    step(tf.constant([0.0, 1.0]))
    np.testing.assert_array_equal(weight, [1.0, 1.0])


class OutsideXla(keras.constraints.Constraint):
    """What XLA cannot compile."""

    def __call__(self, weight):
        clipped = tf.numpy_function(lambda a: a.clip(-1, 1), [weight], tf.float32)
        return tf.ensure_shape(clipped, weight.shape)


def test_constraint_of_the_user_is_not_compiled():
    constrained = keras.layers.Dense(1, kernel_constraint=OutsideXla())
    model = keras.Sequential([keras.Input((3,)), constrained])
    model.compile(tfamp.LossScaleOptimizer(OPT.Adam(0.1)), "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.issue("tensorflow#59215")
def test_numerics_can_be_checked_in_a_graph():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfamp.LossScaleOptimizer(OPT.Adam(0.1)), "mse")
    tf.debugging.enable_check_numerics()
    try:
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    finally:
        tf.debugging.disable_check_numerics()
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_gradients_need_not_be_tensors(runner):
    weight = keras.Variable([1.0, 2.0])
    made = tfamp.LossScaleOptimizer(OPT.SGD(1.0), initial_scale=8.0)
    made.build([weight])
    step = RUNNERS[runner](lambda: made.apply([[8.0, 8.0]], [weight]))
    step()
    np.testing.assert_array_equal(weight, [0.0, 1.0])


def test_float16_weights_are_not_compiled_unasked():
    """Lamb's epsilon is a subnormal of float16, which XLA takes for 0."""
    weight = keras.Variable(np.linspace(-1, 1, 4), dtype="float16")
    made = tfamp.LossScaleOptimizer(OPT.Lamb(0.1), initial_scale=8.0)
    made.build([weight])
    step = tf.function(lambda g: made.apply([g], [weight]))
    step(tf.cast(tf.range(4.0) * 0.8, "float16"))
    assert np.isfinite(weight.numpy()).all()


def test_update_compiled_inside_several_steps_per_execution():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfamp.LossScaleOptimizer(OPT.Adam(0.1)), "mse", steps_per_execution=4)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    x[33] = INF  # One batch of eight.
    model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)
    assert int(model.optimizer.skipped_steps) == 1
    assert int(model.optimizer.iterations) == 7
    assert all(np.isfinite(w).all() for w in model.get_weights())
