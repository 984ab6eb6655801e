"""How a served model compares with float32: outputs, bytes on disk, and latency."""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfamp.facts import formats
from tfamp.serving import verification

_PAIRS, _SECONDS = (5, 50), 1.0  # Least and most calls of each, and when to stop.


class ParityRow(NamedTuple):
    """How far one output is from its reference.

    Attributes:
      name: Of the output.
      max_absolute: max|a - b|; infinite where only one is finite.
      relative: ||a - b|| / ||b||, Euclidean; of integers, booleans and strings the
        share of elements that differ.
    """

    name: str
    max_absolute: float
    relative: float


@dataclasses.dataclass(frozen=True)
class ServingReport:
    """What was exported, and what it costs and saves beside float32.

    `print(report.to_text())`; `dataclasses.asdict(report)` is plain data.

    Attributes:
      path: The SavedModel's folder, or the .tflite file.
      precision: "float32", "mixed_bfloat16" or "mixed_float16".
      format: "tf_saved_model" or "litert".
      parity: What was reloaded against the model in float32, a row for each output.
      weights_parity: What 16-bit weights alone cost: the same precision with them
        against without. Empty unless they were asked for.
      products: How many matrix products and convolutions the graph has, by the dtype
        that they compute in. Empty for LiteRT.
      weight_bytes: Bytes of the stored variables by dtype. Empty for LiteRT.
      bytes: Bytes on disk.
      float32_bytes: Those of the float32 SavedModel.
      seconds: Median of a call with the sample inputs.
      float32_seconds: That of the float32 SavedModel, called in turn with it.
    """

    path: str
    precision: str
    format: str
    parity: tuple[ParityRow, ...]
    weights_parity: tuple[ParityRow, ...]
    products: dict[str, int]
    weight_bytes: dict[str, int]
    bytes: int
    float32_bytes: int
    seconds: float
    float32_seconds: float

    @property
    def latency_ratio(self) -> float:
        """Time of a call to that of the float32 SavedModel; below 1 is faster."""
        return self.seconds / self.float32_seconds

    def to_text(self) -> str:
        """Returns a table of the outputs, and a line for everything else."""
        lines = [f"{self.precision} {self.format}: {self.path}"]
        lines += _table("output, against float32", self.parity)
        if self.weights_parity:
            lines += _table("of that, by 16-bit weights", self.weights_parity)
        if self.products:
            lines.append(f"  products and convolutions: {_listed(self.products)}")
            lines.append(f"  bytes of variables: {_listed(self.weight_bytes)}")
        share = self.bytes / self.float32_bytes
        lines.append(
            f"  on disk: {self.bytes:,} bytes, {share:.2f} of float32's "
            f"{self.float32_bytes:,}"
        )
        lines.append(
            f"  a call: {1e3 * self.seconds:.2f} ms, {self.latency_ratio:.2f} of "
            f"float32's {1e3 * self.float32_seconds:.2f} ms (medians, in turn)"
        )
        return "\n".join(lines)


def _table(title, rows):
    yield f"  {title:<30} {'max absolute':>12} {'relative':>12}"
    for row in rows:
        yield f"  {row.name:<30} {row.max_absolute:>12.2e} {row.relative:>12.2e}"


def _listed(counts):
    return ", ".join(f"{count:,} in {name}" for name, count in counts.items()) or "none"


def compare(
    actual: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[ParityRow, ...]:
    """Returns a row for each output; both have the same names and shapes."""
    return tuple(
        ParityRow(name, *_errors(np.asarray(actual[name]), np.asarray(expected[name])))
        for name in sorted(expected)
    )


def _errors(a, b):
    gap = verification.gaps(a, b)
    if b.dtype.kind in "biuOSU":
        relative = np.mean(gap > 0) if b.size else 0.0
    else:
        b = b.astype(np.float64)
        tiny = formats.float_format("float32").smallest_normal
        relative = np.linalg.norm(gap) / max(np.linalg.norm(b[np.isfinite(b)]), tiny)
    return float(gap.max(initial=0.0)), float(relative)


def latencies(first: Callable[[], Any], second: Callable[[], Any]) -> list[float]:
    """Returns the median seconds of two functions, called in turn, once to warm up."""
    found: tuple[list[float], list[float]] = [], []
    begin = time.perf_counter()
    while len(found[0]) <= _PAIRS[0] or (
        len(found[0]) <= _PAIRS[1] and time.perf_counter() - begin < _SECONDS
    ):
        for function, seconds in zip((first, second), found, strict=True):
            start = time.perf_counter()
            for value in function().values():
                np.asarray(value)  # A device may be behind.
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in found]


def bytes_on_disk(path: pathlib.Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
