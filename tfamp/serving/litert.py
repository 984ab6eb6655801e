"""LiteRT (TFLite) by Keras' own converter, and a run by the interpreter."""

import pathlib
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.facts import versions
from tfamp.inspect import model_inputs, quantized, structure
from tfamp.precision import described
from tfamp.serving import writing

OLDEST_KERAS = "3.13"


def check() -> None:
    """Raises ExportError where Keras has no converter."""
    if not versions.keras_is_at_least(OLDEST_KERAS):
        raise errors.ExportError(
            f'`format="litert"` needs Keras {OLDEST_KERAS} or newer, which brings the '
            f"converter. Received: Keras {keras.__version__}. Upgrade Keras, or export "
            "a SavedModel."
        )


def write(job: writing.Job, call: Callable, half_weights: bool) -> writing.Served:
    """Converts the model, to which float32 is assigned, and runs the interpreter.

    Args:
      job: The export; a file is written in place of its folder.
      call: The model as a function of its inputs, to compare with.
      half_weights: Whether weights are stored in float16; the interpreter casts them.
    """
    halved = {
        "optimizations": [tf.lite.Optimize.DEFAULT],
        "target_spec": {"supported_types": [tf.float16]},
    }
    file = job.folder.with_name("new.tflite")
    expected = writing.run_afresh(job, call)
    what = "cannot be converted to LiteRT"
    if "int8" in {*map(quantized.quantization_of, structure.layers(job.model))}:
        what += ", which has no products of int8 layers: pass `dequantize=True`"
    with model_inputs.explained(job.model, what):
        _convert(job, file, halved if half_weights else {})
        run = _runner(job, file)
        layers = tuple(described.describe_layers(job.model))
        served = writing.Served(None, run, run(), expected, layers)
    file.rename(job.folder)
    return served


def _convert(job, file: pathlib.Path, options):
    nodes = [
        (each, list(each))
        for layer in structure.layers(job.model)
        for each in (layer._inbound_nodes, layer._outbound_nodes)
    ]
    job.put_back()
    try:
        job.model.export(
            str(file),
            format="litert",
            input_signature=[job.specs],
            verbose=False,
            **options,
        )
    finally:  # Keras 3.13 calls a model of several inputs on symbolic ones.
        for held, before in nodes:
            held[:] = before


def _runner(job, file):
    with warnings.catch_warnings():
        # TensorFlow 2.21 announces a package of its own for it, ai-edge-litert.
        warnings.filterwarnings("ignore", ".*Interpreter is deprecated", UserWarning)
        interpreter = tf.lite.Interpreter(str(file))
    runner = interpreter.get_signature_runner("serving_default")
    samples = {name: np.asarray(x) for name, x in job.named_samples.items()}
    names = list(runner.get_input_details())
    if len(names) == 1:  # Keras 3.13 numbers an input that has no name.
        samples = dict(zip(names, samples.values(), strict=True))
    return lambda: runner(**samples)
