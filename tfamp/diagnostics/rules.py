"""Rules of an audit: pure functions of a step, each returns its findings.

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

from tfamp import errors
from tfamp.diagnostics import findings
from tfamp.diagnostics.findings import EPYC, Finding, percent
from tfamp.diagnostics.layer_facts import LayerFacts
from tfamp.facts import formats, hardware

# Smaller shares are not reported; every mixed model has some casts.
_LEAST = {"multiplications": 0.02, "elements": 0.02, "casts": 0.1, "batch_norm": 0.1}
LARGE_OUTPUT = 0.1  # Smaller output layers are meant to be in float32.
_FEW_ROWS = 16
_LITTLE_WORK = 12.5e6  # Multiplications of a forward pass.
_BYTES_16 = {"float16": 8, "bfloat16": 8, "tf32": 4}  # TF32 is in float32.
# Of an output layer in 16 bits, whatever its result is cast to.
_ROUNDING = ("softmax", "log_softmax", "sigmoid")


class TrainingStep(NamedTuple):
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
    is_unscaled: bool = False  # Whether `enable` was called with loss_scale=False.
    prefers_float32: bool = False  # Whether `enable` would advise float32 for it.

    @property
    def multiplications(self) -> int:
        """Multiplications of a forward pass."""
        return sum(x.multiplications for x in self.layers)

    @property
    def narrow(self) -> str | None:
        """The 16-bit dtype that multiplies most, or is in most layers; else None."""
        work = _totals(
            (x.compute_dtype, max(1, x.multiplications))
            for x in self.layers
            # Models around others have a dtype, and compute nothing.
            if x.compute_dtype in formats.LOW and (x.multiplications or x.elements)
        )
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
            return layer.product_dtype or layer.compute_dtype
        if self.rewrite and not self.jit_compile:
            return self.rewrite  # It takes every float32 product: its allowlist.
        narrowed = self.tensor_float_32 and self.support("tf32").supported
        return "tf32" if narrowed else "float32"

    def formats(self) -> dict[str, float]:
        """Returns format -> share of the multiplications, largest first."""
        work = _totals((self.format_of(x), x.multiplications) for x in self.layers)
        return {name: n / self.multiplications for name, n in work.most_common() if n}

    def share(self, layers: Iterable[LayerFacts], of: str = "multiplications") -> float:
        """Returns the layers' share of the model's multiplications or elements."""
        whole = "elements" if of == "casts" else of
        total = max(1, sum(getattr(x, whole) for x in self.layers))
        return min(1.0, sum(getattr(x, of) for x in layers) / total)


def _totals(pairs):
    """Returns the sum of the numbers of each key."""
    counts = (collections.Counter({key: number}) for key, number in pairs)
    return sum(counts, collections.Counter())


# ---- The whole step ----


def _of_step(step):
    name, best = step.narrow or "float32", hardware.choose_mode([step.device])
    unused = step.multiplications and best.mode != "float32" and not step.rewrite
    if not step.prefers_float32 and (not step.is_fast if step.narrow else unused):
        yield Finding(
            *(
                "fast_unit",
                1.0,
                f"this device has units for another format than {name}",
            ),
            f"{name}: {step.support(name).reason}; {best.mode}: {best.reason}",
            f"build the model after tfamp.enable({best.mode!r})",
        )
    if step.runs_eagerly:
        yield Finding(
            *("eager", 1.0, "the model was compiled with run_eagerly=True"),
            "Python launches each operation separately",
            "compile(run_eagerly=False)",
        )
    if step.jit_compile and step.is_fast and step.device.kind == "CPU":
        yield Finding(
            *("xla", 1.0, "XLA is on, and slow in 16 bits on a CPU"),
            "XLA casts 16 bits back to float32 there: measured 0.9 times float32's "
            "speed with XLA, 1.3 to 1.7 times without (AMD EPYC with native bfloat16)",
            "compile(jit_compile=False)",
        )
    elif step.jit_compile and step.rewrite:
        yield Finding(
            *("xla", 1.0, "XLA is on, and bypasses the graph rewrite"),
            "graphs that XLA compiles do not pass through TensorFlow's graph optimizer",
            "compile(jit_compile=False)",
        )


def _of_batch(step):
    """Whether it is too small for a fast unit, or to pay for casting the weights."""
    few = [x for x in step.layers if 0 < x.rows < _FEW_ROWS]
    share = step.share(few)
    growth = _LITTLE_WORK / max(1, step.multiplications)
    if share >= 0.5:
        growth = max(growth, *(_FEW_ROWS / x.rows for x in few))
    if step.is_fast and step.multiplications and growth > 1:
        enough = 8 * math.ceil(growth * step.batch_size / 8)
        yield Finding(
            *("batch", 1.0, f"too little work in a batch of {step.batch_size}"),
            f"{2 * step.multiplications / 1e6:.1f} MFLOP in a forward pass, "
            f"{percent(share)} of them of fewer than {_FEW_ROWS} rows by weights that "
            "are cast from float32 each step. Measured: 0.9 times float32's speed with "
            "1 to 4 rows by 1024 units, 1.7 times from 16 on; 1.07 times with 13 MFLOP,"
            f" 1.2 times with 50 MFLOP {EPYC}",
            f"16 bits pay off from a batch of about {enough}; a GPU needs more",
        )


# ---- Layers: (rule, note) of those that a layer breaks; the words: `findings` ----


def _of_layer(step, x):
    dtype, name, kind = x.compute_dtype, step.format_of(x), step.device.kind
    could = step.allows_xla and not step.jit_compile and not step.runs_eagerly
    if could and step.is_fast and kind == "GPU":
        if x.elements and not x.multiplications:
            yield "xla", dtype
    if x.multiplications and name == "float32" and step.support("tf32").supported:
        yield "tf32", name
    wide = dtype not in formats.LOW
    # There `slow` has those that were measured to be.
    measured = kind == "CPU" and step.support("bfloat16").fast
    if x.depthwise and step.narrow and not measured and not x.is_kept:
        yield "depthwise", dtype
    if x.is_batch_norm and measured and dtype == "bfloat16":
        yield "batch_norm", dtype
    if x.slow and measured and dtype == "bfloat16":
        yield "slow", f"{dtype}, {x.slow} times"
    elif wide and x.multiplications and step.is_fast and not x.is_kept:
        share = step.share([x])
        if not x.output_dtype or share >= LARGE_OUTPUT:
            yield "float32_islands", percent(share)
    # CPUs pad inside oneDNN.
    if kind == "GPU" and name in _BYTES_16 and step.support(name).fast:
        wanted = [(role, n, _padded(role, n, _BYTES_16[name])) for role, n in x.sizes]
        odd = [f"{role} {n} -> {more}" for role, n, more in wanted if n != more]
        if odd:
            yield "alignment", ", ".join(odd)
    if x.data_format == "channels_first" and kind != "TPU":  # There XLA chooses.
        yield "data_format", x.data_format
    if x.casts and not x.output_dtype and step.narrow:
        yield "casts", dtype


def _padded(role, size, multiple):
    return size + -size % (4 if role == "image channels" else multiple)


def _of_accuracy(step, x):
    dtype = x.compute_dtype
    if x.weights and x.variable_dtype in formats.LOW:
        yield "narrow_variables", f"{x.weights:,} weights in {x.variable_dtype}"
    scaled = step.scales_loss is not False or step.is_unscaled
    if x.weights and not scaled and step.format_of(x) == "float16":
        yield "loss_scaling", "float16"
    wrong = step.device.kind == "CPU" and not step.jit_compile and not step.sums_biases
    # Equal terms stop counting at 2 / epsilon; half of that shows already.
    many = x.rows >= 1.0 / formats.float_format("bfloat16").epsilon
    if wrong and x.has_bias and dtype == "bfloat16" and many:
        yield "bias_gradients", f"{x.rows:,} rows"
    # Whatever the result of a softmax is cast to.
    rounded = dtype in formats.LOW and x.activation in _ROUNDING
    # The plan leaves large products in 16 bits, and a model returns float32.
    narrow = x.output_dtype in formats.LOW and not x.planned
    if x.output_dtype and (narrow or rounded):
        yield "outputs", f"{x.activation or 'result'} in {dtype}"


def examine(step: TrainingStep, more: Iterable = ()) -> tuple[Finding, ...]:
    """Returns what all rules find, and `more`: speed by share, then accuracy."""
    rows = [*_of_step(step), *more, *_of_batch(step)]
    broken = collections.defaultdict(dict)
    for x in step.layers:
        for rule, note in (*_of_layer(step, x), *_of_accuracy(step, x)):
            broken[rule][x] = note
    for rule, (of, what, why, advice) in findings.OF_LAYERS.items():
        share = of and step.share(broken[rule], of)
        if broken[rule] and (of is None or share >= _LEAST.get(rule, _LEAST[of])):
            notes = broken[rule].items()
            examples = errors.examples(f"{x.path} ({note})" for x, note in notes)
            paths = tuple(x.path for x in broken[rule])
            rows.append(Finding(rule, share, what, f"{why}: {examples}", advice, paths))
    return tuple(sorted(rows, key=lambda x: 1 if x.share is None else -x.share))
