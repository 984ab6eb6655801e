"""What an export reports: plain data, and the measure of difference in it."""

from typing import Any, NamedTuple

import numpy as np

from tfamp import formats
from tfamp.serving import saved_graph


class Difference(NamedTuple):
    """How far outputs are from reference outputs, the worst of all outputs.

    Attributes:
      relative: max|a - b| / max(max|b|, smallest normal float32) over the elements
        of one output, b being the reference. Equal infinities and pairs of NaN
        count as equal; any other one makes it infinite.
      absolute: max|a - b|.
    """

    relative: float
    absolute: float

    def __str__(self) -> str:
        return f"{self.relative:.1e} relative, {self.absolute:.1e} absolute"


class ExportReport(NamedTuple):
    """What was exported, and what the verification measured.

    Attributes:
      path: The SavedModel's folder.
      parameters: Number of scalars in the float32 model's weights.
      inputs: The signature's inputs.
      outputs: The signature's outputs.
      nodes_checked: Graph nodes read, those of all functions too; none has a
        floating dtype of fewer than 32 bits.
      source_policies: Dtype policies of the original model's layers.
      reloaded: Difference of the reloaded SavedModel from the float32 model.
      original: Difference of the original model from the float32 model. It says
        little of a model that draws random numbers in inference.
    """

    path: str
    parameters: int
    inputs: tuple[saved_graph.TensorDescription, ...]
    outputs: tuple[saved_graph.TensorDescription, ...]
    nodes_checked: int
    source_policies: tuple[str, ...]
    reloaded: Difference
    original: Difference

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "schema_version": 1,
            **self._asdict(),
            "inputs": [tensor._asdict() for tensor in self.inputs],
            "outputs": [tensor._asdict() for tensor in self.outputs],
            "source_policies": list(self.source_policies),
            "reloaded": self.reloaded._asdict(),
            "original": self.original._asdict(),
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"float32 SavedModel: {self.path}",
                f"  parameters: {self.parameters:,}",
                *(f"  input: {tensor}" for tensor in self.inputs),
                *(f"  output: {tensor}" for tensor in self.outputs),
                f"  graph nodes checked: {self.nodes_checked:,}, none below float32",
                f"  reloaded against the float32 model: {self.reloaded}",
                f"  original ({', '.join(self.source_policies)}) against the float32 "
                f"model: {self.original}",
            ]
        )


def difference(actual: dict[str, Any], expected: dict[str, Any]) -> Difference:
    """Returns the worst difference of named outputs from the expected ones.

    Args:
      actual: Name to array, of any dtypes.
      expected: The same names; the reference.

    Returns:
      A `Difference`, infinite where names, shapes or strings differ.
    """
    if set(actual) != set(expected):
        return Difference(np.inf, np.inf)
    each = [
        _difference(np.asarray(actual[k]), np.asarray(expected[k])) for k in expected
    ]
    return Difference(
        max((one.relative for one in each), default=0.0),
        max((one.absolute for one in each), default=0.0),
    )


def _difference(a, b):
    if a.shape != b.shape:
        return Difference(np.inf, np.inf)
    if b.dtype.kind in "OSU":
        gap = 0.0 if np.array_equal(a, b) else np.inf
        return Difference(gap, gap)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity minus infinity.
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    absolute = float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0))
    tiny = formats.float_format("float32").smallest_normal
    scale = float(np.abs(b[np.isfinite(b)]).max(initial=tiny))
    return Difference(absolute / scale, absolute)
