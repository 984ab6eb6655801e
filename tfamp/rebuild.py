"""Rebuilds a model with every layer in float32 and the same weights."""

import contextlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors, float32_config, model_structure, policy


def rebuild_float32(model: keras.Model, sample_inputs: Any) -> keras.Model:
    """Returns a copy of a model that computes in float32; the model is not changed.

    A functional or sequential model is copied along its graph, layer by layer, so
    that layers shared inside it, and with models nested in it, stay shared (Keras'
    own configuration forgets the latter, and gives a nested sequential model a
    float16 input). Every other layer or model is made by `from_config` from its
    configuration with float32 policies, inside a float32 policy scope. The copy is
    not compiled. It computes what the model's layers compute: a functional model
    comes back as a plain functional one, whatever its class.

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
    _check_not_quantized(model)
    copier = _Copier()
    with policy.policy_scope("float32"), _custom_objects(model), _maps_kept(model):
        copy = copier.copy(model)
        with explained(model, "cannot be called on the sample inputs in float32"):
            copy(sample_inputs, training=False)
        copier.copy_weights()
    _check_float32(copy)
    return copy


class _Copier:
    """Copies layers into float32; a layer met twice is copied once."""

    def __init__(self):
        self._copies: dict[int, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []

    def copy(self, operation: Any) -> Any:
        """Returns the float32 copy of a layer, a model or a graph operation."""
        if id(operation) not in self._copies:
            self._copies[id(operation)] = self._rule(operation)(operation)
        return self._copies[id(operation)]

    def copy_weights(self) -> None:
        """Gives every copied layer the weights of its original and compares them."""
        for source, target in self._pairs:
            with explained(source, "does not take its weights after it is rebuilt"):
                for old, new in _paired_layers(source, target):
                    _copy_own_weights(old, new)
                _check_same_values(source, target)

    def _rule(self, operation) -> Callable:
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
                _float32_input(tensor, path[-1] if named else tensor.name)
                for path, tensor in keras.tree.flatten_with_path(model.input)
            ],
        )
        outputs = model_structure.run_graph(model, inputs, self.copy, _call)
        return keras.Model(inputs, outputs, name=model.name)

    def _copy_sequential(self, model):
        tensor = model_structure.declared_inputs(model)
        first = [] if tensor is None else [_float32_input(tensor, tensor.name)]
        layers = [self.copy(layer) for layer in model.layers]
        return keras.Sequential(first + layers, name=model.name)

    def _copy_by_config(self, operation):
        advice = (
            "cannot be rebuilt in float32 from its configuration; give its class a "
            "`get_config` that returns all arguments of `__init__`, and use named, "
            "registered functions (`keras.saving.register_keras_serializable`) "
            "instead of lambdas"
        )
        with explained(operation, advice):
            serialized: Any = keras.saving.serialize_keras_object(operation)
            config = float32_config.convert(serialized["config"])
            copy = type(operation).from_config(config)
            _copy_tables(operation, copy)
        if isinstance(operation, keras.layers.Layer):
            self._pairs.append((operation, copy))
        return copy


def _float32_input(tensor, name):
    if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
        raise errors.ExportError(
            f"Only dense inputs can be exported. Received: {name!r}, a sparse or "
            "ragged one. Convert it before the model."
        )
    return keras.Input(
        batch_shape=tensor.shape,
        dtype=float32_config.dtype_name(tensor.dtype),
        name=name,
    )


def _call(operation, *args, **kwargs):
    """Calls a copied operation on symbolic tensors and on constants of the graph."""
    arguments: Any = keras.tree.map_structure(_float32_constant, (args, kwargs))
    args, kwargs = arguments
    with explained(operation, "cannot be called in float32"):
        return operation(*args, **kwargs)


def _float32_constant(value):
    if isinstance(value, tf.Tensor | np.ndarray | np.generic):
        constant: Any = value
        if float32_config.is_floating(tf.as_dtype(constant.dtype).name):
            return tf.cast(constant, tf.float32)
    return value


def _paired_layers(source, target):
    """Returns pairs of a layer, or a layer in it, and its copy."""
    sources = model_structure.flatten_layers(source)
    targets = model_structure.flatten_layers(target)
    if [type(layer) for layer in sources] != [type(layer) for layer in targets]:
        raise ValueError(
            f"it holds other layers. Received: {_names(targets)}. Expected: "
            f"{_names(sources)}. Create all of them in `__init__`, `build` or "
            "`call`, from what `get_config` returns."
        )
    return zip(sources, targets, strict=True)


def _copy_tables(source, target):
    """Copies vocabularies, which a lookup layer needs to be called at all."""
    if not isinstance(source, keras.layers.Layer):
        return
    pairs = [
        [
            layer
            for layer in model_structure.flatten_layers(each)
            if hasattr(layer, "save_assets")
        ]
        for each in (source, target)
    ]
    for old, new in zip(*pairs, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)


def _copy_own_weights(source, target):
    """Copies the variables that a layer itself owns, and its recurrent states."""
    if source.built and not target.built:
        target.build_from_config(source.get_build_config())
    store = {}
    source.save_own_variables(store)
    target.load_own_variables({key: np.asarray(store[key]) for key in store})
    states = zip(
        model_structure.recurrent_states(source),
        model_structure.recurrent_states(target),
        strict=True,
    )
    for old, new in states:
        new.assign(old)
    if source.trainable != target.trainable:
        target.trainable = source.trainable


def _check_same_values(source, target):
    """Raises unless float32 holds the very values; widening 16 bits is exact."""
    for old, new in zip(source.weights, target.weights, strict=True):
        before, after = np.asarray(old), np.asarray(new)
        widened = before.astype(after.dtype)
        lossless = widened.astype(before.dtype).tobytes() == before.tobytes()
        if not lossless or widened.tobytes() != after.tobytes():
            raise ValueError(
                f"the values of {new.path!r} ({new.dtype}) differ from those of "
                f"{old.path!r} ({old.dtype})"
            )


def _check_not_quantized(model):
    quantized = [
        layer
        for layer in model_structure.flatten_layers(model)
        if layer.dtype_policy.quantization_mode is not None
    ]
    if quantized:
        raise errors.ExportError(
            "A quantized model cannot be rebuilt in float32: its weights are no longer "
            f"there. Received quantized layers: {_names(quantized)}. Export the model "
            "from before `quantize`."
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
            f"float32 policy: {listed(wrong)}. Let their classes take `dtype` from "
            "the configuration or from the global policy instead of fixing it."
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
def explained(operation, what):
    """Turns any error into an `ExportError` that names the layer."""
    try:
        yield
    except errors.ExportError:
        raise
    except Exception as error:  # Code of the user's layers may raise anything.
        plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # Keras prints in bold.
        reason = " ".join(plain.split())[:300]
        raise errors.ExportError(
            f"{_title(operation)} {what}. Received: {type(error).__name__}: {reason}"
        ) from error


def _title(operation):
    kind = "Model" if isinstance(operation, keras.Model) else "Layer"
    return f"{kind} {operation.name!r} ({type(operation).__name__})"


def _names(layers):
    return listed([f"{layer.name} ({type(layer).__name__})" for layer in layers])


def listed(items, most=5):
    """Joins at most five items."""
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
