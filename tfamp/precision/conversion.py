"""`set_precision`, `set_remat`: another precision, or less memory, for built models."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from absl import logging

from tfamp import errors, records
from tfamp.facts import formats, modes
from tfamp.inspect import quantized, structure
from tfamp.precision import assigned, described, model_hooks, plan, rules
from tfamp.precision import overrides as overriding


class ConversionError(errors.TfampError, RuntimeError):
    """A model cannot be converted to another precision."""


def set_precision(
    model: keras.Model, mode: str, overrides: Mapping[str, str] | None = None
) -> keras.Model:
    """Changes the precision of a built, trained or loaded model, in place.

    Weights keep their values: variables are float32 in every mode, 16-bit variables are
    widened, which is exact, and the integers of quantized layers stay. float8 is that
    of Keras' `quantize`, in large products. No global changes; the TF32 flag belongs to
    the process, so set it by `tfamp.enable`. The first of these rules that applies
    decides the precision of a layer:

        the override that matches its path
        the override of the nearest layer or model around it
        float32, by a rule: outputs, softmax, raw values and so on (docs/hardware.md)
        float32 that it was made with, beside layers of 16 bits
        the mode

    `describe_layers` and the log say which one applied. Softmax inside an attention
    layer has the precision of that layer. Layers of float64, integers and strings stay.

    The model's own functions are traced again in the new precision. A custom
    `tf.function` that was traced before keeps the old one. A compiled model stays
    compiled; if float16 layers train now, its optimizer is wrapped as `compile` would
    do. Train the model under `tfamp.enable`: otherwise bias gradients in bfloat16 are
    TensorFlow's, which are wrong on a CPU.

    A saved file holds the precision of the layers that the model's configuration names.
    Layers that a class creates itself (inside attention layers, in subclassed models)
    get the precision of their class when the model is loaded. The log warns of them;
    call `set_precision` again after loading.

    Args:
      model: A built `keras.Model` of any kind.
      mode: "float32", "tf32", "mixed_bfloat16", "mixed_float16" or "float8".
      overrides: {pattern: mode}; a pattern is a regular expression that matches the
        path of a layer, or its end after a `/` (`describe_layers(model)` lists them).

    Returns:
      The model itself.

    Raises:
      OverrideError: If overrides are malformed, match no layer or contradict one
        another; it lists all problems and the known paths.
      ValueError: If there is no such mode, or the model is not built.
      ConversionError: If an optimizer was built for weights of 16 bits, or if float8
        finds no layer, or an optimizer that was built before. No layer is changed.

    Example:
      tfamp.set_precision(model, "mixed_bfloat16", {"encoder/.*": "float32"})
    """
    planned = _checked_plan(model, mode, overrides)
    _check_model(model, planned)
    trains = getattr(model, "train_function", None) is not None
    record, was_set = records.of(model), records.of(model).precision_is_set
    record.precision_is_set = True
    try:
        assigned.keep(model, planned, takes_over=True)
    except BaseException:
        record.precision_is_set = was_set
        raise
    if lost := described.unsaved(planned):
        logging.warning("%s", lost)
    if model.compiled and model.optimizer is not None:
        _scale_loss(model)
    if trains:  # By a callback, in the middle of `fit`.
        model.make_train_function()
    _log(model, planned.mode)
    return model


def _checked_plan(model, mode, overrides):
    chosen = modes.get_mode(mode)
    parsed = overriding.parse(chosen, overrides)
    structure.check_built(model)
    planned = plan_of(model, chosen, parsed)
    planned.check(planned.matched)
    return planned


@contextlib.contextmanager
def precision_scope(
    model: keras.Model, mode: str, overrides: Mapping[str, str] | None = None
) -> Iterator[keras.Model]:
    """Scopes `set_precision`: afterwards the model computes as before.

    For what needs more precision than training does, such as gradients by inputs
    (saliency, FGSM), which float16 loses. Nothing else may use the model meanwhile. A
    `tf.function` of your own that was traced before keeps its precision.

    Args:
      model: A built `keras.Model` of any kind.
      mode: As for `set_precision`.
      overrides: As for `set_precision`.

    Yields:
      The model itself.

    Raises:
      OverrideError: As `set_precision`.
      ValueError: If there is no such mode, or the model is not built.

    Example:
      with tfamp.precision_scope(model, "float32"), tf.GradientTape() as tape:
        tape.watch(image)
        score = model(image)[:, label]
      saliency = tape.gradient(score, image)
    """
    planned = _checked_plan(model, mode, overrides)
    with assigned.assigned(model, planned):
        yield model


def set_remat(model: keras.Model, patterns: Sequence[str] | None) -> keras.Model:
    """Makes a built model recompute layers in the backward pass, in place.

    Such a layer keeps its inputs and weights for the gradients, but no activations.
    This saves activation memory for the time of its forward pass. Dropout draws the
    same numbers both times; statistics, losses and metrics are updated once. A layer
    that holds others, such as a transformer block, saves most. Predictions, exports and
    saved files do not change. It does not need `tfamp.enable`.

    The model's own functions are traced again; a custom `tf.function` that was
    traced before is unchanged.

    Args:
      model: A built `keras.Model` of any kind.
      patterns: Regular expressions that match the path of a layer, or its
        end after a `/` (`describe_layers(model)` lists them). Of nested layers that
        match, the outermost is recomputed. None or () recomputes no layer.

    Returns:
      The model itself.

    Raises:
      OverrideError: If a pattern is malformed or matches no layer.
      ValueError: If the model is not built.

    Example:
      tfamp.set_remat(model, ["block_.*"])
    """
    parsed = overriding.parse_remat(patterns)
    structure.check_built(model)
    planned = plan.Plan(model, modes.get_mode("float32"), remat=parsed)
    planned.check(planned.matched)
    trains = getattr(model, "train_function", None) is not None
    with assigned.EXCLUSIVE:
        records.of(model).remat_is_set = True
        layers = structure.layers(model)
        if assigned.recompute(layers, planned.remat or {}):
            assigned.assign(model, {})
    if trains and model.train_function is None:  # By a callback, in `fit`.
        model.make_train_function()
    return model


def plan_of(
    model: keras.Model,
    mode: modes.Mode,
    parsed: overriding.Overrides = (),
    inputs: Any = None,
) -> plan.Plan:
    """Returns the plan that `set_precision` has for a model.

    Args:
      model: A built model.
      mode: The mode.
      parsed: What `overrides.parse` returned.
      inputs: A batch, structured as the model takes it; without one, the layers that
        compute the outputs are not known of a model that records no inputs.
    """
    layers = [plan.made_with(x).compute_dtype for x in described.weighted(model)]
    mixes = mode.policy != "float32" and not set(formats.LOW).isdisjoint(layers)
    keeps = plan.keeps_float32_made if mixes else plan.keeps_nothing
    return plan.Plan(model, mode, parsed, traced(model, mode, inputs), keeps)


def traced(model: keras.Model, mode: modes.Mode, inputs: Any = None) -> rules.Traced:
    """Returns what a mode needs from a trace of a model; else logs why not."""
    if mode.policy == "float32":
        return rules.UNTRACED
    try:
        return rules.traced_by(model, inputs)
    except errors.ExportError as error:
        or_else = ", or call the model under `tfamp.enable` first"
        described.tell_of_untraced(model, error, or_else)
        return rules.UNTRACED


def as_served(model: keras.Model, mode: modes.Mode, inputs: Any = None) -> plan.Plan:
    """Returns the plan of a model that is exported in a mode.

    Layers of 16 bits get the mode's, and those of float32 beside them stay. A model
    without any gets what `set_precision` would give it.
    """
    dtypes = {layer.compute_dtype for layer in structure.layers(model)}
    if dtypes.isdisjoint(formats.LOW):
        return plan_of(model, mode, (), inputs)
    return plan.Plan(model, mode, keeps=plan.keeps_float32_now)


def _check_model(model, planned):
    is_built = getattr(getattr(model, "optimizer", None), "built", False)
    low = [v.path for v in model.trainable_variables if v.dtype in formats.LOW]
    if low and is_built:
        raise ConversionError(
            "The optimizer holds slots of weights in 16 bits, which would be widened. "
            f"Received: {errors.examples(low)}. `compile` the model with a new "
            "optimizer first."
        )
    if not planned.mode.product_format:
        return
    layers = structure.layers(model)
    chosen = [x for x in layers if planned.rows.get(id(x), "?")[0].startswith("float8")]
    if not chosen:
        whys = {quantized.why_not_float8(x) for x in layers if x.weights}
        raise ConversionError(
            f"No layer of {model.name!r} computes in float8: {errors.examples(whys)}. "
            "Name smaller layers in `overrides`, or use 'mixed_bfloat16'."
        )
    quantized.check_graph(model, True)
    if is_built and any(quantized.quantization_of(x) is None for x in chosen):
        raise ConversionError(
            "float8 adds variables for its scales, which the optimizer was not built "
            "for. `compile` the model with a new optimizer first."
        )


def _scale_loss(model):
    with model.distribute_strategy.scope():
        wrapped = model_hooks.scaled(model)
    if wrapped is not model.optimizer:
        model.optimizer, model.train_function = wrapped, None
        if getattr(model, "_compile_config", None):  # Keras <= 3.15; what a file holds.
            model._compile_config.config["optimizer"] = wrapped


def _log(model, mode):
    rows = described.describe_layers(model)
    others = [
        f"{row.path}: {row.policy} ({row.reason})"
        for row in rows
        if row.policy != mode.policy
    ]
    logging.info(
        "set_precision: %d layers, %d of them not %s: %s",
        *(len(rows), len(others), mode.policy, errors.examples(others) or "none"),
    )
