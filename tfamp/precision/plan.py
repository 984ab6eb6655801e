"""Decides which dtype policy each layer of a built model gets, and why."""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import keras
from absl import logging

from tfamp import errors, modes
from tfamp.precision import assign, float32_layers, overrides

SOFTMAX = "softmax stays in float32: its exponentials overflow and its sums round"
_SOFTMAX_ACTIVATIONS = (keras.activations.softmax, keras.activations.log_softmax)


_SHOWN = 5
# Why each layer has the policy that it was assigned; no model holds more for it.
_reasons: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_set: weakref.WeakSet = weakref.WeakSet()


class LayerPrecision(NamedTuple):
    """A row of `describe_layers`: a layer's path, its dtype policy's name, and why."""

    path: str
    policy: str
    reason: str


class Planned(NamedTuple):
    """What a layer gets: the name of a Keras dtype policy, and why."""

    policy: str
    reason: str


class Plan:
    """What overrides, and a mode, ask of the layers of a model; changes nothing.

    Args:
      model: A built model.
      parsed: What `overrides.parse` returned.

    Raises:
      OverrideError: If patterns contradict one another.
    """

    def __init__(self, model: keras.Model, parsed: overrides.Overrides):
        self._model, self._parsed = model, parsed
        places = [p for p in assign.walk(model) if assign.is_assignable(p.layer)]
        self._places = {id(place.layer): place for place in places}
        self._free = [place for place in places if self._leader(place) is None]
        found = {id(p.layer): overrides.find(_paths(p), parsed) for p in self._free}
        self._own = {key: each for key, each in found.items() if each}

    def unmatched(self) -> list[str]:
        """Returns the patterns that match no layer to which they can apply."""
        paths = [_paths(place) for place in self._free]
        return [x.pattern for x in self._parsed if not any(map(x.matches, paths))]

    def check_matched(self, patterns: list[str]) -> None:
        """Raises OverrideError, with the known paths, if there are such patterns."""
        if patterns:
            paths = [place.path for place in self._free]
            raise overrides.OverrideError(overrides.unmatched(patterns, paths))

    def under_enable(self, policy: str) -> dict[int, Planned]:
        """Returns {id of a layer: what it gets}, where that is not what it has.

        Overrides; and float32 for layers of `policy` that are known to need it.

        Args:
          policy: Name of the dtype policy in force.
        """
        low = keras.dtype_policies.get(policy).compute_dtype

        def pin(layer):
            if low not in assign.LOW or layer.dtype_policy.name != policy:
                return ""
            return float32_layers.reason(layer) or float32_layers.slow_reason(
                layer, low
            )

        pins = self._pins(pin)
        rows = {key: self._asked(p) or pins.get(key) for key, p in self._places.items()}
        return {key: row for key, row in rows.items() if row is not None}

    def complete(self, mode: modes.Mode) -> dict[int, Planned]:
        """Returns {id of a layer: what it gets}, for each layer of the model."""
        pinned = {} if mode.policy == "float32" else _outputs_or_warning(self._model)

        def pin(layer):
            softmax = SOFTMAX if _is_softmax(layer) else ""
            return float32_layers.reason(layer) or softmax

        pins = {} if mode.policy == "float32" else self._pins(pin, pinned)

        def row(place):
            if asked := self._asked(place) or pins.get(id(place.layer)):
                return asked
            if leader := self._leader(place):
                return row(leader)._replace(reason=f"follows {leader.layer.name!r}")
            return Planned(mode.policy, f"the mode is {mode.name}")

        return {key: row(place) for key, place in self._places.items()}

    def _pins(self, why, pinned=()):
        """Returns {id of a layer: float32, and why}, from `why(layer)` or around it."""

        def pin(place):
            if id(place.layer) in pinned:
                return pinned[id(place.layer)]
            if self._leader(place) is None and (reason := why(place.layer)):
                return reason
            for holder in self._holders(place):
                if not isinstance(holder.layer, keras.Model) and pin(holder):
                    return f"in {holder.layer.name!r}, which stays in float32"
            return ""

        found = {key: pin(place) for key, place in self._places.items()}
        return {key: Planned("float32", text) for key, text in found.items() if text}

    def _asked(self, place):
        if id(place.layer) in self._own:
            found = self._own[id(place.layer)]
            return Planned(found.mode.policy, f"asked for by {found.pattern!r}")
        around = self._around(place)
        if len(around) > 1:
            names = " and ".join(repr(name) for name, _ in around.values())
            raise overrides.OverrideError(
                f"Layer {place.path!r} is shared by {names}, which are asked to be "
                f"{' and '.join(around)}. Name the layer itself."
            )
        for name, found in around.values():
            reason = f"in {name!r}, asked for by {found.pattern!r}"
            return Planned(found.mode.policy, reason)
        return None

    def _holders(self, place):
        return [self._places[id(h)] for h in place.holders if id(h) in self._places]

    def _leader(self, place):
        """Returns the place of the layer by whose precision this one runs, or None."""
        holders = self._holders(place)
        return next(
            (p for p in holders if float32_layers.follows(place.layer, p.layer)), None
        )

    def _around(self, place):
        """Returns {mode: (name, override)} of the nearest layers around with one."""
        found = {}
        for holder in self._holders(place):
            own = self._own.get(id(holder.layer))
            one = own and {own.mode.name: (holder.layer.name, own)}
            found |= one or self._around(holder)
        return found


def _paths(place):
    """The structure's path, and Keras' own where it has another."""
    return tuple(dict.fromkeys((place.path, place.layer.path or place.path)))


def _is_softmax(layer):
    activation = getattr(layer, "activation", None)
    return isinstance(layer, keras.layers.Softmax) or any(
        activation is each for each in _SOFTMAX_ACTIVATIONS
    )


def _outputs_or_warning(model):
    try:
        return float32_layers.output_layers(model)
    except errors.ExportError as error:
        logging.warning(
            "set_precision: the layers that compute the outputs are not known, so "
            "only softmax stays in float32. Name them in `overrides`. %s",
            error,
        )
        return {}


# ---- What was assigned ----


def apply(model: keras.Model, planned: Mapping[int, Planned]) -> list[str]:
    """Assigns what is planned, and notes the reasons.

    Returns:
      Paths of the layers whose policy a file of the model would not hold.
    """
    layers = {id(place.layer): place.layer for place in assign.walk(model)}
    changed = any(
        layers[key].dtype_policy.name != row.policy for key, row in planned.items()
    )
    if changed or any(v.dtype in assign.LOW for v in model.variables):
        assign.assign(model, {key: row.policy for key, row in planned.items()})
    _reasons.update({layers[key]: row.reason for key, row in planned.items()})
    return _unsaved(model, planned)


def was_assigned(layer: keras.layers.Layer) -> bool:
    """Whether the precision of a layer was assigned by a plan."""
    return layer in _reasons


def remember(model: keras.Model) -> None:
    """Notes that a model has its precision from `set_precision`."""
    _set.add(model)


def was_set(model: keras.Model) -> bool:
    """Whether a model as a whole has its precision from `set_precision`."""
    return model in _set


def weighted(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers with weights that have a precision, models left out."""
    places = [p for p in assign.walk(model) if assign.is_assignable(p.layer)]
    layers = [place.layer for place in places if place.layer.weights]
    return [each for each in layers if not isinstance(each, keras.Model)]


def is_of_another(model: keras.Model, policy: str) -> bool:
    """Whether a model with weights was built under another policy than this one."""
    wanted = keras.dtype_policies.get(policy).compute_dtype
    layers = weighted(model)
    return bool(layers) and not any(
        each.compute_dtype == wanted or was_assigned(each) for each in [model, *layers]
    )


def others(model: keras.Model, policy: str) -> list[keras.Model]:
    """Returns the models, this one or in it, that stay in float32 as a whole.

    A loaded model has the policy in force itself, whatever its layers have.
    """
    found = []
    for place in assign.walk(model) if policy != "float32" else ():
        layers = weighted(place.layer) if isinstance(place.layer, keras.Model) else []
        if layers and not any(
            each.compute_dtype in assign.LOW or was_assigned(each) for each in layers
        ):
            found.append(place.layer)
    return [model] if model in found else found


def describe_layers(model: keras.Model) -> list[LayerPrecision]:
    """Returns the path, the dtype policy and its reason, if known, of each layer.

    Args:
      model: A built model.

    Returns:
      A row for each layer that computes in floats, those inside others included.
    """
    return [
        LayerPrecision(
            place.path,
            place.layer.dtype_policy.name,
            _reasons.get(place.layer, "as it was made"),
        )
        for place in assign.walk(model)
        if assign.is_assignable(place.layer)
    ]


def _unsaved(model, planned):
    """Returns the paths of these layers that a file of the model would not hold.

    A layer that no configuration names gets its precision, when the file is loaded,
    from what makes it: Keras' own layers pass on theirs; other classes take the global.
    """
    try:
        saved = _named_policies(keras.saving.serialize_keras_object(model))
    except Exception:  # Code of the user's layers; such a model cannot be saved.
        saved = set()
    default = keras.config.dtype_policy().name
    found = []
    for layer, path, holders in assign.walk(model):
        policy = layer.dtype_policy.name
        made = {
            each.dtype_policy.name if _is_of_keras(each) else default
            for each in holders
        }
        if id(layer) in planned and not isinstance(layer, keras.Model):
            if made - {policy} and (layer.name, policy) not in saved:
                found.append(path)
    return found


def _is_of_keras(layer):
    return type(layer).__module__.startswith("keras")  # KerasHub, too.


def warn_of_unsaved(paths: list[str]) -> None:
    """Logs which layers' precision a saved file does not hold, and what to do."""
    more = f" and {len(paths) - _SHOWN} more" if paths[_SHOWN:] else ""
    logging.warning(
        "A saved file does not hold the modes of layers that their class makes "
        "itself: %s%s. After loading, ask for them again by tfamp.set_precision, "
        "or load it under the same tfamp.enable(overrides=...).",
        *(", ".join(map(repr, paths[:_SHOWN])), more),
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
