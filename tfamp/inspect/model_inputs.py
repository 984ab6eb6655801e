"""What a model takes: specs, a batch that fits them, and a trace with them."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors, records
from tfamp.inspect import structure

_BATCH, _OTHER = 2, 16  # Sizes of generated samples; 16 survives four 2x poolings.
_ID_LAYERS = (
    keras.layers.CategoryEncoding,
    keras.layers.Embedding,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
    keras.layers.TextVectorization,
)


def remember(model: keras.Model, inputs: Any) -> None:
    """Notes what a model is called with, of which Keras records no dtypes."""
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # No tensors.
        records.of(model).inputs = keras.tree.map_structure(_any_batch, inputs)


def check_batch(name: str, batch: Any) -> None:
    """Raises unless a batch is of arrays or tensors, none of them without rows.

    Args:
      name: That of the argument.
      batch: A structure of them; None is left out.
    """
    leaves = [x for x in keras.tree.flatten(batch) if x is not None]
    shapes = [x.shape for x in leaves if hasattr(x, "shape")]
    if not leaves or len(shapes) < len(leaves) or 0 in [x[0] for x in shapes if len(x)]:
        received = ", ".join(map(str, shapes)) or "none"
        raise ValueError(
            f"`{name}` must be a batch of arrays or tensors, with a row or more in "
            f"each. Received: {type(batch).__name__}, of shapes: {received}. "
            "Of a dataset pass next(iter(dataset))."
        )


def describe(model: keras.Model, sample_inputs: Any = None) -> tuple[Any, Any]:
    """Returns the specs of a model's inputs in float32, and a batch that fits them.

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
    input_specs = specs(model, sample_inputs)
    if sample_inputs is not None:
        return input_specs, _fitted(sample_inputs, input_specs)
    random = np.random.default_rng(0)
    samples = keras.tree.map_structure(lambda x: _generated(x, random), input_specs)
    return input_specs, samples


def specs(model: keras.Model, sample_inputs: Any = None) -> Any:
    """Returns `tf.TensorSpec`s of a model's inputs, each with a name of its own.

    Floating inputs are float32 whatever the model declares; all other dtypes stay. A
    sequential model that starts with an embedding takes int32, though Keras declares
    its input floating.

    Args:
      model: A built model.
      sample_inputs: As for `describe`; where Keras recorded too little, the specs
        have its dtypes and shapes, with any batch size.

    Raises:
      ExportError: If the inputs are not known, or sparse or ragged.
    """
    if structure.is_functional(model):
        return _specs(model.input)
    # A sequential model has no `inputs` before it is built.
    if isinstance(model, keras.Sequential) and getattr(model, "inputs", None):
        return _specs(_sequential_input(model))
    if sample_inputs is not None:
        return _specs(keras.tree.map_structure(_any_batch, sample_inputs))
    return _recorded_specs(model)


def _sequential_input(model):
    """Returns the symbolic input; without an input layer, Keras had to guess it.

    It declares a float, and the batch size of the first call. That is forgotten here,
    unless a recurrent layer keeps a state for it.
    """
    tensor = model.inputs[0]
    stateful = any(getattr(x, "stateful", False) for x in structure.layers(model))
    shape = (tensor.shape[0] if stateful else None, *tensor.shape[1:])
    reads_ids = isinstance(_first_leaf(model), _ID_LAYERS)
    guessed = reads_ids and keras.backend.is_float_dtype(tensor.dtype)
    dtype = "int32" if guessed else tensor.dtype
    return keras.KerasTensor(shape, dtype, tensor.sparse, name=tensor.name)


def _specs(tensors):
    """Returns specs for symbolic tensors; a key of a dict is its tensor's name."""
    names, specs = [], []
    for path, tensor in keras.tree.flatten_with_path(tensors):
        keyed = any(isinstance(key, str) for key in path)
        name = "_".join(map(str, path)) if keyed else tensor.name
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise errors.ExportError(
                f"Only dense inputs can be traced or exported. Received: {name!r}, "
                "which is sparse or ragged. Convert it to a dense tensor before the "
                "model."
            )
        # Keras numbers unnamed tensors by what the process built before.
        name = "inputs" if name.startswith("keras_tensor") else name
        # TensorFlow allows letters, digits and underscores, a letter first.
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        name = name if name[:1].isalpha() else f"input_{name}"
        names.append(name if name not in names else f"{name}_{len(names)}")
        floating = keras.backend.is_float_dtype(tensor.dtype)
        dtype = "float32" if floating else tensor.dtype
        specs.append(tf.TensorSpec(tensor.shape, dtype, names[-1]))
    return keras.tree.pack_sequence_as(tensors, specs)


def _any_batch(array):
    tensor = tf.convert_to_tensor(array)
    shape = (None, *tensor.shape[1:]) if tensor.shape.rank else ()
    return keras.KerasTensor(shape, tensor.dtype.name)


def _recorded_specs(model):
    """Returns specs from the shapes of a subclassed model's first call."""
    if (taken := records.of(model).inputs) is not None:
        return _specs(taken)
    shapes = (model.get_build_config() or {}).get("input_shape")
    reads_ids = any(isinstance(x, _ID_LAYERS) for x in structure.layers(model))
    if shapes is None or reads_ids:
        why = "reads integers" if reads_ids else "recorded no shape for one input"
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
    held = getattr(layer, "layers", [])
    inner = [x for x in held if not isinstance(x, keras.layers.InputLayer)]
    return _first_leaf(inner[0]) if inner else layer


def _generated(spec, random):
    """Returns a tensor that fits a spec."""
    sizes = [_BATCH, *[_OTHER] * len(spec.shape)]
    shape = [
        dimension or size for dimension, size in zip(spec.shape, sizes, strict=False)
    ]
    if spec.dtype.is_floating:
        return tf.cast(random.standard_normal(shape), spec.dtype)
    if spec.dtype.is_integer or spec.dtype.is_bool:
        return tf.cast(random.integers(0, 2, shape), spec.dtype)
    raise errors.ExportError(
        f"No sample can be generated for input {spec.name!r}. Received: dtype "
        f"{spec.dtype.name}. Expected floats, integers or booleans. Pass "
        "`sample_inputs`."
    )


def _fitted(sample_inputs, specs):
    """Returns the samples as tensors, structured and cast as the specs say."""
    if isinstance(specs, list) and not keras.tree.is_nested(sample_inputs):
        sample_inputs = [sample_inputs]
    try:
        if not keras.tree.is_nested(specs):
            sample_inputs = tf.convert_to_tensor(sample_inputs)
        keras.tree.assert_same_structure(
            keras.tree.lists_to_tuples(specs), keras.tree.lists_to_tuples(sample_inputs)
        )
    except (TypeError, ValueError) as error:
        kinds = keras.tree.map_structure(
            lambda x: f"{type(x).__name__} {getattr(x, 'shape', '')}", sample_inputs
        )
        raise errors.ExportError(
            "`sample_inputs` must have the structure of the model's inputs. Received: "
            f"{kinds}. Expected: {keras.tree.map_structure(str, specs)}."
        ) from error
    values = zip(
        keras.tree.flatten(sample_inputs), keras.tree.flatten(specs), strict=True
    )
    return keras.tree.pack_sequence_as(
        specs, [tf.cast(tf.convert_to_tensor(x), spec.dtype) for x, spec in values]
    )


@contextlib.contextmanager
def explained(model: keras.Model, what: str) -> Iterator[None]:
    """Turns any error of a model's code into an `ExportError` that names the model."""
    try:
        yield
    except errors.ExportError:
        raise
    except Exception as error:  # Code of the user's layers may raise anything.
        plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # Keras prints in bold.
        raise errors.ExportError(
            f"Model {model.name!r} ({type(model).__name__}) {what}. Received: "
            f"{type(error).__name__}: {' '.join(plain.split())[:300]}"
        ) from error
