"""The optimizer over random sequences of gradients, however it runs.

After each step of a sequence:

* the state of the loss scale equals that of `helpers.LossScaleModel`, written in plain
  Python from the documentation;
* a skipped step has changed no bit of a weight, slot, average or counter;
* weights and slots are those of the inner optimizer alone, given the finite steps'
  unscaled gradients.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

NAN, INF = float("nan"), float("inf")
STEPS = "+-++0+--+n+0+++-+"  # Finite, of zeros, infinite or NaN.

SETTINGS = {
    "defaults but the interval": dict(growth_interval=2),
    "hysteresis": dict(initial_scale=8.0, growth_interval=2, hysteresis=3),
    "odd factors": dict(
        initial_scale=10.0, growth_interval=1, growth_factor=1.7, backoff_factor=0.3
    ),
    "narrow bounds": dict(
        initial_scale=8.0,
        growth_interval=1,
        growth_factor=8.0,
        backoff_factor=0.01,
        min_scale=5.0,
        max_scale=19.0,
    ),
    "below 1": dict(initial_scale=0.25, growth_interval=3, min_scale=2.0**-20),
    "lowest": dict(
        initial_scale=2.0**-100,
        growth_interval=2,
        growth_factor=2.0**10,
        min_scale=2.0**-103,
        hysteresis=2,
    ),
    "highest": dict(
        initial_scale=2.0**120,
        growth_interval=1,
        growth_factor=4.0,
        max_scale=2.0**123,
    ),
    "static": dict(initial_scale=100.0, growth_interval=1, dynamic=False),
    "static below 1": dict(initial_scale=0.3, dynamic=False, hysteresis=2),
    "constant": dict(growth_interval=tfamp.ConstantGrowthInterval(3)),
    "piecewise": dict(
        initial_scale=64.0,
        growth_interval=tfamp.PiecewiseGrowthInterval((1, 3), (1, 2, 4)),
    ),
    "geometric": dict(
        growth_interval=tfamp.GeometricGrowthInterval(2, 2.5, 0.4, 1, 6),
        hysteresis=2,
    ),
}


def variables():
    first = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
    return [
        keras.Variable(first, name="first"),
        keras.Variable([1.0, 2.0], name="second"),
        keras.Variable([3.0], name="unused"),
    ]


def dense(first, second):
    return [first, second, tf.zeros([1])]


def sparse(first, second):
    """Row 2 occurs twice; one variable has no gradient."""
    slices = tf.IndexedSlices(first, tf.constant([2, 0, 2, 1]), tf.constant([4, 3]))
    return [slices, second, None]


def draw(kind, rng):
    """Returns unscaled gradients of one step."""
    first, second = (rng.normal(size=s).astype("float32") for s in ((4, 3), 2))
    if kind == "0":
        return np.zeros_like(first), np.zeros_like(second)
    if kind != "+":
        bad = NAN if kind == "n" else rng.choice([INF, -INF])
        # Of rows that occur twice, stock Keras looks at the last alone.
        (first if rng.random() < 0.5 else second).flat[0] = bad
    return first, second


def read(weights, optimizer):
    return [v.numpy() for v in [*weights, *optimizer.variables]]


def check(inner, settings, runner, pack=dense):
    wrap, keywords = helpers.RUNNERS[runner], SETTINGS[settings]
    made = tfamp.LossScaleOptimizer(helpers.OPTIMIZERS[inner](), **keywords)
    alone, model = helpers.OPTIMIZERS[inner](), helpers.LossScaleModel(**keywords)
    weights, expected = variables(), variables()
    made.build(weights)
    alone.build(expected)
    state = [made.loss_scale, made.growth_tracker, *made.variables[4:8]]
    step = wrap(lambda *grads: made.apply(pack(*grads), weights))
    step_alone = tf.function(lambda *grads: alone.apply(pack(*grads), expected))
    rng = np.random.default_rng(len(inner))
    for kind in STEPS:
        before, scale = read(weights, made.inner_optimizer), made.loss_scale.numpy()
        with np.errstate(all="ignore"):
            scaled = [np.float32(grad * scale) for grad in draw(kind, rng)]
            unscaled = [grad / scale for grad in scaled]
        step(*map(tf.constant, scaled))
        finite = all(np.isfinite(grad).all() for grad in unscaled)
        assert tuple(v.numpy() for v in state) == model.step(finite)
        found = read(weights, made.inner_optimizer)
        if not finite:
            helpers.assert_equal(found, before)
            continue
        step_alone(*map(tf.constant, unscaled))
        # XLA orders sums otherwise than Keras' kernels.
        helpers.assert_equal(found, read(expected, alone), rtol=1e-4, atol=1e-5)
        assert int(made.iterations) == int(alone.iterations)
    assert int(made.skipped_steps) == sum(kind in "-n" for kind in STEPS)


TURNED = [*SETTINGS] * 3


def in_graphs(name):
    """Keras 3.10's own Muon asks a TensorFlow variable for its `path`."""
    fails = name == "Muon" and keras.__version__ < "3.11"
    reason = f"Keras {keras.__version__}'s Muon does not train"
    marks = [pytest.mark.skipif(fails, reason=reason)]
    usual = name in ("AdamW", "accumulation")
    marks += [pytest.mark.device] if name == "AdamW" else []
    marks += [] if usual else [pytest.mark.training]
    return pytest.param(name, marks=marks)


@pytest.mark.issue("keras#16560")
@pytest.mark.parametrize("runner", ["graph", "xla"])
@pytest.mark.parametrize("inner", [in_graphs(name) for name in helpers.OPTIMIZERS])
def test_step_of_every_optimizer_is_taken_whole_or_not_at_all(inner, runner):
    index = [*helpers.OPTIMIZERS].index(inner) + 5 * (runner == "xla")
    check(inner, TURNED[index], runner)


@pytest.mark.parametrize("settings", SETTINGS)
def test_so_it_is_with_every_setting_in_eager_mode(settings):
    check("Adam", settings, "eager")


@pytest.mark.issue("tensorflow#31956")
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("runner", ["graph", "xla"])
@pytest.mark.parametrize("inner", ["momentum", "Adam", "accumulation", "several"])
def test_sparse_gradients_with_duplicates_and_none_among_them(inner, runner):
    """XLA does not compile this update; the inner optimizer alone gets them too."""
    check(inner, "hysteresis", runner, sparse)
