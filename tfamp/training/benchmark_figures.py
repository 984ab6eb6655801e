"""The figures of a benchmark's cells, from what their processes measured."""

import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.training import benchmark_cell

PERCENTILES = (50, 90, 95, 99, 100)


class Figures(NamedTuple):
    """What came of one cell; one row of `benchmark.json`.

    Attributes:
      mode, batch_size, sequence_length, jit: The cell.
      failed: Why there are no figures; "" if there are.
      throughput: Examples a second: of the median step, median over the repeats. A step
        under gradient accumulation is a window of several batches; all count.
      throughput_average: Examples a second over all timed steps together, as NVIDIA's
        DeepLearningExamples count.
      throughput_range: Smallest and largest `throughput` of the repeats.
      latency_ms: Of a step over all repeats: "average" and percentiles by number.
      first_step_seconds: Tracing and compilation included; median.
      host_bytes, device_bytes: Peak memory, the largest of the repeats.
      loss: Mean over the timed steps; None for inference, and if not finite.
      skipped_steps, loss_scale: None without loss scaling.
      tensor_float_32: Whether it was in force.
      xla: Whether Keras compiles the step with XLA.
      speed_up: `throughput` over that of the `twin` in float32; of inference
        `throughput_average`, as published.
      speed_up_over_tf32: The same over tf32.
      error: Training: `loss` minus that of float32 on the same batches and seed.
        Inference: largest difference of an output from float32's, relative to the
        largest output. None where the two have batches of different sizes.
    """

    mode: str
    batch_size: int
    sequence_length: int | None
    jit: str
    failed: str = ""
    throughput: float | None = None
    throughput_average: float | None = None
    throughput_range: tuple[float, float] | None = None
    latency_ms: dict[str, float] | None = None
    first_step_seconds: float | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    loss: float | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None
    tensor_float_32: bool | None = None
    xla: bool | None = None
    speed_up: float | None = None
    speed_up_over_tf32: float | None = None
    error: float | None = None


def summarize(
    cells: Sequence[benchmark_cell.Cell],
    measured: Mapping[benchmark_cell.Cell, Sequence[Mapping[str, Any]]],
    failures: Mapping[benchmark_cell.Cell, str],
) -> list[Figures]:
    """Returns the figures of each cell, and how they compare with float32's.

    Args:
      cells: The cells in the order of the rows.
      measured: For each cell what `benchmark_cell.measure` returned in each repeat.
      failures: Reasons of the cells that failed; these have no figures.

    Returns:
      One `Figures` for each cell.
    """
    rows = [
        _failed(cell, failures[cell])
        if cell in failures
        else _summary(cell, measured[cell])
        for cell in cells
    ]
    outputs = {
        row[:4]: measured[cell][0].get("outputs")
        for row, cell in zip(rows, cells, strict=True)
        if not row.failed
    }
    return [
        _compared(row, rows, outputs, cell.job == "inference")
        for row, cell in zip(rows, cells, strict=True)
    ]


def _failed(cell, reason):
    return Figures(*_key(cell), reason)


def _key(cell):
    return cell.mode, cell.batch_size, cell.sequence_length, cell.jit


def _summary(cell, repeats):
    seconds = [repeat["seconds"] for repeat in repeats]
    every = [x for each in seconds for x in each]
    first, last = repeats[0], repeats[-1]
    examples = cell.batch_size * first["batches_per_step"]
    speeds = [examples / statistics.median(each) for each in seconds]
    return Figures(
        *_key(cell),
        throughput=statistics.median(speeds),
        throughput_average=examples / statistics.fmean(every),
        throughput_range=(min(speeds), max(speeds)),
        latency_ms=_latency(every),
        first_step_seconds=statistics.median(r["first_step_seconds"] for r in repeats),
        host_bytes=_largest(repeats, "host_bytes"),
        device_bytes=_largest(repeats, "device_bytes"),
        loss=first.get("loss"),
        skipped_steps=_largest(repeats, "skipped_steps"),
        loss_scale=last["loss_scale"],
        tensor_float_32=first["tensor_float_32"],
        xla=first["xla"],
    )


def _latency(seconds):
    points = np.percentile(seconds, PERCENTILES)
    named = zip(map(str, PERCENTILES), points, strict=True)
    average = {"average": 1e3 * statistics.fmean(seconds)}
    return average | {name: 1e3 * float(value) for name, value in named}


def _largest(repeats, name):
    return max((r[name] for r in repeats if r[name] is not None), default=None)


def twin(rows: Sequence[Figures], row: Figures, mode: str) -> Figures | None:
    """Returns the row of another mode to compare with, if it has figures.

    It is of the same shapes or, if that mode was measured with another batch size
    alone, of that one: the largest that fits, say.

    Args:
      rows: All rows.
      row: One of them.
      mode: The other mode.
    """
    others = [x for x in rows if (x.mode, *x[2:4]) == (mode, *row[2:4])]
    same = [x for x in others if x.batch_size == row.batch_size]
    found = same or (others if len(others) == 1 else [])
    return next((x for x in found if not x.failed), None)


def _compared(row, rows, outputs, inference):
    if row.failed:
        return row
    speed = operator.attrgetter("throughput_average" if inference else "throughput")
    base, tf32 = (twin(rows, row, mode) for mode in ("float32", "tf32"))
    if base is not None and base.batch_size != row.batch_size:
        error = None
    elif base is not None and base.loss is not None and row.loss is not None:
        error = row.loss - base.loss
    elif base is not None and outputs[row[:4]] is not None:
        error = _output_error(outputs[row[:4]], outputs[base[:4]])
    else:
        error = None
    return row._replace(
        speed_up=base and speed(row) / speed(base),
        speed_up_over_tf32=tf32 and speed(row) / speed(tf32),
        error=error,
    )


def _output_error(found, expected):
    """Largest difference relative to the largest number; None if one is not finite."""
    if None in (*found, *expected):
        return None
    difference = np.abs(np.subtract(found, expected)).max()
    return float(difference / max(np.abs(expected).max(), np.finfo("float32").tiny))
