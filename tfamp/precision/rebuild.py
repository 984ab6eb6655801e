"""Rebuilds a model with the same weights, in float32 or by other rules."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp import errors
from tfamp.precision import (
    copied_weights,
    float32_config,
    layer_policies,
    model_structure,
    policy,
)

listed = copied_weights.listed
_TAKES_NO_WEIGHTS = "does not take its weights after it is rebuilt"


class Float32Rules:
    """How `Copier` changes what it copies; these rules make all of it float32.

    Attributes:
      goal: What a copy is made in, for messages.
      error: What is raised when a layer cannot be copied.
      keeps_classes: Whether a functional model of a class of its own is made from
        its configuration, if that gives the same layers, and not along its graph.
    """

    goal: str = "in float32"
    error: type[errors.TfampError] = errors.ExportError
    keeps_classes: bool = False

    def config(self, operation: Any, config: dict) -> dict:
        """Returns the configuration from which to make the copy."""
        return float32_config.convert(config)

    def input_dtype(self, name: str) -> str:
        """Returns the dtype of a model's input in the copy."""
        return float32_config.dtype_name(name)

    def constant(self, value: Any) -> Any:
        """Returns a constant of the graph as the copy takes it."""
        if isinstance(value, tf.Tensor | np.ndarray | np.generic):
            constant: Any = value
            if float32_config.is_floating(tf.as_dtype(constant.dtype).name):
                return tf.cast(constant, tf.float32)
        return value


def rebuild_float32(model: keras.Model, sample_inputs: Any) -> keras.Model:
    """Returns a copy of a model that computes in float32; the model is not changed.

    Made by `Copier`, inside a float32 policy scope. The copy is not compiled.

    Args:
      model: A built `keras.Model`.
      sample_inputs: A batch that the model accepts; it is called on it, in
        inference, so that layers which create weights on their first call do.

    Returns:
      The float32 model, with the same weights bit for bit.

    Raises:
      ExportError: If a layer is quantized, cannot be made from its configuration,
        does not take the weights, or computes in another format even so.
    """
    check_not_quantized(model, Float32Rules.error, "Export the model")
    copier = Copier(Float32Rules())
    with policy.policy_scope("float32"), copying(model):
        copy = copier.copy(model)
        with explained(model, "cannot be called on the sample inputs in float32"):
            copy(sample_inputs, training=False)
        copier.copy_weights()
    _check_float32(copy)
    return copy


class Copier:
    """Copies layers by rules; a layer met twice is copied once.

    A functional or sequential model is copied along its graph, layer by layer, so
    that layers shared inside it, and with models nested in it, stay shared (Keras'
    own configuration forgets the latter, and gives a nested sequential model a
    float16 input). Every other layer or model is made by `from_config` from its
    configuration as the rules change it. A copy computes what the model's layers
    compute: a functional model comes back as a plain functional one, whatever its
    class, unless the rules keep classes.
    """

    def __init__(self, rules: Float32Rules):
        self._rules = rules
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._pairs: list[tuple[Any, Any]] = []

    def copy(self, operation: Any) -> Any:
        """Returns the copy of a layer, a model or a graph operation."""
        if id(operation) not in self._copies:
            self._copies[id(operation)] = operation, self._rule(operation)(operation)
        return self._copies[id(operation)][1]

    def pairs(self) -> list[tuple[keras.layers.Layer, keras.layers.Layer]]:
        """Returns every layer and its copy, layers inside others included."""
        found = {
            key: pair
            for key, pair in self._copies.items()
            if isinstance(pair[0], keras.layers.Layer)
        }
        for source, target in self._pairs:
            with self._explained(source, _TAKES_NO_WEIGHTS):
                for old, new in copied_weights.pair_layers(source, target):
                    found[id(old)] = (old, new)
        return list(found.values())

    def copy_weights(self) -> None:
        """Gives every copied layer the weights of its original and compares them."""
        for source, target in self._pairs:
            with self._explained(source, _TAKES_NO_WEIGHTS):
                for old, new in copied_weights.pair_layers(source, target):
                    copied_weights.copy_own(old, new)
                copied_weights.check_same_values(source, target)
        self._copy_trainable()

    def _copy_trainable(self):
        """Copies each layer's own flag, which Keras passes on: the outer ones first."""
        pairs = self.pairs()
        pairs.sort(key=lambda pair: -len(model_structure.flatten_layers(pair[0])))
        for source, target in pairs:
            if source.trainable != target.trainable:
                target.trainable = source.trainable

    def _explained(self, operation, what):
        return explained(operation, what, self._rules.error)

    def _rule(self, operation) -> Callable:
        if self._rules.keeps_classes and model_structure.has_own_class(operation):
            return self._copy_keeping_class
        if model_structure.is_plain_functional(operation):
            return self._copy_functional
        if model_structure.is_plain_sequential(operation):
            return self._copy_sequential
        return self._copy_by_config

    def _copy_functional(self, model):
        named = isinstance(model.input, dict)  # Keras wants names equal to keys.
        inputs = keras.tree.pack_sequence_as(
            model.input,
            [
                self._input(tensor, path[-1] if named else tensor.name)
                for path, tensor in keras.tree.flatten_with_path(model.input)
            ],
        )
        outputs = model_structure.run_graph(model, inputs, self.copy, self._call)
        return keras.Model(inputs, outputs, name=model.name)

    def _copy_sequential(self, model):
        tensor = model_structure.declared_inputs(model)
        first = [] if tensor is None else [self._input(tensor, tensor.name)]
        layers = [self.copy(layer) for layer in model.layers]
        return keras.Sequential(first + layers, name=model.name)

    def _copy_keeping_class(self, model):
        """Makes the model by its class, unless the layers would come out otherwise."""
        try:
            copy = self._from_config(model)
            pairs = copied_weights.pair_layers(model, copy)
        except (self._rules.error, ValueError) as error:
            return self._copy_without_class(model, error)
        if any(id(old) in self._copies for old, _ in pairs):
            return self._copy_without_class(model, "it shares layers with others")
        self._pairs.append((model, copy))
        self._copies.update({id(old): (old, new) for old, new in pairs})
        return copy

    def _copy_without_class(self, model, reason):
        logging.info(
            "%s comes back as a plain %s: %s",
            _title(model),
            "Sequential" if isinstance(model, keras.Sequential) else "keras.Model",
            reason,
        )
        if model_structure.is_plain_sequential(model):
            return self._copy_sequential(model)
        return self._copy_functional(model)

    def _copy_by_config(self, operation):
        copy = self._from_config(operation)
        if isinstance(operation, keras.layers.Layer):
            self._pairs.append((operation, copy))
        return copy

    def _from_config(self, operation):
        advice = (
            f"cannot be rebuilt {self._rules.goal} from its configuration; give its "
            "class a `get_config` that returns all arguments of `__init__`, and use "
            "named, registered functions "
            "(`keras.saving.register_keras_serializable`) instead of lambdas"
        )
        with self._explained(operation, advice):
            serialized: Any = keras.saving.serialize_keras_object(operation)
            config = self._rules.config(operation, serialized["config"])
            copy = type(operation).from_config(config)
            copied_weights.copy_tables(operation, copy)
        return copy

    def _input(self, tensor, name):
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise self._rules.error(
                f"Only dense inputs can be rebuilt or exported. Received: {name!r}, a "
                "sparse or ragged one. Convert it before the model."
            )
        return keras.Input(
            batch_shape=tensor.shape,
            dtype=self._rules.input_dtype(tensor.dtype),
            name=name,
        )

    def _call(self, operation, *args, **kwargs):
        """Calls a copied operation on symbolic tensors and constants of the graph."""
        arguments: Any = keras.tree.map_structure(self._rules.constant, (args, kwargs))
        args, kwargs = arguments
        with self._explained(operation, f"cannot be called {self._rules.goal}"):
            return operation(*args, **kwargs)


def check_not_quantized(model: keras.Model, error: type[Exception], what: str) -> None:
    """Raises an error that begins its advice with `what` if a layer is quantized.

    Or if one has low-rank parts (LoRA): Keras saves weights in which they are merged.
    """
    layers = model_structure.flatten_layers(model)
    low_rank = [layer for layer in layers if getattr(layer, "lora_enabled", False)]
    if low_rank:
        raise error(
            "A model with LoRA cannot be rebuilt with the same weights. Received "
            f"LoRA in the layers: {copied_weights.describe_layers(low_rank)}. "
            "`save_weights` merges it: make the model without LoRA, load its weights "
            "from there, and take that one."
        )
    quantized = [
        layer for layer in layers if layer.dtype_policy.quantization_mode is not None
    ]
    if quantized:
        raise error(
            "A quantized model cannot be rebuilt: its weights are no longer there. "
            f"Received quantized layers: {copied_weights.describe_layers(quantized)}. "
            f"{what} from before `quantize`."
        )


def _check_float32(model):
    wrong = [
        f"{layer.path} ({', '.join(sorted(dtypes))})"
        for layer in model_structure.flatten_layers(model)
        if (dtypes := {name for name in _dtypes(layer) if _is_other_float(name)})
    ]
    if wrong:
        raise errors.ExportError(
            "These layers stay in another format although they were rebuilt with a "
            f"float32 policy: {listed(wrong)}. Let their classes take `dtype` from the "
            "configuration or from the global policy instead of fixing it."
        )


def _dtypes(layer):
    """Returns the dtypes of a layer without those of the layers in it."""
    inner = {
        id(v)
        for child in model_structure.flatten_layers(layer)[1:]
        for v in child.weights
    }
    own = {v.dtype for v in layer.weights if id(v) not in inner}
    return own | {layer.compute_dtype, layer.variable_dtype}


def _is_other_float(name):
    return name != "float32" and float32_config.is_floating(name)


@contextlib.contextmanager
def copying(model: keras.Model) -> Iterator[None]:
    """Scopes the work of a `Copier`: classes are found, policies stay as they are."""
    with _custom_objects(model), _maps_kept(model), layer_policies.suspended():
        yield


def _custom_objects(model):
    """Scopes the model's own classes, so that wrappers find what they wrap."""
    classes = {type(layer) for layer in model_structure.flatten_layers(model)}
    return keras.saving.custom_object_scope(
        {cls.__name__: cls for cls in classes if not cls.__module__.startswith("keras")}
    )


@contextlib.contextmanager
def _maps_kept(model):
    """Undoes what serializing does to a `DTypePolicyMap` without a default policy.

    Keras 3.15's `DTypePolicyMap.get_config` takes the names of its policies away.
    """
    policies = [layer.dtype_policy for layer in model_structure.flatten_layers(model)]
    maps = [p for p in policies if isinstance(p, keras.dtype_policies.DTypePolicyMap)]
    before = [(each, {key: each[key].name for key in each}) for each in maps]
    try:
        yield
    finally:
        for each, names in before:
            for key in [key for key in names if each[key].name != names[key]]:
                del each[key]
                each[key] = names[key]


@contextlib.contextmanager
def explained(operation, what, kind: type[Exception] = errors.ExportError):
    """Turns any error into an `ExportError`, or another kind, that names the layer."""
    try:
        yield
    except kind:
        raise
    except Exception as error:  # Code of the user's layers may raise anything.
        plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # Keras prints in bold.
        reason = " ".join(plain.split())[:300]
        raise kind(
            f"{_title(operation)} {what}. Received: {type(error).__name__}: {reason}"
        ) from error


def _title(operation):
    kind = "Model" if isinstance(operation, keras.Model) else "Layer"
    return f"{kind} {operation.name!r} ({type(operation).__name__})"
