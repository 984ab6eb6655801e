"""Processes that try batch sizes under a limit of memory."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfamp import errors, hardware
from tfamp.diagnostics import doctor
from tfamp.training import (
    batch_size_report,
    benchmark_cell,
    benchmark_process,
    memory_limit,
    run_files,
)

# Of what the host has available: the rest is for what others take meanwhile.
SHARE = 0.8


class Limits(NamedTuple):
    """Memory of a trial's process.

    Attributes:
      host: Bytes of resident memory.
      device: Bytes of the first GPU; None: all, or there is none.
      place: "GPU" or "CPU": where the search is for the limit.
      source: Where that limit comes from.
    """

    host: int
    device: int | None
    place: str
    source: str

    @property
    def searched(self) -> int | None:
        """The limit that the search is for; None for all of a GPU."""
        return self.device if self.place == "GPU" else self.host

    @property
    def text(self) -> str:
        """That limit in words."""
        size = memory_limit.mib(self.searched) if self.searched else "all"
        return f"memory of the {self.place}: {size}, {self.source}"


def limits(asked_mib: int | None) -> Limits:
    """Returns the limits of a search on this host.

    Args:
      asked_mib: Of a process, in MiB: of the first GPU where there is one, else of the
        host. None: all of the GPU, or `SHARE` of what the host has available.

    Raises:
      RunError: If this host cannot tell its memory.
      ValueError: If that is more than the host can spare.
    """
    available = memory_limit.available()
    share = int(SHARE * available)
    shared = f"{SHARE:.0%} of the {memory_limit.mib(available)} available at the start"
    asked = asked_mib and asked_mib * memory_limit.MIB
    source = "as asked for (--memory_limit_mb)"
    if any(device.kind == "GPU" for device in hardware.read_devices()):
        return Limits(share, asked, "GPU", source if asked else "no limit set")
    if not asked:
        return Limits(share, None, "CPU", shared)
    if asked > share:
        raise ValueError(
            "The limit is more than this host can spare. Received: memory_limit_mb="
            f"{asked_mib}. Expected at most {share // memory_limit.MIB}, {shared}."
        )
    return Limits(asked, None, "CPU", source)


class Trials:
    """The trials of a search; those in its folder are not made again.

    Attributes:
      found: What `benchmark_cell.measure` returned in those that fit.
    """

    def __init__(
        self,
        config,
        steps: int,
        limits: Limits,
        folder: pathlib.Path,
        described: doctor.MachineReport,
        report: Callable[[str], object],
        command: Sequence[str] | None,
    ):
        """Takes what the trials have in common.

        Args:
          config: The configuration.
          steps: Training steps of a trial, at least 2.
          limits: Memory of a trial.
          folder: The search's folder; has a folder `cells`.
          described: This host.
          report: Function that is told of each trial.
          command: The program that makes a trial; default: `benchmark_cell`.
        """
        self.config, self.report, self.command = config, report, command
        self.counts = steps - 1, 1  # The first step is the warm-up.
        self.cells = (folder / "cells").absolute()
        self.identity = benchmark_process.identity(described)
        self.limits = limits
        self.found: list[dict[str, Any]] = []

    def make(self, cell: benchmark_cell.Cell) -> batch_size_report.Trial:
        """Takes the steps of one batch size, and tells of it.

        Args:
          cell: The `benchmark_cell.Cell`.

        Raises:
          RunError: If the trial fails for anything but memory.
        """
        file = self.cells / f"{cell.key}-repeat0.json"
        figures = self._read(file)
        again = " (tried before)" if figures else ""
        figures = figures or self._execute(cell, file)
        reason = self._why_not(figures)
        peak = None if "lack" in figures else self._peak(figures)
        told = f"does not fit: {reason}" if reason else f"fits: {_mib(peak)} at most"
        self.report(f"{cell.mode}, batch {cell.batch_size}{again}: {told}")
        if not reason:
            self.found.append(figures)
        return batch_size_report.Trial(cell.batch_size, peak, reason)

    def _read(self, file):
        """What a trial left; None where a lower limit stood, or none was made."""
        figures = benchmark_process.read(file, self.identity)
        lower = figures and figures.get("limit", self.limits.host) < self.limits.host
        return None if lower else figures

    def _execute(self, cell, file):
        """Runs the process; returns its figures, or how it ran out of memory."""
        memory = {"host": self.limits.host, "device": self.limits.device}
        request = benchmark_cell.to_request(
            self.config, cell, *self.counts, file, self.identity, memory
        )
        failed = benchmark_process.run(request, file, self.command)
        if not failed:
            return json.loads(file.read_text())
        lack = memory_limit.lack(failed)
        if not lack:
            raise errors.RunError(
                f"A trial failed, and not for lack of memory: {cell.label}. Received: "
                f"{failed}"
            )
        figures = {"lack": lack, "limit": memory["host"], "identity": self.identity}
        run_files.write_text(file, json.dumps(figures))
        return figures

    def _why_not(self, figures):
        """How a trial ran out of memory; "" if it did not."""
        if "lack" in figures:
            return figures["lack"]
        # A peak can be shorter than what the process sees of itself.
        held, limit = figures["host_bytes"], self.limits.host
        return memory_limit.over(held, limit) if held > limit else ""

    def _peak(self, figures):
        return figures["host_bytes" if self.limits.place == "CPU" else "device_bytes"]


def _mib(count):
    return "unknown" if count is None else memory_limit.mib(count)
