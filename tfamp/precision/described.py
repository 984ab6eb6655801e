"""What is said of a model's layers: their precision, and why it is not another."""

import json
import re
from typing import NamedTuple

import keras
from absl import logging

from tfamp import errors, records
from tfamp.facts import formats, user_code
from tfamp.inspect import quantized, slow_layers, structure
from tfamp.precision import plan, rules
from tfamp.storage import recomputed


class LayerPrecision(NamedTuple):
    """A row of `describe_layers`: a layer's path, its dtype policy's name, and why."""

    path: str
    policy: str
    reason: str


def describe_layers(model: keras.Model) -> list[LayerPrecision]:
    """Returns each layer's path, its dtype policy, and the reason for the policy.

    The reason also names layers that are recomputed in the backward pass. Under
    `enable` a model has its precision once it is compiled or has been called.

    Args:
      model: A built model.

    Returns:
      A row for each layer that computes in floats, including nested layers.
    """
    places = [x for x in structure.walk(model) if structure.is_assignable(x.layer)]
    return [
        LayerPrecision(
            path,
            quantized.name_of(structure.policy(layer)),
            "; ".join(
                filter(None, [plan.reason_of(layer), recomputed.describe(layer)])
            ),
        )
        for layer, path, _ in places
    ]


# ---- What is faster in float32 ----


def tell_of_slow(model: keras.Model, low: str) -> None:
    """Warns of a model that is faster in float32, as most of it stays in that."""
    if slow := mostly_slow(model, low):
        user_code.warn(
            f"float32 is faster for this model here: most of '{model.name}' "
            f"({', '.join(slow)}) stays in float32. Use tfamp.enable('float32')."
        )


def mostly_slow(model: keras.Model, low: str) -> list[str]:
    """Returns the layers that are faster in float32, if little else multiplies.

    That is, if they hold most weights, tables of embeddings apart, and there is no
    other convolution or attention, which multiply by their weights often.
    """
    slow, in_slow, others, inside = [], 0, 0, set()
    for place in structure.walk(model):
        layer = place.layer
        size = rules.size(layer)
        why = layer.compute_dtype == "float32" and slow_layers.slow_here(layer, low)
        if why:
            slow.append(f"{layer.name}: {why}")
        if why or inside & {id(each.layer) for each in place.holders}:
            inside.add(id(layer))
            in_slow += size
        elif re.search("Conv|Attention", type(layer).__name__):
            return []
        elif not isinstance(layer, keras.layers.Embedding):
            others += size
    return slow if in_slow > others else []


# ---- What a trace has shown ----


def tell_of_trace(model: keras.Model, traced: rules.Traced | None) -> None:
    """Says, once, which raw values are rounded, and which sums stay in float32."""
    for name in traced.rounded if traced else ():
        user_code.warn(
            f"Layer {name!r} receives values that other layers have rounded to 16 "
            "bits, which loses digits of years and prices. Put it before those "
            "layers, or name them in overrides={...: 'float32'}."
        )
    if traced and traced.mixed:
        user_code.log(
            f"Model {model.name!r} adds or multiplies its inputs and what layers "
            f"computed from them ({errors.examples(traced.mixed)}): the results are "
            "float32, of twice the memory. A layer, such as keras.layers.Add(), "
            "returns 16 bits."
        )


def tell_of_untraced(model: keras.Model, error: Exception, or_else: str = "") -> None:
    """Warns of a model without a trace: what only that tells is not in float32."""
    logging.warning(
        "The layers of %r that compute outputs are not known, nor those that take raw "
        "values or ids as floats: none of these stays in float32. Name them in "
        "`overrides`%s. %s",
        *(model.name, or_else, error),
    )


# ---- What a saved file would not hold ----


def unsaved(planned: plan.Plan) -> str:
    """Returns what to say of layers whose policy a file of the model would not hold.

    A layer that no configuration names gets its precision, when the file is loaded,
    from what makes it: Keras' own layers, and KerasHub's, pass on theirs; other classes
    take the global. Empty if a file holds all.
    """
    saved = set()

    def note(config):
        if isinstance(dtype := config.get("dtype"), dict):
            policy = dtype.get("config") or {}
            name = policy.get("name", policy.get("source_name"))
            saved.add((config.get("name"), name))
        return config

    try:  # It is given every dict in the configuration.
        json.loads(planned.model.to_json(), object_hook=note)
    except Exception:  # Code of the user's layers; such a model cannot be saved.
        saved.clear()
    default, paths = keras.config.dtype_policy().name, []
    for layer, path, holders in structure.walk(planned.model):
        inherited = {
            structure.policy(maker).name
            if type(maker).__module__.startswith("keras")
            else default
            for maker, *_ in holders
        }
        policy = quantized.base_name(structure.policy(layer))
        if id(layer) in planned.rows and not isinstance(layer, keras.Model):
            if inherited - {policy} and (layer.name, policy) not in saved:
                paths.append(repr(path))
    if not paths:
        return ""
    return (
        "A saved file does not hold the modes of layers that their class makes "
        f"itself: {errors.examples(paths)}. After loading, set them again with "
        "tfamp.set_precision, or load the file under the same "
        "tfamp.enable(overrides=...)."
    )


# ---- Models from elsewhere ----


def weighted(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers with weights that have a precision, models left out."""
    return [
        x
        for x in structure.layers(model)
        if structure.is_assignable(x) and x.weights and not isinstance(x, keras.Model)
    ]


def is_of_another(model: keras.Model, policy: str) -> bool:
    """Whether a model with weights was made under another policy than this one."""
    low, layers = keras.dtype_policies.get(policy).compute_dtype, weighted(model)
    dtypes = {plan.made_with(each).compute_dtype for each in [model, *layers]}
    return bool(layers) and low not in dtypes


def others(model: keras.Model, policy: str) -> list[keras.Model]:
    """Returns the models, this one or in it, that were made in float32 as a whole.

    A loaded model has the policy in force itself, whatever its layers have. Layers that
    were made with a `dtype` are in float32 on purpose, and those that were set to it.
    """

    def is_ours(layer):
        by = plan.reason_of(layer)
        is_set = by != plan.AS_MADE and not by.startswith(plan.BY_MODE)
        explicit = records.of(layer).enabled.is_explicit
        return is_set or explicit or layer.compute_dtype in formats.LOW

    if policy == "float32":
        return []
    inner = [x for x in structure.layers(model) if isinstance(x, keras.Model)]
    foreign = [
        x for x in inner if (held := weighted(x)) and not any(map(is_ours, held))
    ]
    return [model] if model in foreign else foreign


# Of what an error is about; Keras adds what a layer was called with: "dtype=bfloat16".
_ABOUT_LOW = re.compile(r"(?<!dtype=)\b(bfloat16|float16|half)\b")


def add_override(error: BaseException, layer: keras.layers.Layer) -> None:
    """Adds to an error about 16 bits how to have the layer in float32.

    Args:
      error: What the layer's call raised; an inner layer's has a note already.
      layer: The layer.
    """
    root = error
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__
    low = layer.compute_dtype in formats.LOW
    if low and _ABOUT_LOW.search(str(root)) and not hasattr(error, "__notes__"):
        error.add_note(
            f"Layer {layer.name!r} computes in {layer.compute_dtype}. To have it in "
            f"float32: tfamp.enable(..., overrides={{{layer.name!r}: 'float32'}})."
        )


def describe_others(models: list[keras.Model], policy: str) -> str:
    """Returns what to say of models that are not in the policy in force."""
    layers = [layer for model in models for layer in weighted(model)]
    policies = sorted({structure.policy(each).name for each in layers})
    paths = errors.examples(each.path for each in layers)
    if (now := keras.config.dtype_policy().name) != policy:
        return (
            f"The layers of {models[0].name!r} have {', '.join(policies)}: the global "
            f"dtype policy is {now}, not {policy}, since a script or "
            "keras.utils.clear_session() changed it, or this is another thread. Call "
            "tfamp.enable() here."
        )
    return (
        f"Model {', '.join(repr(each.name) for each in models)} was built before "
        "tfamp.enable() or in another thread, or loaded in another precision: its "
        f"layers keep {', '.join(policies)} ({paths}), "
        f"while {policy} is in force. Build it after tfamp.enable(), or call "
        "tfamp.set_precision on it."
    )
