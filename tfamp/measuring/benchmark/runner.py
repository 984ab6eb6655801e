"""Runs a benchmark: what is missing is measured, and the report written."""

import datetime
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tfamp import checks, errors, extras, progress
from tfamp.measuring import processes, torch_peer, workloads
from tfamp.measuring.benchmark import accuracy, cells, harness, report
from tfamp.runs import run_files


def benchmark_model(
    workload: str | Callable[..., Any],
    modes: tuple[str, ...] | None = None,
    *,
    frameworks: tuple[str, ...] = ("tfamp", "keras"),
    batch_sizes: tuple[int, ...] = (),
    repeats: int = 3,
    steps: int = 20,
    warmup: int = 10,
    memory_limit_mb: int | None = None,
    workdir: str | os.PathLike | None = None,
    verbose: int = 1,
) -> report.Report:
    """Measures which precision mode is fastest for a model on this host, and its cost.

    Each cell (mode, batch size) is measured in a fresh process, under
    `tfamp.enable(mode)`, by the step of `fit`. It yields time, examples a second, peak
    memory, and the loss over the same number of steps from the same seed. A cell that
    fails is a row with the reason.

    Args:
      workload: A function at the top level of a file, or its name: "module:function" or
        "file.py:function". It returns a compiled Keras model and a `tf.data.Dataset` of
        batches, and is called in each process. Layers that it creates with an explicit
        dtype keep it.
      modes: Precision modes; "rewrite_bfloat16" and "rewrite_float16" for the graph
        rewrite. None: float32 and those that this host has units for.
      frameworks: "tfamp", and "keras" for plain Keras with its dtype policy.
      batch_sizes: Passed to the function as `batch_size`. Empty: called without.
      repeats: Processes of each cell; a single one gives no interval.
      steps: Timed steps of each process.
      warmup: Steps before them, including the first.
      memory_limit_mb: Limit of a process in MiB, of GPU memory if there is a GPU, else
        of host memory.
      workdir: Folder for `report.html`, `report.md`, `benchmark.json` and the
        measurements, which a second call does not repeat. None: nothing is kept.
      verbose: 1: a line on each process, on standard error, and the minutes left; 0:
        none.

    Returns:
      A `report.Report`; `print` it.

    Raises:
      RunError: If the folder cannot be written or holds anything but this benchmark, or
        if every cell failed.
      ValueError: If there is no such function, or a setting is invalid.

    Example:
      print(tfamp.benchmark_model("my_script:build"))
    """
    checks.check_names("modes", modes)
    checks.check_names("frameworks", frameworks)
    config = cells.get_config()
    task = cells.get_task(workload)
    task.modes, task.frameworks = tuple(modes or ()), tuple(frameworks)
    task.batch_sizes = tuple(batch_sizes)
    config.name = task.function.rpartition(":")[2]
    config.tasks[config.name] = task
    config.repeats, config.steps, config.warmup = repeats, steps, warmup
    config.memory_limit_mb = memory_limit_mb
    return run(config, workdir, verbose)


def run(
    config,
    workdir: str | os.PathLike | None,
    verbose: int = 1,
    command: str = "",
) -> report.Report:
    """Measures what is missing, and writes the report.

    What a cell's process measured stays in `cells/`, and is not measured again on the
    same machine with the same versions and switches. A cell that fails is a row with
    its reason; the next call tries it again.

    Args:
      config: The configuration, see `cells.get_config`.
      workdir: The benchmark's folder; None: nothing is kept.
      verbose: As of `benchmark_model`.
      command: The command that a user gave, for the report.

    Returns:
      A `report.Report`.

    Raises:
      DataError: If a preset is missing or malformed.
      RunError: If the folder cannot be written or holds anything but this benchmark, or
        if every cell failed.
      ValueError: If a setting is invalid.
    """
    for package in ("jinja2", "matplotlib", "scipy"):
        extras.require(package)  # Of the report: before anything is measured.
    with progress.Progress(verbose) as lines:
        planned = cells.plan(config)
        runs = accuracy.plan(config)
        versions, no_torch = _find_torch(config, planned)
        notes = [f"without PyTorch: {no_torch}"] if no_torch else []
        if no_torch:
            lines.say(notes[0])
            planned = [cell for cell in planned if cell.framework != "torch"]
        check(config, planned)
        with run_files.benchmark_folder(cells.identity(config), workdir) as folder:
            every = harness.Harness(config, folder, versions, lines)
            lines.total = config.repeats * len(planned) + len(runs)
            measured, failures = every.measure(planned)
            times = every.train(runs)
            machine = _machine(every.trials.machine, versions, command)
            result = report.make(config, measured, failures, times, machine, notes)
            result.write(folder)
            result.check(workdir and folder)
    return result


def _machine(machine, versions, command):
    """Returns date, command, commit, device and versions, for the report."""
    own = ("Python", "tfamp", "tensorflow", "keras")
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": commit(),
        "machine": machine.device,
        "platform": platform.platform(),
        "cpu_cores": processes.cores(),
        "versions": {**{name: machine.facts[name] for name in own}, **versions},
    }


def commit() -> str:
    """Returns the commit of this package's checkout; "" where there is none."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _find_torch(config, planned):
    """Returns PyTorch's versions, and why its cells are left out."""
    if not any(cell.framework == "torch" for cell in planned):
        return {}, ""
    python = config.torch_python or sys.executable
    versions, why = torch_peer.versions(python)
    if why and config.torch_python:
        raise errors.RunError(
            "The interpreter cannot import PyTorch and transformers. Received: "
            f"config.torch_python={python!r}: {why}. Leave it empty to measure without "
            "PyTorch."
        )
    return versions, why


def check(config, planned) -> None:
    """Raises what is wrong with a training configuration before anything is timed.

    Args:
      config: The configuration of the benchmark.
      planned: Its cells.
    """
    ours = [cell for cell in planned if config.tasks[cell.task].config is not None]
    if one_of_each := {(cell.task, cell.sequence_length): cell for cell in ours}:
        workloads.check(
            cells.config_of(config.tasks[cell.task], cell, config.seed)
            for cell in one_of_each.values()
        )
