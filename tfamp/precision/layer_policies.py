"""Gives layers their own precision while a model is made: overrides, resolved."""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from absl import logging

from tfamp import modes
from tfamp.precision import model_structure, overrides

ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_IN_ATTENTION = (keras.layers.Softmax, keras.layers.Dropout)
_suspended = contextvars.ContextVar("tfamp_overrides_suspended", default=False)


def follows(layer: keras.layers.Layer, parent: Any) -> bool:
    """Whether Keras runs a layer by the precision of the one that holds it.

    Read in Keras 3.15: `TimeDistributed` calls `layer.call` in its own autocast
    scope; recurrent layers cast what goes into and out of their cell; attention
    layers leave out their softmax and dropout where a fused kernel does both.
    """
    kinds = keras.layers
    if isinstance(parent, kinds.TimeDistributed | kinds.RNN | kinds.StackedRNNCells):
        return True
    return isinstance(parent, ATTENTION) and isinstance(layer, _IN_ATTENTION)


def computes_in_floats(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a precision at all; lookups of ids and strings have none."""
    return keras.backend.is_float_dtype(layer.compute_dtype)


def naming(parent_path: str) -> str:
    """Returns what to do about a pattern that names followers alone."""
    return (
        "what it matches runs by the precision of the layer around it; name "
        f"{parent_path!r}."
    )


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """While a model is copied, its layers get no policy from any `Resolver`."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


class Resolver:
    """Gives each layer a plain policy when its path is first known.

    Keras resolves a `DTypePolicyMap` by the path, which a layer has from `build`
    on: its first call still casts the inputs by the default, and layers without a
    `build` never have one. So `before_use` is to be called whenever a layer is about
    to be built or called; the first time it puts a plain Keras policy in place of
    the map, which is what the layer's configuration and a saved model then hold. A
    file has no configuration of layers that the class of another layer, or of a
    subclassed model, makes itself; the log names those with an override. Loaded under
    the same overrides, they are given them again.

    A layer with a `dtype` of its own keeps it unless a pattern matches its path.
    Layers built before are left alone, and so are models of which each layer was. No
    map is ever changed.

    Attributes:
      policy: The global dtype policy to set: a map with an explicit default.
      paths: Paths of the layers resolved so far.
    """

    def __init__(self, mode: modes.Mode, asked: Mapping[str, str] | None):
        self.policy = overrides.create_policy(mode, asked)
        self.paths: dict[str, None] = {}
        self._parsed = overrides.parse(mode, asked)
        self._default = keras.dtype_policies.get(mode.policy)
        self._asked = {
            each.mode.name: keras.dtype_policies.get(each.mode.policy)
            for each in self._parsed
        }
        self._notes: dict[str, str] = {}
        self._seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._changed: weakref.WeakSet = weakref.WeakSet()
        self._told = False

    def asks_for(self, policy: str) -> bool:
        """Whether an override asks for a policy, by its name."""
        return any(each.mode.policy == policy for each in self._parsed)

    def before_use(self, layer: keras.layers.Layer) -> None:
        """Gives a layer its policy, once.

        Args:
          layer: A layer that is about to be built or called.

        Raises:
          OverrideError: If patterns that ask for different modes match its path.
        """
        if layer in self._seen or _suspended.get() or self._is_older(layer):
            return
        path = model_structure.path_in_scope(layer)
        self._seen[layer] = path
        parent: Any = model_structure.layer_in_scope()
        if model_structure.is_part_of_sequential(layer, parent):
            layer.dtype_policy = parent.dtype_policy
        elif computes_in_floats(layer):
            self._resolve(layer, path, parent)

    def _is_older(self, layer):
        """Whether a layer, or all that a model is made of, was built without this."""
        if model_structure.was_used(layer):
            return True
        inner = model_structure.flatten_layers(layer)[1:]
        inner = [x for x in inner if not isinstance(x, keras.layers.InputLayer)]
        made = isinstance(layer, keras.Model) and layer.built and inner
        return bool(made) and not any(each in self._seen for each in inner)

    def _resolve(self, layer, path, parent):
        found = overrides.find(path, self._parsed)
        around = overrides.find_around(path, self._parsed)
        if follows(layer, parent):
            self._follow(layer, path, parent, found, around)
            return
        apart = self._layers_apart(layer, path) if found else []
        if apart:
            self._note(path, _name_them(path, apart))
            found = None
        else:
            self.paths[path] = None
        mine = self._is_mine(layer.dtype_policy)
        asked = found or (around if mine else None)
        if asked:
            if mine or layer.dtype_policy.name != asked.mode.policy:
                self._changed.add(layer)
            layer.dtype_policy = self._asked[asked.mode.name]
        elif mine:
            layer.dtype_policy = self._default

    def _follow(self, layer, path, parent, found, around):
        given = not isinstance(parent, ATTENTION)  # They pass on what they have.
        if self._is_mine(layer.dtype_policy) or (around and given):
            layer.dtype_policy = parent.dtype_policy
        if found and found.mode.policy == layer.dtype_policy.name:
            self.paths[path] = None
        elif found:
            self._note(path, naming(self._seen.get(parent, path)))

    def _note(self, path, text):
        for each in self._parsed:
            if each.matches(path):
                self._notes.setdefault(each.pattern, text)

    def _layers_apart(self, layer, path):
        """Paths of a model's layers that were resolved before the model's own."""
        inner = getattr(layer, "layers", []) if isinstance(layer, keras.Model) else []
        paths = [self._seen[each] for each in inner if each in self._seen]
        return [each for each in paths if not each.startswith(f"{path}/")]

    def _is_mine(self, policy):
        """Whether a policy is the global one, or a copy that Keras made of it."""
        kind = keras.dtype_policies.DTypePolicyMap
        if policy is self.policy or not isinstance(policy, kind):
            return policy is self.policy
        return isinstance(self.policy, kind) and _content(policy) == _content(
            self.policy
        )

    def check(self, model: keras.Model | None = None) -> None:
        """Raises unless each pattern matched a layer resolved so far.

        Args:
          model: The model just compiled or built, for the message.

        Raises:
          OverrideError: With all patterns that matched none, and the known paths.
        """
        notes = dict(self._notes)
        for each in self._parsed:
            if model is not None and each.matches(model.name):
                paths = [
                    self._seen[layer] for layer in model.layers if layer in self._seen
                ]
                notes.setdefault(each.pattern, _name_them(model.name, paths))
        overrides.check(self.paths, self._parsed, notes)
        if model is not None and not self._told:
            self._tell_unsaved(model)

    def knows(self, model: keras.Model) -> bool:
        """Whether any layer of a model was resolved here."""
        return any(each in self._seen for each in model_structure.flatten_layers(model))

    def _tell_unsaved(self, model):
        """Logs, once, the overrides that a file of this model would not hold."""
        if not any(x in self._changed for x in model_structure.flatten_layers(model)):
            return
        unsaved = [
            self._seen[layer]
            for layer, holder in model_structure.unsaved_layers(model)
            if layer in self._changed and not passes_on(holder, layer)
        ]
        if unsaved:
            self._told = True
            warn_of_unsaved(unsaved)


def passes_on(holder: keras.layers.Layer, layer: keras.layers.Layer) -> bool:
    """Whether a layer has the policy that Keras' own class of its holder gives it."""
    same = layer.dtype_policy.name == holder.dtype_policy.name
    return same and type(holder).__module__.startswith("keras.")


def warn_of_unsaved(paths: Sequence[str]) -> None:
    """Logs which modes a saved file does not hold, and what to do."""
    logging.warning(
        "A saved file does not hold the modes of layers that their class makes itself: "
        "%s. After loading, ask for them again: load it under the same "
        "tfamp.enable(overrides=...), or use tfamp.set_precision.",
        overrides.listed(paths),
    )


def _content(policy_map):
    names = {key: policy_map[key].name for key in policy_map}
    return policy_map.default_policy.name, names


def _name_them(path, inner):
    return (
        f"{path!r} is a model whose layers have paths of their own; name them "
        f"({overrides.listed(inner)}), or use `tfamp.set_precision`."
    )


def check_model(model: keras.Model, resolver: Resolver) -> None:
    """Checks a resolver's patterns once a model is built; before, nothing is known.

    To be called when a model is compiled, and after its first step. Layers of other
    models made since count as well. A model that was built before, or converted, has
    modes of its own: it is not asked for the patterns. `evaluate`, `predict` and a
    training loop of one's own check nothing: what the patterns mean may come later.

    Args:
      model: The model.
      resolver: The one in force.

    Raises:
      OverrideError: If the model is built and a pattern matched no layer yet.
    """
    asked = model_structure.is_built(model) and not _suspended.get()
    if asked and resolver.knows(model):
        resolver.check(model)
