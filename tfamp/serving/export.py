"""Exports a model as a SavedModel that computes in float32, and proves that it does."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.precision import assign, conversion, model_inputs
from tfamp.serving import verification

# The requirement: about 84 times the epsilon of float32, for sums that the saved
# graph may take in another order.
MAX_RELATIVE_DIFFERENCE = 1e-5


class TensorDescription(NamedTuple):
    """A tensor of a signature: name, dtype name, shape (None: any size, any rank)."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


class ExportReport(NamedTuple):
    """What was exported, and what the verification measured.

    Attributes:
      path: The SavedModel's folder.
      parameters: Number of scalars in the float32 model's weights.
      inputs: The signature's inputs, sorted by name.
      outputs: The signature's outputs, sorted by name.
      nodes_checked: Graph nodes read, those of all functions too; none has a
        floating dtype of fewer than 32 bits.
      source_policies: Dtype policies of the original model's layers.
      reloaded: Difference of the reloaded SavedModel from the float32 model.
      original: Difference of the original model from the float32 model. It says
        little of a model that draws random numbers in inference.
    """

    path: str
    parameters: int
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    nodes_checked: int
    source_policies: tuple[str, ...]
    reloaded: verification.Difference
    original: verification.Difference

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "schema_version": 1,
            **self._asdict(),
            "inputs": [tensor._asdict() for tensor in self.inputs],
            "outputs": [tensor._asdict() for tensor in self.outputs],
            "reloaded": self.reloaded._asdict(),
            "original": self.original._asdict(),
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"float32 SavedModel: {self.path}",
                f"  parameters: {self.parameters:,}",
                *("  input: {} {} {}".format(*tensor) for tensor in self.inputs),
                *("  output: {} {} {}".format(*tensor) for tensor in self.outputs),
                f"  graph nodes checked: {self.nodes_checked:,}, none below float32",
                f"  reloaded against the float32 model: {self.reloaded}",
                f"  original ({', '.join(self.source_policies)}) against the float32 "
                f"model: {self.original}",
            ]
        )


def export_float32(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    sample_inputs: Any = None,
    overwrite: bool = False,
) -> ExportReport:
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
      overwrite: Whether to replace a SavedModel, or an empty folder, at `path`. It is
        replaced last, so a failed export leaves it untouched.

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
    if "://" in os.fspath(path):
        raise ValueError(
            f"`path` must be a local folder. Received: path={os.fspath(path)!r}. "
            "Export to a local folder and copy it."
        )
    target = pathlib.Path(path).absolute()
    _check_free(target, overwrite)
    _check_model(model)
    specs, samples = model_inputs.describe(model, sample_inputs)
    policies = {place.layer.dtype_policy.name for place in assign.walk(model)}
    with assign.EXCLUSIVE, contextlib.ExitStack() as undo:
        put_back = undo.callback(_restorer(model))
        original = _run(model, samples)
        put_back()
        with assign.assigned_float32(model), _staged(target, overwrite) as folder:
            with model_inputs.explained(model, "cannot be exported"):
                nodes = _write(model, specs, folder)
                # The call follows the write, so that random seeds and recurrent
                # states are those that were saved.
                expected = _run(model, samples)
                serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
                each = zip(*map(keras.tree.flatten, (specs, samples)), strict=True)
                served = serve(**{spec.name: value for spec, value in each})
            reloaded = _compare(served, expected)
    return ExportReport(
        path=os.fspath(path),
        parameters=model.count_params(),
        inputs=_described(serve.structured_input_signature[1]),
        outputs=_described(serve.structured_outputs),
        nodes_checked=nodes,
        source_policies=tuple(sorted(policies)),
        reloaded=reloaded,
        original=verification.difference(original, expected),
    )


def _check_free(target, overwrite):
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise errors.ExportError(
            f"There is something at `path` already. Received: path={target}. "
            "Choose another one, or pass `overwrite=True`."
        )
    is_folder = target.is_dir() and not target.is_symlink()
    is_model = is_folder and (target / "saved_model.pb").exists()
    if not is_model and not (is_folder and not any(target.iterdir())):
        raise errors.ExportError(
            "`overwrite=True` replaces a SavedModel or an empty folder only. Received: "
            f"path={target}. Choose another one."
        )


def _check_model(model):
    assign.check_built(model, errors.ExportError)
    with model_inputs.explained(model, "cannot be exported"):
        conversion.check_not_quantized(model)
    options = tf.config.optimizer.get_experimental_options()
    if any(on for key, on in options.items() if key.startswith("auto_mixed_precision")):
        raise errors.ExportError(
            "TensorFlow's graph rewrite (auto_mixed_precision) is on, so the exported "
            "graph would be verified in low precision. Turn it off for the export: "
            "tfamp.disable_graph_rewrite(), or tfamp.disable()."
        )


def _restorer(model):
    """Returns what puts seeds, recurrent states and statistics back."""
    variables = list(model.non_trainable_variables)
    for place in assign.walk(model):
        variables += keras.tree.flatten(getattr(place.layer, "states", None) or ())
    before = [(each, np.array(each)) for each in variables]

    def put_back():
        for variable, value in before:
            variable.assign(value)

    return put_back


@contextlib.contextmanager
def _staged(target, overwrite) -> Iterator[pathlib.Path]:
    """Yields a folder beside the target; moves it there unless the block raises."""
    beside = next(parent for parent in target.parents if parent.exists())
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
    """Writes a SavedModel; returns how many nodes of its graph were checked."""
    archive: Any = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda x: model(x, training=False), [specs])
    archive.write_out(str(folder), verbose=False)
    nodes, low = verification.read_graph(folder)
    if low:
        raise errors.ExportError(
            "The graph of the float32 model is not float32 throughout. Received: "
            f"{errors.examples(low)}. Let the layers cast to "
            "`self.compute_dtype`, and not to these dtypes, in their `call`."
        )
    return nodes


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


def _compare(served, expected):
    """Returns the reloaded outputs' difference, which must be small."""
    found = verification.difference(served, expected)
    if found.relative <= MAX_RELATIVE_DIFFERENCE:
        return found
    shapes = [
        {name: tuple(value.shape) for name, value in sorted(outputs.items())}
        for outputs in (served, expected)
    ]
    raise errors.ExportError(
        "The reloaded SavedModel computes something else than the float32 model. "
        f"Received: outputs {shapes[0]}, differing by {found}. Expected: outputs "
        f"{shapes[1]}, and at most {MAX_RELATIVE_DIFFERENCE} relative. A layer may "
        "compute otherwise in a graph than eagerly."
    )


def _described(signature):
    return tuple(
        TensorDescription(
            name,
            spec.dtype.name,
            None if spec.shape.rank is None else tuple(spec.shape),
        )
        for name, spec in sorted(signature.items())
    )
