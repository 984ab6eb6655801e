"""What a run records in its folder: versions, devices, precision, and metrics."""

import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

from tfamp import hardware
from tfamp.kernels import switches
from tfamp.precision import control
from tfamp.training import run_files

_PACKAGES = ("tfamp", "tensorflow", "keras", "numpy", "ml_dtypes", "keras-hub")


def write_environment(
    folder: pathlib.Path, status: control.Status, distribution: dict[str, Any]
) -> None:
    """Writes `environment.json`: versions, devices, precision asked for and got.

    Args:
      folder: The run's folder.
      status: The precision.
      distribution: What `distribution.describe` says of the strategy.
    """
    support = {
        device: {name: each._asdict() for name, each in formats.items()}
        for device, formats in hardware.detect_support().items()
    }
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "precision": status._asdict(),
        "kernel_switches": [each._asdict() for each in switches.describe()],
        "distribution": distribution,
        "support": support,
    }
    run_files.write_text(folder / "environment.json", json.dumps(environment, indent=2))


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_metrics(folder: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of one kind ("step" or "epoch") of `metrics.jsonl`."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def keep_metrics(folder: pathlib.Path, epochs: int, steps_per_epoch: int) -> None:
    """Drops the lines after the last backup; the resumed run writes them again."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    limits = {"step": epochs * steps_per_epoch, "epoch": epochs}
    kept = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # A line cut short by a kill.
        if row[row["kind"]] <= limits[row["kind"]]:
            kept.append(line)
    run_files.write_text(file, "".join(line + "\n" for line in kept))
