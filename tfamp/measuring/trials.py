"""Trials: what a fresh process has measured is kept in a file, and not measured again.

Figures hold on one machine, with one set of versions, and for one text of a user's
function.
"""

import hashlib
import importlib.util
import json
import pathlib
import platform
import re
from collections.abc import Callable
from typing import Any

from tfamp import progress
from tfamp.diagnostics import doctor
from tfamp.measuring import processes
from tfamp.runs import run_files

_SCHEMA_VERSION = 2
# Facts that are the calling process' own; what is measured sets them for itself.
_OWN_FACTS = ("TF32 flag", "dtype policy", "graph rewrite")
# What is free of a GPU, which is another figure at each call.
_FREE = re.compile(r"[\d.]+ of ([\d.]+ GiB) free(: other processes[^;]*)?")


class Trials:
    """The trials of one job.

    Args:
      folder: The job's folder, with `cells/`.
      **held: What their figures hold for besides the machine.

    Attributes:
      folder: The job's folder.
      machine: The machine that they are made on.
    """

    def __init__(self, folder: pathlib.Path, **held: Any):
        self.folder, self.machine = folder, doctor.describe()
        self._held = place(self.machine) | held

    def take(
        self,
        name: str,
        work: Callable[[], processes.Outcome],
        lines: progress.Progress,
        label: str,
        *,
        usable: Callable[[dict[str, Any]], bool] = lambda figures: True,
        **held: Any,
    ) -> processes.Outcome:
        """Returns the outcome of a trial: what its file holds, or else what work does.

        Args:
          name: Name of its file: what is measured, and how.
          work: Makes the trial, in a fresh process. Its figures are kept, as JSON; a
            failure is not, and is tried again by the next call.
          lines: Says that the trial begins.
          label: What it is called there.
          usable: Function of the figures of a file; whether they count now.
          **held: What its figures hold for besides.
        """
        figures = self.read(name, **held)
        before = figures is not None and usable(figures)
        with lines.part(label, "measured before" * before):
            if before:
                return processes.Outcome(figures)
            outcome = work()
        if not outcome.failure:
            self.write(name, outcome.value, **held)
        return outcome

    def read(self, name: str, **held: Any) -> dict[str, Any] | None:
        """Returns a trial's figures; None where there are none that hold here.

        Args:
          name, **held: As of `take`.
        """
        try:
            figures = json.loads((self.folder / f"cells/{name}.json").read_text())
        except (OSError, ValueError):
            return None
        same = isinstance(figures, dict) and figures.pop("identity", None) == (
            self._held | held
        )
        return figures if same else None

    def write(self, name: str, figures: dict[str, Any], **held: Any) -> None:
        """Keeps a trial's figures.

        Args:
          name, **held: As of `take`.
          figures: Can be written as JSON.
        """
        content = {"identity": self._held | held, **figures}
        run_files.write_json(self.folder / f"cells/{name}.json", content, indent=None)


def place(machine: doctor.MachineReport) -> dict[str, Any]:
    """Returns what figures hold for: the device, versions and switches of a report."""
    plain = machine.to_dict()
    return {
        "schema_version": _SCHEMA_VERSION,
        "device": plain["device"],
        "platform": platform.platform(),
        "facts": {
            name: _FREE.sub(r"\1", text) if isinstance(text, str) else text
            for name, text in plain["facts"].items()
            if name not in _OWN_FACTS
        },
        "switches": {each["name"]: each["requested"] for each in plain["switches"]},
    }


def fingerprint(function: str) -> str:
    """Returns a digest of the file of a user's function; "" for a configuration.

    Args:
      function: As `functions.name_of` returns it, or "".
    """
    module = function.rpartition(":")[0]
    named = module and not module.endswith(".py")
    spec = importlib.util.find_spec(module) if named else None
    file = pathlib.Path(spec.origin or "" if spec else module)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
