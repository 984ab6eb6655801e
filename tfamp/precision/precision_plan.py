"""Decides the dtype policy of every layer of a built model; changes nothing."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfamp import errors, modes
from tfamp.precision import (
    layer_policies,
    model_inputs,
    model_structure,
    overrides,
    rebuild,
)

OUTPUT = "computes an output of the model, which stays in float32"
PASSES_OUTPUT = "passes on an output of the model, which stays in float32"
SOFTMAX = "softmax stays in float32: its exponentials overflow and its sums round"
_SOFTMAX_ACTIVATIONS = (keras.activations.softmax, keras.activations.log_softmax)


class ConversionError(errors.TfampError, RuntimeError):
    """A model cannot be rebuilt in another precision."""


class Planned(NamedTuple):
    """What is planned for a layer.

    Attributes:
      policy: Name of a Keras policy; None for what the layer that makes it gives it.
      reason: Why.
      inherited: Whether it comes from a layer around; a dtype that the class of that
        layer fixes then stays.
    """

    policy: str | None
    reason: str
    inherited: bool = False


def output_layers(
    model: keras.Model, sample_inputs: Any = None
) -> list[tuple[keras.layers.Layer, str]]:
    """Returns the layers that compute or pass on a model's outputs, and why.

    Parameter-free layers (activation, reshape, dropout) pass on what the layers
    before them compute; both belong to the output. Found in a trace of the model.

    Args:
      model: A built model; it is not changed.
      sample_inputs: A batch that it takes, where Keras recorded too little.

    Returns:
      (layer, reason) from the output backward.

    Raises:
      ConversionError: If the model cannot be traced with the inputs that are known.
    """
    with rebuild.explained(model, "cannot be traced", ConversionError):
        inputs = _trace_inputs(model, sample_inputs)
        chains = model_structure.output_chains(model, inputs, _computes)
    return [
        (layer, OUTPUT if stop else PASSES_OUTPUT)
        for layer, stop in chains
        if stop or not model_structure.children(layer)
    ]


def _computes(layer):
    """Whether a layer has weights of its own, or runs its inner layers as its own."""
    if _is_model(layer):
        return False
    inner = model_structure.flatten_layers(layer)[1:]
    if any(layer_policies.follows(each, layer) for each in inner):
        return not isinstance(layer, layer_policies.ATTENTION)
    held = {id(v) for each in inner for v in each.weights}
    return any(id(v) not in held for v in layer.weights)


def _trace_inputs(model, sample_inputs):
    if sample_inputs is not None:
        return model_inputs.describe(model, sample_inputs)[0]
    declared = model_structure.declared_inputs(model)
    if declared is not None:
        return keras.tree.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), declared
        )
    shapes = (model.get_build_config() or {}).get("input_shape")
    if shapes is None:
        raise ValueError("Keras recorded no shape of one input")
    return keras.tree.map_shape_structure(
        lambda shape: tf.TensorSpec((None, *shape[1:]), tf.float32), shapes
    )


def paths(model: keras.Model) -> list[tuple[keras.layers.Layer, str]]:
    """Returns (layer, path) of every layer that computes in floats, parents first."""
    found = {}

    def visit(layer, around):
        if id(layer) in found or isinstance(layer, keras.layers.InputLayer):
            return
        path = model_structure.path_of(layer, around)
        found[id(layer)] = (layer, path)
        plain = model_structure.is_plain_functional(layer)
        for each in model_structure.children(layer):
            visit(each, "" if plain else path)

    visit(model, "")
    return [row for row in found.values() if layer_policies.computes_in_floats(row[0])]


class Plan:
    """What the layers of a model get; the order is in `convert.set_precision`.

    Args:
      model: A built model; it is not changed.
      mode: The `Mode` of all layers to which nothing else applies.
      asked: {pattern: name of a mode}, or None.
      sample_inputs: As for `output_layers`.

    Raises:
      OverrideError: If overrides are malformed, match no layer or contradict one
        another.
    """

    def __init__(
        self,
        model: keras.Model,
        mode: modes.Mode,
        asked: Mapping[str, str] | None,
        sample_inputs: Any = None,
    ):
        self._parsed = overrides.parse(mode, asked)
        self._mode = mode
        self._paths = {id(layer): (layer, path) for layer, path in paths(model)}
        self._parents = self._find_parents()
        self._own = self._find_own()
        self._check_shared()
        self._outputs = _outputs_or_warning(model, sample_inputs)

    def rows(self) -> dict[int, Planned]:
        """Returns {id of a layer: what is planned for it}."""
        return {key: self._row(layer) for key, (layer, _) in self._paths.items()}

    def _check_shared(self):
        problems = []
        for layer, path in self._paths.values():
            around = {} if id(layer) in self._own else self._around(layer)
            if len(around) > 1:
                names = " and ".join(repr(name) for name, _ in around.values())
                problems.append(
                    f"Layer {path!r} is shared by {names}, which are asked to be "
                    f"{' and '.join(around)}. Name the layer itself."
                )
        if problems:
            raise overrides.OverrideError("\n".join(problems))

    def _find_parents(self):
        parents: dict[int, list] = {}
        for layer, _ in self._paths.values():
            for each in model_structure.children(layer):
                parents.setdefault(id(each), []).append(layer)
        return parents

    def _leader(self, layer):
        """Returns the layer by whose precision this one runs, or None."""
        parents = self._parents.get(id(layer), [])
        return next((p for p in parents if layer_policies.follows(layer, p)), None)

    def _find_own(self):
        """Checks the overrides against all layers; returns {id: override}."""
        free, notes = [], {}
        for layer, path in self._paths.values():
            leader = self._leader(layer)
            if leader is None:
                free.append((layer, path))
                continue
            note = layer_policies.naming(self._paths[id(leader)][1])
            notes |= {e.pattern: note for e in self._parsed if e.matches(path)}
        overrides.check([path for _, path in free], self._parsed, notes)
        found = {id(layer): overrides.find(path, self._parsed) for layer, path in free}
        return {key: each for key, each in found.items() if each}

    def _row(self, layer):
        if id(layer) in self._own:
            found = self._own[id(layer)]
            return Planned(found.mode.policy, f"asked for by {found.pattern!r}")
        around = self._around(layer)
        if around:
            name, found = next(iter(around.values()))
            reason = f"in {name!r}, asked for by {found.pattern!r}"
            return Planned(found.mode.policy, reason, inherited=True)
        pin = self._pin(layer)
        if pin:
            return Planned("float32", pin)
        leader = self._leader(layer)
        if leader is not None:
            return self._row(leader)._replace(reason=f"follows {leader.name!r}")
        maker = next(filter(_makes_layers, self._parents.get(id(layer), [])), None)
        if maker is not None:
            return Planned(None, f"made by {maker.name!r}")
        return Planned(self._mode.policy, f"the mode is {self._mode.name}")

    def _pin(self, layer):
        if self._mode.policy == "float32":
            return ""
        if id(layer) in self._outputs:
            return self._outputs[id(layer)]
        if self._leader(layer) is None and _is_softmax(layer):
            return SOFTMAX
        for parent in self._parents.get(id(layer), []):
            if not _is_model(parent) and self._pin(parent):
                return f"in {parent.name!r}, which stays in float32"
        return ""

    def _around(self, layer):
        """Returns {mode: (name, override)} of the nearest layers around with one."""
        found = {}
        for parent in self._parents.get(id(layer), []):
            own = self._own.get(id(parent))
            found |= (
                {own.mode.name: (parent.name, own)} if own else self._around(parent)
            )
        return found


def _outputs_or_warning(model, sample_inputs):
    try:
        return {id(each): why for each, why in output_layers(model, sample_inputs)}
    except ConversionError as error:
        logging.warning(
            "set_precision: the layers that compute the outputs are not known, so "
            "only softmax stays in float32. Pass `sample_inputs`, or name them in "
            "`overrides`. %s",
            error,
        )
        return {}


def _is_model(layer):
    return isinstance(layer, keras.Model)


def _makes_layers(layer):
    """Whether a layer's class decides the precision of the layers in it."""
    plain = model_structure.is_plain_functional(
        layer
    ) or model_structure.is_plain_sequential(layer)
    return not plain or model_structure.has_own_class(layer)


def _is_softmax(layer):
    activation = getattr(layer, "activation", None)
    return isinstance(layer, keras.layers.Softmax) or any(
        activation is each for each in _SOFTMAX_ACTIVATIONS
    )
