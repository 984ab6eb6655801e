"""A configuration's compiled model and random batches for it: what is timed."""

import builtins
import contextlib
from collections.abc import Iterable
from typing import Any

import keras
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import base_config, processes, tasks, trainer

_TEXTS = ("text_classification", "question_answering")


def create(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """Describes a configuration's model and makes batches for it, without data.

    Args:
      config: The resolved configuration.

    Raises:
      DataError: If a preset is missing or malformed.
      ValueError: If a setting makes no sense.
    """
    base_config.validate(config)
    return tasks.synthetic(config)


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if a setting makes no sense where one device is measured."""
    base_config.validate(config)
    if config.strategy != "none":
        raise ValueError(
            "Benchmarks measure one device. Received: "
            f"config.strategy={config.strategy!r}. Expected 'none'."
        )


def check(configs: Iterable[config_dict.ConfigDict]) -> None:
    """Raises what `create` would, in a process of its own: none starts TensorFlow here.

    Args:
      configs: Resolved configurations.
    """
    plain = [config.to_dict() for config in configs]
    failure = processes.call(_create, plain, preload=preload(plain)).failure
    if failure:
        name, _, text = failure.partition(": ")
        kind: Any = getattr(errors, name, getattr(builtins, name, errors.RunError))
        raise kind(text)


def _create(plain):
    for each in plain:
        create(config_dict.ConfigDict(each))


def preload(configs: Iterable[Any]) -> tuple[str, ...]:
    """Returns modules that processes of these configurations share."""
    texts = any(config["task"] in _TEXTS for config in configs)
    return ("tfamp.training.trainer", *(("keras_hub",) if texts else ()))


def in_precision(config: config_dict.ConfigDict) -> contextlib.AbstractContextManager:
    """Puts a configuration's precision in force, as a run does.

    Args:
      config: The resolved configuration.
    """
    return trainer.enabled(config.precision)


def compile_model(
    source: tasks.Synthetic, config: config_dict.ConfigDict, batches: int
) -> keras.Model:
    """Returns the model, compiled as a run does, under the precision in force.

    Args:
      source: From `create`.
      config: Its seed, optimizer and `jit_compile` count.
      batches: How many there will be, for the learning-rate schedule.
    """
    keras.utils.set_random_seed(config.seed)
    model = source.build_model()
    trainer.compile_model(model, config, batches, source.loss, source.metrics())
    return model
