"""A job's folder: its settings, what kind of job it is of, and its deletion."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import yaml
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import variants

_CELL = re.compile(
    r"((train|inference)-.+-repeat\d+|accuracy-.+-seed\d+)\.json(\.tmp)?"
)
# In the settings of every run, and of every benchmark of one or of several tasks, of
# all versions.
_OWN_SETTINGS = {"task", "optimizer", "precision"}
_SUITE_SETTINGS = {"benchmark", "tasks", "time_to_accuracy"}
# What a task's `score` may write into a run's folder.
PREDICTIONS = (
    "columns.json",
    "labels.json",
    "nbest_predictions.json",
    "predictions.json",
    "predictions.png",
    "tokenizer.json",
    "underflow.json",
    "underflow.md",
)
# What a run, a benchmark and a comparison write; nothing else is ever deleted.
_RUN_FILES = {
    *PREDICTIONS,
    "backup",
    "backup.new",
    "backup.old",
    "best.weights.h5",
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "model.keras",
    "new-best.weights.h5",
    "result.json",
    "tensorboard",
    "timeline.png",
}
_BENCHMARK_FILES = {
    *("batch_sizes.json", "benchmark.json", "cells", "config.yaml", "report.md"),
    *("accuracy", "calibration.json", "exchange", "figures", "report.html"),
    "screenshot.png",
}
_FIGURE = re.compile(r"[\w-]+\.(png|svg)(\.tmp)?")
_EXCHANGED = re.compile(r"[\w-]+-batch\d+(-seed\d+)?\.(npz|json)(\.tmp)?")
_COMPARISON_FILES = {"comparison.json", "comparison.png", "export", "report.md"}


def open_folder(
    config: config_dict.ConfigDict, workdir: str | os.PathLike, kind: str = "run"
):
    """Creates a run's folder, or checks that it holds the same run.

    The settings are written later, by `write_config`: a run whose settings or data
    turn out to be wrong leaves no trace that the corrected one would stumble over.

    Args:
      config: The resolved configuration.
      workdir: The folder.
      kind: "run" or "benchmark".

    Returns:
      The folder as `pathlib.Path`.

    Raises:
      RunError: If the folder cannot be written, or holds a run with other settings,
        or what another job wrote.
    """
    folder = pathlib.Path(workdir)
    check_kind(folder, kind)
    with _told_as_run_error(folder):
        _make(folder)
        if (folder / "config.yaml").exists():
            _check_same(_read_config(folder), plain_config(config), folder)
    return folder


def make_folder(folder: pathlib.Path) -> None:
    """Makes a job's folder, unless it is there.

    Raises:
      RunError: If it cannot be written.
    """
    with _told_as_run_error(folder):
        _make(folder)


def _make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # The folder can be written.


@contextlib.contextmanager
def _told_as_run_error(folder):
    try:
        yield
    except OSError as e:
        raise errors.RunError(
            f"Cannot write the working directory. Received: {str(folder)!r}: "
            f"{e.strerror or e}. Pass --workdir with a folder that can be written."
        ) from e


def check_kind(folder: pathlib.Path, kind: str) -> None:
    """Raises RunError if a folder holds what another kind of job wrote.

    Both would write files of the same names, and neither could be deleted afterwards.

    Args:
      folder: A job's folder; need not exist.
      kind: What the job writes: "run", "benchmark" or "comparison".
    """
    others = sorted(_kinds(folder) - {kind})
    if others:
        raise errors.RunError(
            f"{str(folder)!r} holds a {others[0]}; this job writes a {kind}. Pass "
            "another --workdir, or --overwrite to delete what is there."
        )


def _kinds(folder):
    """What a folder holds, by the files that each kind of job writes first."""
    kinds = set()
    if (folder / "config.yaml").exists():
        benchmark = "benchmark" in (_own_settings(folder) or ())
        kinds.add("benchmark" if benchmark else "run")
    runs = (folder.glob(f"{name}/seed*") for name in variants.FOLDERS)
    if (folder / "comparison.json").exists() or any(map(any, runs)):
        kinds.add("comparison")
    return kinds


def _own_settings(folder):
    """Returns the settings of a run or a benchmark; None if there are none."""
    try:
        settings = _read_config(folder)
    except (errors.RunError, OSError):
        return None
    known = (_OWN_SETTINGS, _SUITE_SETTINGS)
    return settings if any(settings.keys() >= names for names in known) else None


def write_config(config: config_dict.ConfigDict, folder: pathlib.Path) -> None:
    """Writes `config.yaml`: the resolved settings."""
    text = yaml.safe_dump(plain_config(config), sort_keys=False)
    write_text(folder / "config.yaml", text)


def _read_config(folder):
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        settings = str(e).splitlines()[0]
    if not isinstance(settings, dict):
        raise errors.RunError(
            f"{str(folder / 'config.yaml')!r} is not the settings of a run. Received: "
            f"{settings!r}. Pass another --workdir."
        )
    return settings


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the configuration as dicts, lists, numbers and strings."""
    return json.loads(json.dumps(config.to_dict()))


def _check_same(old, new, folder):
    old, new = flatten(old), flatten(new)
    keys = sorted(old.keys() | new.keys())
    changed = [key for key in keys if old.get(key) != new.get(key)]
    if not changed:
        return
    shown = (f"{k}: {_shown(old, k)} -> {_shown(new, k)}" for k in changed[:5])
    both = all(key in old and key in new for key in changed)
    raise errors.RunError(
        f"{str(folder)!r} holds a run with other settings ({'; '.join(shown)}). "
        + ("" if both else _OTHER_VERSION)
        + "Pass another --workdir, or --overwrite to delete that run."
    )


_OTHER_VERSION = (
    "Where one side has no such setting, another version of tfamp or another task "
    "wrote the folder; its runs cannot go on here. "
)


def _shown(settings, key):
    return repr(settings[key]) if key in settings else "none such"


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


def delete_run(workdir: str | os.PathLike) -> None:
    """Deletes a run's or a comparison's folder, and never anything else.

    Raises:
      RunError: If the folder holds what no run has written, or is the current
        directory or one above it.
    """
    folder = pathlib.Path(workdir).absolute()
    if not folder.exists():
        return
    here = pathlib.Path.cwd()
    if folder.resolve() in (here, *here.parents) or folder.is_symlink():
        reason = "is the current directory, one above it, or a link"
    else:
        foreign = _foreign_files(folder)
        reason = f"holds {', '.join(foreign[:5])}" if foreign else ""
    if reason:
        raise errors.RunError(
            "--overwrite deletes only folders of runs. Received: "
            f"{str(workdir)!r}, which {reason}. Pass another --workdir."
        )
    shutil.rmtree(folder)


def _foreign_files(folder):
    """Names of what no job writes into its folder.

    That is everything where no settings say that a job wrote there: others, too, have
    a folder `cells` or a `report.md`.
    """
    if (folder / "config.yaml").exists():
        benchmark = "benchmark" in (_own_settings(folder) or ())
        return _foreign_in_benchmark(folder) if benchmark else _foreign_in_run(folder)
    kept = {p.name for p in folder.iterdir() if p.is_dir()} & variants.FOLDERS
    runs = [run for mode in kept for run in (folder / mode).iterdir()]
    written = _COMPARISON_FILES if any(map(_own_settings, runs)) else set()
    foreign = _others(folder, written | kept)
    for run in runs:
        name = f"{run.parent.name}/{run.name}"
        if run.is_dir() and run.name.startswith("seed"):
            foreign += [f"{name}/{each}" for each in _foreign_in_run(run)]
        else:
            foreign.append(name)
    return sorted(foreign)


def _foreign_in_run(folder):
    return _others(folder, _RUN_FILES if _own_settings(folder) else set())


def _foreign_in_benchmark(folder):
    patterns = {"cells": _CELL, "figures": _FIGURE, "exchange": _EXCHANGED}
    foreign = [
        path.name
        for name, pattern in patterns.items()
        for path in folder.glob(f"{name}/*")
        if path.is_dir() or not pattern.fullmatch(path.name)
    ]
    for path in folder.glob("accuracy/*/*/*"):  # TASK/MODE/seedN
        name = path.relative_to(folder)
        own = path.is_dir() and path.name.startswith("seed")
        inner = _foreign_in_run(path) if own else ["no run"]
        foreign += [f"{name}: {each}" for each in inner]
    return _others(folder, _BENCHMARK_FILES) + sorted(foreign)


def _others(folder, known):
    """Names in a folder but for known ones, and what a kill left of writing those."""
    names = (path.name for path in folder.iterdir())
    return sorted(
        name
        for name in names
        if name.removesuffix(".tmp") not in known and not name.startswith(".export.")
    )
