"""What is timed: a configuration's compiled model and random batches, or a user's.

A user's function returns a compiled Keras model and a `tf.data.Dataset` of its batches.
It is called in a fresh process, with a precision in force.
"""

import builtins
import inspect
import os
import pathlib
import runpy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from ml_collections import config_dict

from tfamp import checks, errors, functions
from tfamp.measuring import processes
from tfamp.runs import base_config, optimizers, tasks, trainer


class Workload(NamedTuple):
    """A model and its batches.

    Attributes:
      model: Compiled.
      batches: Endless dataset of batches.
      unit: What a batch holds: "images", "sequences", "rows", "examples".
      description: One line on the model and its input.
      examples: In a batch.
    """

    model: keras.Model
    batches: tf.data.Dataset
    unit: str
    description: str
    examples: int


def load(path: str | os.PathLike, beside: str | os.PathLike = ""):
    """Returns the configuration of a file.

    Args:
      path: A file with a function `get_config`.
      beside: A file whose folder `path` is relative to, such as `__file__`.
    """
    return runpy.run_path(str(pathlib.Path(beside).parent / path))["get_config"]()


def named(workload: str | Callable | config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a configuration as it is, and a function as {"function": its name}.

    Raises:
      ValueError: If there is no such function.
    """
    if isinstance(workload, config_dict.ConfigDict):
        return workload
    return config_dict.ConfigDict({"function": functions.name_of(workload)})


def batch_size_of(workload: config_dict.ConfigDict, batch_size: int | None) -> int:
    """Returns the batch size that was asked for, or that of a configuration.

    Args:
      workload: From `named`.
      batch_size: As it was asked for; None if it was not.

    Raises:
      ValueError: If there is none.
    """
    size = workload.get("batch_size") if batch_size is None else batch_size
    if size is None:
        raise ValueError(
            "A function is called with the batch size that is asked for. Received: "
            f"{workload.function!r}, and no batch_size. Expected one: batch_size=32, "
            "say."
        )
    checks.check_count("batch_size", size)
    return size


def from_function(name: str, arguments: dict[str, Any], jit: str) -> Workload:
    """Calls a user's function.

    Args:
      name: From `functions.name_of`.
      arguments: Its keywords.
      jit: "auto" for XLA as the model was compiled, "on" or "off".

    Raises:
      TypeError: If it returns anything but a compiled model and a dataset of batches,
        or has no such keyword.
    """
    function = functions.find(name)
    unknown = arguments.keys() - inspect.signature(function).parameters.keys()
    if unknown:
        raise TypeError(
            f"{name} has no argument {', '.join(sorted(unknown))}, which would give "
            f"it other batches. Received: {arguments}."
        )
    pair = function(**arguments)
    kinds = keras.Model, tf.data.Dataset
    pair = pair if isinstance(pair, tuple) else (pair,)
    if len(pair) != 2 or not all(map(isinstance, pair, kinds)) or not pair[0].compiled:
        names = [type(each).__name__ for each in pair]
        compiled = getattr(pair[0], "compiled", False)
        raise TypeError(
            f"{name} must return a compiled keras.Model and a tf.data.Dataset of "
            f"batches. Received: {', '.join(names)}, compiled: {compiled}."
        )
    model, batches = pair
    if jit != "auto":
        model.jit_compile = jit == "on"
    shapes = [each.shape for each in tf.nest.flatten(next(iter(batches)))]
    text = f"{model.name} of {name}, a batch of {', '.join(map(str, shapes))}"
    return Workload(model, batches.repeat(), "examples", text, shapes[0][0])


def from_config(
    config: config_dict.ConfigDict, steps: int, job: str = "train"
) -> Workload:
    """Returns a configuration's model and batches, as a run has them.

    Args:
      config: The resolved configuration; its precision is in force.
      steps: Updates of the weights that there will be.
      job: "train"; "inference" for a model without the optimizer's memory.
    """
    source = tasks.synthetic(config)
    if job == "train":
        keras.utils.set_random_seed(config.seed)
    model, jit = source.build_model(), config.jit_compile
    if job == "train":
        batches = steps * config.optimizer.accumulation_steps
        optimizers.compile_model(model, config, batches, source.loss, source.metrics())
    else:
        model.compile(jit_compile="auto" if jit is None else jit)
    return Workload(
        model, source.batches, source.unit, source.description, config.batch_size
    )


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if a setting makes no sense where one device is measured."""
    base_config.validate(config)
    if config.strategy != "none":
        raise ValueError(
            "Benchmarks measure one device. Received: "
            f"config.strategy={config.strategy!r}. Expected 'none'."
        )


def check(configs: Iterable[config_dict.ConfigDict]) -> None:
    """Raises what `tasks.synthetic` would, in a process: none starts here.

    Args:
      configs: Resolved configurations.
    """
    plain = [config.to_dict() for config in configs]
    if failure := processes.call(_create, plain, preload=preload(plain)).failure:
        name, _, text = failure.partition(": ")
        kind: Any = getattr(errors, name, getattr(builtins, name, errors.RunError))
        raise kind(text)


def _create(plain):
    for each in plain:
        tasks.synthetic(config_dict.ConfigDict(each))


def preload(configs: Iterable[Any]) -> tuple[str, ...]:
    """Returns modules that processes of these configurations share."""
    presets = any("preset" in config["model"] for config in configs)
    return (trainer.__name__, *(("keras_hub",) if presets else ()))
