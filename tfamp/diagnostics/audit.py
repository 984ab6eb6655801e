"""`audit`: why training in 16 bits is not faster, and what would make it so."""

import itertools
from collections.abc import Iterable
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.diagnostics import (
    audit_arguments,
    audit_report,
    collect,
    devices,
    estimates,
    format_rules,
    model_facts,
    run_rules,
    shape_rules,
    timing,
    xla_choice,
)
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.kernels import bias_gradient
from tfamp.precision import model_inputs, policy

_BATCH_SIZE = 32  # Keras' own default in `fit`.
_UNKNOWN_SIZE = 128  # Of other dimensions that the model leaves open.
_SPEED_RULES = (*format_rules.RULES, *shape_rules.RULES, *run_rules.SPEED_RULES)


def audit(
    model: keras.Model,
    *,
    batch_size: int | None = None,
    inputs: Any = None,
    device: devices.Device = None,
    jit_compile: bool | Literal["auto"] | None = None,
    bias_gradient_fixed: bool | None = None,
    tensor_float_32: bool | None = None,
    rewrite: str | None = None,
    dataset: Iterable | None = None,
    pipeline_seconds: float | None = None,
    step_seconds: float | None = None,
) -> audit_report.AuditReport:
    """Says why a model does not train faster in 16 bits, in order of effect.

    The model is traced once, in training mode; nothing is trained and nothing is
    changed. Looked at are: formats without a fast unit; XLA on or off against what is
    faster there; float32 layers and operations in a 16-bit model; sizes that miss the
    alignment of Tensor Cores; channels first or last; batches too small to fill the
    device; input that is slower than the step; casts between layers. And accuracy:
    16-bit outputs, weights and bias gradients, float16 without loss scaling.

    Args:
      model: A built model of any kind; it need not be compiled.
      batch_size: Examples in a batch; default 32, or that of `inputs` or `dataset`.
      inputs: A batch of arrays, structured as the model takes them. Needed where the
        model does not tell its inputs; better where it leaves sizes open.
      device: None for this host's training device, or another: a key of
        `device_table` such as "a100", an entry of it, or a `DeviceDescription`.
      jit_compile: Whether XLA compiles the step. "auto": as Keras decides on the
        device (on GPUs where all layers have XLA, on CPUs never). None: as the model
        was compiled, else "auto".
      bias_gradient_fixed: Whether bias gradients are kept from being summed in
        bfloat16. None: as it stands, that is under `tfamp.enable()`.
      tensor_float_32: Whether float32 products may use TF32. None: as it stands.
      rewrite: Dtype that TensorFlow's graph optimizer rewrites float32 products to,
        "bfloat16" or "float16". None: as it stands, on this host's device.
      dataset: Batches of training data; drawing them is timed, and a step unless
        `step_seconds` is given. Elements are inputs, or tuples that start with them;
        what is judged, and timed, is its first batch unless `inputs` is given.
      pipeline_seconds: The time to draw a batch, instead of `dataset`.
      step_seconds: The time of a step on data that are at hand.

    Returns:
      An `AuditReport`.

    Raises:
      ValueError: If the model is not built, its inputs are not known, times are
        asked for a device that this host does not have, or an argument makes no sense
        (all that do not are told at once); TypeError for arguments of other types.

    Example:
      print(tfamp.audit(model, batch_size=64, device="a100"))
    """
    audit_arguments.check_model(model)
    about = devices.subject(device)
    audit_arguments.check(
        about,
        batch_size=batch_size,
        jit_compile=jit_compile,
        bias_gradient_fixed=bias_gradient_fixed,
        tensor_float_32=tensor_float_32,
        rewrite=rewrite,
        dataset=dataset,
        pipeline_seconds=pipeline_seconds,
        step_seconds=step_seconds,
    )
    inputs, batch_size = _batch(dataset, inputs, batch_size)
    specs, size, notes = _specs(model, inputs, batch_size)
    facts = collect.collect(model, specs, size, notes)
    if rewrite is None and not about.simulated:
        rewrite = graph_rewrite.requested_dtype()
    xla = xla_choice.choose(model, jit_compile, about, rewrite)
    if dataset is not None:
        pipeline_seconds, step_seconds = _measure(
            model, dataset, inputs, xla.jit_compile, pipeline_seconds, step_seconds
        )
    situation = estimates.Situation(
        subject=about,
        jit_compile=xla.jit_compile,
        tensor_float_32=_or_else(tensor_float_32, policy.read().tensor_float_32),
        graph_rewrite=rewrite,
        bias_gradient_fixed=_or_else(bias_gradient_fixed, bias_gradient.installed()),
        step_seconds=step_seconds,
        pipeline_seconds=pipeline_seconds,
        xla_possible=xla.possible,
    )
    notes = (*facts.notes, *xla.notes, *_times(pipeline_seconds, step_seconds))
    return examine(facts._replace(notes=notes), situation)


def examine(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> audit_report.AuditReport:
    """Applies every rule to the facts; a pure function."""
    if situation.graph_rewrite and not situation.jit_compile:
        facts = _rewritten(facts, situation.graph_rewrite)
    if situation.uses_cudnn:
        facts = _on_cudnn(facts)
    speed = [found for rule in _SPEED_RULES for found in rule(facts, situation)]
    speed.sort(key=lambda finding: -finding.effect)
    accuracy = [x for rule in run_rules.ACCURACY_RULES for x in rule(facts, situation)]
    return audit_report.AuditReport(
        model=facts.name,
        device=situation.device.label,
        simulated=situation.subject.simulated,
        batch_size=facts.batch_size,
        jit_compile=situation.jit_compile,
        flops=facts.flops,
        formats=_formats(facts, situation),
        findings=(*speed, *accuracy),
        notes=facts.notes,
    )


def _rewritten(facts, dtype):
    """The facts after a graph rewrite: it takes every float32 product (its allowlist).

    Which other operations follow depends on the graph; they are not counted as float32.
    """
    return facts._replace(
        layers=tuple(
            layer._replace(
                float32_elements=0,
                products=tuple(
                    p._replace(dtype=dtype) if p.dtype == "float32" else p
                    for p in layer.products
                ),
            )
            for layer in facts.layers
        )
    )


def _on_cudnn(facts):
    """The facts where cuDNN runs each recurrent layer it can in one kernel."""
    return facts._replace(
        layers=tuple(
            layer
            if layer.cudnn_kernels is None
            else layer._replace(
                kernels=layer.cudnn_kernels, elements=0, float32_elements=0
            )
            for layer in facts.layers
        )
    )


def _formats(facts, situation):
    counts: dict[str, int] = {}
    for product in facts.products:
        name = situation.format_of(product)
        counts[name] = counts.get(name, 0) + product.flops
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {name: flops / facts.flops for name, flops in ordered if flops}


def _or_else(value, default):
    return default if value is None else value


def _batch(dataset, inputs, batch_size):
    """Returns the batch that is judged, if there is one, and the batch size."""
    if dataset is None:
        return inputs, batch_size
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("`dataset` must have batches. Received one without any.")
    drawn = keras.utils.unpack_x_y_sample_weight(first)[0]
    sizes = {_size(x) for x in keras.tree.flatten((drawn, inputs)) if x is not None}
    if batch_size is not None:
        sizes.add(batch_size)
    if len(sizes) > 1:
        raise ValueError(
            "`dataset`, `inputs` and `batch_size` must agree. Received: batches of "
            f"{', '.join(map(str, sorted(sizes)))}."
        )
    return drawn if inputs is None else inputs, batch_size


def _size(array):
    shape = tuple(tf.convert_to_tensor(array).shape)
    if not shape or not shape[0]:
        raise ValueError(
            "A batch must have examples in its first dimension. Received: an array of "
            f"shape {shape}."
        )
    return shape[0]


def _specs(model, inputs, batch_size):
    """Returns specs without open sizes, the batch size, and what was assumed."""
    try:
        declared, samples = model_inputs.describe(model, inputs)
    except errors.ExportError as error:
        text = str(error).replace("`sample_inputs`", "`inputs`")
        raise ValueError(text) from error
    except (TypeError, ValueError) as error:  # No arrays.
        raise ValueError(
            "`inputs` must be a batch of arrays, structured as the model takes them. "
            f"Received: {type(inputs).__name__}: {error}"
        ) from error
    if inputs is not None:
        size = _size(keras.tree.flatten(samples)[0])
        if batch_size not in (None, size):
            raise ValueError(
                "`batch_size` must be that of `inputs`. Received: "
                f"batch_size={batch_size}, inputs of {size}."
            )
        return keras.tree.map_structure(_spec_of, samples), size, ()
    size = batch_size or _BATCH_SIZE
    notes = []

    def closed(spec):
        first = [_or_else(extent, size) for extent in spec.shape[:1]]
        rest = [_or_else(extent, _UNKNOWN_SIZE) for extent in spec.shape[1:]]
        if None in spec.shape[1:]:
            notes.append(f"{spec.name!r} {tuple(spec.shape)}")
        return tf.TensorSpec([*first, *rest], spec.dtype, spec.name)

    specs = keras.tree.map_structure(closed, declared)
    if notes:
        notes = [
            f"open sizes of inputs were taken to be {_UNKNOWN_SIZE}: "
            f"{', '.join(notes)}; pass `inputs` for your own"
        ]
    return specs, size, tuple(notes)


def _times(draw, step):
    times = (("a batch takes", draw, "to draw"), ("a step takes", step, ""))
    return [f"{a} {1e3 * t:.2f} ms {b}".rstrip() for a, t, b in times if t is not None]


def _spec_of(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _measure(model, dataset, inputs, jit, draw, step):
    if step is None:
        step = timing.step_seconds(model, inputs, jit)
    if draw is None:
        draw = timing.pipeline_seconds(itertools.islice(dataset, None))
    return draw, step
