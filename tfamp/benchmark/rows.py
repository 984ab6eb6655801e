"""The rows of a report, from what the processes of the cells measured."""

import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfamp import formats
from tfamp.benchmark import parity, records

Figures = Mapping[int, Mapping[str, Any]]


def summarize(
    cells: Sequence[records.Cell],
    measured: Mapping[records.Cell, Figures],
    failures: Mapping[records.Cell, str],
    calibrated: records.Calibration,
    dropout: Mapping[str, float],
) -> list[records.Row]:
    """Returns a row for each cell.

    Args:
      cells: The cells, in the order of the rows.
      measured: For each cell {seed: what `cell_figures` or `torch_cell` found}.
      failures: Why cells without any figures have none.
      calibrated: What the machine gives.
      dropout: Dropout rate of each task's model.
    """
    operations, units = _operations(measured), _units(measured)
    rows = [
        _summary(cell, measured[cell])._replace(unit=units.get(cell.task, ""))
        if measured[cell]
        else records.Row(*cell, failed=failures.get(cell, "not measured"))
        for cell in cells
    ]
    by_cell = {row.cell: row for row in rows if not row.failed}
    return [
        row
        if row.failed
        else row._replace(
            speed_up=_over(row, by_cell.get(base_of(row.cell))),
            speed_up_over_tf32=_over(row, by_cell.get(base_of(row.cell, "tf32"))),
            parity=_parity(row.cell, measured, dropout[row.task]),
            distance=_distance(
                row,
                measured[row.cell],
                operations.get((row.task, row.batch_size)),
                calibrated,
            ),
        )
        for row in rows
    ]


def _over(row, base):
    return row.times_as_fast_as(base) if base else None


def _parity(cell, measured, dropout):
    """The error column of a cell."""
    base = measured.get(base_of(cell), {})
    masks = _masks(cell, base, measured) if dropout else None
    return parity.compare(cell, base, measured[cell], masks)


def base_of(cell: records.Cell, mode: str = "float32") -> records.Cell:
    """Returns the cell that a cell is compared with.

    Args:
      cell: Any cell.
      mode: "float32" or "tf32".
    """
    return cell._replace(framework="tfamp", mode=mode, xla=False)


def _summary(cell, found) -> records.Row:
    """What a cell has of its own."""
    each = [found[seed] for seed in sorted(found)]
    first, last = each[0], each[-1]
    seconds = [s for figures in each for s in figures["seconds"]]
    step = _quartiles([1e3 * s for s in seconds])
    examples = cell.batch_size * first.get("batches_per_step", 1)
    draws = [f["pipeline_seconds"] for f in each if f.get("pipeline_seconds")]
    per_batch = step.median / 1e3 / first.get("batches_per_step", 1)
    compiles = [f["first_step_seconds"] - statistics.median(f["seconds"]) for f in each]
    return records.Row(
        *cell,
        repeats=len(each),
        step_ms=step,
        throughput=records.Spread(
            *(1e3 * examples / ms for ms in (step.median, step.high, step.low))
        ),
        compile_seconds=max(0.0, statistics.median(compiles)),
        host_bytes=_largest(each, "host_bytes"),
        device_bytes=_largest(each, "device_bytes"),
        pipeline_share=statistics.median(draws) / per_batch if draws else None,
        loss_scale=last["loss_scale"],
        skipped_steps=_largest(each, "skipped_steps"),
        tensor_float_32=first["tensor_float_32"],
        xla_in_force=first["xla"],
        note=first["note"],
        losses={str(seed): found[seed]["losses"] for seed in sorted(found)},
        repeat_ms={
            str(seed): 1e3 * statistics.median(found[seed]["seconds"])
            for seed in sorted(found)
        },
        loss_scales={
            str(seed): found[seed]["loss_scales"]
            for seed in sorted(found)
            if found[seed]["loss_scales"]
        },
    )


def _quartiles(values):
    middle, low, high = np.percentile(values, (50, 25, 75))
    return records.Spread(float(middle), float(low), float(high))


def _largest(each, name):
    known = [f[name] for f in each if f[name] is not None]
    return max(known, default=None)


def _masks(cell, base, measured):
    """What dropout masks do to the losses of a task and batch size."""
    own = parity.mask_stream(cell)
    streams = {
        parity.mask_stream(other): found
        for other, found in reversed(measured.items())  # The first of each stays.
        if base_of(other) == base_of(cell) and other != base_of(cell) and found
    }
    others = [
        found
        for stream, found in streams.items()
        if stream not in (own, parity.mask_stream(base_of(cell)))
    ]
    return parity.pool(base, others) if own != "float32" else None


def _units(measured):
    """{task: unit}; PyTorch's cells do not know theirs."""
    return {
        cell.task: figures["unit"]
        for cell, found in measured.items()
        for figures in found.values()
        if "unit" in figures
    }


def _operations(measured):
    """{(task, batch size): operations of a step}, the same in every mode."""
    counted = {}
    for cell, found in measured.items():
        for figures in found.values():
            if figures.get("operations"):
                batches = figures.get("batches_per_step", 1)
                operations = figures["operations"]
                counted[cell.task, cell.batch_size] = {
                    name: batches * operations[name] for name in ("flops", "elements")
                }
    return counted


def _distance(row, found, counted, calibrated):
    """How far a cell is from what the machine gives."""
    if not counted or not counted["flops"]:
        return None
    name = records.format_of(row.mode)
    peak = calibrated.peaks.get(name)
    speed = counted["flops"] / (row.step_ms.median / 1e3)
    moved = counted["elements"] * formats.float_format(name).bytes
    intensity = counted["flops"] / moved if moved else None
    attainable = peak
    if None not in (peak, intensity, calibrated.bandwidth):
        attainable = min(peak, intensity * calibrated.bandwidth)
    kernels = next(filter(None, map(operator.itemgetter("kernels"), _ours(found))), {})
    return records.Distance(
        flops=counted["flops"],
        flops_per_second=speed,
        format=name,
        peak=peak,
        peak_share=speed / peak if peak else None,
        intensity=intensity,
        attainable=attainable,
        matrix_share=kernels.get("matrix_share"),
        others=tuple(map(tuple, kernels.get("others", ()))),
    )


def _ours(found):
    return [figures for figures in found.values() if "kernels" in figures]
