"""Settings that make no sense are named, all at once, before any work."""

import dataclasses

import pytest

from tfamp.loss_scaling import growth_schedules, rule
from tfamp.training import base_config
from tfamp.training.tasks import text_classification

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


BAD = [
    ("epochs", 0),
    ("batch_size", -1),
    ("eval_batch_size", 0),
    ("limit_examples", 1),
    ("validation_fraction", 1.0),
    ("strategy", "parameter_server"),
    ("optimizer.name", "lamb"),
    ("optimizer.schedule", "step"),
    ("optimizer.learning_rate", -1.0),
    ("optimizer.learning_rate", float("nan")),
    ("optimizer.warmup_fraction", 2.0),
    ("optimizer.accumulation_steps", 0),
    ("precision.overrides", ("head", "float32")),
    ("precision.overrides", (("head",),)),
    ("precision.overrides", (("head", 1),)),
    ("precision.overrides", (("a", "b"), ("a", "c"))),
    ("precision.float16_accumulation", "float64"),
    ("model.dropout", 1.0),
    ("model.vocabulary_size", 4),
    ("model.pooling", "max"),
    ("model.num_layers", 0),
    ("model.max_sequence_length", 2),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_nonsense_is_an_error_that_names_the_field_and_the_value(field, value):
    config = make_config({field: value})
    with pytest.raises(ValueError, match=f"config.{field} must be") as caught:
        base_config.validate(config)
    assert str(value) in str(caught.value)


def test_all_wrong_fields_are_named_at_once():
    config = make_config({"epochs": 0, "batch_size": 0, f"{SCALE}.growth_factor": 0.5})
    with pytest.raises(ValueError, match="batch_size must") as caught:
        base_config.validate(config)
    for words in ("config.epochs must", f"config.{SCALE}: `growth_factor` must"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_heads": 3}, "hidden_dim=128, num_heads=3"),
        (
            {"optimizer.accumulation_steps": 4, "strategy": "mirrored"},
            "accumulation_steps=4. Expected",
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


def test_sizes_of_a_preset_are_its_own():
    base_config.validate(make_config({"model.num_heads": 3, "model.preset": "bert"}))


def test_default_loss_scale_is_the_optimizers():
    settings = make_config({}).precision.loss_scale
    keywords = base_config.loss_scale_keywords(settings)
    assert rule.LossScaleConfig.from_keywords(keywords) == rule.LossScaleConfig()


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        (
            "piecewise",
            growth_schedules.PiecewiseGrowthInterval(),
            growth_schedules.PiecewiseGrowthInterval((2, 3), (4, 5, 6)),
        ),
        (
            "geometric",
            growth_schedules.GeometricGrowthInterval(),
            growth_schedules.GeometricGrowthInterval(50, 3.0, 0.5, 5, 500),
        ),
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
