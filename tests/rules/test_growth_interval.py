import dataclasses
import fractions
import inspect
import itertools
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

from tfamp.loss_scaling import growth_schedules as growth_interval
from tfamp.loss_scaling import rule as loss_scale

Constant = growth_interval.ConstantGrowthInterval
Piecewise = growth_interval.PiecewiseGrowthInterval
Geometric = growth_interval.GeometricGrowthInterval
LARGEST = 2**63 - 1

WRAPS = {
    "eager": lambda step: step,
    "graph": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}
in_every_execution = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def trajectory(schedule, mask, wrap=WRAPS["eager"], **settings):
    """Returns the scale and the growth interval after each step."""
    config = loss_scale.LossScaleConfig(
        growth_interval=schedule, **{"initial_scale": 8.0, **settings}
    )
    states = helpers.run_mask(config, helpers.parse_mask(mask), wrap)
    return [int(s.scale) for s in states], [int(s.growth_interval) for s in states]


# ---- The tables of the docstrings ----

DOCUMENTED = {
    "constant": (Constant, 0, Constant(3)),
    "piecewise": (Piecewise, 0, Piecewise(boundaries=(1,), intervals=(1, 3))),
    "geometric": (Geometric, 0, Geometric(4, min_interval=2, max_interval=7)),
    "geometric_calm": (Geometric, 1, Geometric(4, min_interval=2, max_interval=7)),
}


def documented_rows(schedule_class, index):
    """Returns (gradients, scale, interval) of a table in a class' docstring."""
    blocks = inspect.getdoc(schedule_class).split("```")[1::2]
    tables = [block for block in blocks if block.lstrip().startswith("step")]
    lines = [line.split() for line in tables[index].strip().splitlines()]
    assert [line[0] for line in lines] == ["step", "gradients", "scale", "interval"]
    steps, gradients, scales, intervals = (line[1:] for line in lines)
    assert steps == [str(1 + i) for i in range(len(steps))]
    return "".join(gradients), [int(s) for s in scales], [int(i) for i in intervals]


@in_every_execution
@pytest.mark.parametrize("row", DOCUMENTED.values(), ids=DOCUMENTED)
def test_documented_table_is_what_the_rule_gives(row, wrap):
    schedule_class, index, schedule = row
    gradients, scales, intervals = documented_rows(schedule_class, index)
    assert trajectory(schedule, gradients, wrap) == (scales, intervals)


# ---- Trajectories: schedule, settings, mask, interval after each step ----

TRAJECTORIES = {
    "piecewise_counts_skips_that_hysteresis_forgives": (
        Piecewise((2,), (5, 9)),
        dict(hysteresis=3),
        "-+-+",
        [5, 5, 9, 9],
    ),
    "piecewise_moves_past_several_boundaries": (
        Piecewise((1, 2, 4), (1, 2, 3, 4)),
        {},
        "-----+",
        [2, 3, 3, 4, 4, 4],
    ),
    "piecewise_without_boundaries_is_constant": (
        Piecewise((), (6,)),
        {},
        "+-+",
        [6, 6, 6],
    ),
    "geometric_lengthens_on_a_backoff_only": (
        Geometric(4, min_interval=1),
        dict(hysteresis=2),
        "-+--",
        [4, 4, 8, 16],
    ),
    "geometric_rounds_up_to_lengthen": (
        Geometric(1, lengthen=1.01, min_interval=1),
        {},
        "---",
        [2, 3, 4],
    ),
    "geometric_rounds_down_to_shorten": (
        Geometric(3, shorten=0.99, min_interval=1),
        {},
        "+++" + "++" + "+" + "+",
        [3, 3, 2, 2, 1, 1, 1],
    ),
    "geometric_shortens_at_max_scale_too": (
        Geometric(2, shorten=0.5, min_interval=1),
        dict(max_scale=8.0),
        "++",
        [2, 1],
    ),
    "geometric_lengthens_at_min_scale_too": (
        Geometric(2, min_interval=1),
        dict(min_scale=8.0),
        "--",
        [4, 8],
    ),
    "geometric_with_factors_1_is_constant": (
        Geometric(2, lengthen=1, shorten=1, min_interval=1),
        {},
        "++-++-",
        [2] * 6,
    ),
    "geometric_holds_at_both_bounds": (
        Geometric(1, lengthen=1e9, shorten=1e-9, min_interval=1, max_interval=2**53),
        {},
        "--" + "+",
        [10**9, 2**53, 2**53],
    ),
}


@in_every_execution
@pytest.mark.parametrize("row", TRAJECTORIES.values(), ids=TRAJECTORIES)
def test_interval(row, wrap):
    schedule, settings, mask, expected = row
    assert trajectory(schedule, mask, wrap, **settings)[1] == expected


def test_default_piecewise_reaches_the_ceiling_in_900_steps():
    config = loss_scale.LossScaleConfig(growth_interval=Piecewise())
    states = helpers.run_mask(config, [True] * 901, tf.function)
    reached = [s.scale == loss_scale.DEFAULT_MAX_SCALE for s in states]
    assert reached.index(True) == 899


def skipped_steps(schedule, steps):
    """Returns (skipped steps, last interval) where 8 is right and 16 overflows."""
    config = loss_scale.LossScaleConfig(growth_interval=schedule, initial_scale=8.0)
    state = helpers.as_tensors(config.initial_state())
    step = tf.function(lambda s: loss_scale.next_state(config, s, s.scale < 16.0))
    for _ in range(steps):
        state = step(state)
    return int(state.skipped_steps), int(state.growth_interval)


def test_geometric_loses_fewer_and_fewer_steps_where_the_scale_is_found():
    bounds: dict[str, Any] = dict(min_interval=10, max_interval=80)
    assert skipped_steps(Constant(10), 500) == (45, 10)
    # One after each run of 10, 20, 30, 44, 66, 80, 80, ... finite steps.
    assert skipped_steps(Geometric(10, **bounds), 500) == (9, 80)


# ---- Against plain Python ----

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


schedules = st.one_of(counts.map(Constant), piecewise(), geometric())
# Long runs of finite steps, so that growth intervals are often reached.
masks = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=6).map(
    lambda runs: [finite for finite, length in runs for _ in range(length)][:24]
)


def model_interval(schedule, interval, skipped, grew, backed_off):
    """The rule as the docstrings say it, in Python's integers and floats."""
    if isinstance(schedule, Constant):
        return schedule.interval
    if isinstance(schedule, Piecewise):
        return schedule.intervals[sum(skipped >= b for b in schedule.boundaries)]
    interval = min(max(interval, schedule.min_interval), schedule.max_interval)
    if grew:
        interval = math.floor(interval * schedule.shorten)
    if backed_off:
        interval = math.ceil(interval * schedule.lengthen)
    return min(max(interval, schedule.min_interval), schedule.max_interval)


def model_run(schedule, mask, hysteresis):
    interval, tracker, left, skipped = schedule.initial_interval, 0, hysteresis, 0
    for finite in mask:
        grew = backed_off = False
        if finite:
            tracker += 1
            grew = tracker >= interval
        else:
            tracker, skipped, left = 0, skipped + 1, max(left - 1, 0)
            backed_off = left == 0
        if grew:
            tracker, left = 0, hysteresis
        interval = model_interval(schedule, interval, skipped, grew, backed_off)
        yield interval


@given(schedules, masks, st.integers(1, 3))
def test_interval_equals_the_model(schedule, mask, hysteresis):
    config = loss_scale.LossScaleConfig(growth_interval=schedule, hysteresis=hysteresis)
    states = helpers.run_mask(config, mask)
    expected = list(model_run(schedule, mask, hysteresis))
    assert [int(s.growth_interval) for s in states] == expected


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@given(schedules, st.data())
def test_graph_and_xla_equal_the_model(jit_compile, schedule, data):
    """Any state, also one that was restored from another schedule."""
    rows = data.draw(
        st.lists(
            st.tuples(
                st.one_of(counts, st.integers(0, LARGEST)),
                st.integers(0, 15),
                st.sampled_from([(True, False), (False, True), (False, False)]),
            ),
            min_size=1,
            max_size=20,
        )
    )

    @tf.function(jit_compile=jit_compile, autograph=False)
    def run(intervals, skipped, grew, backed_off):
        def one(row):
            state = state_of(growth_interval=row[0], skipped_steps=row[1])
            return schedule.next_interval(state, row[2], row[3])

        rows = (intervals, skipped, grew, backed_off)
        return tf.map_fn(one, rows, fn_output_signature="int64")

    intervals, skipped, changes = zip(*rows, strict=True)
    grew, backed_off = zip(*changes, strict=True)
    result = run(
        tf.constant(intervals, "int64"),
        tf.constant(skipped, "int64"),
        tf.constant(grew),
        tf.constant(backed_off),
    )
    assert result.numpy().tolist() == [
        model_interval(schedule, *row[:2], *row[2]) for row in rows
    ]


def state_of(**fields):
    return loss_scale.LossScaleConfig().initial_state()._replace(**fields)


@given(geometric(), masks)
def test_geometric_stays_within_its_bounds_and_moves_the_right_way(schedule, mask):
    config = loss_scale.LossScaleConfig(growth_interval=schedule)
    before = schedule.initial
    for finite, state in zip(mask, helpers.run_mask(config, mask), strict=True):
        after = int(state.growth_interval)
        assert schedule.min_interval <= after <= schedule.max_interval
        assert after <= before if finite else after >= before
        before = after


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


# ---- A restored state ----


@in_every_execution
@pytest.mark.parametrize(
    ("schedule", "interval", "skipped", "expected"),
    [
        (Constant(7), 3000, 4, 7),
        (Piecewise((1, 5), (10, 20, 30)), 3000, 0, 10),
        (Piecewise((1, 5), (10, 20, 30)), 3000, 4, 20),
        (Piecewise((1, 5), (10, 20, 30)), 3000, 2**60, 30),
        (Geometric(), 3000, 4, 3000),
        (Geometric(), 1, 4, 100),
        (Geometric(), 0, 4, 100),
        (Geometric(), LARGEST, 4, 2**14),
    ],
)
def test_restored_interval_gives_way_unless_it_is_geometric(
    schedule, interval, skipped, expected, wrap
):
    state = helpers.as_tensors(
        state_of(growth_interval=interval, skipped_steps=skipped)
    )
    found = wrap(lambda state: schedule.next_interval(state, False, False))(state)
    assert found.dtype == tf.int64 and found.shape == ()
    assert int(found) == expected


# ---- Settings ----

EXAMPLES = [
    Constant(7),
    Piecewise((2, 9), (1, 20, 300)),
    Geometric(50, lengthen=3.0, shorten=0.5, min_interval=5, max_interval=500),
]
every_example = pytest.mark.parametrize(
    "schedule", EXAMPLES, ids=lambda schedule: type(schedule).__name__
)


@every_example
def test_schedule_survives_keras_serialization_and_json(schedule):
    default = {field.name: field.default for field in dataclasses.fields(schedule)}
    assert all(getattr(schedule, name) != default[name] for name in default)
    stored = keras.saving.serialize_keras_object(schedule)
    assert stored["registered_name"] == f"tfamp>{type(schedule).__name__}"
    for form in (stored, json.loads(json.dumps(stored))):
        loaded = keras.saving.deserialize_keras_object(form)
        assert loaded == schedule and hash(loaded) == hash(schedule)
        assert growth_interval.schedule_from(form) == schedule


@every_example
def test_schedule_is_frozen_and_equal_by_value(schedule):
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.interval = 3
    same = type(schedule).from_config(schedule.get_config())
    assert same == schedule and same is not schedule
    assert len({same, schedule, *EXAMPLES}) == len(EXAMPLES)


def test_numbers_of_numpy_and_others_are_stored_as_pythons():
    made = [
        Constant(np.int32(3)),
        Piecewise([np.int64(2)], [np.int8(1), 2]),
        Geometric(
            np.int64(200), lengthen=np.float32(2), shorten=fractions.Fraction(1, 2)
        ),
    ]
    for schedule in made:
        values = itertools.chain.from_iterable(
            value if isinstance(value, list) else [value]
            for value in schedule.get_config().values()
        )
        assert {type(value) for value in values} <= {int, float}
        assert json.loads(json.dumps(schedule.get_config())) == schedule.get_config()
    assert made[2] == Geometric(200, 2.0, 0.5)


_NOT_INTEGERS = (True, False, 2.0, 1.5, "2", None, [2])
NONSENSE = [
    *((Constant, "interval", value, ValueError) for value in (0, -1, 2**63)),
    *((Constant, "interval", value, TypeError) for value in _NOT_INTEGERS),
    *((Piecewise, "boundaries", v, TypeError) for v in (1, "1", None, {1}, (1.0,))),
    *((Piecewise, "boundaries", v, ValueError) for v in ((), (1, 2), (0,), (-1,))),
    *((Piecewise, "intervals", v, TypeError) for v in (1, None, (1, 2.0), (True, 1))),
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
    ("schedule_class", "name", "value", "error"),
    NONSENSE,
    ids=[f"{name}={value!r}"[:40] for _, name, value, _ in NONSENSE],
)
def test_nonsense_is_an_error_that_says_what_was_received(
    schedule_class, name, value, error
):
    # Of a tuple with one wrong number, that number is named.
    received = re.escape(f"{name}={value!r}") + rf"|{name}\[\d\]="
    with pytest.raises(error, match=received) as caught:
        schedule_class(**{name: value})
    assert "must" in str(caught.value)


@pytest.mark.parametrize("boundaries", [(2, 2), (3, 1)])
def test_boundaries_out_of_order_are_an_error(boundaries):
    with pytest.raises(ValueError, match=re.escape(f"boundaries={boundaries}")):
        Piecewise(boundaries, (1, 2, 3))


@pytest.mark.parametrize("settings", [dict(initial=50), dict(max_interval=500)])
def test_bounds_out_of_order_are_an_error_that_names_all_three(settings):
    with pytest.raises(ValueError, match="min_interval <= initial") as caught:
        Geometric(**settings)
    for name in ("min_interval", "initial", "max_interval"):
        assert f"{name}=" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2.0,
        "geometric",
        {"interval": 3},
        keras.saving.serialize_keras_object(keras.optimizers.SGD()),
    ],
    ids=["none", "bool", "float", "name", "dict", "other_object"],
)
def test_what_is_no_schedule_is_refused(value):
    with pytest.raises(TypeError, match="must be an integer or a GrowthInterval"):
        growth_interval.schedule_from(value)


def test_schedule_of_an_integer_is_constant():
    assert growth_interval.schedule_from(5) == Constant(5)
    assert growth_interval.schedule_from(np.int64(5)) == Constant(5)
    with pytest.raises(ValueError, match="growth_interval=0"):
        growth_interval.schedule_from(0)


# ---- A schedule of the user's ----


@dataclasses.dataclass(frozen=True)
class Doubling(growth_interval.GrowthIntervalSchedule):
    first: int = 1

    @property
    def initial_interval(self):
        return self.first

    def next_interval(self, state, grew, backed_off):
        return tf.where(grew, 2 * state.growth_interval, state.growth_interval)


@in_every_execution
def test_users_schedule_moves_the_interval(wrap):
    found = trajectory(Doubling(), "+++++++", wrap)
    assert found == ([16, 16, 32, 32, 32, 32, 64], [2, 2, 4, 4, 4, 4, 8])


def test_users_schedule_survives_keras_serialization():
    stored = keras.saving.serialize_keras_object(Doubling(3))
    loaded = growth_interval.schedule_from(stored, {"Doubling": Doubling})
    assert loaded == Doubling(3)


def test_users_schedule_may_return_a_python_integer():
    class Fixed(growth_interval.GrowthIntervalSchedule):
        initial_interval = 2

        def next_interval(self, state, grew, backed_off):
            return 5

    assert trajectory(Fixed(), "+++")[1] == [5, 5, 5]
    with pytest.raises(NotImplementedError, match="Received: Fixed"):
        Fixed().get_config()


def test_base_class_says_what_is_missing():
    base = growth_interval.GrowthIntervalSchedule()
    with pytest.raises(NotImplementedError):
        base.initial_interval  # noqa: B018
    with pytest.raises(NotImplementedError):
        base.next_interval(state_of(), False, False)
