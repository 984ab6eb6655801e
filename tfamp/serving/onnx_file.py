"""ONNX: a SavedModel that was written and verified, by tf2onnx; run by onnxruntime."""

import contextlib
import importlib.util
import logging
import math
import os
import pathlib
import types
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp import errors, extras
from tfamp.facts import names, switches
from tfamp.inspect import model_inputs, quantized, structure
from tfamp.serving import onnx_graph, report, writing

_PACKAGES = ("onnx", "onnxruntime", "tf2onnx")
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def check() -> None:
    """Raises ExportError where a package of the extra is missing."""
    missing = [x for x in _PACKAGES if importlib.util.find_spec(x) is None]
    if missing:
        raise errors.ExportError(
            f'`format="onnx"` needs {", ".join(missing)}: pip install "tfamp[onnx]".'
        )


def write(
    job: writing.Job, served: writing.Served, file: pathlib.Path, precision: str
) -> tuple[writing.Served, report.Graph, tuple[str, ...]]:
    """Converts the SavedModel in a job's folder to a file, and runs that.

    Args:
      job: The export.
      served: What the SavedModel was reloaded as.
      file: Where to write.
      precision: "float32" or "mixed_float16".

    Returns:
      The file as it runs, in place of the SavedModel; its nodes, products and
      initializers; names of the float32 initializers of two axes or more, in a file of
      16 bits: the weight, with its layer, or the constant.
    """
    with model_inputs.explained(job.model, "cannot be converted to ONNX"), _quiet():
        proto = _convert(job.folder)
        _check_operations(proto)
        onnx_graph.lift(proto.graph)
        onnx_graph.narrow(proto.graph)
        file.write_bytes(proto.SerializeToString())
        run = _session(job, proto)
        _check_integers(job.model, proto)
        is_low = precision != "float32"
        float32 = _float32(job.model, served.layers, proto) if is_low else ()
        served = served._replace(signature=None, run=run, outputs=run())
        return served, onnx_graph.read(proto), float32


@contextlib.contextmanager
def _quiet():
    """Takes back what tf2onnx sets: a log level, and a handler of the root logger.

    Its messages are left out: what fails is an `ExportError`.
    """
    root, own = logging.getLogger(), logging.getLogger("tf2onnx")
    handler, before = logging.NullHandler(), own.level
    root.addHandler(handler)
    own.setLevel(logging.CRITICAL)
    try:
        # Keras asks whether NumPy has `np.object`.
        ignored = warnings.catch_warnings(action="ignore", category=FutureWarning)
        with ignored, switches.environ({_LEVEL: os.environ.get(_LEVEL)}):
            yield
    finally:
        root.removeHandler(handler)
        own.setLevel(before)


def _convert(folder) -> Any:
    """Returns the `onnx.ModelProto`, with the names of the SavedModel's signature."""
    onnx = extras.require("onnx")
    convert = extras.require("tf2onnx.convert")
    names.resolve("keras.src.export.tf2onnx_lib:patch_tf2onnx", lambda: None)()
    loaded: Any = tf.saved_model.load(str(folder))
    signature = loaded.signatures["serving_default"]
    specs = signature.structured_input_signature[1]
    function = tf.function(lambda **inputs: signature(**inputs), autograph=False)
    concrete = function.get_concrete_function(**specs)
    library = concrete.graph.as_graph_def().library.function
    nodes = [f"{n.op} {n.name!r}" for each in library for n in each.node_def]
    if assigns := [line for line in nodes if line.startswith("Assign")]:
        raise errors.ExportError(
            "An ONNX file has no state that goes on from call to call. Received: a "
            f"model that assigns variables in inference: {errors.examples(assigns)}. "
            "Export a SavedModel."
        )
    if both := set(specs) & set(signature.structured_outputs):
        raise errors.ExportError(
            "An ONNX file has one name for each tensor. Received: inputs and outputs "
            f"named alike: {errors.examples(sorted(both))}. Rename the outputs' keys."
        )
    ready = types.SimpleNamespace(get_concrete_function=lambda: concrete)
    handlers = {"Erfc": (_erfc, []), "PartitionedCall": (_call, [])}
    proto, _ = convert.from_function(ready, (), custom_op_handlers=handlers)
    captured = concrete.captured_inputs
    inner = concrete.inputs[len(concrete.inputs) - len(captured) :]
    pairs = zip(inner, captured, strict=True)
    values = {x.name: y for x, y in pairs if y.dtype != tf.resource}
    for constant in [x for x in proto.graph.input if x.name in values]:
        value = np.asarray(values[constant.name])  # Those of a `Normalization`.
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(value, constant.name)
        )
        proto.graph.input.remove(constant)
    return proto


def _erfc(graph, node, name, _):
    """Writes what exact GELU is made of since TensorFlow 2.21, and ONNX lacks."""
    (output,), (dtype,) = node.output, node.output_dtypes
    low = np.float16 if dtype == 10 else np.float32  # ONNX's number of float16.
    graph.remove_node(name)
    one = graph.make_const(f"{name}/one", np.ones((), low)).output[0]
    erf = graph.make_node("Erf", node.input, dtypes=[dtype]).output[0]
    graph.make_node("Sub", [one, erf], outputs=[output], name=name, dtypes=[dtype])


def _call(graph, node, name, _):
    """Writes a function's body in place of its call.

    As Keras 3.16's mean in float16, which XLA compiles: TensorFlow does not inline it.
    """
    tf_loader = extras.require("tf2onnx.tf_loader")
    controlflow = extras.require("tf2onnx.onnx_opset.controlflow")
    body = tf_loader.find_function(node.get_attr_str("f"))
    inputs = dict(zip(body.input_names, node.input, strict=True))
    results = controlflow.inline_subgraph(graph, body, name, inputs)
    outputs, dtypes = list(node.output), list(node.output_dtypes)
    graph.remove_node(name)
    for inner, output, dtype in zip(results, outputs, dtypes, strict=True):
        graph.make_node("Identity", [inner], outputs=[output], dtypes=[dtype])


def _check_operations(proto):
    onnx = extras.require("onnx")
    nodes = [node for graph in onnx_graph.graphs(proto.graph) for node in graph.node]
    unknown = [x for x in nodes if not onnx.defs.has(x.op_type, x.domain)]
    if unknown:
        ops = errors.examples(f"{x.op_type} in {_short(x.name)}" for x in unknown)
        raise errors.ExportError(
            f"ONNX, or tf2onnx, lacks operations of the model: {ops}. Leave strings "
            "and look-ups to what calls the model, or export a SavedModel."
        )


def _short(name):
    return repr(name.replace("StatefulPartitionedCall/", ""))


def _session(job, proto):
    onnxruntime = extras.require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # Errors; it warns of what it optimizes.
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    taken = {x.name for x in session.get_inputs()}
    samples = {k: np.asarray(x) for k, x in job.named_samples.items() if k in taken}
    outputs = [x.name for x in session.get_outputs()]
    return lambda: dict(zip(outputs, session.run(outputs, samples), strict=True))


# ---- What is checked ----


def _float32(model, layers, proto) -> tuple[str, ...]:
    """Returns the names of large float32 initializers; raises if a layer has 16 bits.

    By value, since a converter transposes weights; by size where it computed with
    those of a float32 layer. Vectors are as Keras' normalization has them.
    """
    onnx = extras.require("onnx")
    low = {row.path for row in layers if not row.policy.endswith("float32")}
    weights = [
        (
            place.path in low and len(weight.shape) > 1,
            f"{place.path}/{weight.name}",
            _mark(np.asarray(weight)),
        )
        for place in structure.walk(model)
        for weight in structure.own_weights(place.layer)
        if tf.as_dtype(weight.dtype).is_floating
    ]
    large = [
        x
        for graph in onnx_graph.graphs(proto.graph)
        for x in graph.initializer
        if x.data_type == onnx.TensorProto.FLOAT and sum(n > 1 for n in x.dims) > 1
    ]
    owners, wrong = [], []
    for tensor in large:
        mark = _mark(onnx.numpy_helper.to_array(tensor))
        constant = f"constant {_short(tensor.name)}"
        same = [x for x in weights if x[2] == mark]
        same = same or [x for x in weights if not x[0] and x[2][0] == mark[0]]
        is_low, owner, _ = min(same, default=(False, constant, mark))
        (wrong if is_low else owners).append(owner)
    if wrong:
        raise errors.ExportError(
            "Weights stay in float32 in the ONNX file though their layers compute in "
            f"float16: {errors.examples(wrong)}. Keep these layers in float32, by the "
            "overrides of `tfamp.set_precision`, or export a SavedModel."
        )
    return tuple(sorted(set(owners)))


def _check_integers(model, proto):
    """Raises for a quantized layer whose integers tf2onnx has made floats."""
    onnx = extras.require("onnx")
    stored = [x for graph in onnx_graph.graphs(proto.graph) for x in graph.initializer]
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    sizes = {math.prod(x.dims) for x in stored if x.data_type not in floats}
    lost = {
        place.path: None
        for place in structure.walk(model)
        for weight in structure.own_weights(place.layer)
        if quantized.quantization_of(place.layer) and weight.dtype in ("int8", "uint8")
        if len(weight.shape) > 1 and math.prod(weight.shape) not in sizes
    }
    if lost:
        raise errors.ExportError(
            "The ONNX file would hold floats for layers that are quantized: "
            f"{errors.examples(lost)}. Pass `dequantize=True` to ask for them, or "
            "export a SavedModel."
        )


def _mark(value):
    """What stays of a weight that is transposed."""
    return value.size, *((value.min(), value.max()) if value.size else ())
