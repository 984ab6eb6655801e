"""`audit`: why training in 16 bits is not faster, and what would make it so."""

import textwrap
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import checks, errors, progress, tables
from tfamp.diagnostics import launch_rules, layer_facts, rules, training_step
from tfamp.diagnostics.findings import Finding, percent
from tfamp.facts import formats, hardware, names
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import launches as counts
from tfamp.inspect import model_inputs, structure
from tfamp.kernels import bias_gradient
from tfamp.precision import described, model_hooks, policy, status
from tfamp.storage import recomputed
from tfamp.updates import compiled

_BATCH_SIZE = 32  # Keras' own default in `fit`.
_UNKNOWN_SIZE = 128  # Of other dimensions that the model leaves open.


class AuditReport(NamedTuple):
    """Reasons why a model does not train faster in 16 bits; `print` it.

    Attributes:
      model: Name of the model.
      device: Name of the device that the audit is for.
      simulated: Whether that device is not one of this host.
      batch_size: Examples in a batch.
      jit_compile: Whether the audit assumes that XLA compiles the training step.
      multiplications: Multiplications of all layers in a forward pass.
      formats: Format -> share of those multiplications, largest first.
      findings: Findings about speed, largest share first, then those about accuracy.
      notes: Assumptions, layers that are not counted, and layers that tfamp keeps in
        float32.
      launches: What a step starts on a GPU; None for other devices, and where a note
        says why it is not counted.
      cost: What that costs, beside arithmetic and memory; None without `launches`.
      verdict: What it means that there are no findings, and what to try next; "" if
        there are some.
    """

    model: str
    device: str
    simulated: bool
    batch_size: int
    jit_compile: bool
    multiplications: int
    formats: dict[str, float]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    launches: counts.Launches | None = None
    cost: launch_rules.StepCost | None = None
    verdict: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 3, **tables.plain(self)}

    def to_markdown(self) -> str:
        """Returns the report as Markdown, readable as plain text."""
        formats = [f"{name} {percent(x)}" for name, x in self.formats.items()]
        said, table = [], ""
        if self.launches and self.cost:
            said, table = launch_rules.describe(self.launches, self.cost)
        items = [
            f"On {self.device}{' (simulated)' if self.simulated else ''}, batch size "
            f"{self.batch_size}, XLA {'on' if self.jit_compile else 'off'}.",
            f"{self.multiplications / 1e6:,.1f} million multiplications by layers in a "
            f"forward pass: {', '.join(formats) or 'none known'}.",
            *said,
            *self.notes,
        ]
        for each in self.findings:
            share = "accuracy" if each.share is None else percent(each.share)
            items.append(f"**{share}: {each.what}.** {each.evidence}. -> {each.advice}")
        if self.verdict:
            items.append(self.verdict)
        wrapper = textwrap.TextWrapper(
            88, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapper.fill(f"- {item}") for item in items]
        lines += [
            "- If results are wrong, `tfamp.compare_precision` shows in which layer "
            "errors begin.",
            *(["", table] if table else []),
        ]
        return "\n".join([f"# Audit of {self.model!r}", "", *lines])

    __str__ = __repr__ = _repr_markdown_ = to_markdown


def audit(
    model: keras.Model,
    *,
    batch_size: int | None = None,
    inputs: Any = None,
    device: str | hardware.DeviceDescription | None = None,
    jit_compile: bool | None = None,
    rewrite: str | None = None,
    verbose: int = 1,
) -> AuditReport:
    """Reports why a model does not train faster in 16 bits, largest effect first.

    The model is traced once, in training mode, and for a GPU its training step, as if
    on it: with Keras' step, the model's loss and metrics, and a copy of its optimizer.
    Nothing is trained, measured or changed; a finding carries the share of the model
    that it concerns. `status()` says it, too, if launches bound a step on this host.
    Call it under `tfamp.enable()` if the model trains there: the audit reads the TF32
    flag, the bias gradients and the compiled updates that are in force, and agrees with
    what `enable` chose itself.

    Args:
      model: A built model of any kind; it need not be compiled.
      batch_size: Examples in a batch. Default: that of `inputs`, else 32.
      inputs: A batch of arrays, structured as the model takes them. Required if the
        model does not record its inputs; useful if it leaves sizes open. The arrays get
        the dtypes that the model declares.
      device: A name such as "a100", or a `DeviceDescription`. None: the training device
        of this host.
      jit_compile: Whether XLA compiles the step. None: as the model was compiled on
        this host; else Keras' default, XLA on accelerators if all layers support it.
      rewrite: "bfloat16" or "float16" if TensorFlow's graph rewrite converts float32
        products. None: the rewrite that is in force on this host's device.
      verbose: 1: a line, on standard error, if it takes long; 0: none.

    Returns:
      An `AuditReport`.

    Raises:
      ValueError: If the model is not built, its inputs are unknown or do not fit, or
        the device is unknown.
      TypeError: If `model` is not a Keras model.

    Example:
      print(tfamp.audit(model, batch_size=64, device="a100"))
    """
    structure.check_built(model)
    if rewrite not in (None, *formats.LOW):
        raise ValueError(
            f"`rewrite` must be 'bfloat16', 'float16' or None. Received: {rewrite!r}."
        )
    if batch_size is not None:
        checks.check_count("batch_size", batch_size)
    description = hardware.find_device(device)
    with progress.Progress(verbose, f"tracing a training step of {model.name!r}"):
        return _audit(model, batch_size, inputs, description, jit_compile, rewrite)


def _audit(model, batch_size, inputs, description, jit_compile, rewrite):
    simulated = description not in hardware.read_devices()
    try:
        specs, size, notes = _specs(model, inputs, batch_size)
        with model_hooks.as_enabled(model, specs):
            layers = layer_facts.collect(model, specs)
    except errors.ExportError as error:
        raise ValueError(str(error).replace("`sample_inputs`", "`inputs`")) from error
    without_xla = training_step.without_xla(model, description)
    way = jit_compile, rewrite, not without_xla
    step = _step(model, layers, size, description, simulated, *way)
    notes += _of_layers(model, step)
    if step.jit_compile:
        notes.append(_of_sizes(model))
    if without_xla and description.kind == "GPU":
        notes.append(f"Keras turns XLA off for {errors.examples(without_xla)}.")
    more, counted, cost = _launches(model, specs, step, notes)
    bound = [each.what for each in more if each.rule == "launch_bound"]
    if bound and not simulated:
        status.NOTES[f"but a step of {model.name!r}: {bound[0]} (tfamp.audit)"] = None
    findings = rules.examine(step, more)
    return AuditReport(
        model=model.name,
        device=description.label,
        simulated=simulated,
        batch_size=size,
        jit_compile=step.jit_compile,
        multiplications=step.multiplications,
        formats=step.formats(),
        findings=findings,
        notes=tuple(notes),
        launches=counted,
        cost=cost,
        verdict="" if findings else _nothing_found(step, cost),
    )


def _step(model, layers, size, device, simulated, jit_compile, rewrite, allows_xla):
    """Returns what the rules look at: the layers, and how a step of theirs is run."""
    if rewrite is None and not simulated:
        rewrite = graph_rewrite.requested_dtype()
    if jit_compile is None and model.compiled and (model.jit_compile or not simulated):
        jit_compile = model.jit_compile
    elif jit_compile is None:  # As Keras decides.
        jit_compile = device.kind != "CPU" and allows_xla and not rewrite
    eager = bool(model.compiled and model.run_eagerly)
    scaling = keras.optimizers.LossScaleOptimizer
    return rules.TrainingStep(
        device,
        layers,
        size,
        jit_compile=bool(jit_compile) and not eager,
        allows_xla=allows_xla,
        runs_eagerly=eager,
        scales_loss=isinstance(model.optimizer, scaling) if model.compiled else None,
        rewrite=rewrite,
        tensor_float_32=policy.read().tensor_float_32,
        sums_biases=bool(bias_gradient.HOOKS.in_force()),
        is_unscaled=model_hooks.is_unscaled(),
        prefers_float32=not simulated
        and bool(described.mostly_slow(model, "bfloat16")),
    )


def _of_layers(model, step):
    """Yields what to note of single layers."""
    for what, paths in {
        "The multiplications of these are not counted": [
            x.path for x in step.layers if x.is_uncounted
        ],
        "Recomputed in the backward pass": [
            x.path for x in names.flatten_layers(model) if recomputed.describe(x)
        ],
        "Kept in float32 by tfamp": [
            f"{x.path} ({percent(share)}: {x.planned})"
            for x in step.layers
            if x.is_kept and step.is_fast
            if (share := step.share([x])) >= rules.LARGE_OUTPUT
        ],
    }.items():
        if paths:
            yield f"{what}: {errors.examples(paths)}"


def _nothing_found(step, cost):
    """Returns what that means, and what to try next."""
    mode, why = hardware.choose_mode([step.device])[:2]
    if step.prefers_float32:
        mode, why = "float32", "most of its layers are slower in 16 bits"
    if mode == "float32":
        return (
            f"Nothing found. Float32 is the fastest format here: {why}. "
            '`tfamp.audit(model, device="h100")` looks at another device.'
        )
    timed = '`tfamp.benchmark_model("my_script:build")` measures it.'
    known = cost and cost.arithmetic is not None
    if known and cost.launches > cost.arithmetic + (cost.memory or 0):
        return (
            "Nothing found. But launches take longer than what they compute: 16 bits "
            "save memory, and hardly time; a larger batch has as many launches, and "
            f"more work in each. {timed}"
        )
    return (
        "Nothing found. Formats, sizes and casts are as 16 bits need them; whether "
        f"they are faster was not timed: {timed}"
    )


def _launches(model, specs, step, notes):
    """Returns findings about the launches of a step, their counts, and what they cost.

    Adds to `notes` what was assumed, or why they are not counted.
    """
    if step.device.kind != "GPU" or step.runs_eagerly:
        return [], None, None
    try:
        graph, assumed = training_step.trace(
            model, specs, step.device, step.jit_compile
        )
        if step.jit_compile:
            counted = counts.count_compiled(graph)
        else:
            counted = counts.count(graph, step.device)
        refused = counts.refused_by_xla(graph)
    except Exception as error:  # The model's own code may raise anything.
        reason = " ".join(str(error).split())[:300]
        notes.append(f"Launches are not counted: {reason or type(error).__name__}")
        return [], None, None
    notes += assumed
    cost = launch_rules.cost(step, counted)
    clusters = bool(compiled.HOOKS.in_force())
    return launch_rules.findings(step, counted, cost, clusters, refused), counted, cost


def _of_sizes(model):
    """Returns what to note of sizes that vary, for each of which XLA compiles anew."""
    try:
        sizes = [x.shape[1:] for x in keras.tree.flatten(model_inputs.specs(model))]
    except errors.ExportError:  # Known from a batch alone.
        sizes = []
    text = (
        "XLA compiles a step anew for each size of a batch: "
        "dataset.batch(n, drop_remainder=True) spares the last batch of `fit` and of "
        "validation a compilation (so does tfamp.enable(), if that batch has at most "
        "three quarters of the rows)"
    )
    if any(None in shape for shape in sizes):
        text += (
            ", and a few lengths to which examples are padded, as by "
            "dataset.bucket_by_sequence_length, all but a few: the model leaves sizes "
            "open"
        )
    return text + "."


def _specs(model, inputs, batch_size):
    """Returns specs without open sizes, the batch size, and what was assumed."""
    specs, samples = model_inputs.describe(model, inputs)
    size = _BATCH_SIZE if batch_size is None else batch_size
    if inputs is not None:
        specs, size = samples, keras.tree.flatten(samples)[0].shape[0]
    if batch_size not in (None, size):
        received = f"batch_size={batch_size}, inputs of {size}"
        raise ValueError(f"`batch_size` must match `inputs`. Received: {received}.")
    is_open = any(None in x.shape[1:] for x in keras.tree.flatten(specs))

    def closed(spec):
        shape = [size, *(extent or _UNKNOWN_SIZE for extent in spec.shape[1:])]
        return tf.TensorSpec(shape[: spec.shape.rank], spec.dtype)

    note = (
        f"Unknown input sizes were assumed to be {_UNKNOWN_SIZE}; pass `inputs` to "
        "set them."
    )
    return keras.tree.map_structure(closed, specs), size, [note] if is_open else []
