"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a process of its own that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from tfamp import errors
from tfamp.diagnostics import doctor
from tfamp.training import (
    base_config,
    batch_size_report,
    batch_size_search,
    batch_size_trials,
    benchmark_cell,
    benchmark_inputs,
    benchmark_notes,
    compare,
    memory_limit,
    run_files,
    step_benchmark,
)

_SUFFIX = "-batch-size"  # Of the name of a search's settings.
TOLERANCE = 0.03  # Two runs of a process differ by as much.
RESULT = "batch_sizes.json"


class Settings(NamedTuple):
    """What is searched for; the arguments of `find_batch_size`.

    Attributes:
      modes: Precision modes; empty: float32 and the configuration's mixed one, as a
        comparison chooses it.
      memory_limit_mb: Memory of a process in MiB: on a host with a GPU, of the first
        GPU, else of the host. None: all of the GPU, or `batch_size_trials.SHARE` of
        what the host has available.
      max_batch_size: Largest batch size that is tried.
      steps: Training steps of a trial; with accumulation, whole windows.
    """

    modes: tuple[str, ...] = ()
    memory_limit_mb: int | None = None
    max_batch_size: int = 2**16
    steps: int = 2


def find_batch_size(
    config,
    modes: Sequence[str] | None = None,
    *,
    memory_limit_mb: int | None = None,
    max_batch_size: int = Settings._field_defaults["max_batch_size"],
    steps: int = Settings._field_defaults["steps"],
    workdir: str | os.PathLike | None = None,
    report: Callable[[str], object] = logging.info,
) -> batch_size_report.BatchSizes:
    """Finds the largest batch size of each mode whose training steps fit into memory.

    Batch sizes are multiples of 8, for Tensor Cores: doubled from 8 until one does not
    fit, then bisected until the bracket is 8 or `TOLERANCE` wide. Steps are those of
    `fit`, with the configuration's optimizer, loss, loss scaling and XLA, on synthetic
    batches on one device. A process that takes more of the host than its limit ends
    itself; one that Linux ends, or whose allocations fail, does not fit, either.

    Args:
      config: The configuration; its data and its batch size are not used.
      modes: As in `Settings`, like the next three.
      memory_limit_mb: See there.
      max_batch_size: See there.
      steps: See there.
      workdir: Folder for `batch_sizes.json`, `report.md` and the trials, which a second
        call does not repeat. None: nothing is kept.
      report: Function that is told of each trial.

    Returns:
      A `BatchSizes`.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If not even 8 fits, if a trial fails for anything but memory, or if the
        folder cannot be written or holds anything but this search.
      ValueError: If a setting makes no sense.
    """
    asked = Settings(tuple(modes or ()), memory_limit_mb, max_batch_size, steps)
    if workdir is not None:
        return run(config, workdir, asked, report)
    with tempfile.TemporaryDirectory() as folder:
        return run(config, folder, asked, report)


def identity(config, settings: Settings):
    """Returns the configuration of a search's folder; it names what trials share.

    Args:
      config: The configuration of the model.
      settings: Its limit and steps; more modes, or a larger batch, go on from there.
    """
    one = step_benchmark.identity(config, _benchmark(settings))
    with one.unlocked():
        one.batch_size = base_config.get_config().batch_size  # It has no use here.
        one.float32.batch_size = None
        one.name = f"{config.name}{_SUFFIX}"
        names = ("memory_limit_mb", "steps")
        asked = {name: getattr(settings, name) for name in names}
        one.benchmark = {"job": "find_batch_size", **asked}
    return one


def _benchmark(settings):
    """The benchmark whose cells are the trials."""
    smallest = (batch_size_search.MULTIPLE,)
    return step_benchmark.Settings(
        "train", smallest, modes=settings.modes, steps=settings.steps - 1, warmup=1
    )


def plan(config, settings: Settings) -> list[benchmark_cell.Cell]:
    """Returns the first trial of each mode.

    Args:
      config: The configuration.
      settings: What to search for.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If this host cannot tell its memory, or makes allocations fail.
      ValueError: If a setting makes no sense.
    """
    least = {"memory_limit_mb": 1, "max_batch_size": 8, "steps": 2}
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and value < lowest:
            raise ValueError(f"`{name}` must be at least {lowest}. Received: {value}.")
    cells = step_benchmark.plan(config, _benchmark(settings))
    batch_size_trials.limits(settings.memory_limit_mb)
    memory_limit.check_allocations()
    return cells


def run(
    config,
    workdir: str | os.PathLike,
    settings: Settings,
    report: Callable[[str], object] = logging.info,
    command: Sequence[str] | None = None,
) -> batch_size_report.BatchSizes:
    """Searches in a folder; see `find_batch_size`.

    Args:
      config: The configuration.
      workdir: The search's folder.
      settings: What to search for.
      report: Function that is told of each trial.
      command: The program that makes a trial; default: `benchmark_cell`.

    Returns:
      A `BatchSizes`.

    Raises:
      As `find_batch_size`.
    """
    cells = plan(config, settings)
    shared = identity(config, settings)
    folder = run_files.open_folder(shared, workdir, "benchmark")
    with run_files.locked(folder):
        return _search_modes(shared, cells, folder, settings, report, command)


def _search_modes(config, cells, folder, settings, report, command):
    """Searches for each mode and writes the files."""
    run_files.write_config(config, folder)
    (folder / "cells").mkdir(exist_ok=True)
    described = doctor.describe()
    limits = batch_size_trials.limits(settings.memory_limit_mb)
    trials = batch_size_trials.Trials(
        config, settings.steps, limits, folder, described, report, command
    )
    sizes = []
    for cell in cells:
        base = next((size for size in sizes if size.mode == "float32"), None)
        known = max((size.batch_size for size in sizes), default=0)
        sizes.append(_search(cell, trials, settings, known, base))
    result = batch_size_report.BatchSizes(
        name=config.name.removesuffix(_SUFFIX),
        unit=benchmark_inputs.unit(config.task),
        limit=limits.text,
        limit_bytes=limits.searched,
        max_batch_size=settings.max_batch_size,
        tolerance=TOLERANCE,
        steps=settings.steps,
        sizes=tuple(sizes),
        notes=tuple(_notes(config, settings, trials.found, described)),
        machine=described.to_dict(),
    )
    run_files.write_text(folder / "report.md", result.to_markdown())
    text = json.dumps(result.to_dict(), indent=2)
    run_files.write_text(folder / RESULT, text)
    return result


def _search(cell, trials, settings, known, base):
    """Searches for one mode; the other modes' size is a good start."""
    made = []

    def fits(size):
        made.append(trials.make(cell._replace(batch_size=size)))
        return not made[-1].reason

    bracket = batch_size_search.search(fits, settings.max_batch_size, known, TOLERANCE)
    if not bracket.largest:
        raise errors.RunError(
            f"{bracket.failing} is the smallest batch size that is tried (multiples of "
            f"it suit Tensor Cores), and does not fit in {cell.mode}. Received: "
            f"{made[-1].reason}; {trials.limits.text}. Expected more memory or a "
            "smaller model."
        )
    return batch_size_report.summarize(cell.mode, bracket, made, base)


def _notes(config, settings, found, described):
    precision = config.precision
    _, note = compare.mixed_mode(precision.mode, precision.graph_rewrite)
    note = "" if settings.modes else note
    yield from benchmark_notes.on_modes(note, found)
    if any(figures["batches_per_step"] > 1 for figures in found):
        yield "a step is a window of several batches and one update of the weights"
    yield benchmark_notes.on_machine(described)
