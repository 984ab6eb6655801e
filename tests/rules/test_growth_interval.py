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

from tfamp.loss_scaling import growth_schedules as growth_interval
from tfamp.loss_scaling import rule as loss_scale

Constant = growth_interval.ConstantGrowthInterval
Piecewise = growth_interval.PiecewiseGrowthInterval
Geometric = growth_interval.GeometricGrowthInterval
LARGEST = 2**63 - 1


def trajectory(schedule, mask, **settings):
    """Returns the scale and the growth interval after each step."""
    config = loss_scale.LossScaleConfig(
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
    config = loss_scale.LossScaleConfig(growth_interval=Piecewise())
    states = helpers.run_mask(config, [True] * 901, tf.function)
    reached = [s.scale == loss_scale.DEFAULT_MAX_SCALE for s in states]
    assert reached.index(True) == 899


# ---- Any state, also one that was restored from another schedule ----


@pytest.mark.parametrize(
    "schedule",
    [Piecewise((1, 5), (10, 20, 30)), Geometric(), Geometric(7, 1.3, 0.6, 2, 2**53)],
    ids=str,
)
@given(
    st.one_of(st.integers(1, 12), st.integers(0, LARGEST)),
    st.integers(0, 15),
    st.sampled_from([(True, False), (False, True), (False, False)]),
)
def test_next_interval_equals_the_model(schedule, interval, skipped, change):
    model = helpers.LossScaleModel(growth_interval=schedule)
    model.interval, model.skipped = interval, skipped
    state = state_of(growth_interval=interval, skipped_steps=skipped)
    assert int(schedule.next_interval(state, *change)) == model.next_interval(*change)


def state_of(**fields):
    return loss_scale.LossScaleConfig().initial_state()._replace(**fields)


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


def test_numbers_of_numpy_are_serialized():
    for schedule in (Constant(np.int32(3)), Piecewise([np.int64(2)], [np.int8(1), 2])):
        stored = json.loads(json.dumps(keras.saving.serialize_keras_object(schedule)))
        assert keras.saving.deserialize_keras_object(stored) == schedule


_NOT_INTEGERS = (True, False, 2.0, 1.5, "2", None, [2])
NONSENSE = [
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


# ---- A schedule of the user's ----


@dataclasses.dataclass(frozen=True)
class Doubling(growth_interval.GrowthIntervalSchedule):
    first: int = 1

    @property
    def initial_interval(self):
        return self.first

    def next_interval(self, state, grew, backed_off):
        return tf.where(grew, 2 * state.growth_interval, state.growth_interval)


def test_users_schedule_moves_the_interval():
    found = trajectory(Doubling(), "+++++++")
    assert found == ([16, 16, 32, 32, 32, 32, 64], [2, 2, 4, 4, 4, 4, 8])


def test_users_schedule_survives_keras_serialization():
    stored = keras.saving.serialize_keras_object(Doubling(3))
    loaded = keras.saving.deserialize_keras_object(stored, {"Doubling": Doubling})
    assert loaded == Doubling(3)
