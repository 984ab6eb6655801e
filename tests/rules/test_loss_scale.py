"""The rule of the loss scale and of its growth interval.

As tables, and against a model in plain Python.
"""

import dataclasses
import inspect
import json
import math
import re

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfamp
from tfamp.facts import formats
from tfamp.loss_scaling import growth_schedules, rule

FLOAT32 = formats.float_format("float32")
Constant = growth_schedules.ConstantGrowthInterval
Piecewise = growth_schedules.PiecewiseGrowthInterval
Geometric = growth_schedules.GeometricGrowthInterval


# ---- Trajectories: settings, mask ("+" finite, "-" not), scale after each step ----

TRAJECTORIES = {
    "non_finite_step_restarts_the_count": (
        dict(growth_interval=3),
        "+++-++-+++",
        [8, 8, 16, 8, 8, 8, 4, 4, 4, 8],
    ),
    "finite_step_does_not_refill_hysteresis": (
        dict(growth_interval=10, hysteresis=2),
        "-+-+-",
        [8, 8, 4, 4, 2],
    ),
    "growth_at_max_scale_refills_hysteresis": (
        dict(growth_interval=1, max_scale=8.0, hysteresis=2),
        "-+--",
        [8, 8, 8, 4],
    ),
    "static_scale_holds": (dict(growth_interval=1, dynamic=False), "+-+", [8, 8, 8]),
    "stops_by_default_at_2_to_the_24": (
        dict(initial_scale=2.0**23, growth_interval=1),
        "+++",
        [2.0**24, 2.0**24, 2.0**24],
    ),
}


@pytest.mark.issue("keras#16100")
@pytest.mark.parametrize("row", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_scale(row):
    settings, mask, expected = row
    config = rule.LossScaleConfig(**{"initial_scale": 8.0, **settings})
    states = helpers.run_mask(config, mask)
    assert [float(state.scale) for state in states] == expected


# ---- Against the model, and what always holds ----

# Runs, so that growth intervals are often reached.
masks = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8).map(
    lambda runs: [finite for finite, length in runs for _ in range(length)][:40]
)
counts = st.integers(1, 12)


@st.composite
def piecewise(draw):
    boundaries = sorted(draw(st.sets(counts, max_size=4)))
    size = len(boundaries) + 1
    return Piecewise(boundaries, draw(st.lists(counts, min_size=size, max_size=size)))


@st.composite
def geometric(draw):
    bounds = st.one_of(counts, st.integers(1, 2**53))
    low, initial, high = sorted(draw(st.tuples(bounds, bounds, bounds)))
    return Geometric(
        initial=initial,
        lengthen=draw(st.one_of(st.floats(1.0, 4.0), st.floats(1.0, 2.0**53))),
        shorten=draw(st.floats(1e-9, 1.0)),
        min_interval=low,
        max_interval=high,
    )


intervals = st.one_of(counts, counts.map(Constant), piecewise(), geometric())


@st.composite
def settings(draw):
    powers = st.floats(2.0**-120, 2.0**120)
    low, initial, high = sorted(draw(st.tuples(powers, powers, powers)))
    return dict(
        initial_scale=initial,
        growth_interval=draw(intervals),
        growth_factor=draw(st.floats(1.001, 1e6)),
        backoff_factor=draw(st.floats(1e-6, 0.999)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=draw(st.sampled_from([high, None])),
        dynamic=draw(st.sampled_from([True, True, True, False])),
    )


@given(settings(), masks)
def test_every_field_equals_the_models_after_each_step(settings, mask):
    config, model = rule.LossScaleConfig(**settings), helpers.LossScaleModel(**settings)
    low, high = np.float32(config.min_scale), np.float32(config.upper_bound)
    before = np.float32(config.initial_scale)
    for finite, state in zip(mask, helpers.run_mask(config, mask), strict=True):
        assert tuple(state) == model.step(finite)
        assert low <= state.scale <= high and np.isfinite(state.scale)
        assert state.scale >= before if finite else state.scale <= before
        before = state.scale


# ---- A restored state ----


def step_from(config, finite=True, **fields):
    return rule.next_state(config, config.initial_state()._replace(**fields), finite)


def test_restored_tracker_above_a_shorter_interval_grows():
    config = rule.LossScaleConfig(initial_scale=8.0, growth_interval=3)
    state = step_from(config, growth_tracker=7)
    assert (float(state.scale), int(state.growth_tracker)) == (16.0, 0)


@pytest.mark.parametrize(
    ("restored", "finite", "expected"),
    [
        (64.0, True, 16.0),
        (64.0, False, 8.0),  # The step was scaled by 16, and 16 overflowed.
        (0.5, False, 4.0),
        (0.5, True, 4.0),
        (float("nan"), True, 8.0),  # The first scale.
        (float("inf"), True, 16.0),
    ],
)
def test_restored_scale_outside_the_bounds_is_brought_within(
    restored, finite, expected
):
    config = rule.LossScaleConfig(initial_scale=8.0, min_scale=4.0, max_scale=16.0)
    assert float(step_from(config, finite, scale=restored).scale) == expected


# ---- The growth interval, by schedules ----


def trajectory(schedule, mask, **settings):
    """Returns the scale and the growth interval after each step."""
    config = rule.LossScaleConfig(
        growth_interval=schedule, **{"initial_scale": 8.0, **settings}
    )
    states = helpers.run_mask(config, mask)
    return [int(s.scale) for s in states], [int(s.growth_interval) for s in states]


# ---- The tables of the docstrings ----

DOCUMENTED = {
    "piecewise": Piecewise(boundaries=(1,), intervals=(1, 3)),
    "geometric": Geometric(4, min_interval=2, max_interval=7),
}


def documented_rows(schedule_class):
    """Returns (gradients, scale, interval) of the table in a class' docstring."""
    blocks = inspect.getdoc(schedule_class).split("```")[1::2]
    (table,) = [block for block in blocks if block.lstrip().startswith("step")]
    lines = [line.split() for line in table.strip().splitlines()]
    assert [line[0] for line in lines] == ["step", "gradients", "scale", "interval"]
    steps, gradients, scales, intervals = (line[1:] for line in lines)
    assert steps == [str(1 + i) for i in range(len(steps))]
    return "".join(gradients), [int(s) for s in scales], [int(i) for i in intervals]


@pytest.mark.parametrize("schedule", DOCUMENTED.values(), ids=DOCUMENTED)
def test_documented_table_is_what_the_rule_gives(schedule):
    gradients, scales, intervals = documented_rows(type(schedule))
    assert trajectory(schedule, gradients) == (scales, intervals)


def test_default_piecewise_reaches_the_ceiling_in_900_steps():
    config = rule.LossScaleConfig(growth_interval=Piecewise())
    states = helpers.run_mask(config, [True] * 901, tf.function)
    reached = [s.scale == rule.DEFAULT_MAX_SCALE for s in states]
    assert reached.index(True) == 899


# ---- Any state, also one that was restored from another schedule ----


@pytest.mark.parametrize(
    "schedule",
    [Piecewise((1, 5), (10, 20, 30)), Geometric(), Geometric(7, 1.3, 0.6, 2, 2**53)],
    ids=str,
)
@given(
    st.one_of(st.integers(1, 12), st.integers(0, 2**63 - 1)),
    st.integers(0, 15),
    st.sampled_from([(True, False), (False, True), (False, False)]),
)
def test_next_interval_equals_the_model(schedule, interval, skipped, change):
    model = helpers.LossScaleModel(growth_interval=schedule)
    model.interval, model.skipped = interval, skipped
    state = state_of(growth_interval=interval, skipped_steps=skipped)
    assert int(schedule.next_interval(state, *change)) == model.next_interval(*change)


def state_of(**fields):
    return rule.LossScaleConfig().initial_state()._replace(**fields)


@given(st.integers(1, 2**53 - 1), st.floats(1.0, 2.0, exclude_min=True))
def test_lengthening_never_stalls_below_the_cap(interval, lengthen):
    schedule = Geometric(
        interval, lengthen=lengthen, min_interval=1, max_interval=2**53
    )
    state = state_of(growth_interval=interval)
    assert int(schedule.next_interval(state, False, True)) > interval


@given(st.integers(2, 2**53), st.floats(0.5, 1.0, exclude_max=True))
def test_shortening_never_stalls_above_the_floor(interval, shorten):
    schedule = Geometric(interval, shorten=shorten, min_interval=1, max_interval=2**53)
    state = state_of(growth_interval=interval)
    assert int(schedule.next_interval(state, True, False)) < interval


# ---- A schedule of the user's ----


@dataclasses.dataclass(frozen=True)
class Doubling(growth_schedules.GrowthIntervalSchedule):
    first: int = 1

    @property
    def initial_interval(self):
        return self.first

    def next_interval(self, state, grew, backed_off):
        return tf.where(grew, 2 * state.growth_interval, state.growth_interval)


def test_users_schedule_moves_the_interval_and_survives_serialization():
    found = trajectory(Doubling(), "+++++++")
    assert found == ([16, 16, 32, 32, 32, 32, 64], [2, 2, 4, 4, 4, 4, 8])
    stored = keras.saving.serialize_keras_object(Doubling(3))
    loaded = keras.saving.deserialize_keras_object(stored, {"Doubling": Doubling})
    assert loaded == Doubling(3)


# ---- Configuration ----

EXAMPLES = [
    Constant(7),
    Piecewise((2, 9), (1, 20, 300)),
    Geometric(50, lengthen=3.0, shorten=0.5, min_interval=5, max_interval=500),
]


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda x: type(x).__name__)
def test_schedule_survives_keras_serialization_and_json(schedule):
    default = {field.name: field.default for field in dataclasses.fields(schedule)}
    assert all(getattr(schedule, name) != default[name] for name in default)
    stored = keras.saving.serialize_keras_object(schedule)
    assert stored["registered_name"] == f"tfamp>{type(schedule).__name__}"
    for form in (stored, json.loads(json.dumps(stored))):
        loaded = keras.saving.deserialize_keras_object(form)
        assert loaded == schedule and hash(loaded) == hash(schedule)


def test_numbers_of_numpy_are_serialized():
    for schedule in (Constant(np.int32(3)), Piecewise([np.int64(2)], [np.int8(1), 2])):
        stored = json.loads(json.dumps(keras.saving.serialize_keras_object(schedule)))
        assert keras.saving.deserialize_keras_object(stored) == schedule


def _numbers(name, *values):
    return [(rule.LossScaleConfig, name, value, ValueError) for value in values]


def _wrong_types(name, *values):
    return [(rule.LossScaleConfig, name, value, TypeError) for value in values]


_NOT_INTEGERS = (True, False, 2.0, 1.5, "2", None, [2])
_NOT_NUMBERS = (True, False, "2", None, [2.0], 2j)
NONSENSE = [
    *_numbers("initial_scale", 0, -1.0, math.inf, -math.inf, math.nan, 1e39, 10**400),
    *_wrong_types("initial_scale", *_NOT_NUMBERS),
    *_numbers("growth_interval", 0, -1, 2**63, 10**400),
    *_wrong_types("growth_interval", 1.5, 2.0, math.inf, math.nan, *_NOT_NUMBERS),
    *_wrong_types("growth_interval", growth_schedules.GrowthIntervalSchedule, {}),
    *_numbers("growth_factor", 0, -2.0, 1, 1.0, 0.5, math.inf, math.nan),
    # Rounds to 1.0 in float32, and would never grow.
    *_numbers("growth_factor", 1 + FLOAT32.epsilon / 4),
    *_wrong_types("growth_factor", *_NOT_NUMBERS),
    *_numbers("backoff_factor", 0, -0.5, 1, 1.0, 2.0, math.inf, math.nan),
    # Rounds to 1.0 in float32: every step would be skipped for ever.
    *_numbers("backoff_factor", 1 - FLOAT32.epsilon / 8),
    *_wrong_types("backoff_factor", *_NOT_NUMBERS),
    *_numbers("hysteresis", 0, -1, 2**63),
    *_wrong_types("hysteresis", 1.5, math.nan, *_NOT_NUMBERS),
    *_numbers("min_scale", 0, -1.0, math.inf, math.nan, 2.0**16),
    *_numbers("min_scale", FLOAT32.smallest_subnormal, FLOAT32.smallest_normal / 2),
    *_wrong_types("min_scale", *_NOT_NUMBERS),
    *_numbers("max_scale", 0, -1.0, math.inf, math.nan, 2.0**14, 1e39),
    *_wrong_types("max_scale", *[v for v in _NOT_NUMBERS if v is not None]),
    *_wrong_types("dynamic", "yes", 1, 0, None, 1.0),
    *_numbers("jit_compile", "yes", None, 2),
    *((Constant, "interval", value, ValueError) for value in (0, -1, 2**63)),
    *((Constant, "interval", value, TypeError) for value in _NOT_INTEGERS),
    *((Piecewise, "boundaries", v, TypeError) for v in ("1", (1.0,))),
    *((Piecewise, "boundaries", v, ValueError) for v in ((), (1, 2), (0,), (-1,))),
    *((Piecewise, "intervals", v, TypeError) for v in ((1, 2.0), (True, 1))),
    *((Piecewise, "intervals", v, ValueError) for v in ((), (1,), (1, 0), (1, 2**63))),
    *(
        (Geometric, name, value, error)
        for name in ("initial", "min_interval", "max_interval")
        for error, values in (
            (ValueError, (0, -1, 2**53 + 1, 10**400)),
            (TypeError, _NOT_INTEGERS),
        )
        for value in values
    ),
    *((Geometric, "lengthen", v, ValueError) for v in (0.5, 0, -2, math.inf, math.nan)),
    *((Geometric, "lengthen", v, ValueError) for v in (10**400, 2.0**54)),
    *((Geometric, "shorten", v, ValueError) for v in (0, -0.5, 1.5, math.nan)),
    *((Geometric, n, True, TypeError) for n in ("lengthen", "shorten")),
    *((Geometric, n, "2", TypeError) for n in ("lengthen", "shorten")),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    NONSENSE,
    ids=[f"{name}={value!r}"[:40] for _, name, value, _ in NONSENSE],
)
def test_nonsense_is_an_error_that_says_what_was_received(kind, name, value, error):
    # Of a tuple with one wrong number, that number is named.
    received = re.escape(f"{name}={value!r}") + rf"|{name}\[\d\]="
    with pytest.raises(error, match=received) as caught:
        kind(**{name: value})
    told = rf"`{name}(\[\d\])?` must|must satisfy|must be one more|be in \["
    assert re.search(told, str(caught.value))


SCALES = rule.LossScaleConfig, "min_scale", "initial_scale", "max_scale"
INTERVALS = Geometric, "min_interval", "initial", "max_interval"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SCALES, dict(initial_scale=4.0, min_scale=8.0)),
        (SCALES, dict(initial_scale=4.0, max_scale=2.0)),
        (SCALES, dict(initial_scale=4.0, min_scale=8.0, max_scale=2.0)),
        (INTERVALS, dict(initial=50)),
        (INTERVALS, dict(max_interval=500)),
    ],
    ids=["min_above_initial", "max_below_initial", "both", "initial", "max_interval"],
)
def test_bounds_out_of_order_are_an_error_that_names_all_three(kind, settings):
    make, *names = kind
    with pytest.raises(ValueError, match=" <= ".join(names)) as caught:
        make(**settings)
    given = [f"{name}={settings.get(name, '')}" for name in names]
    assert [text for text in given if text not in str(caught.value)] == []


@pytest.mark.parametrize("boundaries", [(2, 2), (3, 1)])
def test_boundaries_out_of_order_are_an_error(boundaries):
    with pytest.raises(ValueError, match=re.escape(f"boundaries={boundaries}")):
        Piecewise(boundaries, (1, 2, 3))


@pytest.mark.parametrize(
    "settings",
    [
        dict(initial_scale=1),
        dict(initial_scale=np.float32(4.0)),
        dict(growth_interval=np.int64(3)),
        dict(min_scale=4.0, initial_scale=4.0, max_scale=4.0),
        dict(min_scale=FLOAT32.smallest_normal),
        dict(max_scale=FLOAT32.max),
        dict(growth_factor=1 + FLOAT32.epsilon, backoff_factor=1 - FLOAT32.epsilon / 2),
    ],
    ids=[
        "int", "numpy_float", "numpy_int", "equal_bounds", "lowest_min",
        "highest_max", "narrowest_factors",
    ],
)  # fmt: skip
def test_values_at_the_edge_are_accepted_and_run(settings):
    config = rule.LossScaleConfig(**settings)
    up, down = helpers.run_mask(config, [True, False])
    assert config.min_scale <= down.scale <= up.scale <= config.upper_bound


def test_the_optimizer_has_the_same_defaults_as_its_settings():
    parameters = inspect.signature(tfamp.LossScaleOptimizer).parameters
    fields = dataclasses.fields(rule.LossScaleConfig)
    assert fields and all(parameters[x.name].default == x.default for x in fields)
