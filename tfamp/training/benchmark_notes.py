"""The lines below a benchmark's tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfamp.diagnostics import doctor
from tfamp.training import benchmark_cell


def on_modes(note: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines on the models and on what was in force.

    Args:
      note: On the choice of modes; "" where they were asked for.
      found: What `benchmark_cell.measure` returned, once for each cell with figures.
    """
    described = (
        f"{figures['description']}; {figures['parameters']:,} parameters"
        for figures in found
    )
    modes_in_force = (f for f in found if f["mode"] != "float32" and not note)
    reasons = (f"{f['mode']}: {f['reason']}" for f in modes_in_force)
    rewrites = (f["graph_rewrite"] for f in found if f["graph_rewrite"])
    return list(dict.fromkeys([*described, *filter(None, [note]), *reasons, *rewrites]))


def on_figures(
    settings, cells: Sequence[benchmark_cell.Cell], found: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields lines on what the figures are of.

    Args:
      settings: `step_benchmark.Settings`.
      cells: All cells.
      found: As for `on_modes`.
    """
    yield (
        f"{settings.steps} timed steps after {settings.warmup}, a process for each of "
        f"{settings.repeats} interleaved repeats; throughput: median step, median over "
        "the repeats; avg and latency: all timed steps"
    )
    yield (
        _on_training(found)
        if settings.job == "train"
        else (
            "a step is the one of `predict`, its output read back; the output error is "
            "the largest difference from float32's, relative to the largest output; "
            "the speed-up is of the averages"
        )
    )
    if not settings.batch_sizes and len({cell.batch_size for cell in cells}) > 1:
        yield (
            "each mode has the batch size of its own runs: throughput and speed-up are "
            "of examples, latencies of steps; what batches of different sizes lose or "
            "put out is not compared"
        )


def _on_training(found):
    meaning = (
        "a step is the one of `fit`, its loss read back; the loss is the mean over "
        "the timed steps, from the same seed in every mode and, where sizes are equal, "
        "on the same batches "
        "(dropout draws other numbers in other formats)"
    )
    window = max((f["batches_per_step"] for f in found), default=1)
    if window > 1:
        meaning += (
            f"; here a step is {window} batches and one update of the weights, and "
            "throughput counts them all"
        )
    return meaning


def on_machine(described: doctor.MachineReport) -> str:
    """Returns a line on the device and the versions."""
    facts = described.facts
    packages = ", ".join(f"{name} {facts[name]}" for name in ("tensorflow", "keras"))
    return f"{described.device}; {facts['CPU cores']} CPU cores; {packages}"
