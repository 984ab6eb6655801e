"""The rule of the loss scale, as tables and against a model in plain Python."""

import dataclasses
import inspect
import math
import re

import helpers
import numpy as np
import pytest
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


# ---- Configuration ----


def _numbers(name, *values):
    return [(name, value, ValueError) for value in values]


def _wrong_types(name, *values):
    return [(name, value, TypeError) for value in values]


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
]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    NONSENSE,
    ids=[f"{name}={value!r}"[:40] for name, value, _ in NONSENSE],
)
def test_nonsense_is_an_error_that_says_what_was_received(name, value, error):
    with pytest.raises(error, match=re.escape(f"{name}={value!r}")) as caught:
        rule.LossScaleConfig(**{name: value})
    assert f"`{name}`" in str(caught.value) or "scale" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        dict(initial_scale=4.0, min_scale=8.0),
        dict(initial_scale=4.0, max_scale=2.0),
        dict(initial_scale=4.0, min_scale=8.0, max_scale=2.0),
    ],
    ids=["min_above_initial", "max_below_initial", "both"],
)
def test_bounds_out_of_order_are_an_error_that_names_all_three(settings):
    with pytest.raises(ValueError, match="min_scale <= initial_scale") as caught:
        rule.LossScaleConfig(**settings)
    for name, value in settings.items():
        assert f"{name}={value}" in str(caught.value)


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
