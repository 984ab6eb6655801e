"""Loads models whose optimizer was saved with loss scaling, or without it."""

import os
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

import h5py
import keras
import numpy as np

from tfamp import patches
from tfamp.loss_scaling import keras_optimizers, optimizer, rule, saved_state

# Members of a `.keras` archive, and the group in its weights (Keras 3.15).
_WEIGHTS, _OPTIMIZER_GROUP = "model.weights.h5", "optimizer/vars"


def load_model(
    path: str | os.PathLike,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    loss_scale: Mapping[str, Any] | Literal["auto", False] = "auto",
) -> keras.Model:
    """Loads a saved model with all of its optimizer's state, or says what is missing.

    As `keras.models.load_model`, whatever the global dtype policy, but for the
    optimizer:

    | saved with | `loss_scale="auto"`, or a dict | `loss_scale=False` |
    |---|---|---|
    | `tfamp.LossScaleOptimizer` | the same, all state | its inner optimizer |
    | Keras' `LossScaleOptimizer` | ours, its settings and state | its inner optimizer |
    | wrapped by Keras in `compile` | ours, all state | the inner optimizer |
    | an optimizer alone | ours if a float16 layer trains, or for a dict | the same |

    The second and third kind lose moments and iterations in stock Keras if the
    global dtype policy differs from the one they were saved under.

    Layers have the precision that the file holds for them. Under `tfamp.enable` with
    overrides their patterns match the paths of the model that was saved (which
    Keras alone shortens: "head" for "stack/head"), and win.

    Args:
      path: A `.keras` file (or legacy `.h5`).
      custom_objects, compile, safe_mode: As for `keras.models.load_model`.
      loss_scale: "auto"; keywords of `LossScaleOptimizer`, which win over those that
        were saved; False for no loss scaling.

    Returns:
      The model, compiled if it was saved so.

    Raises:
      ValueError: If the optimizer's state does not fit, or the model cannot be
        compiled by loading it.

    Example:
      model = tfamp.load_model("model.keras")
      model.fit(x, y)  # Goes on with the next loss of the uninterrupted run.
    """
    asked = isinstance(loss_scale, Mapping)
    settings = dict(loss_scale) if asked else {}
    rule.LossScaleConfig.from_keywords(settings)
    if not (asked or loss_scale == "auto" or loss_scale is False):
        raise TypeError(
            "`loss_scale` must be 'auto', a dict of LossScaleOptimizer keywords or "
            f"False. Received: loss_scale={loss_scale!r}."
        )
    saved = _saved_state(path)

    def transform(model, given):
        if isinstance(given, keras.optimizers.LossScaleOptimizer):
            return _with_settings(given, settings)
        auto = loss_scale == "auto" and optimizer.needs_loss_scale(model)
        if asked or auto or _is_scaled_state(saved, given, model):
            return optimizer.wrap_optimizer(given, **settings)
        return given

    with patches.transforming(transform), warnings.catch_warnings():
        # Keras' way to say that state is lost; it says so too of an optimizer that
        # was never built, and has none.
        lost = any(value.shape for value in saved)
        message = "Skipping variable loading"
        warnings.filterwarnings("error" if lost else "ignore", message)
        model = keras.models.load_model(path, custom_objects, compile, safe_mode)
    if compile and saved and getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} was not compiled by loading it, and the file has "
            f"an optimizer's state. Received: {os.fspath(path)!r}. Give the class "
            "`get_compile_config` and `compile_from_config`, or load with "
            "`compile=False`, compile, and call `model.load_weights` with this file."
        )
    found = getattr(model, "optimizer", None)
    if loss_scale is False and isinstance(found, optimizer.LossScaleOptimizer):
        _unwrap(model)
    return model


def _with_settings(given, settings):
    if isinstance(given, optimizer.LossScaleOptimizer) and not settings:
        return given
    config = given.get_config()
    names = {"growth_interval", "dynamic_growth_steps"}  # One thing.
    for name in names if names & settings.keys() else ():
        config.pop(name, None)
    return optimizer.LossScaleOptimizer.from_config({**config, **settings})


def _saved_state(path):
    """Returns stand-ins for the optimizer's variables in a `.keras` file, in order."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        if _WEIGHTS not in archive.namelist():
            return []
        with archive.open(_WEIGHTS) as member, h5py.File(member, "r") as weights:
            group: Any = weights.get(_OPTIMIZER_GROUP, {})
            found = [group[str(index)] for index in range(len(group))]
            return [np.broadcast_to(np.zeros((), v.dtype), v.shape) for v in found]


def _is_scaled_state(saved, given, model):
    """Whether a state is that of the given optimizer with loss scaling around it."""
    if not saved_state.is_scaled(saved):
        return False
    if keras_optimizers.member_optimizers(given) == [given]:
        return True
    # A `MultiOptimizer`'s own counter and rate look like a loss scale's: the number
    # decides.
    alone = type(given).from_config(given.get_config())
    alone.build(model.trainable_variables)
    return len(saved) > len(alone.variables)


def _unwrap(model):
    """Compiles a model with the optimizer inside its loss-scaled one, state kept."""
    inner = model.optimizer.inner_optimizer
    if not model.optimizer.built:
        raise ValueError(
            f"Model '{model.name}' is not built, so its optimizer's state cannot move. "
            "Received: loss_scale=False. Load it with loss scaling, and build it."
        )
    config = model.get_compile_config()
    config["optimizer"] = keras.saving.serialize_keras_object(inner)
    config["auto_scale_loss"] = False
    model.compile_from_config(config)
    for old, new in zip(inner.variables, model.optimizer.variables, strict=True):
        new.assign(old)
