import math

import keras
import pytest
from ml_collections import config_dict

import tfamp
from tfamp.training import base_config, optimizers

EPSILON = tfamp.float_format("float32").epsilon


def options(**changes):
    config = base_config.get_config().optimizer
    config.update(changes)
    return config


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("constant", 0, 0.5),  # First of two warm-up steps.
        ("constant", 1, 1.0),
        ("constant", 9, 1.0),
        ("linear", 2, 1.0),
        ("linear", 6, 0.5),
        ("linear", 10, 0.0),
        ("linear", 99, 0.0),
        ("cosine", 4, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 10, 0.0),
    ],
)
def test_schedule_follows_its_table(decay, step, expected):
    schedule = optimizers.WarmupSchedule(1.0, 10, warmup_steps=2, decay=decay)
    assert float(schedule(step)) == pytest.approx(expected, abs=4 * EPSILON)


def test_schedule_survives_serialization():
    schedule = optimizers.WarmupSchedule(0.5, 10, 2, "cosine")
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )
    assert again.get_config() == schedule.get_config()


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_each_optimizer_is_made_with_clipping(name):
    made = optimizers.create(options(name=name, clip_global_norm=1.0), 10)
    assert type(made).__name__.lower() == name and made.global_clipnorm == 1.0


def test_adamw_decays_kernels_only():
    config = options(name="adamw", weight_decay=0.1, learning_rate=0.0)
    config.learning_rate = 1.0
    made = optimizers.create(config, 10)
    layers = [keras.layers.Dense(2), keras.layers.LayerNormalization()]
    model = keras.Sequential([keras.Input((2,)), *layers])
    made.build(model.trainable_variables)
    decayed = {v.name for v in model.trainable_variables if made._use_weight_decay(v)}
    assert decayed == {"kernel"}


@pytest.mark.parametrize(
    "changes", [{"name": "lamb"}, {"schedule": "step"}], ids=["name", "schedule"]
)
def test_unknown_names_are_refused(changes):
    with pytest.raises(ValueError, match="Received: '(lamb|step)'"):
        optimizers.create(options(**changes), 10)


def test_options_are_locked():
    with pytest.raises(AttributeError, match="Did you mean"):
        config_dict.ConfigDict(options()).lock().learning_rat = 1
