"""What is measured: a training configuration, or a user's function.

The function returns a compiled Keras model and a `tf.data.Dataset` of its batches. It
is called in a fresh process for each cell, with the cell's precision in force.
"""

import importlib
import importlib.util
import inspect
import os
import pathlib
import runpy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from ml_collections import config_dict

_EXPECTED = (
    "Expected 'module:function' or 'file.py:function', of a function at the top level "
    "of a file that returns (compiled model, tf.data.Dataset of batches)."
)


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


def name_of(function: str | Callable[..., Any]) -> str:
    """Returns a function as "module:function" or "/path/file.py:function".

    A fresh process finds it by that name alone, with this folder on its path.

    Args:
      function: A function, or its name.

    Raises:
      ValueError: If there is no such function, or none that a process could import.
    """
    if callable(function):
        module, name = function.__module__, function.__qualname__
        if module == "__main__":
            module = getattr(sys.modules["__main__"], "__file__", "")
            module = module and os.path.abspath(module)
        if not module or not name.isidentifier():
            raise ValueError(
                "The function of a workload must be at the top level of a file, which "
                f"each process imports. Received: {function!r}. {_EXPECTED} In a "
                "notebook write it to a file by %%writefile."
            )
        return f"{module}:{name}"
    module, _, name = function.rpartition(":")
    if module.endswith(".py"):
        path = pathlib.Path(module).absolute()
        found = path.exists()
        module = str(path)
    else:
        found = bool(module) and _module_exists(module)
    if not found or not name.isidentifier():
        raise ValueError(
            f"There is no such workload. Received: {function!r}. {_EXPECTED}"
        )
    return f"{module}:{name}"


def _module_exists(name):
    _see_this_folder()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _see_this_folder():
    """A script's own folder stands on the path, and the user's need not."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def find(name: str) -> Callable[..., Any]:
    """Returns the function that `name_of` named; imports its file.

    Args:
      name: The name.
    """
    module, _, function = name.rpartition(":")
    if not module.endswith(".py"):
        _see_this_folder()
        return getattr(importlib.import_module(module), function)
    sys.path.insert(0, os.path.dirname(module))  # For what stands beside it.
    spec = importlib.util.spec_from_file_location(pathlib.Path(module).stem, module)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is no Python file.")
    found = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, found)
    spec.loader.exec_module(found)
    return getattr(found, function)


def from_function(name: str, arguments: dict[str, Any], jit: str) -> Workload:
    """Calls a user's function.

    Args:
      name: From `name_of`.
      arguments: Its keywords.
      jit: "auto" for XLA as the model was compiled, "on" or "off".

    Raises:
      TypeError: If it returns anything but a compiled model and a dataset of batches,
        or has no such keyword.
    """
    function = find(name)
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
