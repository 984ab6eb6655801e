"""Rules of an audit: pure functions of a step, each yields what it finds.

Findings about speed have a share and are ordered by it: 1 for what slows the whole
step, for layers their share of the forward pass' multiplications, and for what moves
more than it multiplies (depthwise, casts) of the elements that layers return. It is no
estimate of time. Findings without a share are about accuracy.

References:
  NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001, 2023), 2.2
  "Tensor Core Requirements": multiples of 16 bytes are the most efficient.
  NVIDIA, "Convolutional Layers User's Guide" (2023): the same for channels; 4 are
  enough for the images of a first layer. https://docs.nvidia.com/deeplearning/performance
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tfamp import formats, hardware
from tfamp.diagnostics import layer_facts

# Smaller shares are not reported; every mixed model has some casts.
_LEAST = {"multiplications": 0.02, "elements": 0.02, "casts": 0.1}
_LARGE_OUTPUT = 0.1  # Smaller output layers are meant to be in float32.
_FEW_ROWS = 16
_LITTLE_WORK = 12.5e6  # Multiplications of a forward pass.
_MULTIPLES = {"float16": 8, "bfloat16": 8, "tf32": 4}  # 16 bytes; TF32 is in float32.
# Of an output layer in 16 bits, whatever its result is cast to.
_ROUNDING = ("softmax", "log_softmax", "sigmoid")
_EXAMPLES = 5
_EPYC = "(2 cores of an AMD EPYC)"


class Finding(NamedTuple):
    """One reason why training is slower, or less exact, than it could be.

    Attributes:
      rule: Name of the rule, e.g. "alignment".
      share: How much of the model is concerned, from 0 to 1; None for what costs
        accuracy and not speed.
      what: What was found, in one phrase.
      evidence: Why it matters, and where.
      advice: What to do.
      layers: Paths of the layers concerned, those with most work first; none where it
        is the whole step.
    """

    rule: str
    share: float | None
    what: str
    evidence: str
    advice: str
    layers: tuple[str, ...] = ()


def percent(share: float) -> str:
    """Returns a share for people: 0.123 -> "12%"."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"


def examples(names: Iterable[str]) -> str:
    """Returns at most five names as one phrase."""
    found = list(names)
    more = len(found) - _EXAMPLES
    return ", ".join(found[:_EXAMPLES]) + (f", and {more} more" if more > 0 else "")


def _pad(size, multiple):
    return -(-size // multiple) * multiple


# ---- The whole step: each rule returns what, why and advice, or nothing ----


def _fast_unit(step):
    name, best = step.narrow or "float32", hardware.choose_mode([step.device])
    unused = step.multiplications and best.mode != "float32" and not step.rewrite
    return (not step.is_fast if step.narrow else unused) and (
        f"{name} is not the fast format of this device",
        f"{name}: {step.support(name).reason}; {best.mode}: {best.reason}",
        f"build the model after tfamp.enable({best.mode!r})",
    )


def _eager(step):
    return step.runs_eagerly and (
        "the model was compiled with run_eagerly=True",
        "each operation is started by Python, one after the other",
        "compile(run_eagerly=False)",
    )


def _xla(step):
    slow = step.is_fast and step.device.kind == "CPU"
    if not step.jit_compile or not (slow or step.rewrite):
        return None
    why = (
        "XLA casts 16 bits back to float32 there: measured 0.9 times float32's speed "
        "with XLA, 1.3 to 1.7 times without (AMD EPYC with native bfloat16)"
    )
    if not slow:
        why = "what XLA compiles never passes TensorFlow's graph optimizer"
    where = "slow with 16 bits on a CPU" if slow else "bypasses the graph rewrite"
    return f"XLA is on, and {where}", why, "compile(jit_compile=False)"


def _batch(step):
    """Steps too small for a fast unit, or to pay for casting the weights."""
    few = [x for x in step.layers if 0 < x.rows < _FEW_ROWS]
    share = step.share(few)
    growth = _LITTLE_WORK / max(1, step.multiplications)
    if share >= 0.5:
        growth = max(growth, *(_FEW_ROWS / x.rows for x in few))
    return (step.is_fast and step.multiplications and growth > 1) and (
        f"too little work in a batch of {step.batch_size}",
        f"{2 * step.multiplications / 1e6:.1f} MFLOP in a forward pass, "
        f"{percent(share)} of them of fewer than {_FEW_ROWS} rows by weights that are "
        "cast from float32 each step. Measured: 0.9 times float32's speed with 1 to 4 "
        "rows by 1024 units, 1.7 times from 16 on; 1.07 times with 13 MFLOP, 1.2 times "
        f"with 50 MFLOP {_EPYC}",
        "16 bits pay from a batch of about "
        f"{_pad(math.ceil(growth * step.batch_size), 8)} on there; a GPU wants more",
    )


# ---- Layers: each rule returns a note on a layer that it concerns, or nothing ----


def _xla_off(step, x):
    off = step.allows_xla and not step.jit_compile and not step.runs_eagerly
    helps = off and step.device.kind == "GPU" and step.is_fast
    return helps and x.elements and not x.multiplications and x.compute_dtype


def _tf32(step, x):
    name = step.format_of(x)
    return step.support("tf32").supported and name == "float32" and name


def _depthwise(step, x):
    return x.depthwise and step.narrow and x.compute_dtype


def _float32_islands(step, x):
    island = x.multiplications and not x.is_narrow and step.is_fast
    meant = x.output_dtype and step.share([x]) < _LARGE_OUTPUT
    return island and not meant and percent(step.share([x]))


def _alignment(step, x):
    """Sizes that Tensor Cores take less well. CPUs pad inside oneDNN."""
    name = step.format_of(x)
    if step.device.kind != "GPU" or not step.support(name).fast:
        return None
    multiple = {role: _MULTIPLES[name] for role, _ in x.sizes} | {"image channels": 4}
    padded = [(role, size, _pad(size, multiple[role])) for role, size in x.sizes]
    return ", ".join(f"{role} {n} -> {more}" for role, n, more in padded if n != more)


def _data_format(step, x):
    # On a TPU XLA chooses the layout.
    first = x.data_format == "channels_first"
    return first and step.device.kind != "TPU" and x.data_format


def _casts(step, x):
    return x.casts and not x.output_dtype and step.narrow and x.compute_dtype


def _narrow_variables(step, x):
    narrow = x.weights and x.variable_dtype in layer_facts.NARROW
    return narrow and f"{x.weights:,} weights in {x.variable_dtype}"


def _loss_scaling(step, x):
    name = step.format_of(x)
    return step.scales_loss is False and x.weights and name == "float16" and name


def _bias_gradients(step, x):
    wrong = step.device.kind == "CPU" and not step.jit_compile and not step.sums_biases
    # Equal terms stop counting at 2 / epsilon; half of that shows already.
    many = x.has_bias and x.rows >= 1.0 / formats.float_format("bfloat16").epsilon
    return wrong and x.compute_dtype == "bfloat16" and many and f"{x.rows:,} rows"


def _outputs(step, x):
    # Whatever the result of a softmax is cast to.
    rounded = x.is_narrow and x.activation in _ROUNDING
    narrow = x.output_dtype in layer_facts.NARROW
    made = f"{x.activation or 'result'} in {x.compute_dtype}"
    return x.output_dtype and (narrow or rounded) and made


# Name: (rule, what its share is of or "accuracy", what, why, advice).
_LAYER_RULES = {
    "xla": (
        *(_xla_off, "elements", "XLA is off"),
        "XLA fuses layers that multiply nothing, and casts of weights, into other "
        "kernels",
        "compile(jit_compile=True), if all operations of the step have XLA",
    ),
    "tf32": (
        *(_tf32, "multiplications", "TF32 is off"),
        "the device has TF32 tensor cores",
        "use mode 'tf32', or a mixed mode, which leaves it on; keep it off only where "
        "float32's 24 bits are needed",
    ),
    "depthwise": (
        *(_depthwise, "elements", "depthwise or separable convolutions in 16 bits"),
        "GPUs were reported to have no fast 16-bit kernels for them "
        "(tensorflow/tensorflow#41715)",
        "measure the model in float32, too, and with these layers in float32, which "
        "costs two casts each",
    ),
    "float32_islands": (
        *(_float32_islands, "multiplications", "float32 layers in a 16-bit model"),
        "they gain nothing from 16 bits, and cast what they take and return",
        "take them out of the overrides, or drop their dtype='float32', unless their "
        "accuracy needs it; a large output layer can multiply in 16 bits if "
        "Activation('linear', dtype='float32') casts its logits",
    ),
    "alignment": (
        *(_alignment, "multiplications", "sizes that are no multiples of 16 bytes"),
        "Tensor Cores want 8 elements of 16 bits, or 4 of TF32 (NVIDIA, Matrix "
        "Multiplication Background User's Guide, 2.2)",
        "pad to the size after the arrow; unused units, channels and entries of a "
        "vocabulary do no harm, a sequence's must be masked",
    ),
    "data_format": (
        *(_data_format, "multiplications", "convolutions have their channels first"),
        "Tensor Cores want channels_last (NVIDIA, Convolutional Layers User's Guide); "
        "so does oneDNN on a CPU: three convolutions in bfloat16 were measured 3 times "
        f"slower, and slower than in float32 {_EPYC}",
        "use data_format='channels_last'",
    ),
    "casts": (
        *(_casts, "casts", "layers take results of another dtype"),
        "casts move memory and compute nothing, again in the backward pass",
        "give neighbors the same dtype: a float32 layer between 16-bit ones costs two "
        "casts",
    ),
    "narrow_variables": (
        *(_narrow_variables, "accuracy", "weights are stored in 16 bits"),
        "an update of less than half an epsilon of its weight is rounded away",
        "use a mixed mode, or float32: both store weights in float32",
    ),
    "loss_scaling": (
        *(_loss_scaling, "accuracy", "float16 layers train without loss scaling"),
        "gradients below half of float16's smallest number become 0",
        "compile after tfamp.enable(), or wrap the optimizer by tfamp.wrap_optimizer",
    ),
    "bias_gradients": (
        *(_bias_gradients, "accuracy", "bias gradients are summed in bfloat16"),
        "BiasAddGrad of TensorFlow 2.21 keeps its sum in bfloat16 on a CPU: 4096 ones "
        "make 256, and errors of 70 to 92% were measured with 4096 rows",
        "train under tfamp.enable(), which sums them rightly",
    ),
    "outputs": (
        *(_outputs, "accuracy", "outputs are not in float32"),
        "logarithms and sums of the loss start from rounded values",
        "dtype='float32' for the output layer, or after a large one "
        "Activation('linear', dtype='float32')",
    ),
}
_STEP_RULES = {"fast_unit": _fast_unit, "eager": _eager, "xla": _xla, "batch": _batch}


def examine(step: layer_facts.Step) -> tuple[Finding, ...]:
    """Returns what all rules find: speed by share, then accuracy."""
    whole = {name: rule(step) for name, rule in _STEP_RULES.items()}
    found = [Finding(name, 1.0, *texts) for name, texts in whole.items() if texts]
    for name, (rule, measure, what, why, advice) in _LAYER_RULES.items():
        notes = {x: note for x in step.layers if (note := rule(step, x))}
        share = None if measure == "accuracy" else step.share(notes, measure)
        if notes and (share is None or share >= _LEAST[measure]):
            told = examples(f"{x.path} ({note})" for x, note in notes.items())
            paths = tuple(x.path for x in notes)
            found.append(Finding(name, share, what, f"{why}: {told}", advice, paths))
    return tuple(sorted(found, key=lambda x: 1 if x.share is None else -x.share))
