"""Exports a model as a SavedModel that computes in float32, and proves that it does."""

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
from tfamp.precision import assign, conversion, model_inputs
from tfamp.serving import export_report, saved_graph

# The requirement: about 84 times the epsilon of float32, for sums that the saved
# graph may take in another order.
MAX_RELATIVE_DIFFERENCE = 1e-5
SIGNATURE = "serving_default"
_MOST_SHOWN = 5


def export_float32(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    sample_inputs: Any = None,
    overwrite: bool = False,
) -> export_report.ExportReport:
    """Exports a model as a SavedModel that computes in float32, and verifies it.

    ```
    assign float32 to every layer; widen what is stored in 16 bits, which is exact
    write a SavedModel beside `path`; read its graph: nothing below float32
    reload it, run its "serving_default" signature, compare with the float32 model
    only then move it to `path`
    ```
    All of it runs with a float32 policy and TF32 off. Both are restored, and so are
    the model's layers, its traced functions, its random seeds and its states: it can
    be exported in the middle of a training, by the thread that trains it.

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
      ExportError: If `path` exists or cannot be written, or the result does not pass
        the verification. Nothing is left on disk.
      TypeError: If `model` is not a Keras model.
      ValueError: If `path` is remote.

    Example:
      print(tfamp.export_float32(model, "exported/1"))
    """
    target = _checked_target(path, overwrite)
    _check_model(model)
    specs, samples = model_inputs.describe(model, sample_inputs)
    policies = {place.layer.dtype_policy.name for place in assign.walk(model)}
    with assign.EXCLUSIVE, _state_kept(model) as put_back:
        original = _run(model, samples)
        put_back()
        with assign.assigned_float32(model), _staged(target, overwrite) as folder:
            _write(model, specs, folder)
            graph = saved_graph.read(folder, SIGNATURE)
            _check_graph(graph)
            # The call follows the write, so that random seeds and recurrent states
            # are those that were saved.
            expected = _run(model, samples)
            with model_inputs.explained(model, "cannot be run after it is reloaded"):
                served = _serve(folder, specs, samples)
            reloaded = export_report.difference(served, expected)
            _check_reloaded(reloaded, served, expected)
    return export_report.ExportReport(
        path=os.fspath(path),
        parameters=model.count_params(),
        inputs=graph.inputs,
        outputs=graph.outputs,
        nodes_checked=graph.nodes,
        source_policies=tuple(sorted(policies)),
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
    try:
        conversion.check_not_quantized(model)
    except conversion.ConversionError as error:
        raise errors.ExportError(str(error)) from error
    rewrites = tf.config.optimizer.get_experimental_options()
    if any(rewrites[key] for key in rewrites if key.startswith("auto_mixed_precision")):
        raise errors.ExportError(
            "TensorFlow's graph rewrite (auto_mixed_precision) is on, so the exported "
            "graph would be verified in low precision. Turn it off for the export: "
            "tfamp.disable_graph_rewrite(), or tfamp.disable()."
        )


@contextlib.contextmanager
def _state_kept(model):
    """Yields what puts seeds, recurrent states and statistics back, as the end does."""
    variables = list(model.non_trainable_variables)
    for place in assign.walk(model):
        variables += keras.tree.flatten(getattr(place.layer, "states", None) or ())
    before = [(each, np.asarray(each).copy()) for each in variables]

    def put_back():
        for variable, value in before:
            variable.assign(value)

    try:
        yield put_back
    finally:
        put_back()


@contextlib.contextmanager
def _staged(target, overwrite) -> Iterator[pathlib.Path]:
    """Yields a folder beside the target; moves it there unless the block raises."""
    beside = next(parent for parent in target.parents if parent.exists())
    if not beside.is_dir():
        raise errors.ExportError(
            f"`path` lies below a file. Received: path={target}; {beside} is no folder."
        )
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=beside)
    except OSError as error:
        raise errors.ExportError(
            f"`path` cannot be written. Received: path={target}: {error}."
        ) from error
    with scratch as name:
        new, old = pathlib.Path(name, "new"), pathlib.Path(name, "old")
        yield new
        _check_free(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.path.lexists(target):
                os.replace(target, old)
            os.replace(new, target)
        except BaseException:  # An interrupt in between would delete the old one.
            if os.path.lexists(old) and not os.path.lexists(target):
                os.replace(old, target)
            raise


def _write(model, specs, folder):
    archive: Any = keras.export.ExportArchive()
    archive.track(model)
    with model_inputs.explained(model, "cannot be traced for export"):
        archive.add_endpoint("serve", lambda x: model(x, training=False), [specs])
        archive.write_out(str(folder), verbose=False)


def _check_graph(graph):
    low = graph.low_precision
    if low:
        more = f", and {len(low) - _MOST_SHOWN} more" if low[_MOST_SHOWN:] else ""
        raise errors.ExportError(
            "The graph of the float32 model is not float32 throughout. Received: "
            f"{', '.join(low[:_MOST_SHOWN])}{more}. Let the layers cast to "
            "`self.compute_dtype`, and not to these dtypes, in their `call`."
        )
    for tensor in (*graph.inputs, *graph.outputs):
        if tensor.dtype == "float64":
            raise errors.ExportError(
                f"Floating inputs and outputs must be float32. Received: {tensor}."
            )


def _run(model, samples):
    """Returns the model's outputs in inference as name -> tensor."""
    advice = "cannot be called on the sample inputs; check or pass `sample_inputs`"
    with model_inputs.explained(model, advice):
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
        shapes = [
            {name: tuple(value.shape) for name, value in sorted(outputs.items())}
            for outputs in (served, expected)
        ]
        raise errors.ExportError(
            "The reloaded SavedModel computes something else than the float32 model. "
            f"Received: outputs {shapes[0]}, differing by {reloaded}. Expected: "
            f"outputs {shapes[1]}, and at most {MAX_RELATIVE_DIFFERENCE} relative. A "
            "layer may compute otherwise in a graph than eagerly."
        )
