"""The optimizer: settings, what it refuses and skips, however it runs; saved state.

Its trajectories: test_optimizer_properties.py; saved files: test_checkpoint.py.
"""

import contextlib

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


def make(inner=None, value=(1.0, 2.0), dtype="float32", **keywords):
    """Returns a built optimizer and its one variable."""
    variable = keras.Variable(np.array(value, "float32"), dtype=dtype)
    made = tfamp.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **keywords)
    made.build([variable])
    return made, variable


def test_scale_is_live_in_a_function_traced_before_build():
    made = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    variable = keras.Variable([1.0])
    scaled = tf.function(made.scale_loss)
    assert float(scaled(tf.constant(1.0))) == 8.0
    made.build([variable])
    made.apply([tf.constant([NAN])], [variable])
    assert float(scaled(tf.constant(1.0))) == 4.0


@pytest.mark.issue("keras#19244")
@pytest.mark.parametrize("scaled", [False, True])
def test_loop_that_forgets_to_scale_the_loss_is_told_once(scaled, caplog):
    made, variable = make()
    if scaled:
        made.scale_loss(tf.constant(1.0))
    for _ in range(2):
        made.apply([tf.constant([1.0, 1.0])], [variable])
    assert caplog.text.count("`scale_loss` was not called") == (0 if scaled else 1)


# ---- Drop-in ----


def test_positional_order_and_names_are_those_of_keras():
    made = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), 4.0, 7, "scaled")
    assert (made.initial_scale, made.dynamic_growth_steps) == (4.0, 7)
    assert made.growth_interval == 7 and made.name == "scaled"
    named = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), dynamic_growth_steps=9)
    assert named.growth_interval == 9
    named.dynamic_growth_steps = 11
    assert named.get_config()["growth_interval"] == 11
    assert isinstance(made, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("runner", RUNNERS)
def test_interval_set_before_a_step_is_traced_holds(runner):
    made, variable = make(initial_scale=1.0, growth_interval=100)
    made.growth_interval = 2
    step = RUNNERS[runner](lambda: made.apply([tf.zeros(2)], [variable]))
    for _ in range(5):
        step()
    assert float(made.loss_scale) == 4.0 and int(made.current_growth_interval) == 2


def test_every_setting_survives_the_round_trip():
    settings = dict(
        initial_scale=64.0,
        growth_interval=3,
        growth_factor=4.0,
        backoff_factor=0.25,
        hysteresis=2,
        min_scale=1.0,
        max_scale=512.0,
        dynamic=False,
        jit_compile=False,
        name="mine",
    )
    made = tfamp.LossScaleOptimizer(keras.optimizers.Adam(), **settings)
    default = tfamp.LossScaleOptimizer(keras.optimizers.Adam()).get_config()
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(made)
    )
    assert type(again) is tfamp.LossScaleOptimizer
    config = again.get_config()
    assert {k: config[k] for k in settings} == settings
    assert set(config) == {"inner_optimizer", *settings}
    assert all(config[k] != default[k] for k in settings)


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"dynamic_growth_steps": 0}, ValueError),
        ({"jit_compile": "yes"}, ValueError),
        ({"no_such_setting": 1}, ValueError),
        ({"hysteresis": 1.5}, TypeError),
    ],
    ids=str,
)
def test_nonsense_is_refused(keywords, error):
    with pytest.raises(error, match="(?i)received|does not support"):
        tfamp.LossScaleOptimizer(keras.optimizers.SGD(), **keywords)


def test_interval_by_both_names_is_refused_unless_they_agree():
    inner = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="pass one"):
        tfamp.LossScaleOptimizer(inner, growth_interval=5, dynamic_growth_steps=7)
    made = tfamp.LossScaleOptimizer(inner, growth_interval=7, dynamic_growth_steps=7)
    assert made.growth_interval == 7


def test_what_cannot_be_wrapped_or_applied_is_refused():
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="already scales the loss"):
        tfamp.LossScaleOptimizer(stock)
    with pytest.raises(TypeError, match="'adam'"):
        tfamp.LossScaleOptimizer("adam")
    with pytest.raises(ValueError, match="not built"):
        tfamp.LossScaleOptimizer(keras.optimizers.SGD()).apply([tf.constant([1.0])])
    made, variable = make()
    with pytest.raises(ValueError, match="2 gradients and 1 variables"):
        made.apply([tf.constant([1.0, 1.0])] * 2, [variable])


def test_wrap_optimizer_is_idempotent():
    made = tfamp.wrap_optimizer("adam", growth_interval=5)
    assert type(made) is tfamp.LossScaleOptimizer and made.growth_interval == 5
    assert tfamp.wrap_optimizer(made) is made
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    assert tfamp.wrap_optimizer(stock) is stock


def test_one_device_strategy_works():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        made, variable = make()
        strategy = tf.distribute.get_strategy()
    step = tf.function(lambda: made.apply([tf.constant([1.0, NAN])], [variable]))
    strategy.run(step)
    np.testing.assert_array_equal(variable, [1.0, 2.0])


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
    "overflows when unscaled": ([1.0, LARGEST], False, 0.5),
    "does not": ([1.0, LARGEST / 2], True, 0.5),
}


def is_applied(gradients, scale, runner):
    """Whether a step with these gradients, as they are scaled, is taken."""
    weights = [keras.Variable(tf.zeros(each.shape)) for each in gradients]
    made = tfamp.LossScaleOptimizer(OPT.SGD(), scale)
    made.build(weights)
    RUNNERS[runner](lambda g: made.apply(g, weights))(gradients)
    return not int(made.skipped_steps)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", helpers.names_of(GRADIENTS, device=["largest"]))
def test_what_is_finite_is_decided_exactly(runner, name):
    values, expected, *scale = GRADIENTS[name]
    for shape in ([len(values)], [1, len(values), 1]):
        grads = [tf.ones([2]), tf.reshape(tf.constant(values, tf.float32), shape)]
        assert is_applied(grads, *(scale or [2.0]), runner) is expected


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
    made, weight = make(Scattering(1.0), initial_scale=2.0, jit_compile=jit_compile)
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


def trained_a_step(**keywords):
    dense = keras.layers.Dense(1, **keywords)
    model = keras.Sequential([keras.Input((3,)), dense])
    scaled = tfamp.LossScaleOptimizer(OPT.Adam(0.1))
    helpers.fit(model, np.ones((8, 3)), np.ones((8, 1)), scaled)
    return int(scaled.iterations) == 1


def test_constraint_of_the_user_is_not_compiled():
    assert trained_a_step(kernel_constraint=OutsideXla())


@pytest.mark.issue("tensorflow#59215")
def test_numerics_can_be_checked_in_a_graph():
    tf.debugging.enable_check_numerics()
    try:
        assert trained_a_step()
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("runner", RUNNERS)
def test_gradients_need_not_be_tensors(runner):
    made, weight = make(initial_scale=8.0)
    step = RUNNERS[runner](lambda: made.apply([[8.0, 8.0]], [weight]))
    step()
    np.testing.assert_array_equal(weight, [0.0, 1.0])


def test_float16_weights_are_not_compiled_unasked():
    """Lamb's epsilon is a subnormal of float16, which XLA takes for 0."""
    values = np.linspace(-1, 1, 4)
    made, weight = make(OPT.Lamb(0.1), values, "float16", initial_scale=8.0)
    step = tf.function(lambda g: made.apply([g], [weight]))
    step(tf.cast(tf.range(4.0) * 0.8, "float16"))
    assert np.isfinite(weight.numpy()).all()


def test_bfloat16_weights_are_updated_on_a_gpu_in_one_program():
    """Their epsilon is not subnormal; a layer's `dtype="bfloat16"` makes them."""

    def updated(scope):
        weight = keras.Variable(np.linspace(-1, 1, 4), dtype="bfloat16")
        plain = OPT.SGD(0.1, momentum=0.9)
        plain.build([weight])
        step = tf.function(lambda grad: plain.apply([grad], [weight]))
        with scope:
            traced = step.get_concrete_function(tf.TensorSpec([4], "bfloat16"))
        for _ in range(3):
            traced(tf.ones([4], "bfloat16"))
        kinds = {op.type for op in traced.graph.get_operations()}
        return "AssignAddVariableOp" in kinds, weight.numpy().astype("float32")

    is_small, expected = updated(contextlib.nullcontext())
    on_gpu, found = updated(helpers.as_if_on_a_gpu("mixed_bfloat16"))
    assert is_small and not on_gpu
    np.testing.assert_allclose(found, expected, rtol=2**-7)


def test_check_finite_asks_the_unscaled_gradients():
    scaled = tfamp.LossScaleOptimizer(OPT.SGD(), 2.0**-10)
    assert scaled.check_finite([tf.constant([1e30])])
    assert not scaled.check_finite([tf.constant([1e37])])


def test_a_step_is_skipped_inside_several_steps_per_execution():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    x[33] = INF  # One batch of eight.
    scaled = tfamp.LossScaleOptimizer(OPT.Adam(0.1))
    few = {"batch_size": 8, "shuffle": False, "steps_per_execution": 4}
    helpers.fit(model, x, x[:, :1], scaled, **few)
    assert (int(scaled.skipped_steps), int(scaled.iterations)) == (1, 7)
    assert all(np.isfinite(w).all() for w in model.get_weights())


# ---- Saved state ----


OPTIMIZERS = {
    "ours": lambda inner: tfamp.LossScaleOptimizer(inner, 8.0, 3),
    "stock": lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0, 3),
    "bare": lambda inner: inner,
}


def untrained(kind, inner=None):
    """Returns a small compiled model, and its data."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(OPTIMIZERS[kind](inner or keras.optimizers.Adam()), "mse")
    return model, np.random.default_rng(0).normal(size=(16, 3)).astype("float32")


def trained(kind, inner=None):
    """Returns such a model after two epochs, and its data."""
    model, x = untrained(kind, inner)
    model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0)
    return model, x


@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_state_of_an_optimizer_that_was_never_built_loads(saved, tmp_path):
    source, _ = untrained(saved)
    source.save_weights(tmp_path / "saved.weights.h5")
    target, _ = trained("ours")
    target.load_weights(tmp_path / "saved.weights.h5")
    assert int(target.optimizer.iterations) == 0


@pytest.mark.parametrize("inner", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_state_of_another_optimizer_is_an_error_that_changes_nothing(inner):
    made, _ = make(inner(), value=0.0)
    other = keras.optimizers.RMSprop(momentum=0.9, centered=True)
    other.build([keras.Variable(0.0), keras.Variable(np.zeros(3))])
    before = [v.numpy() for v in made.variables]
    store = {str(i): v.numpy() for i, v in enumerate(other.variables)}
    with pytest.raises(ValueError, match=f"{len(store)} saved variables"):
        made.load_own_variables(store)
    helpers.assert_equal(made.variables, before)


@pytest.mark.parametrize("saved", OPTIMIZERS)
@pytest.mark.parametrize("built", [False, True])
def test_state_without_slots_is_not_taken_for_one_that_took_no_step(
    saved, built, tmp_path
):
    """SGD's two variables look like an Adam's that was never built."""
    source, _ = trained(saved, keras.optimizers.SGD(0.01))
    source.save_weights(tmp_path / "saved.weights.h5")
    target, _ = untrained("ours")
    with pytest.raises(ValueError, match="was not loaded"):
        if built:
            target.optimizer.build(target.trainable_variables)
        target.load_weights(tmp_path / "saved.weights.h5")
        target.optimizer.build(target.trainable_variables)
    assert int(target.optimizer.iterations) == 0


def test_skip_mismatch_loads_weights_without_the_state_of_another_optimizer(tmp_path):
    source, x = trained("bare", keras.optimizers.RMSprop(momentum=0.9))
    source.save_weights(tmp_path / "saved.weights.h5")
    target, _ = trained("ours")
    with pytest.raises(ValueError, match="skip_mismatch"):
        target.load_weights(tmp_path / "saved.weights.h5")
    with pytest.warns(UserWarning, match="was not loaded"):
        target.load_weights(tmp_path / "saved.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(target(x), source(x))


def test_layouts_of_equal_length_are_told_apart_by_kind():
    """Bare Adam of four scalars has as many variables as ours around SGD."""
    made, _ = make(value=0.0)
    adam = keras.optimizers.Adam()
    adam.build([keras.Variable(0.0) for _ in range(4)])
    assert len(adam.variables) == len(made.variables)
    store = {str(i): v.numpy() for i, v in enumerate(adam.variables)}
    with pytest.raises(ValueError, match="not loaded"):
        made.load_own_variables(store)
    assert float(made.loss_scale) == 2.0**15 and int(made.skipped_steps) == 0


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("scale", "used"), [(0.0, 2.0**-14), (NAN, 2.0**15), (INF, 2.0**24), (-1, 2.0**-14)]
)
def test_scale_assigned_or_restored_from_outside_does_no_harm(runner, scale, used):
    made, variable = make()
    made.dynamic_scale.assign(scale)

    @RUNNERS[runner]
    def step():
        scaled = made.scale_loss(tf.constant(1.0))
        made.apply([tf.fill((2,), scaled)], [variable])
        return scaled

    assert float(step()) == used
    np.testing.assert_array_equal(variable, [0.0, 1.0])
    assert float(made.loss_scale) == used


@pytest.mark.parametrize(
    ("scale", "expected"), [(1e30, 2.0**24), (0.0, 2.0**-14), (NAN, 2.0**15)]
)
def test_loaded_scale_outside_the_bounds_is_clamped_with_a_warning(scale, expected):
    made, _ = make()
    store = {str(i): v.numpy() for i, v in enumerate(made.variables)}
    store["3"] = np.float32(scale)
    with pytest.warns(UserWarning, match="outside"):
        made.load_own_variables(store)
    assert float(made.loss_scale) == expected


@pytest.mark.parametrize("how", ["weights", "checkpoint"])
def test_static_scale_stays_whatever_is_loaded(how, tmp_path):
    """A finite guard must not begin to scale."""
    source, x = trained("ours")
    guard = tfamp.LossScaleOptimizer(keras.optimizers.Adam(), 1.0, dynamic=False)
    target, _ = trained("bare", guard)
    if how == "weights":
        source.save_weights(tmp_path / "saved.weights.h5")
        target.load_weights(tmp_path / "saved.weights.h5")
    else:
        path = tf.train.Checkpoint(o=source.optimizer).write(str(tmp_path / "saved"))
        tf.train.Checkpoint(o=guard).read(path).expect_partial()
    assert float(guard.scale_loss(tf.constant(2.0))) == 2.0
    expected = source.fit(x, x[:, :1], verbose=0, shuffle=False).history["loss"]
    if how == "weights":
        got = target.fit(x, x[:, :1], verbose=0, shuffle=False).history["loss"]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert float(guard.loss_scale) == 1.0
