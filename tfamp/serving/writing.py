"""What every export does: one job at a time, written, reloaded and compared."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.inspect import model_inputs, structure
from tfamp.precision import assigned, described, policy
from tfamp.serving import report, staging

# The requirement: about 84 times the epsilon of float32, for sums that the saved
# graph may take in another order.
MAX_RELATIVE_DIFFERENCE = 1e-5
# Keras rounds the inputs of a product with integers to 127 steps of their largest; sums
# in another order may move some by a step, in each layer anew.
_MAX_STEP = 1 / 127


class Job(NamedTuple):
    """One export.

    Attributes:
      model: The built model.
      specs: `tf.TensorSpec`s, structured as the model's inputs.
      samples: Tensors that fit them, likewise.
      folder: Where to write; it is moved to the given path if checks pass. What is
        written beside it is deleted.
      put_back: Puts seeds, recurrent states and statistics back.
    """

    model: keras.Model
    specs: Any
    samples: Any
    folder: pathlib.Path
    put_back: Callable[[], None]

    @property
    def named_samples(self) -> dict[str, tf.Tensor]:
        """The samples by the names of the signature's inputs."""
        each = zip(*map(keras.tree.flatten, (self.specs, self.samples)), strict=True)
        return {spec.name: value for spec, value in each}


class Served(NamedTuple):
    """What was written, as it was reloaded.

    Attributes:
      signature: A SavedModel's "serving_default", a `tf.types` concrete function.
      run: Returns its outputs for the samples, by name.
      outputs: What it returned first.
      expected: What the model that was written returned for them, eagerly.
      layers: What `describe_layers` gave of it.
    """

    signature: Any
    run: Callable[[], Mapping[str, Any]]
    outputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    layers: tuple[described.LayerPrecision, ...]


@contextlib.contextmanager
def opened(
    model: keras.Model, path: str | os.PathLike, sample_inputs: Any, overwrite: bool
) -> Iterator[Job]:
    """Scopes an export: checks it before, restores the model and its states after."""
    target = staging.checked(path, overwrite)
    _check_model(model)
    specs, samples = model_inputs.describe(model, sample_inputs)
    with assigned.EXCLUSIVE, contextlib.ExitStack() as undo:
        put_back = undo.callback(_restorer(model))
        with staging.staged(target, overwrite) as folder:
            yield Job(model, specs, samples, folder, put_back)


def _check_model(model):
    structure.check_built(model, errors.ExportError)
    options = tf.config.optimizer.get_experimental_options()
    if any(on for key, on in options.items() if key.startswith("auto_mixed_precision")):
        raise errors.ExportError(
            "TensorFlow's graph rewrite (auto_mixed_precision) is on, so the exported "
            "graph would be verified in low precision. Turn it off for the export: "
            "tfamp.disable_graph_rewrite(), or tfamp.disable()."
        )


def states(model: keras.Model) -> list[keras.Variable]:
    """Returns what a call in inference may change: seeds, recurrent states, counts."""
    variables = list(model.non_trainable_variables)
    for layer in structure.layers(model):
        variables += keras.tree.flatten(getattr(layer, "states", None) or ())
    return variables


def _restorer(model):
    before = [(each, tf.identity(each.value)) for each in states(model)]

    def put_back():
        for variable, value in before:
            variable.assign(value)

    return put_back


def run(job: Job, call: Callable) -> dict[str, Any]:
    """Returns the outputs of `call` for the samples, by name.

    From the states that the model had, which are those that are saved.
    """
    job.put_back()
    advice = "cannot be called on the sample inputs; check or pass `sample_inputs`"
    with model_inputs.explained(job.model, advice):
        outputs = call(job.samples)
    if isinstance(outputs, dict):
        return dict(outputs)
    # The names that TensorFlow gives the outputs of a signature.
    return {f"output_{i}": x for i, x in enumerate(keras.tree.flatten(outputs))}


def run_afresh(job: Job, call: Callable) -> dict[str, Any]:
    """As `run`; a `tf.function` in the model neither keeps nor leaves a trace."""
    with assigned.assign(job.model, {}):
        return run(job, call)


def plain_call(model: keras.Model) -> Callable:
    """Returns the model in inference as a function of its inputs."""
    return lambda inputs: model(inputs, training=False)


def write(job: Job, folder: pathlib.Path, call: Callable) -> Served:
    """Writes `call`, of the model's inputs, as a SavedModel, and reloads it.

    The precision to write in is assigned to the job's model.
    """
    job.put_back()
    archive: Any = keras.export.ExportArchive()
    with model_inputs.explained(job.model, "cannot be exported"):
        for table in _tables(job.model):
            archive.track(table)
        archive.add_endpoint("serve", call, [job.specs])
        archive.write_out(str(folder), verbose=False)
        expected = run_afresh(job, call)
        serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
        state, samples = policy.read(), job.named_samples

        def reloaded():
            with policy.scope(state):  # TF32, too, whenever it is timed.
                return serve(**samples)

        layers = tuple(described.describe_layers(job.model))
        return Served(serve, reloaded, reloaded(), expected, layers)


def _tables(model):
    """Returns lookup tables. Variables are tracked by what reads them.

    To track the model as well would store each variable twice, as `model.export` does
    (Keras 3.10 to 3.15).
    """
    return [
        x
        for layer in structure.layers(model)
        for x in vars(layer).values()
        if isinstance(x, tf.saved_model.experimental.TrackableResource)
    ]


# ---- Weights in 16 bits ----


def half_weights(model: keras.Model, format_name: str) -> Callable:
    """Returns the model in inference as a function that reads 16-bit copies of weights.

    Each is cast up where it is read; the model keeps its own. Stored so are float32
    weights of two axes or more, that is kernels and tables. What has one axis or none
    (biases, scales, the statistics of normalization, counters) is a thousandth of the
    bytes, and is not converted.

    Args:
      model: A built model, in the precision that it is to be served in.
      format_name: "bfloat16" or "float16".

    Raises:
      ExportError: If there are no such weights, or one is beyond the format's range.
    """
    large = [v for v in model.weights if v.dtype == "float32" and len(v.shape) > 1]
    if not large:
        raise errors.ExportError(
            f"`half_weights=True` stores float32 weights of two axes or more. "
            f"Received: model {model.name!r}, which has none."
        )
    with tf.init_scope():
        copies = [_copy(variable, format_name) for variable in large]
    ids = {id(variable) for variable in large}
    others = [v for v in states(model) if id(v) not in ids]

    def call(inputs):
        wide = [
            (variable, tf.cast(copy, "float32"))
            for variable, copy in zip(large, copies, strict=True)
        ]
        with keras.StatelessScope(wide) as scope:
            outputs = model(inputs, training=False)
        for variable in others:  # A scope collects updates, and makes none.
            if (value := scope.get_current_value(variable)) is not None:
                variable.assign(value)
        return outputs

    return call


def _copy(variable, format_name):
    low = tf.cast(keras.ops.convert_to_tensor(variable), format_name)
    finite = tf.math.is_finite(tf.cast(low, "float32"))
    if not bool(tf.reduce_all(finite | ~tf.math.is_finite(variable.value))):
        raise errors.ExportError(
            f"{format_name} overflows in weight {variable.path!r}. Store it in "
            'bfloat16, by precision="mixed_bfloat16", or leave out `half_weights`.'
        )
    return tf.Variable(low, trainable=variable.trainable, name=variable.name)


# ---- In float32 ----


def write_float32(job: Job, folder: pathlib.Path) -> Served:
    """Writes the model, to which float32 is assigned, and verifies it."""
    served = write(job, folder, plain_call(job.model))
    if low := report.read_graph(folder).low:
        raise errors.ExportError(
            "The graph of the float32 model is not float32 throughout. Received: "
            f"{errors.examples(low)}. Let the layers cast to "
            "`self.compute_dtype`, and not to these dtypes, in their `call`."
        )
    check_float32(served)
    return served


def check_float32(served: Served) -> None:
    """Raises ExportError if outputs are not those of the float32 model."""
    if shapes(served.outputs) != shapes(served.expected):
        raise mismatch("float32", served, "of other names or shapes", "those")
    rounding = sum("int" in x.policy.split("_from_")[0] for x in served.layers)
    share = rounding * _MAX_STEP or MAX_RELATIVE_DIFFERENCE
    for row in report.compare(served.outputs, served.expected):
        most = share * report.largest(served.expected[row.name])
        if row.max_absolute > most:
            other = f"{row.name!r} differing by {row.max_absolute:.1e}"
            raise mismatch("float32", served, other, f"at most {most:.1e}")


def mismatch(
    precision: str, served: Served, received: str, expected: str
) -> errors.ExportError:
    """Returns the error of an export that does not compute what was written."""
    return errors.ExportError(
        f"The exported model computes other outputs than the {precision} model. "
        f"Received: outputs {shapes(served.outputs)}, {received}. Expected: outputs "
        f"{shapes(served.expected)}, and {expected}. A layer may compute otherwise in "
        "a graph than eagerly."
    )


def shapes(outputs: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns the shapes of named arrays, sorted by name."""
    return {name: tuple(value.shape) for name, value in sorted(outputs.items())}
