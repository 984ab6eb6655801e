"""A job's folder: its marker and lock, settings and metrics."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from ml_collections import config_dict

from tfamp import errors, extras

# An empty file `.tfamp-KIND` says that a job made the folder, and which kind of job. A
# folder without one is somebody's: no job writes into it, and none deletes it.
KINDS = ("run", "comparison", "benchmark")
_MARKER = ".tfamp-"


# ---- The folder ----


def open_folder(
    config: config_dict.ConfigDict | None, workdir: str | os.PathLike, kind: str = "run"
) -> pathlib.Path:
    """Creates a job's folder, or checks that it holds the same job.

    The settings are written later, by `write_config`: a run whose settings or data
    turn out to be wrong leaves nothing that the corrected one would stumble over.

    Args:
      config: The resolved configuration; None for a job without one.
      workdir: The folder.
      kind: One of `KINDS`.

    Raises:
      RunError: If the folder cannot be written, or holds a job of other settings or of
        another kind, or what no job has written.
    """
    folder = pathlib.Path(workdir)
    if re.match(r"\w\w+:/", str(folder)):
        raise errors.RunError(
            "A job's folder is a local or mounted one, for its lock and HDF5 files. "
            f"Received: {str(workdir)!r}. Copy it when the job is done; a custom "
            "`fit` can save backups there by tfamp.BackupAndRestore."
        )
    try:
        held_kind = _kind(folder)
        if held_kind is None and folder.exists() and any(folder.iterdir()):
            raise errors.RunError(
                f"{str(folder)!r} is not empty, and was not created by this version of "
                "tfamp. Pass --workdir with a new or empty folder."
            )
        if held_kind not in (None, kind):
            raise errors.RunError(
                f"{str(folder)!r} holds a {held_kind}; this job writes a {kind}. Pass "
                "another --workdir, or --overwrite to delete its contents."
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_MARKER}{kind}").touch()
        settings = folder / "config.yaml"
        if config is not None and settings.exists():
            _check_same(_read_settings(settings), config, folder)
    except OSError as e:
        raise errors.RunError(
            f"Cannot write the working directory. Received: {str(folder)!r}: "
            f"{e.strerror or e}. Pass a --workdir that can be written."
        ) from e
    return folder


def _kind(folder):
    return next((k for k in KINDS if (folder / f"{_MARKER}{k}").exists()), None)


def write_config(config: config_dict.ConfigDict, folder: pathlib.Path) -> None:
    """Writes `config.yaml`: the resolved settings."""
    settings = plain_config(config)
    write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def default_workdir(
    config: config_dict.ConfigDict, job: str = "compare"
) -> pathlib.Path:
    """Returns runs/NAME-HASH: the same settings, the same folder, so runs resume.

    Args:
      config: The configuration of the job's folder.
      job: Value of --job. "train" has its own folder: runs/NAME-train-HASH.
    """
    settings = with_old_names(plain_config(config))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    name = f"{config.name}-train" if job == "train" else config.name
    return pathlib.Path("runs", f"{name}-{digest.hexdigest()[:8]}")


# What tasks were called in `config.yaml` up to version 0.2 -> their recipe.
_RECIPES = {
    "image_classification": "images",
    "language_model": "language_model",
    "question_answering": "question_answering",
    "segmentation": "segmentation",
    "tabular_regression": "tabular",
    "text_classification": "text_classification",
}
_NEW_NAMES = {old: f"tfamp.recipes.{name}:create" for old, name in _RECIPES.items()}
_OLD_NAMES = {new: old for old, new in _NEW_NAMES.items()}


def with_old_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns plain settings with the names that tasks had up to version 0.2.

    Folders are named by those, so that a command finds the folder it has always had.
    """
    return _renamed(settings, _OLD_NAMES)


def _renamed(settings, names):
    """Names tasks anew: of a run, or of each run that a benchmark's settings hold."""
    if not isinstance(settings, dict):
        return settings
    renamed = {name: _renamed(each, names) for name, each in settings.items()}
    if isinstance(task := renamed.get("task"), str):
        if {"precision", "optimizer"} <= renamed.keys():  # A run's.
            renamed["task"] = names.get(task, task)
    return renamed


def plain_config(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the configuration as dicts, lists, numbers and strings."""
    return json.loads(json.dumps(config.to_dict()))


# What changes nothing of the steps that were trained.
_FREE = {"eval_batch_size", "strategy", "bytes_per_pack"}


def _check_same(old, config, folder):
    old, new = _flatten(old), _flatten(plain_config(config))
    keys = sorted(old.keys() | new.keys())
    # Without a backup it would start again, and lose what is there.
    longer = _may_be_longer(old, new) and any(folder.glob("backup/*.npz"))
    free = _FREE | ({"epochs"} if longer else set())
    changed = [key for key in keys if old.get(key) != new.get(key) and key not in free]
    shown = (f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed[:5])
    if changed:
        raise errors.RunError(
            f"{str(folder)!r} holds a run with other settings ({'; '.join(shown)}). "
            "Pass another --workdir, or --overwrite to delete that run. A run "
            "resumes with more epochs if the learning rate is constant and the folder "
            "has a backup. It also resumes with another eval_batch_size or strategy."
        )


def _may_be_longer(old, new):
    """Whether more epochs leave the learning rates of those before as they were."""
    steady = ("optimizer.schedule", "constant"), ("optimizer.warmup_fraction", 0)
    same = all(new.get(field) == value for field, value in steady)
    return same and new["epochs"] > old.get("epochs", new["epochs"])


def read_config(folder: pathlib.Path) -> config_dict.ConfigDict:
    """Returns the settings of a run, as `write_config` has written them.

    Raises:
      RunError: If the folder holds no run; the runs of a comparison are named.
    """
    file = folder / "config.yaml"
    if not file.exists():
        runs = [str(path.parent) for path in sorted(folder.glob("*/seed*/config.yaml"))]
        raise errors.RunError(
            f"No run found in {str(folder)!r}. Expected --workdir=FOLDER"
            + (f", one of {', '.join(runs)}." if runs else " of a run.")
        )
    return config_dict.ConfigDict(_tuples(_read_settings(file)))


def _read_settings(file):
    return _renamed(yaml.safe_load(file.read_text()), _NEW_NAMES)


def _tuples(value):
    """YAML has lists where a configuration has tuples."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _flatten(settings, prefix=""):
    """Nested dicts as one dict with dotted keys."""
    flat = {}
    for key, value in settings.items():
        inner = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat


def delete_run(workdir: str | os.PathLike) -> None:
    """Deletes a job's folder with all that is in it; no other folder is ever deleted.

    Raises:
      RunError: If no job has made the folder, another process is at work in it, or it
        is a link, the current directory or one above it.
    """
    folder = pathlib.Path(workdir).absolute()
    if not folder.exists():
        return
    here = pathlib.Path.cwd()
    if folder.is_symlink() or folder.resolve() in (here, *here.parents):
        what = "is the current directory, one above it, or a link"
    else:
        what = "" if _kind(folder) else "was not created by this version of tfamp"
    if what:
        raise errors.RunError(
            f"--overwrite deletes only folders of runs. Received: {str(workdir)!r}, "
            f"which {what}. Pass another --workdir."
        )
    with locked(folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.name.startswith(_MARKER):
                path.unlink()
        shutil.rmtree(folder)  # The marker last: what a kill leaves can be deleted.


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other processes from writing a job's folder meanwhile.

    Two of them, given the same command twice, would mix their metrics and backups. The
    lock ends with the process.

    Raises:
      RunError: If another process holds the lock.
    """
    filelock = extras.require("filelock")
    try:
        with filelock.FileLock(folder / f"{_MARKER}lock", timeout=0):
            yield
    except filelock.Timeout as e:
        raise errors.RunError(
            f"Another process is working in {str(folder)!r}. Wait until it has ended, "
            "or pass another --workdir."
        ) from e


@contextlib.contextmanager
def benchmark_folder(
    config: config_dict.ConfigDict, workdir: str | os.PathLike | None
) -> Iterator[pathlib.Path]:
    """Opens a benchmark's folder with its settings and `cells/`, and locks it.

    Args:
      config: What its cells share.
      workdir: The folder; None for a temporary one.

    Raises:
      RunError: As `open_folder` and `locked` do.
    """
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = stack.enter_context(tempfile.TemporaryDirectory())
        folder = open_folder(config, workdir, "benchmark")
        stack.enter_context(locked(folder))
        write_config(config, folder)
        (folder / "cells").mkdir(exist_ok=True)
        yield folder


# ---- Its files ----


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the file to write, so that a kill leaves the old one or the new one."""
    new = path.with_name(f"new-{path.name}")  # Its ending tells Keras the format.
    yield new
    os.replace(new, path)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    with replaced(path) as new:
        new.write_text(text)


def write_json(path: pathlib.Path, content: Any, indent: int | None = 2) -> None:
    """Writes plain data so that a kill leaves the old file or the new one."""
    write_text(path, json.dumps(content, indent=indent))


def write_assets(assets: Mapping[str, str], folder: pathlib.Path) -> None:
    """Writes the files of a `tasks.Task` that a model's users need beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in assets.items():
        write_text(folder / name, text)


def read_metrics(folder: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of one kind ("step" or "epoch") of `metrics.jsonl`."""
    return [row for row in _rows(folder) if row["kind"] == kind]


def _rows(folder):
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # Cut short by a kill.
            yield json.loads(line)


def keep_metrics(folder: pathlib.Path, epochs: int, steps: int) -> None:
    """Drops the lines after a backup; the resumed run writes them again.

    Args:
      folder: The run's folder.
      epochs: Finished epochs.
      steps: Finished steps of the whole run.
    """
    limits = {"step": steps, "epoch": epochs}
    rows = [row for row in _rows(folder) if row[row["kind"]] <= limits[row["kind"]]]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(folder / "metrics.jsonl", lines)
