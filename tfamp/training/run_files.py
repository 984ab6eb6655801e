"""What a run keeps in its folder: settings, environment, metrics, result."""

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from typing import Any

import yaml
from ml_collections import config_dict

from tfamp import control, errors, hardware

_PACKAGES = ("tfamp", "tensorflow", "keras", "numpy", "ml_dtypes", "keras-hub")
# Where the data lie is no property of the run.
_PATHS = ("data_dir", "manual_dir")


def open_folder(config: config_dict.ConfigDict, workdir: str | os.PathLike):
    """Creates a run's folder, or checks that it holds the same run.

    Args:
      config: The resolved configuration.
      workdir: The folder.

    Returns:
      The folder as `pathlib.Path`.

    Raises:
      RunError: If the folder cannot be written, or holds a run with other settings.
    """
    folder = pathlib.Path(workdir)
    file = folder / "config.yaml"
    settings = plain_config(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.exists():
            _check_same(yaml.safe_load(file.read_text()), settings, folder)
        write_text(file, yaml.safe_dump(settings, sort_keys=False))
    except OSError as e:
        raise errors.RunError(
            f"Cannot write the working directory. Received: {str(folder)!r}: "
            f"{e.strerror or e}. Pass --workdir with a folder that can be written."
        ) from e
    return folder


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the configuration as dicts, lists, numbers and strings."""
    return json.loads(json.dumps(config.to_dict()))


def _check_same(old, new, folder):
    old, new = flatten(old), flatten(new)
    changed = [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in _PATHS
    ]
    if changed:
        raise errors.RunError(
            f"{str(folder)!r} holds a run with other settings "
            f"({'; '.join(changed[:5])}). Pass another --workdir, or --overwrite to "
            "delete that run."
        )


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dicts as one dict with dotted keys."""
    flat = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_environment(folder: pathlib.Path, status: control.Status) -> None:
    """Writes `environment.json`: versions, devices, precision asked for and got."""
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
        "support": support,
    }
    write_text(folder / "environment.json", json.dumps(environment, indent=2))


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
    write_text(file, "".join(line + "\n" for line in kept))


def delete_run(workdir: str | os.PathLike) -> None:
    """Deletes a folder of runs.

    Raises:
      RunError: If the folder holds something else.
    """
    folder = pathlib.Path(workdir)
    if not folder.exists():
        return
    holds_run = any(folder.rglob("config.yaml"))
    if any(folder.iterdir()) and not holds_run:
        raise errors.RunError(
            f"--overwrite deletes only folders of runs. Received: {str(folder)!r}, "
            "which holds no config.yaml."
        )
    shutil.rmtree(folder)
