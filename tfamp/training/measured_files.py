"""Files of what was measured, which hold on one machine, with one set of versions."""

import hashlib
import importlib.util
import json
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

from tfamp.diagnostics import doctor
from tfamp.training import run_files

_SCHEMA_VERSION = 2
# Facts that are the calling process' own; what is measured sets them for itself.
_OWN_FACTS = ("TF32 flag", "dtype policy", "graph rewrite")


def place(described: doctor.MachineReport) -> dict[str, Any]:
    """Returns what figures hold for: the device, versions and switches of a report."""
    plain = described.to_dict()
    return {
        "schema_version": _SCHEMA_VERSION,
        "device": plain["device"],
        "platform": platform.platform(),
        "facts": {k: v for k, v in plain["facts"].items() if k not in _OWN_FACTS},
        "switches": {each["name"]: each["requested"] for each in plain["switches"]},
    }


def fingerprint(function: str) -> str:
    """Returns a digest of the file of a user's function; "" for a configuration.

    Args:
      function: As `functions.name_of` returns it, or "".
    """
    module = function.rpartition(":")[0]
    if not module:
        return ""
    spec = None if module.endswith(".py") else importlib.util.find_spec(module)
    file = pathlib.Path(spec.origin or "" if spec else module)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def read(file: pathlib.Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the figures of a file; None where they hold for something else."""
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(figures, dict) and figures.pop("identity", None) == expected
    return figures if same else None


def write(file: pathlib.Path, held: Mapping[str, Any], figures: dict[str, Any]) -> None:
    """Writes figures with what they hold for."""
    run_files.write_text(file, json.dumps({"identity": held, **figures}))
