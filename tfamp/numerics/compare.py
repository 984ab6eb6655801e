"""`compare_precision`: where 16 bits lose what float32 computes, call by call."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import progress
from tfamp.facts import formats, hardware, modes
from tfamp.graph_rewrite import switch
from tfamp.inspect import batches, calls, model_inputs, quantized, structure
from tfamp.numerics import backward, results, statistics
from tfamp.operators import promotion
from tfamp.precision import assigned, conversion, described


class _Pass(NamedTuple):
    """A call in one format: tensors of a graph, or their values."""

    inputs: list  # What it computes from.
    results: list  # What it computes.
    upstream: list  # Gradients of `results`; empty without a loss.
    passed: list  # Gradients of `inputs`.
    of_weights: list
    local: list  # Both by its own backward pass.


def compare_precision(
    model: keras.Model,
    inputs: Any,
    mode: str | None = None,
    *,
    targets: Any = None,
    loss: Callable[[Any, Any], Any] | str | None = None,
    loss_scale: float | None = None,
    jit_compile: bool = False,
    verbose: int = 1,
) -> results.PrecisionComparison:
    """Compares a mode with float32, for each call of each layer.

    The same weights are run twice, by assignment: in float32, and in the mode as
    `enable` and `set_precision` would give it. Then each layer runs once more in the
    mode on what float32 gave it, which shows the error that it makes itself; with a
    loss, its backward pass, too. Inference: no dropout, no new statistics. A layer that
    only calls others, or returns what it is given, has no row; one with its own
    operations has a row for those. What runs inside a loop, as the cell of a recurrent
    layer, belongs to the layer around it. Memory: some ten times the activations.

    Args:
      model: A built model of any kind; its precision, weights, optimizer and random
        state are afterwards as before.
      inputs: A batch, structured as the model takes it.
      mode: "mixed_bfloat16", "mixed_float16" or "float8", whose scales are those of
        this batch; None: the precision that it has.
      targets: Targets of the batch, for the loss.
      loss: Function of (targets, outputs in float32), a Keras loss or its name; by
        default the compiled one if `targets` are given.
      loss_scale: What the loss is multiplied by in 16 bits; by default what the
        model's optimizer scales it by, else 1.
      jit_compile: Whether XLA compiles both.
      verbose: 1: a line, on standard error, if it takes long; 0: none.

    Returns:
      A `PrecisionComparison`.

    Raises:
      TypeError: If `model` is no Keras model.
      ValueError: If it is not built; if the mode is not one of 16 bits; if the
        float32 pass itself makes NaN; if there are targets, but no loss; if inputs
        are strings.

    Example:
      print(tfamp.compare_precision(model, x, "mixed_float16"))
    """
    given = model, inputs, mode, targets, loss, loss_scale, jit_compile
    with progress.Progress(verbose, "comparing the model with float32"):
        return compare(*given)[0]


def compare(
    model,
    inputs,
    mode=None,
    targets=None,
    loss=None,
    loss_scale=None,
    jit_compile=False,
) -> tuple[results.PrecisionComparison, dict[int, tuple[float, float]]]:
    """Returns what `compare_precision` does, and what `quantized.calibrated` takes."""
    structure.check_built(model)
    chosen = None if mode is None else modes.get_mode(mode)
    dtypes = {layer.compute_dtype for layer in structure.layers(model)}
    low = {*formats.LOW} & ({chosen.compute_format} if chosen else dtypes)
    if not low:
        raise ValueError(
            f"Nothing to compare with float32: the requested mode of {model.name!r} "
            f"computes in 32 bits. Received: mode={mode!r}. Pass 'mixed_bfloat16' or "
            "'mixed_float16'."
        )
    model_inputs.check_batch("inputs", inputs)
    batches.check_shapes("inputs", model, inputs)
    batches.check_rows(model, inputs, targets if loss is None else None)
    inputs = keras.tree.map_structure(as_float32, inputs)
    has_loss = targets is not None or loss is not None
    objective = objective_of(model, inputs, targets, loss) if has_loss else None
    scale = _scale_of(model) if loss_scale is None else loss_scale
    planned: Any = contextlib.nullcontext()
    if chosen:
        plan = conversion.plan_of(model, chosen, inputs=inputs)
        planned = assigned.assigned(model, plan)
    with assigned.EXCLUSIVE, switch.paused():
        with assigned.float32(model):
            exact, paths = _run_exact(model, inputs, objective, jit_compile)
        _check_finite(exact, paths)
        seen = quantized.largest(model, paths, exact, scale)
        with quantized.calibrated(seen), planned:
            layers = tuple(described.describe_layers(model))
            rows = _run_low(model, inputs, objective, scale, exact, paths, jit_compile)
    if chosen and chosen.product_format:
        low.add(chosen.product_format)
    comparison = results.PrecisionComparison(
        model=model.name,
        mode=chosen.name if chosen else "as it is",
        jit_compile=jit_compile,
        loss_scale=scale if objective else None,
        recommended_loss_scale=_recommended(exact, rows) if objective else None,
        notes=tuple(_notes(low)),
        rows=tuple(rows),
        layers=layers,
    )
    return comparison, seen


def as_float32(x: Any) -> tf.Tensor:
    """Returns a tensor, in float32 if it is of floats."""
    tensor = tf.convert_to_tensor(x)
    if tensor.dtype == tf.string:
        raise ValueError(
            "Layers are compared on numbers. Received strings as inputs. Pass a model "
            "without its TextVectorization or StringLookup, and what those return."
        )
    return tf.cast(tensor, "float32") if tensor.dtype.is_floating else tensor


def objective_of(model, inputs, targets, loss):
    """Returns a function from a model's outputs to the loss, a scalar.

    Raises:
      ValueError: If there is no loss, or if it lacks targets.
    """
    if loss is None:
        if not model.compiled:
            raise ValueError(
                f"`targets` need a loss, and {model.name!r} is not compiled. Pass "
                "`loss`, a function of (targets, outputs)."
            )
        return lambda outputs: model.compute_loss(inputs, targets, outputs)
    if targets is None and isinstance(loss, str | keras.losses.Loss):
        raise ValueError(
            f"A loss needs targets. Received: loss={loss!r} and none. Pass `targets`, "
            "or batches of (inputs, targets)."
        )
    function = keras.losses.get(loss)
    return lambda outputs: tf.reduce_mean(function(targets, outputs))


def _scale_of(model):
    optimizer = model.optimizer if model.compiled else None
    return float(keras.ops.convert_to_numpy(getattr(optimizer, "dynamic_scale", 1.0)))


def _recorded(model, inputs, objective, scale, note, chosen):
    """Runs a model and its loss; returns the calls that `chosen` takes, and `note`s."""
    with tf.GradientTape() as tape:
        recorder = calls.Recorder(model, tape)
        with recorder.installed():
            outputs = model(inputs, training=False)
            if objective:
                value = objective(promotion.widened(outputs)) * scale
        with tape.stop_recording():
            own = list(filter(chosen, recorder.calls))
            sources = [(x.results, x.inputs, x.weights) for x in own]
    gradients = [([], [], [])] * len(own)
    if objective:
        gradients = backward.gradients(tape, value, sources)
    noted: list[Any] = []
    with recorder.installed():
        for each in zip(own, gradients, strict=True):
            # One after the other: all at once would need memory for all at once.
            with tf.control_dependencies(keras.tree.flatten(noted[-1:])):
                noted.append(note(recorder, *each))
    return own, noted


def _computes(call):
    """Whether a call has a row; float32 tells, where no cast is in between."""
    return call.results and not call.only_chains


def _run_exact(model, inputs, objective, jit_compile):
    """Returns values of the float32 pass, a `_Pass` for each call, and the paths."""
    paths = []

    def note(recorder, call, gradients):
        local = []
        if objective:
            _, local = backward.again(recorder, call, call.inputs, gradients[0])
        return _Pass(call.inputs, call.results, *gradients, local)

    def run(inputs):
        own, noted = _recorded(model, inputs, objective, 1.0, note, _computes)
        paths.extend((call.path, call.number) for call in own)
        return noted

    return tf.function(run, autograph=False, jit_compile=jit_compile)(inputs), paths


def _run_low(model, inputs, objective, scale, exact, paths, jit_compile):
    """Returns the rows: the pass in 16 bits beside the float32 values of each call."""
    owners = []
    # A function that stays one: calls of the same shapes share its graph, which has ten
    # times the operations of the model's, and is optimized once and not for each.
    measure = tf.function(
        _measure, autograph=False, experimental_attributes={"_noinline": True}
    )

    def run(inputs, exact):
        wide = dict(zip(paths, exact, strict=True))

        def note(recorder, call, gradients):
            beside = wide[call.path, call.number]
            return measure(*_set_beside(recorder, call, gradients, beside, scale))

        def chosen(call):
            return (call.path, call.number) in wide

        own, noted = _recorded(model, inputs, objective, scale, note, chosen)
        owners.extend(own)
        return noted

    # The calls are counted before `run` reads their values.
    measurements = tf.function(run, autograph=False, jit_compile=jit_compile)(
        inputs, exact
    )
    rows = []
    for call, (errors, counts) in zip(owners, measurements, strict=True):
        errors = [*errors.numpy().tolist(), None, None][:5]
        kinds = [*(statistics.Counts(*x) for x in counts.numpy().tolist()), None, None]
        row = call.path, call.number, _format(call), *errors, *kinds[:4]
        rows.append(results.CallPrecision(*row))
    return rows


def _set_beside(recorder, call, gradients, wide, scale):
    """Returns what a row is measured of: pairs for its errors, and for its counts."""
    upstream, passed, of_weights = gradients
    scaled = [x * scale for x in wide.upstream]
    low_upstream = _cast_as(scaled, call.results) if scaled else []
    outputs, local = backward.again(
        recorder, call, _cast_as(wide.inputs, call.inputs), low_upstream
    )
    errors = [
        (call.inputs, wide.inputs),
        (call.results, wide.results),
        (outputs, wide.results),
    ]
    counts = [(call.results, wide.results), _cast_weights(call)]
    if scaled:
        whole = [*passed, *of_weights], [*wide.passed, *wide.of_weights]
        for low, exact in (whole, (local, wide.local)):
            unscaled = [tf.cast(x, "float32") / scale for x in low]
            errors.append((unscaled, exact))
        larger = [x * scale for x in wide.of_weights]
        counts += [(upstream, scaled), (of_weights, larger)]
    return errors, counts


def _measure(errors, counts):
    return (
        tf.stack([statistics.relative_error(*pair) for pair in errors]),
        tf.stack([statistics.count_lost(*pair) for pair in counts]),
    )


def _cast_as(values, like):
    return [tf.cast(x, y.dtype) for x, y in zip(values, like, strict=True)]


def _cast_weights(call):
    wide = [tf.cast(weight, "float32") for weight in call.weights]
    low = getattr(call.owner, "compute_dtype", "float32")
    return [tf.cast(x, low) for x in wide], wide


def _format(call):
    if not isinstance(call.owner, keras.layers.Layer):
        return call.results[0].dtype.name
    is_float8 = quantized.quantization_of(call.owner) == quantized.FLOAT8
    return quantized.FLOAT8 if is_float8 else call.owner.compute_dtype


def _check_finite(exact, paths):
    for (path, _), call in zip(paths, exact, strict=True):
        gradients = [*call.passed, *call.of_weights]
        for what, values in (("outputs", call.results), ("gradients", gradients)):
            if any(bool(tf.reduce_any(tf.math.is_nan(x))) for x in values):
                raise ValueError(
                    f"The {what} of {path!r} have NaN in float32 already, so precision "
                    "is not the cause. Look for bad values in the data or the weights, "
                    "a division by 0, or a logarithm of 0."
                )


def _recommended(exact, rows):
    largest = 0.0
    for call, row in zip(exact, rows, strict=True):
        if row.format == "float16":
            tensors = [x for x in (*call.upstream, *call.of_weights) if tf.size(x)]
            largest = max([largest, *(float(tf.reduce_max(abs(x))) for x in tensors)])
    return statistics.recommended_loss_scale(largest)


def _notes(formats):
    for low in sorted(formats):
        support = hardware.format_support(low, hardware.read_devices())
        if not support.fast:
            yield f"{low} here: {support.reason}"
