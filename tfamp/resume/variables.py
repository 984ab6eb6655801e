"""The variables that a training is resumed from, and their values in NumPy's files."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.facts import names

_GLOBAL = "keras.src.backend.common.global_state:get_global_attribute"


def of_training(model: keras.Model) -> dict[str, list[Any]]:
    """Returns a training's variables by what they belong to, as files name it."""
    groups = {"model": list(model.variables), "metrics": model.metrics_variables}
    # The model's optimizer, and those that a `train_step` of its own has.
    held = [model.optimizer, *vars(model).values()]
    optimizers = [each for each in held if isinstance(each, keras.optimizers.Optimizer)]
    for index, each in enumerate({id(each): each for each in optimizers}.values()):
        groups[f"optimizer{index}"] = list(each.variables)
    shared = names.resolve(_GLOBAL, lambda name: None)("global_seed_generator")
    return {**groups, "seed": [shared.state]} if shared else groups


def parts(variable):
    """Returns the variable of each replica of this process.

    One that is stored in fewer bits is read, saved and assigned as a whole, in float32.
    """
    value = variable.value
    own = value if hasattr(value, "assign") else variable
    return getattr(value, "values", (own,))


def facts_of(variable) -> list[Any]:
    """Returns what tells a variable from another: path, shape and dtype."""
    return [variable.path, list(variable.shape), variable.dtype]


def plain(array):
    """Returns the bits of a format that NumPy's files do not know."""
    native = array.dtype.kind in "biufc"
    return array if native else array.view(f"u{array.dtype.itemsize}")


def typed(array, variable):
    """Returns what `plain` was made of, in the format of a variable."""
    kind = tf.as_dtype(variable.dtype).as_numpy_dtype
    return array if array.dtype == kind else array.view(kind)
