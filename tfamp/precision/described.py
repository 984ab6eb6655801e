"""What is said of a model's layers: their precision, and why it is not another."""

from typing import NamedTuple

import keras

from tfamp import errors
from tfamp.facts import formats
from tfamp.inspect import structure
from tfamp.precision import assigned, plan

_AS_MADE = "as it was made"


class LayerPrecision(NamedTuple):
    """A row of `describe_layers`: a layer's path, its dtype policy's name, and why."""

    path: str
    policy: str
    reason: str


def describe_layers(model: keras.Model) -> list[LayerPrecision]:
    """Returns the path, the dtype policy and its reason, if known, of each layer.

    Under `enable` a model has its precision once it is compiled or was called.

    Args:
      model: A built model.

    Returns:
      A row for each layer that computes in floats, those inside others included.
    """
    return [
        LayerPrecision(
            place.path,
            place.layer.dtype_policy.name,
            assigned.REASONS.get(place.layer, _AS_MADE),
        )
        for place in structure.walk(model)
        if structure.is_assignable(place.layer)
    ]


# ---- What a saved file would not hold ----


def unsaved(planned: plan.Plan) -> str:
    """Returns what to say of layers whose policy a file of the model would not hold.

    A layer that no configuration names gets its precision, when the file is loaded,
    from what makes it: Keras' own layers, and KerasHub's, pass on theirs; other classes
    take the global. Empty if a file holds all.
    """
    try:
        config = keras.saving.serialize_keras_object(planned.model)
        saved = _named_policies(config)
    except Exception:  # Code of the user's layers; such a model cannot be saved.
        saved = set()
    default, found = keras.config.dtype_policy().name, []
    for layer, path, holders in structure.walk(planned.model):
        made = {
            maker.dtype_policy.name
            if type(maker).__module__.startswith("keras")
            else default
            for maker, *_ in holders
        }
        policy = layer.dtype_policy.name
        if id(layer) in planned.rows and not isinstance(layer, keras.Model):
            if made - {policy} and (layer.name, policy) not in saved:
                found.append(repr(path))
    if not found:
        return ""
    return (
        "A saved file does not hold the modes of layers that their class makes "
        f"itself: {errors.examples(found)}. After loading, ask for them again by "
        "tfamp.set_precision, or load it under the same tfamp.enable(overrides=...)."
    )


def _named_policies(config):
    """Returns {(name of a layer, name of its policy)} of all layers in a config."""
    if isinstance(config, list | tuple):
        return set().union(*map(_named_policies, config))
    if not isinstance(config, dict):
        return set()
    found = set().union(*map(_named_policies, config.values()))
    dtype = config.get("dtype")
    if isinstance(dtype, dict) and "name" in config:
        found.add((config["name"], (dtype.get("config") or {}).get("name")))
    return found


# ---- Models from elsewhere ----


def _weighted(model):
    """Returns the layers with weights that have a precision, models left out."""
    layers = [place.layer for place in structure.walk(model)]
    kinds = keras.Model
    return [
        x
        for x in layers
        if structure.is_assignable(x) and x.weights and not isinstance(x, kinds)
    ]


def _has_none(model, policies, *also):
    """Whether no layer with weights computes so, or has its policy on purpose."""
    layers = _weighted(model)
    return bool(layers) and not any(
        each.compute_dtype in policies or _is_on_purpose(each)
        for each in (*also, *layers)
    )


def _is_on_purpose(layer):
    reason = assigned.REASONS.get(layer, plan.BY_MODE)
    return not reason.startswith(plan.BY_MODE)


def is_of_another(model: keras.Model, policy: str) -> bool:
    """Whether a model with weights was built under another policy than this one."""
    return _has_none(model, [keras.dtype_policies.get(policy).compute_dtype], model)


def others(model: keras.Model, policy: str) -> list[keras.Model]:
    """Returns the models, this one or in it, that stay in float32 as a whole.

    A loaded model has the policy in force itself, whatever its layers have.
    """
    if policy == "float32":
        return []
    layers = [place.layer for place in structure.walk(model)]
    inner = [each for each in layers if isinstance(each, keras.Model)]
    found = [each for each in inner if _has_none(each, formats.LOW)]
    return [model] if model in found else found


def describe_others(models: list[keras.Model], policy: str) -> str:
    """Returns what to say of models that are not in the policy in force."""
    layers = [layer for model in models for layer in _weighted(model)]
    kept = sorted({each.dtype_policy.name for each in layers})
    paths = errors.examples(each.path for each in layers)
    return (
        f"Model {', '.join(repr(each.name) for each in models)} was built before "
        "tfamp.enable() or in another thread, or loaded in another precision: its "
        f"layers keep {', '.join(kept)} ({paths}), "
        f"while {policy} is in force. Build it after tfamp.enable(), or call "
        "tfamp.set_precision on it."
    )
