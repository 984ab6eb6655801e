"""Puts the report together from what was measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfamp.benchmark import advice, exchange, records, rows
from tfamp.training import memory_limit


class Findings(NamedTuple):
    """What the processes of a benchmark measured.

    Attributes:
      cells: In the order of the rows.
      measured: For each cell {seed: figures}.
      failures: Why cells failed; one may have figures of other seeds.
      calibrated: What the machine gives.
      accuracy_runs, accuracy_rows: Time to accuracy.
      peers: Versions of what was compared with.
      no_torch: Why PyTorch was not; "" if it was, or was not asked for.
    """

    cells: Sequence[records.Cell]
    measured: Mapping[records.Cell, rows.Figures]
    failures: Mapping[records.Cell, str]
    calibrated: records.Calibration
    accuracy_runs: Sequence[records.AccuracyRun]
    accuracy_rows: Sequence[records.AccuracyRow]
    peers: Mapping[str, str]
    no_torch: str = ""


def make(
    config, found: Findings, machine: Mapping[str, Any], command: str, date: str
) -> records.Report:
    """Returns the report.

    Args:
      config: The configuration of the benchmark.
      found: What was measured.
      machine: What `diagnostics.doctor` says of this host, as a dict.
      command: The command that a user gave.
      date: ISO date of the end.
    """
    failures = {cell: _shortened(why) for cell, why in found.failures.items()}
    dropout = {
        name: task.config.model.get("dropout", 0.0)
        for name, task in config.tasks.items()
    }
    made = rows.summarize(
        found.cells, found.measured, failures, found.calibrated, dropout
    )
    first = [next(iter(each.values())) for each in found.measured.values() if each]
    return records.Report(
        name=config.name,
        command=command,
        date=date,
        advice=advice.make(made, found.accuracy_rows, machine),
        rows=tuple(made),
        accuracy_runs=tuple(found.accuracy_runs),
        accuracy_rows=tuple(found.accuracy_rows),
        calibration=found.calibrated,
        tasks={name: _describe(name, found.measured) for name in config.tasks},
        settings={
            name: config[name] for name in ("steps", "warmup", "repeats", "seed")
        },
        notes=(
            *_notes(config, found, failures),
            *_on_limits(made),
            *_on_counts(found.measured),
        ),
        machine=machine,
        peers=found.peers,
        clocks=next((f["clocks"] for f in first if f.get("clocks")), ""),
    )


def _shortened(why):
    """A lack of memory in a few words; else the reason as it is."""
    return memory_limit.lack(why) or why


def _describe(name, measured):
    """A line on a task's model and data."""
    for cell, found in measured.items():
        for figures in found.values():
            if cell.task == name and "description" in figures:
                text = figures["description"].rstrip(".")
                return f"{text}; {figures['parameters']:,} parameters"
    return ""


def _on_limits(made) -> Iterator[str]:
    """A peak that cells go beyond was measured while the machine was busy."""
    beyond = [
        row.cell.label for row in made if row.distance and _peak_share(row.distance) > 1
    ]
    if beyond:
        yield (
            f"{', '.join(beyond)}: faster than the machine's peak as it was measured, "
            "so that was too low: something else ran beside it. Delete "
            "`calibration.json` and give the same command again."
        )


def _peak_share(distance):
    return distance.peak_share or 0.0


def _on_counts(measured) -> Iterator[str]:
    """Operations that are not in the count."""
    told = {
        (cell.task, text): None
        for cell, each in measured.items()
        for figures in each.values()
        for text in (figures.get("operations") or {}).get("uncounted", ())
    }
    for task, text in told:
        yield f"{task}: of the operations, {text}."


def _notes(config, found, failures) -> Iterator[str]:
    yield (
        f"A step is the one of `fit`, its loss read back; {config.steps} timed steps "
        f"after {config.warmup}, in a process of their own for each of "
        f"{config.repeats} interleaved repeats, each with a seed of its own: the same "
        "weights, data and order in every mode. Step times are quartiles over all "
        "timed steps; speed-ups are of the repeats' medians, repeat by repeat, and the "
        "range is that of the repeats."
    )
    yield (
        "The loss is the mean over the timed steps; its difference is relative to "
        "float32's, seed by seed, with a 95 % interval (Student's t). Dropout "
        "masks are others in other formats and frameworks: a part of the noise."
    )
    if any(cell.column == "keras float32" for cell in found.measured):
        yield (
            "The row of plain Keras' float32 shows the noise of this machine: it takes "
            "the same kernels, up to the optimizer's update."
        )
    if any(cell.framework == "tfamp" for cell in found.measured):
        yield (
            "tfamp's fused kernels are of its mixed modes on a CPU; its float32 and "
            "TF32 take TensorFlow's own, as plain Keras does."
        )
    yield (
        "Operations are those of the matrix products and convolutions, forward and "
        "backward, 2 for each multiply-add, counted once for each task and batch size "
        "and the same for all; the bytes are their operands and results, each moved "
        "once."
    )
    yield (
        "Peak memory is what the device's allocator gave, on a CPU the resident memory "
        "beyond what the process held before the model was built, without programs and "
        "libraries; what XLA holds to compile kernels is in it. PyTorch runs without "
        "`torch.compile`, and has its batches in memory beforehand."
    )
    yield from _on_config(config, found, failures)


def _on_config(config, found, failures) -> Iterator[str]:
    """What is particular to this benchmark: limits, tasks, failures."""
    if found.no_torch:
        yield (
            f"PyTorch was not measured: {found.no_torch}. Install `tfamp[bench]`, or "
            "name an interpreter that has it: --config.torch_python=PYTHON."
        )
    if config.memory_limit_mb:
        yield (
            f"Processes were held to {config.memory_limit_mb:,} MiB of memory; what "
            "was measured before was not measured again for that."
        )
    for name, task in config.tasks.items():
        reason = exchange.reason_without_twin(task.config)
        if "torch" in task.frameworks and reason:
            yield f"{name}: not measured in PyTorch. {reason}"
        if task.synthetic:
            yield f"{name}: random batches, which only the numerics tell apart."
    for cell, each in found.measured.items():
        if each and cell in failures:
            yield (
                f"{cell.label} ({cell.framework}): {len(each)} of {config.repeats} "
                f"repeats, then failed: {failures[cell]}"
            )
