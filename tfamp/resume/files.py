"""The files of backups: two of them, each whole or not there, in any file system."""

import contextlib
import json
import os
import re
import tempfile
import zipfile
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp import errors

_KIND = "tfamp backup 1"
_KEPT = 2  # Files: if the newest turns out to be damaged, the one before is used.
_DAMAGED = AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile
_FAILED = OSError, tf.errors.OpError
_NAME = r"\d+-\d+\.npz"


class Position(NamedTuple):
    """Where a training stands.

    Attributes:
      epoch: Epochs that are finished.
      calls: Calls of the training function in the epoch after them; each takes
        `steps_per_execution` batches.
    """

    epoch: int = 0
    calls: int = 0


class Backup(NamedTuple):
    """What a file holds: the place, facts of the variables, and their arrays."""

    position: Position
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def read(folder: str | os.PathLike, last: Position | None = None) -> Backup | None:
    """Returns the newest backup that can be read; None if there is no file.

    Args:
      folder: Where to look.
      last: One that is newer does not count.

    Raises:
      RunError: If no file can be read.
    """
    refused = []
    for path in reversed(_files(folder)):
        try:
            with tf.io.gfile.GFile(path, "rb") as file, np.load(file) as stored:
                arrays = {name: stored[name] for name in stored.files}
            facts = json.loads(bytes(arrays.pop("facts")))
            if facts["kind"] != _KIND:
                raise ValueError("it is of another version of tfamp")
        except (*_FAILED, *_DAMAGED) as e:
            refused.append(f"{path!r} is damaged: {' '.join(str(e).split())}")
            continue
        backup = Backup(Position(*facts["position"]), facts, arrays)
        if last is None or backup.position <= last:
            for text in refused:
                logging.warning("Backup %s. The one before it is used.", text)
            return backup
    if refused:
        raise errors.RunError(
            f"No backup can be used. Received: {'; '.join(refused)}. Delete "
            f"{os.fspath(folder)!r} to train from the start."
        )
    return None


def write(folder: str | os.PathLike, backup: Backup) -> None:
    """Writes a file in one step, then deletes all but the last two.

    Raises:
      RunError: If it cannot be written; what was there stays.
    """
    folder, position = os.fspath(folder), backup.position
    path = tf.io.gfile.join(folder, f"{position.epoch:06}-{position.calls:09}.npz")
    text = json.dumps({**backup.facts, "kind": _KIND}).encode()
    arrays = {**backup.arrays, "facts": np.frombuffer(text, np.uint8)}
    remote = "://" in folder
    try:
        tf.io.gfile.makedirs(folder)
        with contextlib.ExitStack() as stack:
            new = f"{path.removesuffix('.npz')}.new"
            if remote:  # An object appears when all of it has arrived.
                new = f"{stack.enter_context(tempfile.TemporaryDirectory())}/new"
            stack.callback(lambda: os.path.exists(new) and os.unlink(new))
            with open(new, "wb") as stream:
                np.savez(stream, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            if remote:
                tf.io.gfile.copy(new, path, overwrite=True)
            else:
                os.replace(new, path)
    except _FAILED as e:
        raise errors.RunError(
            f"The backup {path!r} cannot be written. Received: "
            f"{getattr(e, 'strerror', None) or e}. Make room, or pass another folder; "
            "what was saved before is still there."
        ) from e
    for old in _files(folder)[:-_KEPT]:
        _unlink(old)


def delete(folder: str | os.PathLike, torn: bool = False) -> None:
    """Deletes the backups; or, `torn`, what a kill has left of one."""
    name = _NAME.replace("npz", "new") if torn else _NAME
    for path in _files(folder, name):
        _unlink(path)


def _unlink(path):
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


def _files(folder, name=_NAME):
    folder = os.fspath(folder)
    there = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else ()
    names = [each for each in sorted(there) if re.fullmatch(name, each)]
    return [tf.io.gfile.join(folder, each) for each in names]
