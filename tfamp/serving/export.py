"""Exports a model, verifies the files, and reports cost and savings."""

import contextlib
import os
from typing import Literal

import keras
import numpy as np

from tfamp import errors, progress
from tfamp.facts import formats, modes
from tfamp.inspect import quantized, structure
from tfamp.operators import promotion
from tfamp.precision import assigned, conversion
from tfamp.serving import litert, onnx_file, report, staging, writing
from tfamp.storage import stored

_PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
_FORMATS = ("tf_saved_model", "litert", "onnx")
# What is meant by the end of a path that is no SavedModel's.
_OTHER_FILES = {
    **{end: f"format={name!r}" for name, end in staging.SUFFIXES.items()},
    ".keras": "`model.save(path)`",
    ".h5": "`model.save(path)`",
}
# The saved graph may round elsewhere than the model does eagerly (a fused kernel
# leaves out some roundings): that much farther from float32, and no more.
_FARTHER = 4


def export(
    model: keras.Model,
    path: str | os.PathLike,
    precision: str = "float32",
    *,
    half_weights: bool = False,
    dequantize: bool = False,
    format: Literal["tf_saved_model", "litert", "onnx"] = "tf_saved_model",
    sample_inputs=None,
    overwrite: bool = False,
    verbose: int = 1,
) -> report.ExportReport:
    """Exports a model that computes in a precision, verified and compared with float32.

    ```
    assign float32 to every layer; write, verify and reload the float32 SavedModel
    assign the precision; write; read the graph: products in its format, and no other
    reload, run, compare with the float32 model; time both in turn
    of ONNX: convert that; read its graph; run it by onnxruntime, and compare again
    only then move it to `path`
    ```
    A float32 graph has no float dtype below 32 bits, and its outputs differ from the
    float32 model's by 1e-5 of the largest at most, or by a step of the integers for
    each quantized layer. A mixed model keeps its overrides: its 16-bit layers get the
    requested format, its float32 layers stay. A float32 model gets what
    `set_precision` would give it. What the signature takes and returns is float32
    (ids, strings and so on as they are). The model's layers, traced functions, seeds
    and states are as before afterwards: it can be exported in the middle of a training,
    by the thread that trains it.

    Args:
      model: A built `keras.Model` with any dtype policies; float8 is not exported.
      path: Local folder to create; a file that ends in ".tflite" for LiteRT, in ".onnx"
        for ONNX.
      precision: "float32", "mixed_bfloat16" or "mixed_float16".
      half_weights: Whether weights of two axes or more are stored in 16 bits and cast
        where they are read: bfloat16 for "mixed_bfloat16", else float16.
      dequantize: Whether quantized layers (Dense, EinsumDense, Embedding) are exported
        with float weights, LoRA merged. By default they keep their integers.
      format: "tf_saved_model"; "litert" by Keras' converter, in float32 only; or "onnx"
        by tf2onnx (`pip install "tfamp[onnx]"`), in float32 or mixed_float16.
      sample_inputs: A batch of inputs, structured as the model takes them, to compare
        and time on. Default: generated from the model's input shapes. A subclassed
        model that reads integers needs one, since Keras records no dtypes for it; its
        signature then has the dtypes and shapes of this batch, with any batch size.
      overwrite: Whether to replace a SavedModel, a .tflite or .onnx file or an empty
        folder at `path`. It is replaced last, so that a failed export leaves it
        untouched.
      verbose: 1: a line, on standard error, if it takes long; 0: none.

    Returns:
      An `ExportReport`.

    Raises:
      ExportError: If `path` cannot be written, the converter is missing, or the result
        does not pass: another format in the graph, overflow where float32 is finite,
        outputs that the model does not have. Nothing is left on disk.
      TypeError: If `model` is not a Keras model.
      ValueError: If an argument is none of its choices, or `path` is remote.

    Example:
      print(tfamp.export(model, "exported/1", "mixed_bfloat16"))
    """
    _check_request(path, precision, format, half_weights)
    with (
        progress.Progress(verbose, f"exporting {os.fspath(path)!r}"),
        writing.opened(model, path, sample_inputs, overwrite) as job,
        stored.in_float32(model.variables),
        contextlib.ExitStack() as undo,
    ):
        policies = {
            quantized.name_of(structure.policy(layer))
            for layer in structure.layers(model)
        }
        original = writing.run(job, writing.plain_call(model))
        if dequantize:
            undo.enter_context(quantized.dequantized(model))
        is_plain = precision == "float32" and format != "litert" and not half_weights
        target = job.folder
        if format == "onnx":  # Which is made of a SavedModel.
            job = job._replace(folder=target.with_name("saved"))
        folder = job.folder if is_plain else job.folder.with_name("float32")
        with assigned.float32(model):
            float32 = writing.write_float32(job, folder)
        served, cost, float32_weights = float32, (), ()
        if not is_plain:
            served, full = _write(job, precision, half_weights, format)
            cost = report.compare(served.expected, full) if half_weights else ()
            _check_outputs(served, float32.expected, precision)
        graph = report.Graph(0, [], {}, {})
        if format != "litert":
            graph = report.read_graph(job.folder)
            _check_graph(graph, precision, half_weights)
        if format == "onnx":
            served, graph, float32_weights = onnx_file.write(
                job, served, target, precision
            )
            _check_graph(graph, precision, half_weights)
            if precision == "float32":
                writing.check_float32(served)
            else:
                _check_outputs(served, float32.expected, precision)
        seconds, full_seconds = report.latencies(served.run, float32.run)
        return report.ExportReport(
            path=os.fspath(path),
            precision=precision,
            format=format,
            parameters=model.count_params(),
            inputs=report.described(float32.signature.structured_input_signature[1]),
            outputs=report.described(float32.signature.structured_outputs),
            layers=served.layers,
            parity=report.compare(served.outputs, float32.expected),
            weights_parity=cost,
            source_policies=tuple(sorted(policies)),
            source_parity=report.compare(original, float32.expected),
            nodes_checked=graph.nodes,
            products={name: len(nodes) for name, nodes in graph.products.items()},
            weight_bytes=graph.weight_bytes,
            float32_weights=float32_weights,
            bytes=report.bytes_on_disk(target),
            float32_bytes=report.bytes_on_disk(folder),
            seconds=seconds,
            float32_seconds=full_seconds,
        )


def export_float32(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    sample_inputs=None,
    overwrite: bool = False,
    verbose: int = 1,
) -> report.ExportReport:
    """Exports a model as a SavedModel that computes in float32, and verifies it.

    Args:
      model, path, sample_inputs, overwrite, verbose: As for `export`.

    Returns:
      An `ExportReport`.

    Raises:
      ExportError: As `export`; so TypeError and ValueError.

    Example:
      print(tfamp.export_float32(model, "exported/1"))
    """
    return export(
        model, path, sample_inputs=sample_inputs, overwrite=overwrite, verbose=verbose
    )


def _check_request(path, precision, format, half_weights):
    for name, value, choices in (
        ("precision", precision, _PRECISIONS),
        ("format", format, _FORMATS),
    ):
        if value not in choices:
            raise ValueError(
                f"`{name}` must be one of {', '.join(map(repr, choices))}. "
                f"Received: {name}={value!r}."
            )
    if format == "litert" and precision != "float32":
        raise ValueError(
            'LiteRT computes in float32 here. Received: format="litert", precision='
            f'{precision!r}. Use precision="float32"; `half_weights=True` halves it.'
        )
    if format == "onnx" and precision == "mixed_bfloat16":
        raise ValueError(
            "ONNX is written in float32 or mixed_float16: onnxruntime cannot multiply "
            'bfloat16 on CPUs, so it could not be verified. Received: format="onnx", '
            f"precision={precision!r}."
        )
    if format == "onnx" and half_weights:
        raise ValueError(
            '`half_weights` is for SavedModels and LiteRT. Received: format="onnx". In '
            'precision="mixed_float16", layers of 16 bits store float16 weights.'
        )
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "`path` must be that of a folder or file. Received: "
            f"{type(path).__name__}. Expected export(model, path)."
        )
    if format == "tf_saved_model":
        end = os.path.splitext(os.fspath(path))[1]
        if other := _OTHER_FILES.get(end):
            raise ValueError(
                f"A SavedModel is a folder, and {end!r} the end of a file. Received: "
                f"path={os.fspath(path)!r}. Expected a folder, or {other}."
            )
        return
    suffix = staging.SUFFIXES[format]
    if not os.fspath(path).endswith(suffix):
        raise ValueError(
            f"A file of format={format!r} ends in {suffix}. Received: "
            f"path={os.fspath(path)!r}."
        )
    {"litert": litert, "onnx": onnx_file}[format].check()


def _weights_format(precision):
    return "bfloat16" if precision == "mixed_bfloat16" else "float16"


def _write(job, precision, half_weights, format):
    """Returns what was reloaded, and the outputs that float32 weights would give."""
    scope, full = assigned.float32(job.model), {}
    if precision != "float32":
        mode = modes.get_mode(precision)
        planned = conversion.as_served(job.model, mode, job.samples)
        scope = assigned.assigned(job.model, planned)
    call = writing.plain_call(job.model)
    with scope:
        if half_weights:
            full = writing.run_afresh(job, call)
            call = writing.half_weights(job.model, _weights_format(precision))
        if format == "litert":
            return litert.write(job, call, half_weights), full
        wide = lambda inputs: promotion.widened(call(inputs))  # noqa: E731
        return writing.write(job, job.folder, wide), full


def _check_graph(graph, precision, half_weights):
    mode, stored = modes.get_mode(precision), _weights_format(precision)
    products = graph.products
    wrong = [line for line in graph.low if not line.endswith(f": {stored}")]
    if precision == "float32":
        wrong += [x for name in formats.LOW for x in products.get(name, ())]
    elif not products.get(mode.compute_format) and (products or not graph.low):
        counts = {name: len(nodes) for name, nodes in products.items()}
        wrong.append(f"no product of {mode.compute_format}, but {counts}")
    if half_weights and stored not in graph.weight_bytes:
        wrong.append(f"no variable of {stored}")
    if wrong:
        raise errors.ExportError(
            f"The graph does not compute in {precision}. Received: "
            f"{errors.examples(wrong)}. Output layers of a float32 model stay in "
            "float32, as with `tfamp.set_precision`, and int8 does in float16; let "
            "others cast to `self.compute_dtype` in their `call`."
        )


def _check_outputs(served, float32, precision):
    if writing.shapes(served.outputs) != writing.shapes(float32):
        raise writing.mismatch(precision, served, "of other names or shapes", "those")
    epsilon = formats.float_format(_weights_format(precision)).epsilon
    for row, model_row in zip(
        report.compare(served.outputs, served.expected),
        report.compare(served.expected, float32),
        strict=True,
    ):
        low, wide = (np.asarray(x[row.name]) for x in (served.outputs, float32))
        if wide.dtype.kind != "f":  # A class may be another one by a rounding.
            continue
        if lost := int(np.sum(np.isfinite(wide) & ~np.isfinite(low))):
            raise errors.ExportError(
                f"{precision} overflows on the sample inputs: {lost} of {low.size} "
                f"elements of output {row.name!r} are not finite, which they are in "
                "float32. Use mixed_bfloat16, which has float32's range, or first keep "
                "layers in float32, by the overrides of `tfamp.set_precision`."
            )
        most = _FARTHER * max(model_row.relative, epsilon)
        if row.relative > most:
            received = f"{row.name!r} differing by {row.relative:.1e} relative"
            raise writing.mismatch(precision, served, received, f"at most {most:.1e}")
