"""Settings of the growth interval's schedule: defaults, errors, objects."""

import dataclasses
import re

import pytest

from tfamp.loss_scaling import growth_schedules as growth_interval
from tfamp.loss_scaling import rule
from tfamp.training import base_config, bert_config, precision_config

PREFIX = "precision.loss_scale"


def make_config(**changes):
    """A configuration with changes of `precision.loss_scale`, "__" for a dot."""
    config = base_config.get_config()
    given = {f"{PREFIX}.{k.replace('__', '.')}": v for k, v in changes.items()}
    config.update_from_flattened_dict(given)
    return config


def interval_of(**changes):
    config = make_config(**changes)
    base_config.validate(config)
    settings = config.precision.loss_scale
    return precision_config.loss_scale_keywords(settings)["growth_interval"]


def test_default_is_the_optimizers():
    keywords = precision_config.loss_scale_keywords(make_config().precision.loss_scale)
    assert rule.LossScaleConfig.from_keywords(keywords) == rule.LossScaleConfig()
    assert keywords["growth_interval"] == 2000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("piecewise", growth_interval.PiecewiseGrowthInterval()),
        ("geometric", growth_interval.GeometricGrowthInterval()),
    ],
)
def test_defaults_of_the_configuration_are_those_of_the_class(name, expected):
    assert interval_of(schedule__name=name) == expected


def test_every_field_of_the_schedules_can_be_set():
    piecewise = growth_interval.PiecewiseGrowthInterval((2, 3), (4, 5, 6))
    geometric = growth_interval.GeometricGrowthInterval(50, 3.0, 0.5, 5, 500)
    for name, schedule in {"piecewise": piecewise, "geometric": geometric}.items():
        given = {f"schedule__{k}": v for k, v in dataclasses.asdict(schedule).items()}
        assert interval_of(schedule__name=name, **given) == schedule
    fields = {f.name for s in (piecewise, geometric) for f in dataclasses.fields(s)}
    settings = make_config().precision.loss_scale.schedule
    assert set(settings) == fields | {"name"}


@pytest.mark.parametrize(
    ("changes", "initial"),
    [
        ({}, 2000),
        ({"growth_interval": 300}, 300),
        ({"growth_interval": 30}, 100),
        ({"schedule__max_interval": 500}, 500),
        ({"growth_interval": 300, "schedule__initial": 400}, 400),
    ],
)
def test_geometric_starts_from_the_growth_interval_within_its_bounds(changes, initial):
    schedule = interval_of(schedule__name="geometric", **changes)
    assert schedule.initial == initial


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("growth_interval", 0),
        ("schedule.name", "linear"),
        ("schedule.boundaries", (2, 1)),
        ("schedule.boundaries", (0,)),
        ("schedule.boundaries", (1.5,)),
        ("schedule.intervals", (0, 5)),
        ("schedule.intervals", ("a", 5)),
        ("schedule.initial", 0),
        ("schedule.lengthen", 0.5),
        ("schedule.lengthen", float("inf")),
        ("schedule.shorten", 0.0),
        ("schedule.shorten", float("nan")),
        ("schedule.min_interval", 0),
        ("schedule.max_interval", 2**53 + 1),
    ],
)
def test_nonsense_is_an_error_that_names_the_field(field, value):
    config = make_config(**{field.replace(".", "__"): value})
    message = re.escape(f"config.{PREFIX}.{field} must be")
    with pytest.raises(ValueError, match=message) as caught:
        base_config.validate(config)
    assert str(value) in str(caught.value)


def test_all_wrong_fields_are_named_at_once():
    config = make_config(schedule__name="linear", schedule__shorten=7.0)
    config.batch_size = 0
    with pytest.raises(ValueError, match="batch_size must") as caught:
        base_config.validate(config)
    for field in ("schedule.name", "schedule.shorten"):
        assert f"config.{PREFIX}.{field} must be" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(schedule__name="piecewise", schedule__boundaries=(1, 2)),
            "one more interval than boundaries",
        ),
        (
            dict(schedule__name="geometric", schedule__initial=9),
            "min_interval <= initial <= max_interval",
        ),
        (
            dict(schedule__name="geometric", schedule__max_interval=50),
            "min_interval <= initial <= max_interval",
        ),
    ],
    ids=["lengths", "initial", "bounds"],
)
def test_fields_that_contradict_each_other_are_an_error(changes, message):
    config = make_config(**changes)
    with pytest.raises(ValueError, match=f"config.{PREFIX}.schedule: .*{message}"):
        base_config.validate(config)


def test_unknown_schedule_is_refused_without_validation_too():
    settings = make_config(schedule__name="linear").precision.loss_scale
    with pytest.raises(ValueError, match="schedule.name='linear'"):
        precision_config.loss_scale_keywords(settings)


@pytest.mark.parametrize(
    "overrides",
    [("head", "float32"), (("head",),), (("head", 1),), (("a", "b"), ("a", "c"))],
    ids=str,
)
def test_overrides_must_be_pairs(overrides):
    config = base_config.get_config()
    with config.unlocked():
        config.precision.overrides = overrides
    with pytest.raises(ValueError, match="a tuple of pairs"):
        base_config.validate(config)


def test_vocabulary_holds_the_special_tokens():
    config = bert_config.get_bert_config()
    config.model.vocabulary_size = 5
    base_config.validate(config)
    config.model.vocabulary_size = 4
    with pytest.raises(ValueError, match="vocabulary_size must be at least 5.* 4"):
        base_config.validate(config)


def test_accumulation_under_a_strategy_is_refused_before_any_work():
    config = base_config.get_config()
    config.optimizer.accumulation_steps = 4
    base_config.validate(config)
    config.strategy = "mirrored"
    with pytest.raises(ValueError, match="accumulation_steps=4. Expected"):
        base_config.validate(config)
