"""A row of a benchmark: what came of one cell over its repeats, beside the base."""

import statistics as numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfamp.measuring.benchmark import cells, statistics

PERCENTILES = (50, 90, 95, 99, 100)


class Row(NamedTuple):
    """What came of one cell over its repeats.

    Attributes:
      cell: The cell.
      failed: Why there is nothing else; "" if there is.
      repeats: How many processes measured it.
      examples: In a step.
      step_ms: Lower quartile, median and upper quartile of all timed steps.
      latency_ms: Of the same: "average" and percentiles, "90 %" for one.
      rate: Examples a second: of the median step (of inference: of all timed steps
        together, as NVIDIA's DeepLearningExamples count), median over the repeats.
      first_step_seconds: Tracing and compilation included; median.
      host_bytes, device_bytes: Peak memory, the largest of the repeats.
      loss: Mean over the timed steps of all repeats; None for inference.
      skipped_steps, loss_scale: None without loss scaling.
      xla, tensor_float_32, note: What was in force.
      speed_up: Rate over that of the base, repeat by repeat; None without.
      loss_difference: Relative, from the base over equal steps of equal seeds; None
        where batches have other sizes, or a loss is not finite.
      output_error: Inference: largest difference of an output from the base's, relative
        to the largest output.
      base: The cell that it is compared with, of `cell_modes.BASES`; None without.
    """

    cell: cells.Cell
    failed: str = ""
    repeats: int = 0
    examples: int | None = None
    step_ms: tuple[float, float, float] | None = None
    latency_ms: dict[str, float] | None = None
    rate: float | None = None
    first_step_seconds: float | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    loss: float | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None
    xla: bool | None = None
    tensor_float_32: bool | None = None
    note: str = ""
    speed_up: statistics.Estimate | None = None
    loss_difference: statistics.Estimate | None = None
    output_error: float | None = None
    base: cells.Cell | None = None

    @property
    def memory(self) -> int | None:
        """Peak memory in bytes: of the GPU, if there is one."""
        return self.host_bytes if self.device_bytes is None else self.device_bytes

    @property
    def is_base(self) -> bool:
        """Whether others are compared with it."""
        return self.base == self.cell

    @property
    def error(self) -> str:
        """The error column's text: never nothing beside a speed-up."""
        if self.is_base:
            return "the base"
        if self.output_error is not None:
            return f"{self.output_error:.2g} of the largest output"
        if self.loss is None:
            return "not finite" if self.repeats else "-"
        difference = self.loss_difference
        if difference is None:
            return "no float32" if self.base is None else "not compared"
        kind = "" if difference.low is None else f", {statistics.judge(difference)}"
        return statistics.percent(difference) + kind


def make(
    cell: cells.Cell,
    results: Mapping[cells.Cell, Mapping[int, Mapping[str, Any]]],
    config: Any,
) -> Row:
    """Returns the row of a cell.

    Args:
      cell: The cell.
      results: {cell: {repeat: figures}} of all that have figures.
      config: The configuration of the benchmark.
    """
    repeats = results[cell]
    figures = list(repeats.values())
    every = np.concatenate([each["seconds"] for each in figures]) * 1e3
    rates, losses = _rates(repeats, config.job), _losses(repeats)
    whole = bool(losses) and len(losses) == len(repeats)
    base = cells.base(results, cell, config)
    others = results[base] if base else {}
    same = base and base.batch_size == cell.batch_size
    return Row(
        cell,
        repeats=len(repeats),
        examples=figures[0]["examples"],
        step_ms=tuple(np.percentile(every, (25, 50, 75)).tolist()),
        latency_ms={"average": float(every.mean())}
        | {f"{p} %": float(np.percentile(every, p)) for p in PERCENTILES},
        rate=numbers.median(rates.values()),
        first_step_seconds=numbers.median(x["first_step_seconds"] for x in figures),
        host_bytes=_largest(figures, "host_bytes"),
        device_bytes=_largest(figures, "device_bytes"),
        loss=numbers.fmean(losses.values()) if whole else None,
        skipped_steps=_largest(figures, "skipped_steps"),
        loss_scale=figures[-1]["loss_scale"],
        xla=figures[0]["xla"],
        tensor_float_32=figures[0]["tensor_float_32"],
        note=figures[0]["note"],
        speed_up=statistics.ratio(_rates(others, config.job), rates),
        loss_difference=(
            statistics.difference(_losses(others), losses) if same and whole else None
        ),
        output_error=_output_error(others, repeats) if same else None,
        base=base,
    )


def _rates(repeats, job):
    """{repeat: examples a second}."""
    middle = numbers.fmean if job == "inference" else numbers.median
    return {k: f["examples"] / middle(f["seconds"]) for k, f in repeats.items()}


def _losses(repeats):
    """{repeat: mean loss of the timed steps} of those that are finite throughout."""
    losses = {k: f["losses"][-len(f["seconds"]) :] for k, f in repeats.items()}
    return {
        k: numbers.fmean(each)
        for k, each in losses.items()
        if each and None not in each and None not in repeats[k]["losses"]
    }


def _output_error(base, repeats):
    repeat = min(base.keys() & repeats.keys(), default=None)
    if repeat is None:
        return None
    expected, outputs = (each[repeat].get("outputs") for each in (base, repeats))
    if not expected or not outputs or None in (*expected, *outputs):
        return None
    difference = np.abs(np.subtract(outputs, expected)).max()
    return float(difference / max(np.abs(expected).max(), np.finfo("float32").tiny))


def _largest(figures, name):
    return max((each[name] for each in figures if each[name] is not None), default=None)
