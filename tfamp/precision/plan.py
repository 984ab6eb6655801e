"""Decides which dtype policy each layer of a built model gets, and why."""

import functools
import weakref
from collections.abc import Container, Mapping
from typing import NamedTuple

import keras
from absl import logging

from tfamp import errors
from tfamp.facts import formats, modes
from tfamp.inspect import structure
from tfamp.precision import assign, borders, float32_layers, overrides

_AS_MADE = "as it was made"
SOFTMAX = "softmax stays in float32: its exponentials overflow and its sums round"
_SOFTMAX_ACTIVATIONS = (keras.activations.softmax, keras.activations.log_softmax)
# Why each layer has the policy that it was assigned; no model holds more for it.
_reasons: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
SET: weakref.WeakSet = weakref.WeakSet()  # Models that `set_precision` was called on.
# By the id of a layer: the name of the policy that it gets, and why.
Planned = Mapping[int, tuple[str, str]]


class LayerPrecision(NamedTuple):
    """A row of `describe_layers`: a layer's path, its dtype policy's name, and why."""

    path: str
    policy: str
    reason: str


class Plan:
    """What overrides, and a mode, ask of the layers of a model; changes nothing.

    `matched` are the patterns that match a layer to which they can apply.

    Args:
      model: A built model.
      parsed: What `overrides.parse` returned.

    Raises:
      OverrideError: If patterns contradict one another.
    """

    def __init__(self, model: keras.Model, parsed: overrides.Overrides):
        self._model, self._parsed = model, parsed
        self._places = _assignable(model)
        self._free = [place for place in self._places if _leader(place) is None]
        found = {id(p.layer): overrides.find(_paths(p), parsed) for p in self._free}
        self._own = {key: each for key, each in found.items() if each}
        paths = [_paths(place) for place in self._free]
        self.matched = {x.pattern for x in parsed if any(map(x.matches, paths))}

    def check(self, matched: Container[str]) -> None:
        """Raises OverrideError, with the known paths, for patterns not in `matched`."""
        missing = [x.pattern for x in self._parsed if x.pattern not in matched]
        if missing:
            paths = [place.path for place in self._free]
            raise overrides.OverrideError(overrides.unmatched(missing, paths))

    def under_enable(self, policy: str) -> Planned:
        """Returns what layers get, where that is not what they have.

        Overrides; and float32 for layers of `policy` that are known to need it.

        Args:
          policy: Name of the dtype policy in force.
        """
        pin = functools.partial(_pin, why=lambda x: stays_in_float32(x, policy))
        rows = {id(p.layer): self._asked(p) or pin(p) for p in self._places}
        return {key: row for key, row in rows.items() if row}

    def complete(self, mode: modes.Mode) -> Planned:
        """Returns what each layer of the model gets."""
        is_mixed = mode.policy != "float32"
        outputs = _outputs_or_warning(self._model) if is_mixed else {}

        def why(place):
            layer = place.layer
            softmax = SOFTMAX if _is_softmax(layer) else ""
            kind = float32_layers.made_in_float32(layer) or softmax
            kind = kind or float32_layers.uncompiled(layer)
            return is_mixed and (outputs.get(id(layer)) or kind)

        def row(place):
            if asked := self._asked(place) or _pin(place, why):
                return asked
            if leader := _leader(place):
                return row(leader)[0], f"follows {leader.layer.name!r}"
            return mode.policy, f"the mode is {mode.name}"

        return {id(place.layer): row(place) for place in self._places}

    def _asked(self, place):
        if found := self._own.get(id(place.layer)):
            return found.mode.policy, f"asked for by {found.pattern!r}"
        around = self._around(place)
        if len(around) > 1:
            names = " and ".join(repr(name) for name, _ in around.values())
            raise overrides.OverrideError(
                f"Layer {place.path!r} is shared by {names}, which are asked to be "
                f"{' and '.join(around)}. Name the layer itself."
            )
        for name, found in around.values():
            return found.mode.policy, f"in {name!r}, asked for by {found.pattern!r}"
        return None

    def _around(self, place):
        """Returns {mode: (layer around, its override)} of the nearest ones around."""
        found = {}
        for holder in place.holders:
            own = self._own.get(id(holder.layer))
            one = own and {own.mode.name: (holder.layer.name, own)}
            found |= one or self._around(holder)
        return found


def stays_in_float32(place: structure.Place, policy: str) -> str:
    """Returns why a layer that has the policy in force gets float32; empty if not.

    Only where all layers around it are Keras' own, which cast what they take: in a
    `call` of the user's own, float32 may meet 16 bits in an operation.
    """
    layer, low = place.layer, keras.dtype_policies.get(policy).compute_dtype
    if low not in formats.LOW or layer.dtype_policy.name != policy:
        return ""
    reason = float32_layers.uncompiled(layer) or float32_layers.slow_here(layer, low)
    return reason if reason and _is_in_keras(place) else ""


def _is_in_keras(place):
    return all(_only_casts(each.layer) and _is_in_keras(each) for each in place.holders)


def _only_casts(layer):
    known = isinstance(layer, keras.Sequential) or structure.is_functional(layer)
    return known or type(layer).__module__.startswith("keras")


def _assignable(model):
    return [p for p in structure.walk(model) if structure.is_assignable(p.layer)]


def _leader(place):
    """Returns the place of the layer by whose precision this one runs, or None."""
    leads = (p for p in place.holders if float32_layers.follows(place.layer, p.layer))
    return next(leads, None)


def _pin(place, why):
    """Returns float32, and the reason, by `why(place)` or that of one around it."""
    if _leader(place) is None and (reason := why(place)):
        return "float32", reason
    for holder in place.holders:
        if not isinstance(holder.layer, keras.Model) and _pin(holder, why):
            return "float32", f"in {holder.layer.name!r}, which stays in float32"
    return None


def _paths(place):
    """The structure's path, and Keras' own where it has another."""
    return tuple(dict.fromkeys((place.path, place.layer.path or place.path)))


def _is_softmax(layer):
    activation = getattr(layer, "activation", None)
    return isinstance(layer, keras.layers.Softmax) or activation in _SOFTMAX_ACTIVATIONS


def _outputs_or_warning(model):
    try:
        return float32_layers.output_layers(model)
    except errors.ExportError as error:
        logging.warning(
            "set_precision: the layers that compute the outputs are not known, so "
            "they do not stay in float32. Name them in `overrides`. %s",
            error,
        )
        return {}


# ---- What was assigned ----


def apply(model: keras.Model, planned: Planned) -> str:
    """Assigns what is planned, and notes the reasons.

    Returns:
      What to say of layers whose policy a file of the model would not hold.
    """
    layers = {id(place.layer): place.layer for place in structure.walk(model)}
    policies = {key: policy for key, (policy, _) in planned.items()}
    changed = any(layers[key].dtype_policy.name != policies[key] for key in policies)
    if changed or any(v.dtype in formats.LOW for v in model.variables):
        assign.assign(model, policies)
    _reasons.update({layers[key]: reason for key, (_, reason) in planned.items()})
    unsaved = _unsaved(model, planned)
    if not unsaved:
        return ""
    return (
        "A saved file does not hold the modes of layers that their class makes "
        f"itself: {errors.examples(unsaved)}. After loading, ask for them again by "
        "tfamp.set_precision, or load it under the same tfamp.enable(overrides=...)."
    )


# ---- Models from elsewhere ----


def _weighted(model):
    """Returns the layers with weights that have a precision, models left out."""
    layers = [place.layer for place in _assignable(model) if place.layer.weights]
    return [each for each in layers if not isinstance(each, keras.Model)]


def _has_none(model, formats, *also):
    """Whether no layer, of those with weights, has a format or its own on purpose."""
    layers = _weighted(model)
    return bool(layers) and not any(
        each.compute_dtype in formats or each in _reasons or each in borders.CHOSEN
        for each in (*also, *layers)
    )


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


# ---- Telling ----


def describe_layers(model: keras.Model) -> list[LayerPrecision]:
    """Returns the path, the dtype policy and its reason, if known, of each layer.

    Args:
      model: A built model.

    Returns:
      A row for each layer that computes in floats, those inside others included.
    """
    return [
        LayerPrecision(path, layer.dtype_policy.name, _reasons.get(layer, _AS_MADE))
        for layer, path, _ in _assignable(model)
    ]


def _unsaved(model, planned):
    """Returns the quoted paths of these layers that a file of the model would not hold.

    A layer that no configuration names gets its precision, when the file is loaded,
    from what makes it: Keras' own layers, and KerasHub's, pass on theirs; other classes
    take the global.
    """
    try:
        saved = _named_policies(keras.saving.serialize_keras_object(model))
    except Exception:  # Code of the user's layers; such a model cannot be saved.
        saved = set()
    default, found = keras.config.dtype_policy().name, []
    for layer, path, holders in structure.walk(model):
        made = {
            maker.dtype_policy.name
            if type(maker).__module__.startswith("keras")
            else default
            for maker, *_ in holders
        }
        policy = layer.dtype_policy.name
        if id(layer) in planned and not isinstance(layer, keras.Model):
            if made - {policy} and (layer.name, policy) not in saved:
                found.append(repr(path))
    return found


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
