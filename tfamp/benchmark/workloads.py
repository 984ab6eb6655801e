"""What is measured: a training configuration, or a user's function.

The function returns a compiled Keras model and a `tf.data.Dataset` of its batches. It
is called in a fresh process for each cell, with the cell's precision in force.
"""

import inspect
import os
import pathlib
import runpy
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from ml_collections import config_dict

from tfamp import functions


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
    file = pathlib.Path(beside).parent / path
    return runpy.run_path(str(file))["get_config"]()


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
    made = function(**arguments)
    kinds = keras.Model, tf.data.Dataset
    made = made if isinstance(made, tuple) else (made,)
    if len(made) != 2 or not all(map(isinstance, made, kinds)) or not made[0].compiled:
        names = [type(each).__name__ for each in made]
        compiled = getattr(made[0], "compiled", False)
        raise TypeError(
            f"{name} must return a compiled keras.Model and a tf.data.Dataset of "
            f"batches. Received: {', '.join(names)}, compiled: {compiled}."
        )
    model, batches = made
    if jit != "auto":
        model.jit_compile = jit == "on"
    shapes = [each.shape for each in tf.nest.flatten(next(iter(batches)))]
    text = f"{model.name} of {name}, a batch of {', '.join(map(str, shapes))}"
    return Workload(model, batches.repeat(), "examples", text, shapes[0][0])


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns a configuration as dicts that a process can be given."""
    return config.copy_and_resolve_references().to_dict()
