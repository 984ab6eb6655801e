"""Where an export goes: checked before the work, replaced last, all or nothing."""

import contextlib
import glob
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from tfamp import errors

SUFFIXES = {"litert": ".tflite", "onnx": ".onnx"}  # Of formats that are a file.
_LOCK = "lock"


def checked(path: str | os.PathLike, overwrite: bool) -> pathlib.Path:
    """Returns the absolute path, which must be local and free, or replaceable."""
    if "://" in os.fspath(path):
        raise ValueError(
            f"`path` must be a local folder. Received: path={os.fspath(path)!r}. "
            "Export to a local folder and copy it."
        )
    target = pathlib.Path(path).absolute()
    _check_free(target, overwrite)
    return target


def _check_free(target, overwrite):
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise errors.ExportError(
            f"`path` exists already. Received: path={target}. Choose another one, or "
            "pass `overwrite=True`."
        )
    is_folder = target.is_dir() and not target.is_symlink()
    is_model = is_folder and (target / "saved_model.pb").exists()
    is_model |= target.suffix in SUFFIXES.values() and target.is_file()
    if not is_model and not (is_folder and not any(target.iterdir())):
        raise errors.ExportError(
            "`overwrite=True` replaces a SavedModel or an empty folder, or a "
            f"{' or '.join(SUFFIXES.values())} file, only. Received: path={target}. "
            "Choose another one."
        )


def _lock(folder):
    """Returns a file that is locked until it is closed or its process ends.

    None if another process has locked it, or if the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:  # On Windows.
        return None
    file = open(folder / _LOCK, "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def staged(target: pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
    """Yields a path in a folder beside the target; it is moved there at the end.

    Unless the block raises: then nothing of it is left, nor of what it put beside.
    """
    beside = next(parent for parent in target.parents if parent.exists())
    prefix = f".{target.name}."
    for left in beside.glob(f"{glob.escape(prefix)}*"):
        if (left / _LOCK).exists() and (lock := _lock(left)):  # Its process has died.
            with lock:
                shutil.rmtree(left)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=prefix, dir=beside)
    except OSError as error:
        raise errors.ExportError(
            f"`path` cannot be written. Received: path={target}: {error}."
        ) from error
    with scratch as name, _lock(pathlib.Path(name)) or contextlib.nullcontext():
        new, old = pathlib.Path(name, "new"), pathlib.Path(name, "old")
        yield new
        _check_free(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.path.lexists(target):
                os.replace(target, old)
            os.replace(new, target)
        except BaseException:  # An interrupt in between would delete the old one.
            if os.path.lexists(old) and not os.path.lexists(target):
                os.replace(old, target)
            raise
