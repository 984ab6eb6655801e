"""Rules of an audit: pure functions of a step, each says what it finds.

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

import collections
import math
from collections.abc import Iterable
from typing import NamedTuple

from tfamp import formats, hardware
from tfamp.diagnostics.layer_facts import LayerFacts

NARROW = ("float16", "bfloat16")
# Smaller shares are not reported; every mixed model has some casts.
_LEAST = {"multiplications": 0.02, "elements": 0.02, "casts": 0.1}
_LARGE_OUTPUT = 0.1  # Smaller output layers are meant to be in float32.
_FEW_ROWS = 16
_LITTLE_WORK = 12.5e6  # Multiplications of a forward pass.
_BYTES_16 = {"float16": 8, "bfloat16": 8, "tf32": 4}  # TF32 is in float32.
# Of an output layer in 16 bits, whatever its result is cast to.
_ROUNDING = ("softmax", "log_softmax", "sigmoid")
_EPYC = "(2 cores of an AMD EPYC)"


class Finding(NamedTuple):
    """One reason why training is slower, or less exact, than it could be.

    Attributes:
      rule: Its name, e.g. "alignment".
      share: Of the model that it concerns, from 0 to 1; None if it costs accuracy.
      what: What was found, in one phrase.
      evidence: Why it matters, and where.
      advice: What to do.
      layers: Paths, those with most work first; none where it is the whole step.
    """

    rule: str
    share: float | None
    what: str
    evidence: str
    advice: str
    layers: tuple[str, ...] = ()


class Step(NamedTuple):
    """A training step as the rules see it; layers with most work come first."""

    device: hardware.DeviceDescription
    layers: tuple[LayerFacts, ...]
    batch_size: int
    jit_compile: bool = False  # Whether XLA compiles it,
    allows_xla: bool = True  # and would, by what Keras knows of the layers.
    runs_eagerly: bool = False
    rewrite: str | None = None  # Dtype that graphs are rewritten to.
    tensor_float_32: bool = True  # Whether float32 products may use TF32.
    scales_loss: bool | None = None  # None without an optimizer.
    sums_biases: bool = False  # Whether bias gradients are right, as under `enable`.

    @property
    def multiplications(self) -> int:
        """Multiplications of a forward pass."""
        return sum(x.multiplications for x in self.layers)

    @property
    def narrow(self) -> str | None:
        """The 16-bit dtype that multiplies most, or is in most layers; else None."""
        work = collections.Counter()
        for x in self.layers:
            # Models around others have a dtype, and compute nothing.
            if x.compute_dtype in NARROW and (x.multiplications or x.elements):
                work[x.compute_dtype] += max(1, x.multiplications)
        return max(work, key=work.__getitem__, default=None)

    @property
    def is_fast(self) -> bool:
        """Whether the model has 16 bits, and they are fast on the device."""
        return self.narrow is not None and self.support(self.narrow).fast

    def support(self, name: str) -> hardware.PrecisionSupport:
        """Returns the support of a format on the device."""
        return hardware.describe_support(self.device)[name]

    def format_of(self, layer: LayerFacts) -> str:
        """Returns the format that a layer multiplies in; "tf32" is one."""
        if layer.compute_dtype != "float32":
            return layer.compute_dtype
        if self.rewrite and not self.jit_compile:
            return self.rewrite  # It takes every float32 product: its allowlist.
        narrowed = self.tensor_float_32 and self.support("tf32").supported
        return "tf32" if narrowed else "float32"

    def formats(self) -> dict[str, float]:
        """Returns format -> share of the multiplications, largest first."""
        work = collections.Counter()
        for x in self.layers:
            work[self.format_of(x)] += x.multiplications
        return {name: n / self.multiplications for name, n in work.most_common() if n}

    def share(self, layers: Iterable[LayerFacts], of: str = "multiplications") -> float:
        """Returns the layers' share of the model's multiplications or elements."""
        whole = "elements" if of == "casts" else of
        total = max(1, sum(getattr(x, whole) for x in self.layers))
        return min(1.0, sum(getattr(x, of) for x in layers) / total)


def percent(share: float) -> str:
    """Returns a share for people: 0.123 -> "12%"."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"


def examples(names: Iterable[str]) -> str:
    """Returns at most five names as one phrase."""
    first, more = (found := list(names))[:5], len(found) - 5
    return ", ".join(first) + (f", and {more} more" if more > 0 else "")


# ---- The whole step: each rule returns what, why and advice, or nothing ----


def _fast_unit(step):
    name, best = step.narrow or "float32", hardware.choose_mode([step.device])
    unused = step.multiplications and best.mode != name and not step.rewrite
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
    why = (
        "XLA casts 16 bits back to float32 there: measured 0.9 times float32's speed "
        "with XLA, 1.3 to 1.7 times without (AMD EPYC with native bfloat16)"
    )
    if not slow:
        why = "what XLA compiles never passes TensorFlow's graph optimizer"
    where = "slow with 16 bits on a CPU" if slow else "bypasses the graph rewrite"
    found = f"XLA is on, and {where}", why, "compile(jit_compile=False)"
    return step.jit_compile and (slow or step.rewrite) and found


def _batch(step):
    """Steps too small for a fast unit, or to pay for casting the weights."""
    few = [x for x in step.layers if 0 < x.rows < _FEW_ROWS]
    share = step.share(few)
    growth = _LITTLE_WORK / max(1, step.multiplications)
    if share >= 0.5:
        growth = max(growth, *(_FEW_ROWS / x.rows for x in few))
    enough = 8 * math.ceil(growth * step.batch_size / 8)
    return (step.is_fast and step.multiplications and growth > 1) and (
        f"too little work in a batch of {step.batch_size}",
        f"{2 * step.multiplications / 1e6:.1f} MFLOP in a forward pass, "
        f"{percent(share)} of them of fewer than {_FEW_ROWS} rows by weights that are "
        "cast from float32 each step. Measured: 0.9 times float32's speed with 1 to 4 "
        "rows by 1024 units, 1.7 times from 16 on; 1.07 times with 13 MFLOP, 1.2 times "
        f"with 50 MFLOP {_EPYC}",
        f"16 bits pay from a batch of about {enough} on there; a GPU wants more",
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
    island = x.multiplications and x.compute_dtype not in NARROW and step.is_fast
    meant = x.output_dtype and step.share([x]) < _LARGE_OUTPUT
    return island and not meant and percent(step.share([x]))


def _alignment(step, x):
    """Sizes that Tensor Cores take less well. CPUs pad inside oneDNN."""
    name = step.format_of(x)
    if step.device.kind != "GPU" or not step.support(name).fast:
        return None
    multiple = {role: _BYTES_16[name] for role, _ in x.sizes} | {"image channels": 4}
    missing = [(role, size, -size % multiple[role]) for role, size in x.sizes]
    return ", ".join(f"{role} {n} -> {n + more}" for role, n, more in missing if more)


def _data_format(step, x):
    chosen = step.device.kind == "TPU"  # By XLA.
    return not chosen and x.data_format == "channels_first" and x.data_format


def _casts(step, x):
    return x.casts and not x.output_dtype and step.narrow and x.compute_dtype


def _narrow_variables(step, x):
    note = f"{x.weights:,} weights in {x.variable_dtype}"
    return x.weights and x.variable_dtype in NARROW and note


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
    rounded = x.compute_dtype in NARROW and x.activation in _ROUNDING
    narrow = x.output_dtype in NARROW
    made = f"{x.activation or 'result'} in {x.compute_dtype}"
    return x.output_dtype and (narrow or rounded) and made


# Name: (rule, what its share is of or "accuracy", what, why, advice).
_LAYER_RULES = {
    "xla": (
        *(_xla_off, "elements", "XLA is off"),
        "XLA fuses what multiplies nothing, and casts of weights, into other kernels",
        "compile(jit_compile=True), if all operations of the step have XLA",
    ),
    "tf32": (
        *(_tf32, "multiplications", "TF32 is off"),
        "the device has TF32 tensor cores",
        "use mode 'tf32', or a mixed mode, unless float32's 24 bits are needed",
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
        "take out their override or dtype='float32' unless their accuracy needs it; a "
        "large output layer can multiply in 16 bits if Activation('linear', "
        "dtype='float32') casts its logits",
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
        f"so does oneDNN: measured 3 times slower, and slower than float32 {_EPYC}",
        "use data_format='channels_last'",
    ),
    "casts": (
        *(_casts, "casts", "layers take results of another dtype"),
        "casts move memory and compute nothing, again in the backward pass",
        "give neighbors the same dtype: a layer between others costs two casts",
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


def examine(step: Step) -> tuple[Finding, ...]:
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
