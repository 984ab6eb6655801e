"""What an export reports: its graph, how outputs differ from float32's, and costs."""

import collections
import math
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tfamp import errors, tables
from tfamp.facts import formats
from tfamp.precision import described as described_layers

# Operations that multiply, by how their names begin.
_PRODUCT = re.compile("(Batch)?MatMul|Einsum|Conv|DepthwiseConv|CudnnRNN|Xla(Dot|Conv)")
# Narrow floating dtypes as the text of a message has them, references ("_REF") too; the
# text of a string has a quotation mark before it.
_LOW = re.compile(r": DT_(HALF|BFLOAT16|FLOAT8_\w+?|FLOAT4_\w+?)(?:_REF)?\b")
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


class TensorDescription(NamedTuple):
    """A tensor of a signature: name, dtype name, shape (None: any size, any rank)."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


class ExportReport(NamedTuple):
    """What was exported and verified, with its cost and savings; `print` it.

    Attributes:
      path: The SavedModel's folder, or the .tflite or .onnx file.
      precision: "float32", "mixed_bfloat16" or "mixed_float16".
      format: "tf_saved_model", "litert" or "onnx".
      parameters: Number of scalars in the model's weights.
      inputs: The signature's inputs, sorted by name.
      outputs: The signature's outputs, sorted by name.
      layers: What `describe_layers` gives while the precision is assigned.
      parity: What was reloaded against the model in float32, a row for each output.
      weights_parity: What 16-bit weights alone cost: the same precision with them
        against without. Empty unless requested.
      source_policies: Dtype policies of the model's layers before.
      source_parity: The model as it was against the model in float32. It says little of
        a model that draws random numbers in inference.
      nodes_checked: Graph nodes read, those of all functions too. 0 for LiteRT, as the
        two below are empty.
      products: How many matrix products and convolutions the graph has, by the dtype
        that they compute in.
      weight_bytes: Bytes of the stored variables by dtype; of ONNX, of initializers.
      float32_weights: Of ONNX in 16 bits: which weights (and constants) of two axes or
        more stay float32, each with the layer that computes in it.
      bytes: Bytes on disk.
      float32_bytes: Those of the float32 SavedModel.
      seconds: Median of a call with the sample inputs.
      float32_seconds: That of the float32 SavedModel, called in turn with it.
    """

    path: str
    precision: str
    format: str
    parameters: int
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    layers: tuple[described_layers.LayerPrecision, ...]
    parity: tuple[ParityRow, ...]
    weights_parity: tuple[ParityRow, ...]
    source_policies: tuple[str, ...]
    source_parity: tuple[ParityRow, ...]
    nodes_checked: int
    products: dict[str, int]
    weight_bytes: dict[str, int]
    float32_weights: tuple[str, ...]
    bytes: int
    float32_bytes: int
    seconds: float
    float32_seconds: float

    @property
    def latency_ratio(self) -> float:
        """Time of a call to that of the float32 SavedModel; below 1 is faster."""
        return self.seconds / self.float32_seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 2, **tables.plain(self)}

    def to_text(self) -> str:
        """Returns a table of the outputs, and a line for everything else."""
        return "\n".join(self._lines())

    __str__ = to_text

    def _quantized(self):
        """What became of quantized layers; their policies are named int8_from_..."""
        before, now = set(self.source_policies), [x.policy for x in self.layers]
        counts = collections.Counter(x.split("_from_")[0] for x in now if "_from_" in x)
        if counts:
            listed = ", ".join(f"{name} in {n} layers" for name, n in counts.items())
            return f"kept, {listed}; `dequantize=True` exports floats"
        was = sorted({x.split("_from_")[0] for x in before if "_from_" in x})
        return f"{', '.join(was)} before, exported as floats" if was else ""

    def _lines(self):
        yield f"{self.precision} {self.format}: {self.path}"
        yield f"  parameters: {self.parameters:,}"
        yield from ("  input: {} {} {}".format(*tensor) for tensor in self.inputs)
        yield from ("  output: {} {} {}".format(*tensor) for tensor in self.outputs)
        parts = {
            "reloaded, against float32": self.parity,
            "of that, by 16-bit weights": self.weights_parity,
            f"the model itself ({', '.join(self.source_policies)})": self.source_parity,
        }
        rows = [
            [what, row.name, f"{row.max_absolute:.2e}", f"{row.relative:.2e}"]
            for what, parity in parts.items()
            for row in parity
        ]
        header = ["error of", "output", "max absolute", "relative"]
        yield from tables.table(header, rows).splitlines()
        if quantized := self._quantized():
            yield f"  quantized layers: {quantized}"
        if self.nodes_checked:
            yield f"  graph nodes checked: {self.nodes_checked:,}"
            yield f"  products and convolutions: {_listed(self.products)}"
            yield f"  bytes of variables: {_listed(self.weight_bytes)}"
        if self.float32_weights:
            yield f"  weights in float32: {errors.examples(self.float32_weights)}"
        share = self.bytes / self.float32_bytes
        yield (
            f"  on disk: {self.bytes:,} bytes, {share:.2f} of float32's "
            f"{self.float32_bytes:,}"
        )
        yield (
            f"  a call: {1e3 * self.seconds:.2f} ms, {self.latency_ratio:.2f} of "
            f"float32's {1e3 * self.float32_seconds:.2f} ms (medians of alternating "
            "calls)"
        )


def described(signature: Mapping[str, Any]) -> tuple[TensorDescription, ...]:
    """Returns the tensors of a signature, sorted by name."""
    return tuple(
        TensorDescription(
            name,
            spec.dtype.name,
            None if spec.shape.rank is None else tuple(spec.shape),
        )
        for name, spec in sorted(signature.items())
    )


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


def largest(values: Any) -> float:
    """Returns the largest finite absolute value of an array of numbers; 1 of others."""
    b = np.asarray(values)
    if b.dtype.kind in "OSU":
        return 1.0
    b = np.abs(b[np.isfinite(b)].astype(np.float64))
    return float(b.max(initial=formats.float_format("float32").smallest_normal))


def _errors(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns both errors of a `ParityRow`; what is equal has none, NaN too."""
    kind = b.dtype.kind
    if kind in "OSU":
        gap = np.where(a == b, 0.0, np.inf)
    else:
        a, b = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):  # Infinity minus infinity.
            gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        gap = np.where(np.isnan(gap), np.inf, gap)
    if kind in "biuOSU":
        relative = np.mean(gap > 0) if b.size else 0.0
    else:
        tiny = formats.float_format("float32").smallest_normal
        relative = np.linalg.norm(gap) / max(np.linalg.norm(b[np.isfinite(b)]), tiny)
    return float(gap.max(initial=0.0)), float(relative)


def latencies(first: Callable[[], Any], second: Callable[[], Any]) -> list[float]:
    """Returns the median seconds of two functions, called in turn, once to warm up."""
    times: tuple[list[float], list[float]] = [], []
    begin = time.perf_counter()
    while len(times[0]) <= _PAIRS[0] or (
        len(times[0]) <= _PAIRS[1] and time.perf_counter() - begin < _SECONDS
    ):
        for function, seconds in zip((first, second), times, strict=True):
            start = time.perf_counter()
            for value in function().values():
                np.asarray(value)  # A device may be behind.
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in times]


def bytes_on_disk(path: pathlib.Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


# ---- What the graph has ----


class Graph(NamedTuple):
    """What the graph of a SavedModel has, with all functions of its library.

    Attributes:
      nodes: How many nodes.
      low: A line for each node, function argument and variable of a floating dtype
        below 32 bits.
      products: Matrix products and convolutions by floating dtype.
      weight_bytes: Bytes of the variables by dtype.
    """

    nodes: int
    low: list[str]
    products: dict[str, list[str]]
    weight_bytes: dict[str, int]


def read_graph(folder: pathlib.Path) -> Graph:
    """Reads the graph of a SavedModel, without loading it."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    (meta,) = saved.meta_graphs
    functions = meta.graph_def.library.function
    graphs = [("the graph", meta.graph_def.node)]
    graphs += [(f"function {f.signature.name!r}", f.node_def) for f in functions]
    nodes = [(f"{n.op} {n.name!r} in {g}", n) for g, held in graphs for n in held]
    products = collections.defaultdict(list)
    for what, node in nodes:
        dtype = tf.as_dtype(node.attr["Ta" if "Ta" in node.attr else "T"].type or 1)
        if _PRODUCT.match(node.op) and dtype.is_floating:
            products[dtype.name].append(what)
    variables = [
        each.variable
        for each in meta.object_graph_def.nodes
        if each.HasField("variable")
    ]
    sizes = collections.Counter()
    for each in variables:
        dtype = tf.as_dtype(each.dtype)
        sizes[dtype.name] += dtype.size * math.prod(x.size for x in each.shape.dim)
    parts = [(f"an argument of {f.signature.name!r}", f.signature) for f in functions]
    parts += [(f"variable {each.name!r}", each) for each in variables]
    low = [
        f"{what}: {name.replace('HALF', 'FLOAT16').lower()}"
        for what, message in nodes + parts
        for name in sorted(set(_LOW.findall(str(message))))
    ]
    return Graph(len(nodes), low, dict(products), dict(sizes))
