"""Loads models whose optimizer was saved with loss scaling, or without it."""

import os
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

import h5py
import keras

from tfamp.keras_patches import compiling
from tfamp.loss_scaling import rule, wrapping

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
    """Loads a saved model with the full state of its optimizer, or raises an error.

    It works as `keras.models.load_model`, whatever the global dtype policy is, except
    for the optimizer:

    | saved with | `loss_scale="auto"`, or a dict | `loss_scale=False` |
    |---|---|---|
    | `tfamp.LossScaleOptimizer` | the same, all state | its inner optimizer |
    | Keras' `LossScaleOptimizer` | tfamp's, settings and state | its inner optimizer |
    | wrapped by Keras in `compile` | tfamp's, all state | the inner optimizer |
    | an optimizer alone | tfamp's if a float16 layer trains, or for a dict | the same |

    Stock Keras loses moments and iterations of the second and third kind if the global
    dtype policy differs from the one they were saved under. A `.h5` file of Keras 2
    loads with `compile=False`, since Keras 3 cannot read its optimizer.

    Layers have the precision that is saved in the file. Under `tfamp.enable`, overrides
    win over it. Their patterns match the paths in the saved model, which Keras alone
    shortens ("head" for "stack/head").

    Args:
      path: A `.keras` file (or legacy `.h5`).
      custom_objects, compile, safe_mode: As in `keras.models.load_model`.
      loss_scale: "auto"; keywords of `LossScaleOptimizer`, which win over the saved
        ones; or False for no loss scaling.

    Returns:
      The model.

    Raises:
      ValueError: If the file is damaged or cut short, the optimizer's state does not
        fit, or loading cannot compile the model.

    Example:
      model = tfamp.load_model("model.keras")
      model.fit(x, y)  # Continues with the next loss of the uninterrupted run.
    """
    has_keywords = isinstance(loss_scale, Mapping)
    if not (has_keywords or loss_scale == "auto" or loss_scale is False):
        raise TypeError(
            "`loss_scale` must be 'auto', a dict of LossScaleOptimizer keywords or "
            f"False. Received: loss_scale={loss_scale!r}."
        )
    settings = rule.own_names(loss_scale) if has_keywords else {}
    rule.LossScaleConfig.from_keywords(settings)

    _check_file(path)

    def transform(model, original):
        if isinstance(original, keras.optimizers.LossScaleOptimizer):
            return _with_settings(original, settings)
        # Ours takes every layout; where none is wanted, it goes again.
        if loss_scale == "auto" and not wrapping.needs_loss_scale(model):
            return original
        return wrapping.wrap_optimizer(original, **settings)

    custom_objects = {"Policy": keras.DTypePolicy, **(custom_objects or {})}
    has_slots = _has_slots(path)
    with compiling.transforming(transform), warnings.catch_warnings():
        # Keras only warns that an optimizer's state is lost; and warns, too, of an
        # optimizer that was never built, and has none. Of what is no archive it is not
        # known.
        if has_slots is not None:
            action = "error" if has_slots else "ignore"
            warnings.filterwarnings(action, "Skipping variable loading")
        model = keras.models.load_model(path, custom_objects, compile, safe_mode)
    loaded = getattr(model, "optimizer", None)
    if compile and loaded is None and getattr(model, "compiled", False):
        raise ValueError(
            f"{type(model).__name__} was not compiled when it was loaded, but the file "
            f"has an optimizer's state. Received: {os.fspath(path)!r}. Give the class "
            "`get_compile_config` and `compile_from_config`, or load with "
            "`compile=False`, compile, and call `model.load_weights` with this file."
        )
    if loss_scale is False and isinstance(loaded, wrapping.LossScaleOptimizer):
        _unwrap(model)
    return model


def _check_file(path):
    """Raises ValueError for a `.keras` file that is none: Keras says "not found"."""
    name = os.fspath(path)
    if not name.endswith(".keras") or not os.path.isfile(name):
        return
    try:
        with zipfile.ZipFile(name) as archive:
            missing = {"config.json", _WEIGHTS} - {*archive.namelist()}
            damaged = archive.testzip()
        wrong = f"whose part {damaged} is damaged" if damaged else ""
        wrong = f"without {' and '.join(sorted(missing))}" if missing else wrong
    except (zipfile.BadZipFile, EOFError) as error:
        wrong = f"no whole zip archive: {error}"
    if wrong:
        raise ValueError(
            f"{name!r} is not a whole model of Keras. Received: a file of "
            f"{os.path.getsize(name):,} bytes, {wrong}. Copy or save it again; it may "
            "have been cut short."
        )


def _with_settings(original, settings):
    """Returns our optimizer in place of a loss-scaled one, ours or stock Keras'."""
    if isinstance(original, wrapping.LossScaleOptimizer):
        saved = vars(original.config)
    else:
        steps = original.dynamic_growth_steps
        saved = {"initial_scale": original.initial_scale, "growth_interval": steps}
    keywords = {"name": original.name, **saved, **settings}
    return wrapping.LossScaleOptimizer(original.inner_optimizer, **keywords)


def _has_slots(path):
    """Whether a `.keras` file has an optimizer's state beyond its counters.

    None for other files, for folders and for what is remote.
    """
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive, archive.open(_WEIGHTS) as member:
        with h5py.File(member, "r") as weights:
            group: Any = weights.get(_OPTIMIZER_GROUP, {})
            return any(value.shape for value in group.values())


def _unwrap(model):
    """Compiles a model with the optimizer inside its loss-scaled one, state kept."""
    inner = model.optimizer.inner_optimizer
    config = model.get_compile_config()
    config["optimizer"] = keras.saving.serialize_keras_object(inner)
    config["auto_scale_loss"] = False
    model.compile_from_config(config)
    for old, new in zip(inner.variables, model.optimizer.variables, strict=True):
        new.assign(old)
