"""Runs a benchmark: every process, one after another, interleaved; resumable.

    calibration; then for each repeat every cell; then the runs up to an accuracy

What a process measured stays in the folder, and is not measured again on the same
machine with the same versions and switches. A cell that fails is a row with its reason;
the next call tries it again.
"""

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import logging

from tfamp import errors
from tfamp.benchmark import (
    assembly,
    calibration,
    exchange,
    plan,
    records,
    report_files,
    suite_config,
    time_to_accuracy,
    worker,
)
from tfamp.diagnostics import doctor
from tfamp.training import (
    batch_size_trials,
    benchmark_inputs,
    benchmark_process,
    child_process,
    compare,
    memory_limit,
    run_files,
)


def run(
    config,
    workdir: str | os.PathLike,
    report: Callable[[str], object] = logging.info,
    command: str = "",
    program: Sequence[str] | None = None,
) -> records.Report:
    """Measures what there is to measure and writes the report.

    Writes `benchmark.json`, `report.md`, `report.html` and `figures/`.

    Args:
      config: The configuration, see `suite_config.get_config`.
      workdir: The benchmark's folder.
      report: Function that is told of each process.
      command: The command that a user gave, for the report.
      program: The program that measures; default: `worker`.

    Returns:
      A `records.Report`.

    Raises:
      DataError: If a preset is missing or malformed.
      RunError: If the folder cannot be written or holds anything but this benchmark.
      ValueError: If a setting makes no sense.
    """
    cells = plan.make(config)
    accuracy = plan_accuracy(config)
    versions, no_torch = _find_torch(config, cells)
    if no_torch:
        report(f"without PyTorch: {no_torch}")
        cells = [cell for cell in cells if cell.framework != "torch"]
    shared = suite_config.identity(config)
    folder = run_files.open_folder(shared, workdir, "benchmark")
    with run_files.locked(folder):
        run_files.write_config(shared, folder)
        (folder / "cells").mkdir(exist_ok=True)
        described = doctor.describe()
        place = benchmark_process.identity(described) | {"keras-hub": _keras_hub()}
        with _processes(config, program) as started:
            suite = _Suite(
                *(config, folder, place, versions, report, started, len(accuracy))
            )
            measured, failures = suite.measure(cells)
            runs, accuracy_rows = suite.train(accuracy)
        result = assembly.make(
            config,
            assembly.Findings(
                *(cells, measured, failures, suite.calibrated, runs, accuracy_rows),
                *(versions, no_torch),
            ),
            described.to_dict(),
            command=command,
            date=datetime.date.today().isoformat(),
        )
        report_files.write(result, folder)
    return result


def _processes(config, program):
    if program is not None:
        return contextlib.nullcontext(program)
    parts = (*config.tasks.values(), *config.time_to_accuracy.values())
    texts = any(benchmark_inputs.is_text(part.config.task) for part in parts)
    return worker.processes(texts)


def _keras_hub():
    """The version of KerasHub, which the figures of texts depend on, too."""
    try:
        return importlib.metadata.version("keras-hub")
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_torch(config, cells):
    """Returns PyTorch's versions, and why its cells are left out."""
    if not any(cell.framework == "torch" for cell in cells):
        return {}, ""
    versions, reason = exchange.torch_versions(_torch_python(config))
    if reason and config.torch_python:
        raise errors.RunError(
            "The interpreter has no PyTorch and transformers. Received: "
            f"config.torch_python={config.torch_python!r}: {reason}. Leave it empty to "
            "measure without PyTorch."
        )
    return versions, reason


def _torch_python(config):
    return config.torch_python or sys.executable


def plan_accuracy(config) -> dict[tuple[str, str, int], Any]:
    """Returns the runs of the time to accuracy: {(task, mode, seed): configuration}.

    Raises:
      ValueError: If a setting makes no sense.
    """
    runs = {}
    for name, accuracy in config.time_to_accuracy.items():
        time_to_accuracy.check(accuracy.config, accuracy.target)
        chosen, _ = compare.mixed_mode(accuracy.config.precision.mode)
        modes = accuracy.modes or ("float32", chosen)
        planned = time_to_accuracy.plan(accuracy.config, name, accuracy.seeds, modes)
        runs |= {(name, *key): one for key, one in planned.items()}
    return runs


class _Job(NamedTuple):
    """One process: what it is told, its file, a line on it, its memory limit, identity.

    `peers` are the versions that figures depend on beside those of all processes.
    """

    asked: dict[str, Any]
    file: pathlib.Path
    label: str
    program: worker.Program
    limited: bool = True
    peers: dict[str, str] | None = None


class _Suite:
    """The processes of one benchmark over its folder."""

    def __init__(self, config, folder, place, peers, report, program, accuracy_runs):
        self.config, self.folder = config, folder
        self.place, self.peers = place, peers
        self.report, self.program = report, program
        self.accuracy_runs = accuracy_runs
        self.seeds = range(config.seed, config.seed + config.repeats)
        self.memory = _limits(config.memory_limit_mb)
        self.torch_python = _torch_python(config)
        self.calibrated = records.Calibration()
        self._number = self._total = 0
        self._seconds = []

    # ---- Cells ----

    def measure(self, cells):
        """Returns {cell: {seed: figures}} and {cell: why it failed}."""
        counted = self._counted()
        measured = {cell: {} for cell in cells}
        failures = {}
        calibrations = int(self.config.calibration_seconds > 0)
        self._total = calibrations + len(self.seeds) * len(cells) + self.accuracy_runs
        self._calibrate()
        for repeat, seed in enumerate(self.seeds):
            # Each repeat begins elsewhere: no cell is always the first one.
            start = repeat * len(cells) // len(self.seeds)
            for cell in (*cells[start:], *cells[:start]):
                if cell in failures:
                    self._number += 1
                    continue
                shape = cell.task, cell.batch_size
                found, why = self._cell(cell, seed, repeat, shape not in counted)
                if found is None:
                    failures[cell] = why
                    continue
                measured[cell][seed] = found
                counted |= {shape: found} if found.get("operations") else {}
        for cell in cells:  # Of a cell that is not asked for now, perhaps.
            for found in measured[cell].values():
                shape = cell.task, cell.batch_size
                found["operations"] = counted.get(shape, {}).get("operations")
        shutil.rmtree(self.folder / "exchange", ignore_errors=True)
        return measured, failures

    def _counted(self):
        """{(task, batch size): figures} of cells whose operations were counted."""
        counted = {}
        for file in (self.folder / "cells").glob("train-*.json"):
            found = benchmark_process.read(file, self.place)
            if found and found.get("operations"):
                counted[found["task"], found["batch_size"]] = found
        return counted

    def _cell(self, cell, seed, repeat, count):
        file = self.folder / "cells" / f"{cell.key}-repeat{repeat}.json"
        label = f"{cell.label}, {cell.framework}, repeat {repeat + 1}"
        if cell.framework == "torch":
            return self._torch(cell, seed, file.absolute(), label)
        asked = {
            "job": "cell",
            "task": run_files.plain_config(self.config.tasks[cell.task]),
            "cell": cell._asdict(),
            "seed": seed,
            "steps": self.config.steps,
            "warmup": self.config.warmup,
            "profile_steps": 0 if repeat or cell.xla else self.config.profile_steps,
            "count": count,
        }
        return self._do(_Job(asked, file.absolute(), label, self.program))

    def _torch(self, cell, seed, file, label):
        """The twin in PyTorch, after Keras has written its weights and batches."""
        path = self._exchange_file(cell, seed)
        if benchmark_process.read(file, self._place(self.peers)) is None:
            why = self._exchange(cell)
            if why:
                self._number += 1
                self.report(f"  failed: {label}: {why}")
                return None, why
        asked = {
            "cell": cell._asdict(),
            "exchange": str(path),
            "steps": self.config.steps,
            "warmup": self.config.warmup,
            "threads": calibration.cores(),
        }
        program = exchange.command(self.torch_python)
        return self._do(_Job(asked, file, label, program, peers=self.peers))

    def _exchange_file(self, cell, seed):
        name = f"{cell.task}-batch{cell.batch_size}-seed{seed}.npz"
        return (self.folder / "exchange" / name).absolute()

    def _exchange(self, cell):
        """Has Keras write what PyTorch needs, of all seeds; returns why not."""
        files = {str(seed): self._exchange_file(cell, seed) for seed in self.seeds}
        done = self.folder / "exchange" / f"{cell.task}-batch{cell.batch_size}.json"
        written = benchmark_process.read(done, self.place) is not None
        if written and all(file.exists() for file in files.values()):
            return ""
        done.parent.mkdir(exist_ok=True)
        asked = {
            "job": "exchange",
            "task": run_files.plain_config(self.config.tasks[cell.task]),
            "batch_size": cell.batch_size,
            "steps": self.config.warmup + self.config.steps,
            "files": {seed: str(file) for seed, file in files.items()},
        }
        request = child_process.to_request(
            asked, done.absolute(), self.place, self.memory
        )
        return benchmark_process.run(request, done, self.program)

    def _calibrate(self):
        """What the machine gives, unless it is known."""
        if not self.config.calibration_seconds:
            return
        asked = {"job": "calibration", "seconds": self.config.calibration_seconds}
        file = (self.folder / "calibration.json").absolute()
        # It is the machine that is measured, not what fits into a limit.
        job = _Job(asked, file, "calibration", self.program, limited=False)
        found, why = self._do(job)
        if found is None:
            self.calibrated = records.Calibration(failed=why)
        else:
            self.calibrated = records.Calibration(**found["calibration"])

    # ---- Time to accuracy ----

    def train(self, runs):
        """Makes the runs that there are not; returns (runs, rows)."""
        made = [self._train(*key, config) for key, config in runs.items()]
        rows = []
        for name, accuracy in self.config.time_to_accuracy.items():
            own = [each for each in made if each.task == name]
            done = [each for each in own if not each.failed]
            metric, is_error = "", False
            if done:
                folder = self._run_folder(done[0])
                metric, is_error = time_to_accuracy.read_metric(folder)
            rows += time_to_accuracy.summarize(own, metric, accuracy.target, is_error)
        return made, rows

    def _run_folder(self, run):
        return self.folder / "accuracy" / run.task / run.mode / f"seed{run.seed}"

    def _train(self, task, mode, seed, config):
        run = records.AccuracyRun(task, mode, seed)
        folder = self._run_folder(run)
        file = self.folder / "cells" / f"accuracy-{task}-{mode}-seed{seed}.json"
        label = f"{task}: {mode} up to an accuracy, seed {seed}"
        if benchmark_process.read(file, self.place) is None:
            # Of another machine or version, or killed: going on with it would add the
            # seconds of both, and of two tracings.
            run_files.delete_run(folder)
        asked = {
            "job": "accuracy",
            "config": run_files.plain_config(config),
            "folder": str(folder.absolute()),
        }
        found, why = self._do(_Job(asked, file.absolute(), label, self.program))
        if found is None:
            return run._replace(failed=why)
        target = self.config.time_to_accuracy[task].target
        return time_to_accuracy.read_run(folder, task, mode, target)

    # ---- One process ----

    def _do(self, job: _Job):
        """Returns (figures, "") of a process, or (None, why it failed)."""
        self._number += 1
        place = self._place(job.peers)
        found = benchmark_process.read(job.file, place)
        done = " (measured before)" if found else self._left()
        self.report(f"{self._number} of {self._total}: {job.label}{done}")
        if found is not None:
            return found, ""
        start = time.monotonic()
        limit = self.memory if job.limited else None
        request = child_process.to_request(job.asked, job.file, place, limit)
        why = benchmark_process.run(request, job.file, job.program)
        self._seconds.append(time.monotonic() - start)
        found = benchmark_process.read(job.file, place)
        if found is None:
            self.report(f"  failed: {memory_limit.lack(why) or why}")
        return found, why

    def _place(self, peers):
        """What figures depend on: PyTorch's versions if they are PyTorch's."""
        return self.place | ({"peers": peers} if peers else {})

    def _left(self):
        """How long the rest will take, going by what was measured so far."""
        if not self._seconds:
            return ""
        each = sum(self._seconds) / len(self._seconds)
        minutes = each * (self._total - self._number + 1) / 60
        return f" (about {max(1, round(minutes))} min left)"


def _limits(asked_mib):
    """The limits of a cell's memory; None where there are none."""
    if asked_mib is None:
        return None
    found = batch_size_trials.limits(asked_mib)
    return {"host": found.host, "device": found.device}
