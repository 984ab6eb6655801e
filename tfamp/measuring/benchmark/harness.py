"""Makes the trials of a benchmark: each in a fresh process, the repeats in turns.

Every cell once, then every cell again, so that a machine that is busy for a while slows
all modes and not one.
"""

import pathlib
import sys
import tempfile
from typing import Any

from tfamp.measuring import process_memory, processes, torch_peer, trials, workloads
from tfamp.measuring.benchmark import accuracy, cells, measure
from tfamp.measuring.torch_peer import exchange
from tfamp.runs import run_files


class Harness:
    """The trials of one benchmark."""

    def __init__(self, config, folder, versions, lines):
        self.config, self.folder, self.lines = config, folder, lines
        self.trials, self.peers = trials.Trials(folder), versions
        self.memory, limit = process_memory.NO_LIMIT, config.memory_limit_mb
        if limit:
            self.memory, _ = process_memory.limits(limit * process_memory.MIB)
        parts = (*config.tasks.values(), *config.time_to_accuracy.values())
        self.preload = workloads.preload(
            part.config for part in parts if part.config is not None
        )

    def measure(self, planned) -> tuple[dict, dict]:
        """Returns {cell: {repeat: figures}} and {cell: why it failed}."""
        measured: dict[cells.Cell, dict[int, Any]] = {cell: {} for cell in planned}
        failures: dict[cells.Cell, str] = {}
        for repeat in range(self.config.repeats):
            # Each repeat begins elsewhere: no cell is always the first one.
            start = repeat * len(planned) // self.config.repeats
            for cell in (*planned[start:], *planned[:start]):
                if cell in failures:
                    self.lines.number += 1
                    continue
                figures, why = self._cell(cell, repeat)
                if figures is None:
                    failures[cell] = why
                else:
                    measured[cell][repeat] = figures
        return measured, failures

    def _cell(self, cell, repeat):
        task = self.config.tasks[cell.task]
        plain = task.copy_and_resolve_references().to_dict()
        seed = self.config.seed + repeat
        counts = self.config.steps, self.config.warmup
        torch = cell.framework == "torch"

        def work():
            if torch:
                return self._torch(cells.config_of(task, cell, seed), cell, *counts)
            job = self.config.job
            return self._call(measure.measure, plain, cell, job, seed, *counts)

        return self._take(
            f"{self.config.job}-{cell.key}-repeat{repeat}",
            f"{cell.label}, repeat {repeat + 1}",
            work,
            peers=self.peers if torch else {},
            # It may have changed: its file is part of what was measured.
            function=trials.fingerprint(task.function),
        )

    def _call(self, function, *arguments, limited=True):
        return processes.call(
            function,
            *arguments,
            timeout=self.config.time_limit,
            memory=self.memory if limited else process_memory.NO_LIMIT,
            preload=(measure.__name__, accuracy.__name__, *self.preload),
        )

    def _torch(self, config, cell, steps, warmup):
        """The twin in PyTorch, after Keras has written its weights and batches."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "exchange.safetensors")
            arguments = str(file), config.to_dict(), warmup + steps
            written = self._call(exchange.write, *arguments)
            if written.failure:
                return written
            request = {
                "mode": cell.mode,
                "exchange": str(file),
                "steps": steps,
                "warmup": warmup,
                "threads": processes.cores(),
            }
            python = self.config.torch_python or sys.executable
            return torch_peer.call(python, request, self.config.time_limit)

    def train(self, runs) -> list[accuracy.Row]:
        """Makes the runs up to an accuracy that there are not; returns their rows."""
        targets = self.config.time_to_accuracy
        by_task: dict[str, dict[str, dict[int, Any]]] = {}
        for (task, mode, seed), config in runs.items():
            folder = self.folder / "accuracy" / task / mode / f"seed{seed}"

            def work(config=config, folder=folder):
                # A killed one would add the seconds of two tracings.
                run_files.delete_run(folder)
                return self._call(
                    accuracy.train, config.to_dict(), str(folder), limited=False
                )

            name = f"accuracy-{task}-{mode}-seed{seed}"
            label = f"{task}: {mode}, time to accuracy, seed {seed}"
            figures, why = self._take(name, label, work)
            run = figures or {"failed": why}
            by_task.setdefault(task, {}).setdefault(mode, {})[seed] = run
        return [
            row
            for task, modes in by_task.items()
            for row in accuracy.summarize(task, modes, targets[task].target)
        ]

    def _take(self, name, label, work, **held) -> tuple[Any, str]:
        """Returns (figures, "") of a trial, or (None, why it failed)."""
        outcome = self.trials.take(name, work, self.lines, label, **held)
        if outcome.failure:
            self.lines.result(f"failed: {outcome.lack or outcome.failure}")
        return outcome.value, outcome.lack or outcome.failure
