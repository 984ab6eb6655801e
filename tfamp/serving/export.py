"""Exports a model as a SavedModel that computes in float32, and proves that it does."""

import os
from typing import Any, NamedTuple

import keras

from tfamp.inspect import structure
from tfamp.precision import assigned
from tfamp.serving import verification, writing


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
    with writing.opened(model, path, sample_inputs, overwrite) as job:
        policies = {place.layer.dtype_policy.name for place in structure.walk(model)}
        original = writing.run(job)
        with assigned.float32(model):
            nodes, served = writing.write_float32(job, job.folder)
    return ExportReport(
        path=os.fspath(path),
        parameters=model.count_params(),
        inputs=_described(served.signature.structured_input_signature[1]),
        outputs=_described(served.signature.structured_outputs),
        nodes_checked=nodes,
        source_policies=tuple(sorted(policies)),
        reloaded=verification.difference(served.outputs, served.expected),
        original=verification.difference(original, served.expected),
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
