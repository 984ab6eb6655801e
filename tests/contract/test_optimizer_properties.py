"""The optimizer over thousands of random sequences of gradients.

Each sequence mixes ordinary, zero, tiny, huge, infinite and NaN gradients. After
each step of it:

* the state of the loss scale equals that of `helpers.LossScaleModel`, written in plain
  Python from the documentation;
* a skipped step has changed no bit of a weight, slot, average or counter;
* weights and slots are those of the inner optimizer alone, given the finite steps'
  unscaled gradients; they hold nothing non-finite that it does not.

Settings and inner optimizers come from two tables, combined in eager mode, graphs
and XLA, one call for each step or several steps in one.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfamp

FLOAT32 = tfamp.float_format("float32")
LENGTH = 12  # Steps of a sequence.
SIZE = 8  # Elements of one step's gradients.

# ---- What is combined ----

NAMES = ["SGD", "momentum", "Adam", "AdamW", "averages that overwrite"]
NAMES += ["accumulation", "RMSprop", "schedule", "global clipping", "several"]
INNER = {name: helpers.OPTIMIZERS[name] for name in NAMES}
ACCUMULATED = {"accumulation": 3}

SETTINGS: dict[str, dict[str, Any]] = {
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
        initial_scale=2.0**-120,
        growth_interval=2,
        growth_factor=2.0**10,
        min_scale=FLOAT32.smallest_normal,
        hysteresis=2,
    ),
    "highest": dict(
        initial_scale=2.0**120,
        growth_interval=1,
        growth_factor=40.0,
        max_scale=FLOAT32.max,
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

# ---- Gradients ----


def ordinary(rng, scale):
    return scaled(rng.normal(size=SIZE) * 10 ** rng.uniform(-3, 1), scale)


def zero(rng, scale):
    return np.copysign(np.zeros(SIZE, "float32"), rng.normal(size=SIZE))


def tiny(rng, scale):
    """Down to the smallest subnormal and beyond."""
    return scaled(rng.normal(size=SIZE) * 10 ** rng.uniform(-46, -20, SIZE), scale)


def huge(rng, scale):
    """As large as may be while every optimizer's squares stay finite."""
    return scaled(rng.uniform(-1e15, 1e15, SIZE), scale)


def largest(rng, scale):
    """Up to float32's largest number once scaled; the sum of two is infinite."""
    size = rng.choice([1.0, 1.0, 0.75, 0.3], SIZE) * rng.choice([-1.0, 1.0], SIZE)
    return (size * FLOAT32.max).astype("float32")


def mixed(rng, scale, kinds=(ordinary, zero, tiny, huge)):
    rows = np.stack([kind(rng, scale) for kind in kinds])
    return rows[rng.integers(0, len(kinds), SIZE), np.arange(SIZE)]


def mixed_with_largest(rng, scale):
    return mixed(rng, scale, (ordinary, zero, largest))


def one_bad(rng, scale):
    found = mixed(rng, scale)
    found[rng.integers(0, SIZE)] = rng.choice([np.nan, np.inf, -np.inf])
    return found


def opposite_infinities(rng, scale):
    found = ordinary(rng, scale)
    found[rng.permutation(SIZE)[:2]] = np.inf, -np.inf
    return found


def all_nan(rng, scale):
    return np.full(SIZE, np.nan, "float32")


def largest_and_bad(rng, scale):
    found = largest(rng, scale)
    found[rng.integers(0, SIZE)] = rng.choice([np.nan, np.inf, -np.inf])
    return found


def scaled(gradient, scale):
    with np.errstate(all="ignore"):
        return gradient.astype("float32") * scale


def without_subnormals(gradient, scale):
    """With 0 for what TensorFlow may flush, if unscaling would make it matter."""
    is_small = np.abs(gradient) < FLOAT32.smallest_normal
    return np.where(is_small, np.float32(0), gradient) if scale < 1 else gradient


GOOD = [ordinary, ordinary, zero, tiny, huge, mixed]
BAD = [one_bad, one_bad, opposite_infinities, all_nan]
# With these alone the inner optimizer may overflow by itself, in squares or sums.
EXTREME = [largest, largest, mixed_with_largest, largest_and_bad]


def runs_of(kinds):
    """Runs, so that growth intervals are often reached."""
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.integers(1, 4)), min_size=1, max_size=7
    )


MODERATE = runs_of(GOOD + BAD)
ANY = st.one_of(MODERATE, runs_of(GOOD + BAD + EXTREME))
SEEDS = st.integers(0, 2**32 - 1)


class Sequence(NamedTuple):
    """Steps, and what the model says of them.

    Attributes:
      gradients: float32 [LENGTH, SIZE], scaled.
      indices: int32 [LENGTH, 3]. Rows of a sparse gradient, the first two equal.
      finite: bool [LENGTH]. Whether each step is finite once unscaled.
      unscaled: float32 [LENGTH, SIZE]. `gradients` by the scale of the step.
      states: The model's state after each step.
    """

    gradients: np.ndarray
    indices: np.ndarray
    finite: list[bool]
    unscaled: np.ndarray
    states: list[tuple]


def play(settings, runs, seed, salt):
    """Draws the gradients of each step, by the scale that the model has then."""
    rng = np.random.default_rng([seed, zlib.crc32(salt.encode())])
    # Hypothesis draws alike for every row of a test's table.
    runs = [runs[index] for index in rng.permutation(len(runs))]
    kinds = itertools.cycle([kind for kind, length in runs for _ in range(length)])
    model = helpers.LossScaleModel(**settings)
    finite, states = [], []
    gradients = np.zeros((LENGTH, SIZE), "float32")
    unscaled = np.zeros((LENGTH, SIZE), "float32")
    for index, kind in enumerate(itertools.islice(kinds, LENGTH)):
        gradients[index] = without_subnormals(kind(rng, model.scale), model.scale)
        with np.errstate(all="ignore"):
            unscaled[index] = gradients[index] / model.scale
        finite.append(bool(np.isfinite(unscaled[index]).all()))
        states.append(model.step(finite[-1]))
    indices = rng.integers(0, 4, (LENGTH, 3)).astype("int32")
    indices[:, 1] = indices[:, 0]
    return Sequence(gradients, indices, finite, unscaled, states)


# ---- Optimizers, each made and traced once, and set back before each sequence ----


class Rows(NamedTuple):
    """What was seen after each step: [LENGTH, ...].

    Attributes:
      floats: float32. The weights and the inner optimizer's float variables.
      counts: int64. The inner optimizer's integer variables.
      scales: float32. The loss scale; empty for an inner optimizer alone.
      counters: int64. The rest of the loss scale's state, and `iterations`.
    """

    floats: np.ndarray
    counts: np.ndarray
    scales: np.ndarray
    counters: np.ndarray


class Cell(NamedTuple):
    """One optimizer, ours or an inner one alone.

    Attributes:
      run: Function of (gradients, indices) that returns `Rows`.
      start: `Rows` of one row: before the first step.
      read: Function that returns the variables' values now, as one such row.
      size_of: int64 [columns of `floats`]. The column to measure errors by: of the
        weight, for its moving average; else the column itself.
    """

    run: Callable[[np.ndarray, np.ndarray], Rows]
    start: Rows
    read: Callable[[], Rows]
    size_of: np.ndarray


def dense_variables():
    first = np.linspace(-1.0, 1.0, 6, dtype="float32").reshape(2, 3)
    return [
        keras.Variable(first, name="first"),
        keras.Variable([1.0, 2.0], name="second"),
    ]


def dense(flat, indices):
    return [tf.reshape(flat[:6], (2, 3)), flat[6:]]


def sparse_variables():
    table = np.linspace(-1.0, 1.0, 8, dtype="float32").reshape(4, 2)
    return [
        keras.Variable(table, name="first"),
        keras.Variable([1.0, 2.0], name="second"),
        keras.Variable([3.0], name="unused"),
    ]


def sparse(flat, indices):
    values = tf.reshape(flat[:6], (3, 2))
    return [tf.IndexedSlices(values, indices, tf.constant([4, 2])), flat[6:], None]


def one_call_for_each_step(wrap):
    def runner(apply, snapshot, reset):
        @wrap
        def step(flat, indices):
            apply(flat, indices)
            return snapshot()

        def run(gradients, indices):
            reset()
            steps = zip(gradients, indices, strict=True)
            rows = [step(*map(tf.constant, arguments)) for arguments in steps]
            columns = zip(*rows, strict=True)
            return Rows(*(np.stack(column) for column in columns))

        return run

    return runner


def one_call_for_all_steps(jit_compile):
    def runner(apply, snapshot, reset):
        @tf.function(jit_compile=jit_compile)
        def loop(gradients, indices):
            reset()
            rows = [_array(value) for value in snapshot()]
            for i in tf.range(LENGTH):
                apply(gradients[i], indices[i])
                pairs = zip(rows, snapshot(), strict=True)
                rows = [row.write(i, value) for row, value in pairs]
            return [row.stack() for row in rows]

        def run(gradients, indices):
            found = loop(tf.constant(gradients), tf.constant(indices))
            return Rows(*(value.numpy() for value in found))

        return run

    return runner


def _array(value):
    return tf.TensorArray(value.dtype, LENGTH, element_shape=value.shape)


RUNNERS = {
    "eager": one_call_for_each_step(lambda step: step),
    "graph": one_call_for_each_step(tf.function),
    "xla": one_call_for_each_step(lambda f: tf.function(f, jit_compile=True)),
    "graph loop": one_call_for_all_steps(False),
    "xla loop": one_call_for_all_steps(True),
}


def make_cell(optimizer, weights, pack, runner, own=()):
    """Builds a `Cell`.

    Args:
      optimizer: The optimizer to apply.
      weights: Its variables.
      pack: Function of (flat gradients, indices) that returns gradients.
      runner: A value of `RUNNERS`.
      own: The variables of the loss scale, its scale first.
    """
    if not optimizer.built:
        optimizer.build(weights)
    inner = optimizer.inner_optimizer if own else optimizer
    state = [*weights, *inner.variables]
    floats = [v for v in state if "float" in v.dtype]
    counts = [v for v in state if "int" in v.dtype]
    initial = [(v, v.numpy()) for v in [*state, *own]]

    def reset():
        for variable, value in initial:
            variable.assign(value)

    def snapshot():
        iterations = tf.convert_to_tensor(optimizer.iterations)
        counters = [v.value for v in own[1:]] + [iterations]
        return (
            tf.concat([tf.reshape(v.value, [-1]) for v in floats], 0),
            tf.stack([tf.cast(v.value, "int64") for v in counts]),
            tf.stack([v.value for v in own[:1]] or [0.0]),
            tf.stack([tf.cast(value, "int64") for value in counters]),
        )

    def read():
        return Rows(
            np.concatenate([v.numpy().ravel() for v in floats])[None],
            np.stack([v.numpy() for v in counts])[None],
            np.array([[v.numpy() for v in own[:1]] or [0.0]], "float32"),
            np.array([[*(int(v) for v in own[1:]), int(optimizer.iterations)]]),
        )

    def apply(flat, indices):
        optimizer.apply(pack(flat, indices), weights)

    run = runner(apply, snapshot, reset)
    return Cell(run, read(), read, columns_of(floats, weights))


def columns_of(floats, weights):
    """Returns `Cell.size_of`."""
    ends = np.cumsum([math.prod(v.shape) for v in floats])
    columns = np.split(np.arange(ends[-1]), ends[:-1])
    weight_columns = zip(weights, columns, strict=False)  # The weights come first.
    averaged = {f"{v.name}_average": place for v, place in weight_columns}
    named = [(v.name, place) for v, place in zip(floats, columns, strict=True)]
    return np.concatenate([averaged.get(name, place) for name, place in named])


@functools.cache
def ours(inner, settings, runner, is_sparse=False):
    made = tfamp.LossScaleOptimizer(INNER[inner](), **SETTINGS[settings])
    weights = sparse_variables() if is_sparse else dense_variables()
    pack = sparse if is_sparse else dense
    made.build(weights)
    own = [made.loss_scale, made.growth_tracker, *made.variables[4:8]]
    return make_cell(made, weights, pack, RUNNERS[runner], own)


@functools.cache
def alone(inner, is_sparse=False):
    weights = sparse_variables() if is_sparse else dense_variables()
    pack = sparse if is_sparse else dense
    return make_cell(INNER[inner](), weights, pack, RUNNERS["graph loop"])


# ---- Properties ----


def check_scale(settings, sequence, rows):
    """The state of the loss scale is the model's, and within its bounds."""
    expected = np.array(sequence.states).T  # All exact in float64.
    found = np.array([rows.scales[:, 0], *rows.counters[:, :-1].T])
    assert_same(helpers.LossScaleModel.FIELDS, found, expected)
    keywords = SETTINGS[settings]
    low = keywords.get("min_scale", 2.0**-14)
    high = keywords.get("max_scale", max(2.0**24, keywords.get("initial_scale", 0)))
    assert np.isfinite(rows.scales).all()
    assert (np.float32(low) <= rows.scales).all()
    assert (rows.scales <= np.float32(high)).all()


def assert_same(names, found, expected):
    wrong = [
        (name, left, right)
        for name, left, right in zip(names, found, expected, strict=True)
        if not np.array_equal(left, right)
    ]
    assert not wrong, f"(name, found, expected): {wrong}"


def check_skips(cell, sequence, rows):
    """A skipped step has changed no bit."""
    bits = np.concatenate([cell.start.floats, rows.floats]).view("int32")
    counts = np.concatenate([cell.start.counts, rows.counts])
    iterations = np.concatenate([cell.start.counters, rows.counters])[:, -1]
    after = 1 + np.flatnonzero(~np.array(sequence.finite))
    assert np.array_equal(iterations[after], iterations[after - 1])
    assert np.array_equal(counts[after], counts[after - 1])
    assert np.array_equal(bits[after], bits[after - 1])


def steps_that_count(finite):
    """Returns, after each step, which steps the inner optimizer has taken so far."""
    return [
        [step for step in range(last + 1) if finite[step]]
        for last in range(len(finite))
    ]


def check_inner(cell, reference, sequence, rows, taken):
    """Weights and slots are those of the inner optimizer alone."""
    for last, steps in enumerate(taken):
        if last + 1 < len(taken) and steps == taken[last + 1][: len(steps)]:
            continue  # The run for a later step has these first.
        expected = run_alone(reference, sequence, steps)
        # Of the steps before, not those that were dropped with their window.
        shown = [i for i in range(last + 1) if taken[i] == steps[: len(taken[i])]]
        done = [len(taken[i]) for i in shown]
        largest_f32 = np.fmax.accumulate(np.abs(expected.floats))[:, cell.size_of]
        assert_close(rows.floats[shown], expected.floats[done], largest_f32[done])
        assert np.array_equal(rows.counts[shown], expected.counts[done])
        assert np.array_equal(rows.counters[shown, -1], expected.counters[done, -1])


def run_alone(reference, sequence, steps):
    """Returns the `Rows` of an inner optimizer alone, before and after each step."""
    gradients = np.zeros_like(sequence.unscaled)
    gradients[: len(steps)] = sequence.unscaled[steps]
    indices = np.zeros_like(sequence.indices)
    indices[: len(steps)] = sequence.indices[steps]
    rows = reference.run(gradients, indices)
    return Rows(*map(np.concatenate, zip(reference.start, rows, strict=True)))


def assert_close(found, expected, largest_f32):
    """Equal, but for the rounding of sums that XLA orders otherwise than Keras.

    That is a few units in the last place at each step, of the largest value that
    the element has had so far; and subnormals may be flushed to 0. What is not
    finite in the one must be the same in the other.
    """
    allowed = 8 * LENGTH * (FLOAT32.epsilon * largest_f32 + FLOAT32.smallest_normal)
    with np.errstate(all="ignore"):
        close = np.abs(found.astype("float64") - expected) <= allowed
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    wrong = ~np.where(np.isfinite(expected), close, same)
    assert not wrong.any(), (
        f"At {np.argwhere(wrong).tolist()} (step, column): found {found[wrong]}, "
        f"expected {expected[wrong]}, at most {allowed[wrong]} apart"
    )


def check(inner, settings, runner, runs, seed, is_sparse=False):
    """Plays one sequence and checks every property after each of its steps.

    That nothing becomes non-finite is checked against the inner optimizer alone,
    and as it stands where no gradient is so large that its square overflows.
    """
    cell, reference = ours(inner, settings, runner, is_sparse), alone(inner, is_sparse)
    salt = f"{inner}, {settings}, {runner}, {is_sparse}"
    sequence = play(SETTINGS[settings], runs, seed, salt)
    rows = cell.run(sequence.gradients, sequence.indices)
    window = ACCUMULATED.get(inner, 1)
    taken = steps_that_count(sequence.finite)
    check_scale(settings, sequence, rows)
    assert rows.counters[:, -1].tolist() == [len(steps) // window for steps in taken]
    check_skips(cell, sequence, rows)
    check_inner(cell, reference, sequence, rows, taken)
    if not {kind for kind, _ in runs} & set(EXTREME):
        assert np.isfinite(rows.floats).all()
    for now, last in zip(cell.read(), rows, strict=True):
        np.testing.assert_array_equal(now[0], last[-1])


# ---- Tests ----


def pairs(shift, *runners):
    """Returns a row for each inner optimizer: with it, settings and a runner.

    `shift` turns the table of settings, so that each test has other pairs.
    """
    names = list(SETTINGS)
    rows = [
        (inner, names[(index + shift) % len(names)], runners[index % len(runners)])
        for index, inner in enumerate(INNER)
    ]
    return [pytest.param(*row, id=", ".join(row)) for row in rows]


def for_each(rows, examples):
    """Returns a decorator: `examples` sequences for each row."""

    def decorate(test):
        test = hypothesis.settings(max_examples=examples)(test)
        return pytest.mark.parametrize(("inner", "settings", "runner"), rows)(test)

    return decorate


# Each optimizer is in a graph in the one, under XLA in the other.
EACH_STEP = pairs(0, "graph", "xla")
SEVERAL_STEPS = pairs(6, "xla loop", "graph loop")


@for_each(EACH_STEP, 50)
@hypothesis.given(ANY, SEEDS)
def test_step_is_taken_whole_or_not_at_all(inner, settings, runner, runs, seed):
    check(inner, settings, runner, runs, seed)


@for_each(SEVERAL_STEPS, 120)
@hypothesis.given(ANY, SEEDS)
def test_so_it_is_with_several_steps_in_one_call(inner, settings, runner, runs, seed):
    check(inner, settings, runner, runs, seed)


@for_each(pairs(9, "eager"), 5)
@hypothesis.given(ANY, SEEDS)
def test_so_it_is_in_eager_mode(inner, settings, runner, runs, seed):
    check(inner, settings, runner, runs, seed)


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@for_each(pairs(3, "graph loop", "xla loop"), 40)
@hypothesis.given(MODERATE, SEEDS)
def test_sparse_gradients_with_duplicates_and_none_among_them(
    inner, settings, runner, runs, seed
):
    """XLA does not compile this update; the inner optimizer alone gets them too."""
    check(inner, settings, runner, runs, seed, is_sparse=True)
