import dataclasses
import json
import math
import re
from typing import Any

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfamp import formats
from tfamp.loss_scaling import growth_schedules as growth_interval
from tfamp.loss_scaling import rule as loss_scale

FLOAT32 = formats.float_format("float32")

WRAPS = {
    "eager": lambda step: step,
    "graph": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}
in_every_execution = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def scales(states):
    return [float(state.scale) for state in states]


# ---- Trajectories: settings, mask ("+" finite, "-" not), scale after each step ----

TRAJECTORIES = {
    "grows_at_exactly_the_growth_interval": (
        dict(initial_scale=8.0, growth_interval=3),
        "+++",
        [8, 8, 16],
    ),
    "counts_anew_after_each_growth": (
        dict(initial_scale=8.0, growth_interval=3),
        "+++++++",
        [8, 8, 16, 16, 16, 32, 32],
    ),
    "grows_every_step_at_interval_1": (
        dict(initial_scale=8.0, growth_interval=1),
        "+++",
        [16, 32, 64],
    ),
    "backs_off_at_each_non_finite_step": (
        dict(initial_scale=8.0),
        "---",
        [4, 2, 1],
    ),
    "non_finite_step_restarts_the_count": (
        dict(initial_scale=8.0, growth_interval=3),
        "++-+++",
        [8, 8, 4, 4, 4, 8],
    ),
    "backs_off_only_after_hysteresis_is_spent": (
        dict(initial_scale=8.0, growth_interval=10, hysteresis=3),
        "----",
        [8, 8, 4, 2],
    ),
    "finite_step_does_not_refill_hysteresis": (
        dict(initial_scale=8.0, growth_interval=10, hysteresis=2),
        "-+-+-",
        [8, 8, 4, 4, 2],
    ),
    "growth_refills_spent_hysteresis": (
        dict(initial_scale=8.0, growth_interval=2, hysteresis=2),
        "--++--",
        [8, 4, 4, 8, 8, 4],
    ),
    "growth_refills_half_spent_hysteresis": (
        dict(initial_scale=8.0, growth_interval=2, hysteresis=2),
        "-++--",
        [8, 8, 16, 16, 8],
    ),
    "non_finite_step_within_hysteresis_restarts_the_count": (
        dict(initial_scale=8.0, growth_interval=2, hysteresis=2),
        "+-++",
        [8, 8, 8, 16],
    ),
    "holds_at_max_scale": (
        dict(initial_scale=8.0, growth_interval=1, max_scale=16.0),
        "+++-",
        [16, 16, 16, 8],
    ),
    "growth_stops_at_a_max_scale_within_the_factor": (
        dict(initial_scale=8.0, growth_interval=1, max_scale=10.0),
        "++-",
        [10, 10, 5],
    ),
    "growth_at_max_scale_refills_hysteresis": (
        dict(initial_scale=8.0, growth_interval=1, max_scale=8.0, hysteresis=2),
        "-+--",
        [8, 8, 8, 4],
    ),
    "holds_at_min_scale": (
        dict(initial_scale=8.0, growth_interval=1, min_scale=4.0),
        "---+",
        [4, 4, 4, 8],
    ),
    "backoff_stops_at_a_min_scale_within_the_factor": (
        dict(initial_scale=8.0, growth_interval=1, min_scale=5.0),
        "--+",
        [5, 5, 10],
    ),
    "factors_need_not_be_2": (
        dict(
            initial_scale=8.0,
            growth_interval=1,
            growth_factor=1.5,
            backoff_factor=0.25,
        ),
        "++-",
        [12, 18, 4.5],
    ),
    "static_scale_holds": (
        dict(initial_scale=8.0, growth_interval=1, dynamic=False),
        "+-+--",
        [8, 8, 8, 8, 8],
    ),
    "never_reaches_infinity": (
        dict(initial_scale=FLOAT32.max, growth_interval=1),
        "++-",
        [FLOAT32.max, FLOAT32.max, FLOAT32.max / 2],
    ),
    "never_falls_below_the_smallest_normal_number": (
        dict(
            initial_scale=2 * FLOAT32.smallest_normal,
            min_scale=FLOAT32.smallest_normal,
        ),
        "---",
        [FLOAT32.smallest_normal] * 3,
    ),
    "stops_by_default_at_2_to_the_24": (
        dict(initial_scale=2.0**23, growth_interval=1),
        "+++",
        [2.0**24, 2.0**24, 2.0**24],
    ),
}


@in_every_execution
@pytest.mark.parametrize("row", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_scale(row, wrap):
    settings, mask, expected = row
    config = loss_scale.LossScaleConfig(**settings)
    states = helpers.run_mask(config, helpers.parse_mask(mask), wrap)
    assert scales(states) == expected


COUNTERS = {  # One string of digits per counter, one digit per step.
    "hysteresis_1": (
        dict(growth_interval=3, hysteresis=1),
        "++-+++--+",
        dict(
            growth_tracker="120120001",
            hysteresis_tracker="110001000",
            skipped_steps="001111233",
            consecutive_skipped_steps="001000120",
        ),
    ),
    "hysteresis_2": (
        dict(growth_interval=2, hysteresis=2),
        "-+-----++-",
        dict(
            growth_tracker="0100000100",
            hysteresis_tracker="1100000021",
            skipped_steps="1123456667",
            consecutive_skipped_steps="1012345001",
        ),
    ),
    "static": (
        dict(growth_interval=2, hysteresis=2, dynamic=False),
        "++--+-",
        dict(
            growth_tracker="000000",
            hysteresis_tracker="222222",
            skipped_steps="001223",
            consecutive_skipped_steps="001201",
        ),
    ),
}


@in_every_execution
@pytest.mark.parametrize("row", COUNTERS.values(), ids=COUNTERS)
def test_counters(row, wrap):
    settings, mask, expected = row
    config = loss_scale.LossScaleConfig(**settings)
    states = helpers.run_mask(config, helpers.parse_mask(mask), wrap)
    for name, digits in expected.items():
        assert "".join(str(getattr(state, name)) for state in states) == digits, name
    assert {int(s.growth_interval) for s in states} == {settings["growth_interval"]}


@in_every_execution
def test_fields_keep_their_dtype_and_shape(wrap):
    config = loss_scale.LossScaleConfig(growth_interval=1)
    for state in helpers.run_mask(config, [True, False], wrap):
        assert state.scale.dtype == np.float32
        assert {field.dtype for field in state[1:]} == {np.dtype(np.int64)}
        assert {np.shape(field) for field in state} == {()}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_whole_run_in_one_loop_equals_single_steps(jit_compile):
    config = loss_scale.LossScaleConfig(
        initial_scale=8.0, growth_interval=2, hysteresis=2, min_scale=3.0
    )
    mask = helpers.parse_mask("++-+--+++++----++")

    @tf.function(jit_compile=jit_compile)
    def run(mask):
        initial = helpers.as_tensors(config.initial_state())
        return tf.scan(
            lambda state, finite: loss_scale.next_state(config, state, finite),
            mask,
            initializer=initial,
        )

    in_loop = run(tf.constant(mask))
    for name, field in zip(in_loop._fields, in_loop, strict=True):
        single = [getattr(state, name) for state in helpers.run_mask(config, mask)]
        assert field.numpy().tolist() == single, name


def test_counter_dtype_is_that_of_keras_step_counter():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build([keras.Variable(0.0)])
    assert optimizer.step_counter.dtype == loss_scale.COUNTER_DTYPE


@in_every_execution
def test_restored_tracker_above_a_shorter_interval_grows(wrap):
    config = loss_scale.LossScaleConfig(initial_scale=8.0, growth_interval=3)
    restored = config.initial_state()._replace(growth_tracker=7)
    step = wrap(lambda state: loss_scale.next_state(config, state, True))
    state = step(helpers.as_tensors(restored))
    assert float(state.scale) == 16.0
    assert int(state.growth_tracker) == 0


@in_every_execution
def test_step_is_held_against_the_states_growth_interval(wrap):
    """A restored one gives way to the schedule's after the step."""
    schedule = growth_interval.ConstantGrowthInterval(3)
    config = loss_scale.LossScaleConfig(initial_scale=8.0, growth_interval=schedule)
    state = helpers.as_tensors(config.initial_state()._replace(growth_interval=1))
    step = wrap(lambda state: loss_scale.next_state(config, state, True))
    intervals, scales = [], []
    for _ in range(4):
        state = step(state)
        scales.append(float(state.scale))
        intervals.append(int(state.growth_interval))
    assert scales == [16, 16, 16, 32]
    assert intervals == [3, 3, 3, 3]


def test_number_stays_as_the_state_has_it():
    """So that another one can be set between two steps that are traced already."""
    config = loss_scale.LossScaleConfig(initial_scale=8.0, growth_interval=3)
    state = helpers.as_tensors(config.initial_state()._replace(growth_interval=1))
    for expected in (16, 32, 64):
        state = loss_scale.next_state(config, state, True)
        assert (float(state.scale), int(state.growth_interval)) == (expected, 1)


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
    config = loss_scale.LossScaleConfig(
        initial_scale=8.0, min_scale=4.0, max_scale=16.0
    )
    state = config.initial_state()._replace(scale=restored)
    assert float(loss_scale.next_state(config, state, finite).scale) == expected


# ---- Configuration ----


def test_initial_state_follows_the_configuration():
    config = loss_scale.LossScaleConfig(
        initial_scale=8, growth_interval=5, hysteresis=3
    )
    assert config.initial_state() == loss_scale.LossScaleState(
        scale=8.0,
        growth_tracker=0,
        hysteresis_tracker=3,
        growth_interval=5,
        skipped_steps=0,
        consecutive_skipped_steps=0,
    )
    assert isinstance(config.initial_state().scale, float)


def test_defaults_that_keras_has_too_are_keras_defaults():
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    config = loss_scale.LossScaleConfig()
    assert config.initial_scale == stock.initial_scale
    assert config.growth_interval == stock.dynamic_growth_steps


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2.0**24),
        ({"initial_scale": 2.0**30}, 2.0**30),
        ({"max_scale": 2.0**16}, 2.0**16),
        ({"max_scale": FLOAT32.max}, FLOAT32.max),
    ],
    ids=["default", "initial_scale_above_default", "given", "largest"],
)
def test_upper_bound(settings, expected):
    assert loss_scale.LossScaleConfig(**settings).upper_bound == expected


def test_configuration_is_frozen():
    config = loss_scale.LossScaleConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.initial_scale = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_every_field_survives_a_round_trip():
    settings: dict[str, Any] = dict(
        initial_scale=2.0**10,
        growth_interval=7,
        growth_factor=4.0,
        backoff_factor=0.25,
        hysteresis=3,
        min_scale=2.0**-3,
        max_scale=2.0**20,
        dynamic=False,
    )
    config = loss_scale.LossScaleConfig(**settings)
    default = loss_scale.LossScaleConfig().to_dict()
    assert config.to_dict() == settings
    assert loss_scale.LossScaleConfig(**config.to_dict()) == config
    # A new field must be added above.
    assert set(settings) == set(default)
    assert all(settings[name] != default[name] for name in default)


def test_schedule_survives_a_round_trip_as_plain_data():
    schedule = growth_interval.PiecewiseGrowthInterval((2, 5), (1, 10, 100))
    config = loss_scale.LossScaleConfig(growth_interval=schedule)
    stored = json.loads(json.dumps(config.to_dict()))
    loaded = growth_interval.schedule_from(stored.pop("growth_interval"))
    assert loss_scale.LossScaleConfig(**stored, growth_interval=loaded) == config
    assert config.schedule is schedule
    assert config.initial_state().growth_interval == 1


def test_integer_stands_for_a_constant_schedule_and_stays_an_integer():
    config = loss_scale.LossScaleConfig(growth_interval=7)
    assert config.schedule == growth_interval.ConstantGrowthInterval(7)
    assert config.to_dict()["growth_interval"] == config.growth_interval == 7


def test_static_scale_leaves_the_growth_interval_alone():
    schedule = growth_interval.GeometricGrowthInterval(initial=150)
    config = loss_scale.LossScaleConfig(growth_interval=schedule, dynamic=False)
    for state in helpers.run_mask(config, helpers.parse_mask("+--+")):
        assert state.growth_interval == 150


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
    # A serialized schedule; `growth_interval.schedule_from` takes it.
    *_wrong_types("growth_interval", growth_interval.GrowthIntervalSchedule, {}),
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
]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    NONSENSE,
    ids=[f"{name}={value!r}"[:40] for name, value, _ in NONSENSE],
)
def test_nonsense_is_an_error_that_says_what_was_received(name, value, error):
    with pytest.raises(error, match=re.escape(f"{name}={value!r}")) as caught:
        loss_scale.LossScaleConfig(**{name: value})
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
        loss_scale.LossScaleConfig(**settings)
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
    config = loss_scale.LossScaleConfig(**settings)
    up, down = helpers.run_mask(config, [True, False])
    assert config.min_scale <= down.scale <= up.scale <= config.upper_bound


def test_narrowest_factors_still_move_the_scale():
    config = loss_scale.LossScaleConfig(
        initial_scale=3.0,
        growth_interval=1,
        growth_factor=1 + FLOAT32.epsilon,
        backoff_factor=1 - FLOAT32.epsilon / 2,
    )
    up, down, again = scales(helpers.run_mask(config, [True, False, False]))
    assert up > 3.0
    assert up > down > again


# ---- Against the peers' rules, and what always holds ----

# Runs, so that growth intervals are often reached.
masks = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8).map(
    lambda runs: [finite for finite, length in runs for _ in range(length)][:40]
)
# Exact in float64, so that rounding to float32 is the only rounding.
growth_factors = st.floats(1.125, 4.0, width=32)
backoff_factors = st.floats(0.125, 0.875, width=32)
# At most 40 steps from here, each a factor of 8 at most, stay well within these.
WIDE: dict[str, Any] = dict(min_scale=FLOAT32.smallest_normal, max_scale=FLOAT32.max)


def run_within(config, mask, room):
    """Runs a mask; the bounds must not have been touched."""
    states = helpers.run_mask(config, mask)
    assert all(room.min_scale < s.scale < room.upper_bound for s in states)
    return states


@given(masks, st.integers(1, 8), st.sampled_from([1.0, 2.0**10, 2.0**15]))
def test_trajectory_equals_keras(mask, growth_interval, initial_scale):
    config = loss_scale.LossScaleConfig(
        initial_scale=initial_scale, growth_interval=growth_interval, **WIDE
    )
    states = run_within(config, mask, config)
    assert [(s.scale, s.growth_tracker) for s in states] == helpers.keras_rule(
        mask, initial_scale, growth_interval
    )


@given(masks, st.integers(1, 8), growth_factors, backoff_factors)
def test_trajectory_equals_pytorch(mask, interval, growth_factor, backoff_factor):
    rule: dict[str, Any] = dict(
        initial_scale=2.0**15,
        growth_interval=interval,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
    )
    config = loss_scale.LossScaleConfig(**rule, **WIDE)
    states = run_within(config, mask, config)
    assert [(s.scale, s.growth_tracker) for s in states] == helpers.pytorch_rule(
        mask, **rule
    )


@given(
    masks,
    st.integers(1, 6),
    growth_factors,
    backoff_factors,
    st.integers(1, 5),
    st.floats(2.0**-10, 2.0**15, width=32),
)
def test_trajectory_equals_megatron(
    mask, interval, growth_factor, backoff_factor, hysteresis, min_scale
):
    rule: dict[str, Any] = dict(
        initial_scale=2.0**15,
        min_scale=min_scale,
        growth_interval=interval,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        hysteresis=hysteresis,
    )
    config = loss_scale.LossScaleConfig(**rule, max_scale=FLOAT32.max)
    states = helpers.run_mask(config, mask)
    # Megatron counts spent hysteresis below 0, where nothing reads it.
    assert [(s.scale, s.growth_tracker, s.hysteresis_tracker) for s in states] == [
        (scale, growth_tracker, max(hysteresis_tracker, 0))
        for scale, growth_tracker, hysteresis_tracker in helpers.megatron_rule(
            mask, **rule
        )
    ]


def test_the_model_of_keras_rule_is_that_of_the_installed_keras():
    mask = helpers.parse_mask("+++--+-+++++++-++++---+++")
    variable = keras.Variable(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    rows = []
    for finite in mask:
        optimizer.apply([tf.constant(0.0 if finite else math.nan)], [variable])
        scale, counter = optimizer.dynamic_scale, optimizer.step_counter
        rows.append((np.float32(scale.numpy()), int(counter.numpy())))
    assert rows == helpers.keras_rule(mask, 2.0**10, 3)


@st.composite
def configs(draw):
    powers = st.floats(2.0**-120, 2.0**120)
    low, initial, high = sorted(draw(st.tuples(powers, powers, powers)))
    return loss_scale.LossScaleConfig(
        initial_scale=initial,
        growth_interval=draw(st.integers(1, 6)),
        growth_factor=draw(st.floats(1.001, 1e6)),
        backoff_factor=draw(st.floats(1e-6, 0.999)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=draw(st.sampled_from([high, None])),
        dynamic=draw(st.sampled_from([True, True, True, False])),
    )


@given(configs(), masks)
def test_scale_stays_finite_and_within_its_bounds(config, mask):
    low, high = np.float32(config.min_scale), np.float32(config.upper_bound)
    for state in helpers.run_mask(config, mask):
        assert state.scale.dtype == np.float32
        assert np.isfinite(state.scale)
        assert low <= state.scale <= high


@given(configs(), masks)
def test_finite_steps_never_lower_the_scale_and_others_never_raise_it(config, mask):
    before = np.float32(config.initial_scale)
    for finite, state in zip(mask, helpers.run_mask(config, mask), strict=True):
        assert state.scale >= before if finite else state.scale <= before
        before = state.scale


@given(configs(), masks)
def test_skipped_steps_are_counted_exactly(config, mask):
    total = in_a_row = 0
    for finite, state in zip(mask, helpers.run_mask(config, mask), strict=True):
        total += not finite
        in_a_row = 0 if finite else in_a_row + 1
        assert state.skipped_steps == total
        assert state.consecutive_skipped_steps == in_a_row


@given(configs(), masks)
def test_trackers_stay_in_their_ranges(config, mask):
    for state in helpers.run_mask(config, mask):
        assert 0 <= state.growth_tracker < config.growth_interval
        assert 0 <= state.hysteresis_tracker <= config.hysteresis
