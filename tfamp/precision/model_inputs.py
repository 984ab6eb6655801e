"""The inputs that a model takes: their specs, and a batch that fits them."""

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.precision import float32_config, model_structure

_BATCH, _OTHER = 2, 16  # Sizes of generated samples; 16 survives four 2x poolings.
_SEED = 0
_ID_LAYERS = (
    keras.layers.CategoryEncoding,
    keras.layers.Embedding,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
    keras.layers.TextVectorization,
)


def describe(model: keras.Model, sample_inputs: Any = None) -> tuple[Any, Any]:
    """Returns the specs of a model's inputs in float32, and a batch that fits them.

    Floating inputs are float32 in the specs whatever the model declares; all other
    dtypes stay. A sequential model that starts with an embedding takes int32, though
    Keras declares its input floating.

    Args:
      model: A built model.
      sample_inputs: A batch of arrays or tensors, structured as the model takes
        them; None generates one with a fixed seed (ids are 0 or 1).

    Returns:
      (specs, samples): `tf.TensorSpec`s, each with a name of its own, and tensors;
      both structured as the model takes its inputs.

    Raises:
      ExportError: If the inputs are not known, or `sample_inputs` does not fit them.
    """
    declared = model_structure.declared_inputs(model)
    if declared is not None:
        specs = _specs(declared)
        # Keras declares a float where it had to guess: with no input layer.
        if isinstance(model, keras.Sequential) and specs.dtype.is_floating:
            if _reads_ids(_first_leaf(model)):
                specs = tf.TensorSpec(specs.shape, tf.int32, specs.name)
    elif sample_inputs is not None:
        sample_inputs = keras.tree.map_structure(tf.convert_to_tensor, sample_inputs)
        specs = _specs(keras.tree.map_structure(_any_batch, sample_inputs))
    else:
        specs = _recorded_specs(model)
    if sample_inputs is None:
        return specs, keras.tree.map_structure(_generator(), specs)
    return specs, _fitted(sample_inputs, specs)


def _specs(tensors):
    """Returns specs for symbolic tensors; a key of a dict is its tensor's name."""
    paths = keras.tree.flatten_with_path(tensors)
    names = []
    for path, tensor in paths:
        keyed = any(isinstance(key, str) for key in path)
        name = "_".join(map(str, path)) if keyed else tensor.name
        # Keras numbers unnamed tensors by what the process built before.
        name = "inputs" if name.startswith("keras_tensor") else name
        # TensorFlow allows letters, digits and underscores, a letter first.
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        name = name if name[:1].isalpha() else f"input_{name}"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return keras.tree.pack_sequence_as(
        tensors,
        [
            tf.TensorSpec(tensor.shape, float32_config.dtype_name(tensor.dtype), name)
            for name, (_, tensor) in zip(names, paths, strict=True)
        ],
    )


def _any_batch(tensor):
    shape = (None, *tensor.shape[1:]) if tensor.shape.rank else ()
    return keras.KerasTensor(shape, tensor.dtype.name)


def _recorded_specs(model):
    """Returns specs from the shapes of a subclassed model's first call."""
    shapes = (model.get_build_config() or {}).get("input_shape")
    reads_ids = any(map(_reads_ids, model_structure.flatten_layers(model)))
    if shapes is None or reads_ids:
        why = "reads integers" if reads_ids else "recorded no shape of one input"
        raise errors.ExportError(
            f"The inputs of model {model.name!r} are not known: Keras records no "
            f"dtypes for a {type(model).__name__}, and it {why}. Pass "
            "`sample_inputs`, a batch as the model takes it (several inputs in a "
            "dict or list)."
        )
    return _specs(
        keras.tree.map_shape_structure(
            lambda shape: keras.KerasTensor((None, *shape[1:]), "float32"), shapes
        )
    )


def _first_leaf(layer):
    """Returns the first layer that computes, in models nested in one another."""
    inner = [each for each in getattr(layer, "layers", []) if not _is_input(each)]
    return _first_leaf(inner[0]) if inner else layer


def _is_input(layer):
    return isinstance(layer, keras.layers.InputLayer)


def _reads_ids(layer):
    return isinstance(layer, _ID_LAYERS)


def _generator():
    """Returns a function from a spec to a tensor; the same ones each time."""
    random = np.random.default_rng(_SEED)

    def generate(spec):
        sizes = [_BATCH, *[_OTHER] * len(spec.shape)]
        shape = [known or size for known, size in zip(spec.shape, sizes, strict=False)]
        if spec.dtype.is_floating:
            return tf.cast(random.standard_normal(shape), spec.dtype)
        if spec.dtype.is_integer or spec.dtype.is_bool:
            return tf.cast(random.integers(0, 2, shape), spec.dtype)
        raise errors.ExportError(
            f"No sample can be generated for input {spec.name!r}. Received: dtype "
            f"{spec.dtype.name}. Expected floats, integers or booleans. Pass "
            "`sample_inputs`."
        )

    return generate


def _fitted(sample_inputs, specs):
    """Returns the samples as tensors, structured and cast as the specs say."""
    if not keras.tree.is_nested(specs):
        sample_inputs = tf.convert_to_tensor(sample_inputs)
    elif isinstance(specs, list) and not keras.tree.is_nested(sample_inputs):
        sample_inputs = [sample_inputs]
    try:
        keras.tree.assert_same_structure(
            keras.tree.lists_to_tuples(specs), keras.tree.lists_to_tuples(sample_inputs)
        )
    except (TypeError, ValueError) as error:
        raise errors.ExportError(
            "`sample_inputs` must be structured as the model's inputs. Received: "
            f"{keras.tree.map_structure(_kind, sample_inputs)}. Expected: "
            f"{keras.tree.map_structure(str, specs)}."
        ) from error
    values = zip(
        keras.tree.flatten(sample_inputs), keras.tree.flatten(specs), strict=True
    )
    return keras.tree.pack_sequence_as(
        specs,
        [_cast(tf.convert_to_tensor(value), spec.dtype) for value, spec in values],
    )


def _kind(value):
    return f"{type(value).__name__} {getattr(value, 'shape', '')}"


def _cast(tensor, dtype):
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)
