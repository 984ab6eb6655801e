"""Times a configuration's steps over modes, batch sizes, lengths and XLA.

Each cell runs in a process of its own, so that no mode finds the memory, the caches or
the switches of another. The repeats are interleaved: every cell once, then every cell
again, so that a machine that is busy for a while slows all modes and not one.
"""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from tfamp import modes
from tfamp.diagnostics import doctor
from tfamp.training import (
    base_config,
    benchmark_cell,
    benchmark_figures,
    benchmark_inputs,
    benchmark_notes,
    benchmark_process,
    benchmark_report,
    compare,
    run_files,
)


class Settings(NamedTuple):
    """What a benchmark measures; cells are all combinations.

    Attributes:
      job: "train" or "inference".
      batch_sizes: Examples in a batch; empty: the configuration's, of float32 and tf32
        that of `config.float32` where it has one.
      sequence_lengths: Tokens of an example; empty: the configuration's. None for
        images.
      modes: Precision modes; empty: float32 and the configuration's mixed one, as a
        comparison chooses it.
      jit: "auto", "on", "off"; empty: as the configuration says.
      steps: Timed steps of each repeat; see `benchmark_cell.measure`.
      warmup: Steps before them, the first one included.
      repeats: Processes of each cell.
    """

    job: str
    batch_sizes: tuple[int, ...] = ()
    sequence_lengths: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    jit: tuple[str, ...] = ()
    steps: int = 20
    warmup: int = 5
    repeats: int = 3


# Fields of a configuration that no cell depends on.
_UNUSED = (
    *("data_dir", "manual_dir", "epochs", "eval_batch_size"),
    *("validation_fraction", "limit_examples"),
)


def identity(config, settings: Settings):
    """Returns the configuration of a benchmark's folder; it names what cells share.

    Args:
      config: The configuration of the model.
      settings: Its job, steps and warm-up count. Cells are files of the folder: more of
        them, and more repeats, go on from those that there are.
    """
    one = base_config.settle_rewrite(config)
    defaults = base_config.get_config()
    with one.unlocked():
        one.update({name: defaults[name] for name in _UNUSED})
        one.name = f"{config.name}-{settings.job}-benchmark"
        names = ("job", "steps", "warmup")
        one.benchmark = {name: getattr(settings, name) for name in names}
    return one


def plan(config, settings: Settings) -> list[benchmark_cell.Cell]:
    """Returns the cells, the modes of one shape next to each other.

    Args:
      config: The configuration.
      settings: What to measure.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting makes no sense, or the mode is unknown.
    """
    base_config.validate(config)
    config = base_config.settle_rewrite(config)
    text = benchmark_inputs.is_text(config.task)
    _check(config, settings, text)
    asked = {None: "auto", True: "on", False: "off"}[config.jit_compile]
    lengths = settings.sequence_lengths or (config.data.get("sequence_length"),)
    shapes = itertools.product(
        settings.jit or (asked,),
        lengths if text else (None,),
        settings.batch_sizes or (None,),
        settings.modes or ("float32", _mixed(config)[0]),
    )
    cells = (
        benchmark_cell.Cell(
            settings.job, mode, batch or _own_batch_size(config, mode), length, jit
        )
        for jit, length, batch, mode in shapes
    )
    cells = list(dict.fromkeys(cells))
    _check_model(config, cells)
    return cells


def _own_batch_size(config, mode):
    """The batch size of a mode in a comparison."""
    one = compare.config_of(config, mode, config.seed)
    base_config.validate(one)
    return one.batch_size


def _mixed(config):
    """The mode beside float32, and why."""
    precision = config.precision
    return compare.mixed_mode(precision.mode, precision.graph_rewrite)


def _check(config, settings, text):
    for mode in settings.modes:
        modes.get_mode(mode)
    if settings.job not in benchmark_cell.JOBS:
        raise ValueError(
            f"Unknown benchmark. Received: job={settings.job!r}. Expected one of "
            f"{benchmark_cell.JOBS}."
        )
    unknown = set(settings.jit) - benchmark_cell.JIT.keys()
    if unknown:
        raise ValueError(
            f"Unknown choice of XLA. Received: {', '.join(sorted(unknown))}. Expected "
            f"some of {', '.join(benchmark_cell.JIT)}."
        )
    for name in ("batch_sizes", "sequence_lengths"):
        values = getattr(settings, name)
        if values and min(values) < 1:
            raise ValueError(f"`{name}` must be at least 1. Received: {name}={values}.")
    if settings.sequence_lengths and not text:
        raise ValueError(
            "Only texts have a sequence length. Received: sequence lengths "
            f"{settings.sequence_lengths} for config.task={config.task!r}."
        )
    if config.strategy != "none":
        raise ValueError(
            "Benchmarks measure one device. Received: "
            f"config.strategy={config.strategy!r}. Expected 'none'."
        )


def _check_model(config, cells):
    """Finds what is wrong before any process starts; loads no weights."""
    for length in dict.fromkeys(cell.sequence_length for cell in cells):
        if length:
            config = config.copy_and_resolve_references()
            config.data.sequence_length = length
            base_config.validate(config)
        benchmark_inputs.check(config)


def run(
    config,
    workdir: str | os.PathLike,
    settings: Settings,
    report: Callable[[str], object] = logging.info,
    command: Sequence[str] | None = None,
) -> benchmark_report.Report:
    """Measures every cell and writes `benchmark.json` and `report.md`.

    What a cell's process measured stays in `cells/`, and is not measured again on the
    same machine with the same versions and switches. A cell that fails is a row with
    its reason; the next call tries it again.

    Args:
      config: The configuration; its model, optimizer, loss scaling and seed are used,
        its data are not.
      workdir: The benchmark's folder.
      settings: What to measure.
      report: Function that is told of each cell.
      command: The program that measures a cell; default: `benchmark_cell`.

    Returns:
      A `benchmark_report.Report`.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If the folder cannot be written or holds anything but this benchmark.
      ValueError: If a setting makes no sense.
    """
    cells = plan(config, settings)
    shared = identity(config, settings)
    note = "" if settings.modes else _mixed(shared)[1]
    folder = run_files.open_folder(shared, workdir, "benchmark")
    with run_files.locked(folder):
        run_files.write_config(shared, folder)
        (folder / "cells").mkdir(exist_ok=True)
        described = doctor.describe()
        place = benchmark_process.identity(described)
        measured, failures = _measure(
            shared, settings, cells, folder, place, report, command
        )
        result = _report(config, settings, note, measured, failures, described)
        text = json.dumps(result.to_dict(), indent=2)
        run_files.write_text(folder / "benchmark.json", text)
        run_files.write_text(folder / "report.md", result.to_markdown())
    return result


def _measure(shared, settings, cells, folder, place, report, command):
    """Runs the processes; returns figures and reasons of failures, by cell."""
    measured = {cell: [] for cell in cells}
    failures = {}
    work = list(itertools.product(range(settings.repeats), cells))
    for number, (repeat, cell) in enumerate(work, 1):
        if cell in failures:
            continue
        file = (folder / "cells" / f"{cell.key}-repeat{repeat}.json").absolute()
        figures = benchmark_process.read(file, place)
        done = " (measured before)" if figures else ""
        report(f"cell {number} of {len(work)}: {cell.label}, repeat {repeat + 1}{done}")
        if figures is None:
            counts = settings.steps, settings.warmup
            request = benchmark_cell.to_request(shared, cell, *counts, file, place)
            failures[cell] = benchmark_process.run(request, file, command)
            figures = benchmark_process.read(file, place)
        if figures is None:
            report(f"  failed: {failures[cell]}")
        else:
            failures.pop(cell, None)
            measured[cell].append(figures)
            report(f"  {_told(cell, figures, shared.task)}")
    return measured, failures


def _told(cell, figures, task):
    """What one process measured, in a line."""
    (row,) = benchmark_figures.summarize([cell], {cell: [figures]}, {})
    return (
        f"{row.throughput:.2f} {benchmark_inputs.unit(task)}/s, "
        f"{row.latency_ms['50']:.1f} ms a step, first step "
        f"{row.first_step_seconds:.1f} s"
    )


def _report(config, settings, note, measured, failures, described):
    found = [each[0] for each in measured.values() if each]
    none = {cell: why for cell, why in failures.items() if not measured[cell]}
    fewer = [
        f"{cell.label}: {len(measured[cell])} of {settings.repeats} repeats, then "
        f"failed: {why}"
        for cell, why in failures.items()
        if measured[cell]
    ]
    return benchmark_report.Report(
        name=config.name,
        job=settings.job,
        unit=benchmark_inputs.unit(config.task),
        settings={
            "steps": settings.steps,
            "warmup": settings.warmup,
            "repeats": settings.repeats,
            "seed": config.seed,
        },
        rows=benchmark_figures.summarize(list(measured), measured, none),
        notes=[
            *benchmark_notes.on_modes(note, found),
            *benchmark_notes.on_figures(settings, list(measured), found),
            *fewer,
            benchmark_notes.on_machine(described),
        ],
        machine=described.to_dict(),
    )
