"""Exports a model as a SavedModel that computes in float32, and proves that it does.

A mixed-precision model's variables are float32 already; its graph is not. TensorFlow
stores the compute dtype in every operation, so the model is rebuilt in float32
(`rebuild.py`) before it is written.
"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.precision import model_inputs, model_structure, policy, rebuild
from tfamp.serving import export_report, saved_graph

# The requirement: about 84 times the epsilon of float32, for sums that the saved
# graph may take in another order.
MAX_RELATIVE_DIFFERENCE = 1e-5
SIGNATURE = "serving_default"


def export_float32(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    sample_inputs: Any = None,
    overwrite: bool = False,
) -> export_report.ExportReport:
    """Exports a model as a SavedModel that computes in float32, and verifies it.

    ```
    rebuild the model in float32; copy and compare the weights
    write a SavedModel beside `path`; read its graph: nothing below float32
    reload it, run its "serving_default" signature, compare with the float32 model
    only then move it to `path`
    ```
    All of it runs with a float32 policy and TF32 off; both are restored. The model,
    its random seeds and its other state stay as they were.

    Args:
      model: A built `keras.Model` with any dtype policies but quantized ones.
      path: Local folder to create.
      sample_inputs: A batch of inputs, structured as the model takes them, to verify
        with. Default: generated from the model's input shapes. A subclassed model
        that reads integers needs one, since Keras records no dtypes for it; its
        signature then has the dtypes and shapes of this batch, with any batch size.
      overwrite: Whether to replace what is at `path`. It is replaced last, so a
        failed export leaves it untouched.

    Returns:
      An `ExportReport`.

    Raises:
      ExportError: If `path` exists, a layer cannot be rebuilt (it is named), or the
        result does not pass the verification. Nothing is left on disk.
      TypeError: If `model` is not a Keras model.
      ValueError: If `path` is remote.

    Example:
      print(tfamp.export_float32(model, "exported/1"))
    """
    target = _checked_target(path, overwrite)
    _check_model(model)
    with policy.policy_scope("float32"):
        specs, samples = model_inputs.describe(model, sample_inputs)
        with _state_kept(model):
            original = _run(model, samples)
        copy = rebuild.rebuild_float32(model, samples)
        with _staged(target, overwrite) as folder:
            _write(copy, specs, folder)
            graph = saved_graph.read(folder, SIGNATURE)
            _check_graph(graph)
            # The call follows the write, so that random seeds and recurrent states
            # are those that were saved.
            expected = _run(copy, samples)
            with rebuild.explained(model, "cannot be run after it is reloaded"):
                served = _serve(folder, specs, samples)
            reloaded = export_report.difference(served, expected)
            _check_reloaded(reloaded, served, expected)
    return export_report.ExportReport(
        path=os.fspath(path),
        parameters=copy.count_params(),
        inputs=graph.inputs,
        outputs=graph.outputs,
        nodes_checked=graph.nodes,
        source_policies=_policies(model),
        reloaded=reloaded,
        original=export_report.difference(original, expected),
    )


def _checked_target(path, overwrite):
    if "://" in os.fspath(path):
        raise ValueError(
            f"`path` must be a local folder. Received: path={os.fspath(path)!r}. "
            "Export to a local folder and copy it."
        )
    target = pathlib.Path(path).absolute()
    _check_free(target, overwrite)
    return target


def _check_free(target, overwrite):
    if os.path.lexists(target) and not overwrite:
        raise errors.ExportError(
            f"There is something at `path` already. Received: path={target}. "
            "Choose another one, or pass `overwrite=True`."
        )
    if os.path.lexists(target) and not _is_replaceable(target):
        raise errors.ExportError(
            "`overwrite=True` replaces a SavedModel or an empty folder only. Received: "
            f"path={target}. Choose another one."
        )


def _is_replaceable(target):
    if target.is_symlink() or not target.is_dir():
        return False
    return (target / "saved_model.pb").exists() or not any(target.iterdir())


def _check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {type(model).__name__}."
        )
    if not model.built:
        raise errors.ExportError(
            f"Model {model.name!r} is not built: it has no weights to export, and its "
            "inputs are not known. Call it on a batch, or load its weights, first."
        )
    rewrites = tf.config.optimizer.get_experimental_options()
    if any(rewrites[key] for key in rewrites if key.startswith("auto_mixed_precision")):
        raise errors.ExportError(
            "TensorFlow's graph rewrite (auto_mixed_precision) is on, so the exported "
            "graph would be verified in low precision. Turn it off for the export: "
            "tfamp.disable_graph_rewrite(), or tfamp.disable()."
        )


@contextlib.contextmanager
def _state_kept(model):
    """Puts seeds, recurrent states and statistics back; inference may move them."""
    variables = list(model.non_trainable_variables)
    for layer in model_structure.flatten_layers(model):
        variables += model_structure.recurrent_states(layer)
    before = [(variable, np.asarray(variable).copy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def _staged(target, overwrite) -> Iterator[pathlib.Path]:
    """Yields a folder beside the target; moves it there unless the block raises."""
    beside = next(parent for parent in target.parents if parent.exists())
    if not beside.is_dir():
        raise errors.ExportError(
            f"`path` lies below a file. Received: path={target}; {beside} is no folder."
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=beside) as scratch:
        new, old = pathlib.Path(scratch, "new"), pathlib.Path(scratch, "old")
        yield new
        _check_free(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            os.replace(target, old)
        try:
            os.replace(new, target)
        except OSError:
            if os.path.lexists(old):
                os.replace(old, target)
            raise


def _write(model, specs, folder):
    def serve(inputs):
        return model(inputs, training=False)

    archive: Any = keras.export.ExportArchive()
    archive.track(model)
    with rebuild.explained(model, "cannot be traced for export"):
        archive.add_endpoint("serve", serve, [specs])
        archive.write_out(str(folder), verbose=False)


def _check_graph(graph):
    if graph.low_precision:
        raise errors.ExportError(
            "The graph of the float32 model is not float32 throughout. Received: "
            f"{rebuild.listed(graph.low_precision)}. Remove fixed casts to these "
            "dtypes from the layers' `call`."
        )
    for tensor in (*graph.inputs, *graph.outputs):
        if tensor.dtype == "float64":
            raise errors.ExportError(
                f"Floating inputs and outputs must be float32. Received: {tensor}."
            )


def _run(model, samples):
    """Returns the model's outputs in inference as name -> tensor."""
    advice = "cannot be called on the sample inputs; check or pass `sample_inputs`"
    with rebuild.explained(model, advice):
        outputs = model(samples, training=False)
    if isinstance(outputs, dict):
        return dict(outputs)
    # The names that TensorFlow gives the outputs of a signature.
    flat = keras.tree.flatten(outputs)
    return {f"output_{index}": value for index, value in enumerate(flat)}


def _serve(folder, specs, samples):
    """Returns the outputs of the reloaded SavedModel's signature."""
    serve = tf.saved_model.load(str(folder)).signatures[SIGNATURE]
    pairs = zip(keras.tree.flatten(specs), keras.tree.flatten(samples), strict=True)
    return serve(**{spec.name: value for spec, value in pairs})


def _check_reloaded(reloaded, served, expected):
    if not reloaded.relative <= MAX_RELATIVE_DIFFERENCE:
        raise errors.ExportError(
            "The reloaded SavedModel computes something else than the float32 model. "
            f"Received: outputs {_shapes(served)}, differing by {reloaded}. Expected: "
            f"outputs {_shapes(expected)}, and at most {MAX_RELATIVE_DIFFERENCE} "
            "relative. A layer may compute otherwise in a graph than eagerly."
        )


def _shapes(outputs):
    return {name: tuple(value.shape) for name, value in sorted(outputs.items())}


def _policies(model):
    names = {layer.dtype_policy.name for layer in model_structure.flatten_layers(model)}
    return tuple(sorted(names))
