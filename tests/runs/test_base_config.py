"""Settings that make no sense are named, all at once, before any work."""

import dataclasses
import re

import pytest

from tfamp.loss_scaling import growth_schedules, rule
from tfamp.recipes import text_classification
from tfamp.runs import base_config

SCALE = "precision.loss_scale"


def make_config(changes):
    config = text_classification.get_config()
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    return config


def interval_of(**changes):
    config = make_config({f"{SCALE}.{k}": v for k, v in changes.items()})
    base_config.validate(config)
    keywords = base_config.loss_scale_keywords(config.precision.loss_scale)
    return keywords["growth_interval"]


BAD = {
    "epochs": 0,
    "batch_size": -1,
    "eval_batch_size": 0,
    "limit_examples": 1,
    "validation_fraction": 1.0,
    "strategy": "parameter_server",
    "data.on_bad_rows": "drop",
    "optimizer.name": "lamb",
    "optimizer.schedule": "step",
    "optimizer.learning_rate": float("nan"),
    "optimizer.epsilon": -1.0,
    "optimizer.weight_decay": float("inf"),
    "optimizer.warmup_fraction": 2.0,
    "optimizer.accumulation_steps": 0,
    "precision.float16_accumulation": "float64",
    "model.dropout": 1.0,
    "model.vocabulary_size": 4,
    "model.pooling": "max",
    "model.num_layers": 0,
    "model.max_sequence_length": 2,
}


def test_nonsense_is_an_error_that_names_all_fields_and_values_at_once():
    changes = {f"{SCALE}.growth_factor": 0.5}
    with pytest.raises(ValueError, match=f"config.{SCALE}: `growth_factor`") as caught:
        base_config.validate(make_config(BAD | changes))
    for field, value in BAD.items():
        found = rf"config\.{field} must be [^:]*Received: {value!r}\."
        assert re.search(found, str(caught.value)), field
    # The sizes of a preset are its own.
    base_config.validate(make_config({"model.num_heads": 3, "model.preset": "bert"}))


@pytest.mark.parametrize(
    "overrides",
    [("head", "float32"), (("head",),), (("head", 1),), (("a", "b"), ("a", "c"))],
)
def test_overrides_are_pairs_each_pattern_once(overrides):
    with pytest.raises(ValueError, match="overrides must be a tuple of pairs"):
        base_config.validate(make_config({"precision.overrides": overrides}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_heads": 3}, "hidden_dim=128, num_heads=3"),
        (
            {"steps_per_execution": 4, "strategy": "mirrored"},
            "config.steps_per_execution=4. Expected",
        ),
        (
            {"steps_per_execution": 4, "precision.numerics": 9},
            "numerics=9 and config.steps_per_execution=4",
        ),
        ({f"{SCALE}.growth_interval": 0}, "must be an integer of at least 1.*=0"),
        ({f"{SCALE}.schedule.name": "linear"}, "schedule.name.*'linear'"),
        (
            {f"{SCALE}.schedule.name": "piecewise", f"{SCALE}.schedule.boundaries": ()},
            "one more interval than boundaries",
        ),
        (
            {f"{SCALE}.schedule.name": "geometric", f"{SCALE}.schedule.initial": 9},
            "min_interval <= initial <= max_interval",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        base_config.validate(make_config(changes))


def test_default_loss_scale_is_the_optimizers():
    settings = make_config({}).precision.loss_scale
    keywords = base_config.loss_scale_keywords(settings)
    assert rule.LossScaleConfig.from_keywords(keywords) == rule.LossScaleConfig()


PIECEWISE = growth_schedules.PiecewiseGrowthInterval
GEOMETRIC = growth_schedules.GeometricGrowthInterval


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("piecewise", PIECEWISE(), PIECEWISE((2, 3), (4, 5, 6))),
        ("geometric", GEOMETRIC(), GEOMETRIC(50, 3.0, 0.5, 5, 500)),
    ],
)
def test_schedules_have_their_defaults_and_every_field(name, default, other):
    assert interval_of(**{"schedule.name": name}) == default
    given = {f"schedule.{k}": v for k, v in dataclasses.asdict(other).items()}
    assert interval_of(**{"schedule.name": name}, **given) == other


@pytest.mark.parametrize(
    ("changes", "initial"),
    [
        ({"growth_interval": 300}, 300),
        ({"growth_interval": 30}, 100),
        ({"schedule.max_interval": 500}, 500),
        ({"growth_interval": 300, "schedule.initial": 400}, 400),
    ],
)
def test_geometric_starts_from_the_growth_interval_within_its_bounds(changes, initial):
    schedule = interval_of(**{"schedule.name": "geometric"}, **changes)
    assert schedule.initial == initial
