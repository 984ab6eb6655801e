"""What the benchmark measures, as plain data; every other module reads or writes it.

| record       | is                                                            |
| ------------ | ------------------------------------------------------------- |
| Cell         | what one process measures                                     |
| Row          | what came of a cell over its repeats                          |
| AccuracyRun  | one training run up to its end, with the clock read           |
| AccuracyRow  | the runs of one mode over all seeds                           |
| Calibration  | what this machine gives at most                               |
| Report       | all of it; `benchmark.json`                                   |
"""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfamp import modes

SCHEMA_VERSION = 1
FRAMEWORKS = ("tfamp", "keras", "torch")
# Columns of the benchmark -> (mode, dtype that graphs are rewritten to or None).
VARIANTS = {
    "float32": ("float32", None),
    "tf32": ("tf32", None),
    "mixed_bfloat16": ("mixed_bfloat16", None),
    "mixed_float16": ("mixed_float16", None),
    "rewrite_bfloat16": ("mixed_bfloat16", "bfloat16"),
    "rewrite_float16": ("mixed_float16", "float16"),
}


def format_of(mode: str) -> str:
    """Returns the format of a mode's matrix products: "float32", "tf32", "bfloat16".

    Args:
      mode: A key of `VARIANTS`.
    """
    return modes.get_mode(VARIANTS[mode][0]).compute_format


class Cell(NamedTuple):
    """What one process measures.

    Attributes:
      task: Name of a task of the benchmark's configuration.
      framework: "tfamp"; "keras": the same model in plain Keras, its policy set by hand
        and its own loss scaling; "torch": a twin of the model in PyTorch, with its AMP.
      mode: A key of `VARIANTS`.
      batch_size: Examples in a batch.
      xla: Whether XLA is asked for.
    """

    task: str
    framework: str
    mode: str
    batch_size: int
    xla: bool

    @property
    def label(self) -> str:
        """The cell in a line."""
        xla = ", XLA" if self.xla else ""
        return f"{self.task}: {self.column}, batch {self.batch_size}{xla}"

    @property
    def column(self) -> str:
        """Framework and mode, as tables and figures name them."""
        ours = self.framework == "tfamp"
        return self.mode if ours else f"{self.framework} {self.mode}"

    @property
    def key(self) -> str:
        """The cell as a part of a file's name."""
        xla = "on" if self.xla else "off"
        return (
            f"train-{self.task}-{self.framework}-{self.mode}-batch{self.batch_size}"
            f"-xla_{xla}"
        )


class Spread(NamedTuple):
    """A median and how far the values around it reach.

    Attributes:
      median: The median.
      low, high: First and third quartile, or what the field says.
    """

    median: float
    low: float
    high: float


class Parity(NamedTuple):
    """What a cell learned beside what float32 learned from the same seeds.

    Attributes:
      loss: Mean loss over the timed steps, mean over the seeds; None if not finite.
      loss_difference: Relative to float32's, mean over the seeds: 0.01 is 1 % higher.
        None where there is nothing to compare with.
      loss_interval: 95 % interval of that mean; None for one seed, and where all
        differences are equal.
      metric_name: Name of the metric, a fraction such as accuracy; "" without one.
      metric: Over the timed steps, mean over the seeds.
      metric_difference: Minus float32's, a fraction: 0.01 is one point.
      metric_interval: As `loss_interval`.
      verdict: One of "base", "equal", "noise", "explained", "unexplained", "one seed",
        "broken" (not finite) and "" (nothing to compare with).
      explanation: Why, in a sentence or two.
    """

    loss: float | None
    loss_difference: float | None
    loss_interval: tuple[float, float] | None
    metric_name: str
    metric: float | None
    metric_difference: float | None
    metric_interval: tuple[float, float] | None
    verdict: str
    explanation: str


class Distance(NamedTuple):
    """How far a cell is from what the machine gives.

    Attributes:
      flops: Floating-point operations of the matrix products and convolutions of one
        training step, 2 for each multiply-add; the same in every mode and framework.
      flops_per_second: `flops` over the median step.
      format: Format of the products: "float32", "tf32", "bfloat16" or "float16".
      peak: Measured FLOP/s of large products in that format; None if not measured.
      peak_share: `flops_per_second / peak`.
      intensity: FLOP for each byte of the products' operands and results, each moved
        once.
      attainable: min(peak, intensity * bandwidth), the roofline; None as `peak`.
      matrix_share: Share of the time of all kernels that products and convolutions
        took, read from a profile of some steps; None if that is not known.
      others: The kernels that took most of the rest: (name, share) pairs.
    """

    flops: float
    flops_per_second: float
    format: str
    peak: float | None
    peak_share: float | None
    intensity: float | None
    attainable: float | None
    matrix_share: float | None = None
    others: tuple[tuple[str, float], ...] = ()


class Row(NamedTuple):
    """What came of one cell.

    Attributes:
      task, framework, mode, batch_size, xla: The cell.
      unit: What a batch holds: "images", "sequences", "rows".
      failed: Why there are no figures; "" if there are.
      repeats: Processes that measured it.
      step_ms: Milliseconds of a step, over the timed steps of all repeats.
      throughput: Examples a second; the quartiles are of the steps.
      speed_up: Throughput over that of tfamp's float32 without XLA of the same task and
        batch size, repeat by repeat; low and high are the smallest and the largest.
      speed_up_over_tf32: The same over tf32, where that was measured.
      compile_seconds: First step minus a median step: tracing and compilation; median.
      host_bytes: Peak memory of the process beyond what it held before the model was
        built, programs and libraries left out; the largest of the repeats; None where
        it is not known.
      device_bytes: Peak memory of the GPU, in the same way; None without one.
      pipeline_share: Time to draw a batch over the time of a step; 1 and more: the
        input is the bottleneck. None where batches were in memory before.
      parity: The error column.
      distance: How far from the machine's limit; None where FLOPs are not known.
      loss_scale: After the last step, of the last repeat; None without loss scaling.
      skipped_steps: Of the timed and the warm-up steps, the most of the repeats; None
        without loss scaling.
      tensor_float_32: Whether TF32 was allowed for float32 products.
      xla_in_force: Whether XLA compiled the step.
      note: What was in force and why, in a line.
      losses: {seed: loss after each step from the first one on}, None if not finite.
      loss_scales: {seed: loss scale after each step}; empty without loss scaling.
      repeat_ms: {seed: median step of that repeat in milliseconds}.
    """

    task: str
    framework: str
    mode: str
    batch_size: int
    xla: bool
    unit: str = ""
    failed: str = ""
    repeats: int = 0
    step_ms: Spread | None = None
    throughput: Spread | None = None
    speed_up: Spread | None = None
    speed_up_over_tf32: Spread | None = None
    compile_seconds: float | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    pipeline_share: float | None = None
    parity: Parity | None = None
    distance: Distance | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    tensor_float_32: bool | None = None
    xla_in_force: bool | None = None
    note: str = ""
    losses: Mapping[str, list[float | None]] = {}
    loss_scales: Mapping[str, list[float]] = {}
    repeat_ms: Mapping[str, float] = {}

    @property
    def cell(self) -> Cell:
        """What was measured."""
        return Cell(*self[:5])

    def times_as_fast_as(self, other: "Row") -> Spread | None:
        """Returns how many times as fast this row is as another, repeat by repeat.

        Args:
          other: A row with figures.

        Returns:
          Median, smallest and largest ratio; None if no repeat has both.
        """
        both = self.repeat_ms.keys() & other.repeat_ms.keys()
        ratios = [other.repeat_ms[seed] / self.repeat_ms[seed] for seed in both]
        if not ratios:
            return None
        return Spread(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def memory(self) -> int | None:
        """Peak memory of the device; of the host where that is the device."""
        return self.device_bytes if self.device_bytes is not None else self.host_bytes


class AccuracyRun(NamedTuple):
    """One run of the time to accuracy.

    Attributes:
      task: Name of the task.
      mode: A key of `VARIANTS`.
      seed: Its seed.
      points: (seconds, score) after each epoch: validation score over the time spent
        in training and validation so far, tracing included. A score that is not finite
        is None.
      first_step_seconds: Of these, tracing and compilation.
      reached_seconds: When the score first was the target or better; None if never.
      reached_epoch: In which epoch, from 1; None if never.
      test_score: On the test split, of the best epoch; None if not finite.
      failed: Why there are no figures; "" if there are.
    """

    task: str
    mode: str
    seed: int
    points: tuple[tuple[float, float | None], ...] = ()
    first_step_seconds: float | None = None
    reached_seconds: float | None = None
    reached_epoch: int | None = None
    test_score: float | None = None
    failed: str = ""


class AccuracyRow(NamedTuple):
    """The runs of one mode.

    Attributes:
      task: Name of the task.
      mode: A key of `VARIANTS`.
      metric: Name of the score.
      target: The score to reach.
      seeds: How many seeds were run.
      reached: How many of them reached the target.
      seconds: To the target; median, smallest and largest of those that did.
      without_first_step: The same without tracing and compilation.
      epochs: Mean number of epochs of those that did.
      ratio: Time of float32 over the time of this mode, seed by seed: geometric mean
        with its 95 % interval (None without one: a single seed, or float32 itself).
      ratio_without_first_step: The same of `without_first_step`.
      test_score: Mean on the test split.
      note: What a reader must know, such as seeds that never got there.
      is_error: Whether a lower score is better: no fraction then, but a number.
    """

    task: str
    mode: str
    metric: str
    target: float
    seeds: int
    reached: int
    seconds: Spread | None = None
    without_first_step: Spread | None = None
    epochs: float | None = None
    ratio: tuple[float, float | None, float | None] | None = None
    ratio_without_first_step: tuple[float, float | None, float | None] | None = None
    test_score: float | None = None
    note: str = ""
    is_error: bool = False


class Calibration(NamedTuple):
    """What the machine gives at most, measured.

    Attributes:
      peaks: {format: FLOP/s of large matrix products}; formats that do not run here are
        missing.
      sizes: {format: (m, n, k) of the product that gave the peak}.
      bandwidth: Bytes a second of memory, read and written together.
      bandwidth_bytes: Bytes that one pass of that moved.
      clock_mhz: Clock while it ran; None where it cannot be read.
      device: Name of the device.
      failed: Why there is nothing; "" if there is.
    """

    peaks: Mapping[str, float] = {}
    sizes: Mapping[str, tuple[int, int, int]] = {}
    bandwidth: float | None = None
    bandwidth_bytes: int | None = None
    clock_mhz: float | None = None
    device: str = ""
    failed: str = ""


class Advice(NamedTuple):
    """What to use on this machine.

    Attributes:
      headline: One sentence.
      reasons: Sentences that a reader without experience understands.
      others: What became of the modes that are not advised, a sentence each.
    """

    headline: str
    reasons: tuple[str, ...]
    others: tuple[str, ...] = ()


class Report(NamedTuple):
    """A benchmark; `benchmark.json` by `to_dict`.

    Attributes:
      name: Name of the configuration.
      command: The command that made it.
      date: ISO date of the end.
      advice: What to use.
      rows: The cells, in the order they were asked for.
      accuracy_runs, accuracy_rows: Time to accuracy; empty without.
      calibration: What the machine gives.
      tasks: {name: a line on model and data}.
      settings: Steps, warm-up, repeats, seed, time limits.
      notes: Lines below the tables.
      machine: What `diagnostics.doctor` says of this host.
      peers: {"torch": version, ...} of what was compared with.
      clocks: What could be read of the clocks, as text; "" if nothing.
    """

    name: str
    command: str
    date: str
    advice: Advice
    rows: tuple[Row, ...]
    accuracy_runs: tuple[AccuracyRun, ...]
    accuracy_rows: tuple[AccuracyRow, ...]
    calibration: Calibration
    tasks: Mapping[str, str]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    machine: Mapping[str, Any]
    peers: Mapping[str, str] = {}
    clocks: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}


def _plain(value):
    """NamedTuples as dicts, tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
