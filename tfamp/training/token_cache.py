"""Arrays on disk by the hash of what they were made of: token ids of large corpora."""

import os
import pathlib
import tempfile
import warnings
import zipfile
from collections.abc import Mapping

import numpy as np

_OFF = "off"


def find_folder(setting: str) -> pathlib.Path | None:
    """Returns the cache's folder, which need not exist yet.

    Args:
      setting: "off", a folder, or "" for the folder `tokens` in `$TFAMP_CACHE`, else
        in `$XDG_CACHE_HOME/tfamp`, else in `~/.cache/tfamp`.

    Returns:
      The folder; None for "off".
    """
    if setting == _OFF:
        return None
    if setting:
        return pathlib.Path(setting).expanduser()
    if root := os.environ.get("TFAMP_CACHE"):
        return pathlib.Path(root, "tokens")
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~", ".cache").expanduser()
    return pathlib.Path(root, "tfamp", "tokens")


def load(folder: pathlib.Path, key: str) -> dict[str, np.ndarray] | None:
    """Returns the arrays that were stored under a key.

    Args:
      folder: The cache's folder.
      key: Hash of all that the arrays depend on.

    Returns:
      The arrays; None if there are none, or if the file is torn or another one.
    """
    path = _path(folder, key)
    try:
        if not zipfile.is_zipfile(path):
            return None
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    if "key" not in arrays or str(arrays.pop("key")) != key:
        return None
    return arrays


def store(folder: pathlib.Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Stores arrays under a key; a kill leaves the whole file or none.

    A folder that cannot be written is warned about: the arrays are made anew each time.

    Args:
      folder: The cache's folder; it is created.
      key: As in `load`.
      arrays: Arrays by name.
    """
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=folder, prefix=".tokens-")
        with os.fdopen(number, "wb") as file:
            np.savez(file, **arrays, key=np.array(key))
        os.replace(temporary, _path(folder, key))
    except OSError as error:
        warnings.warn(
            f"Token ids are not kept: {folder} cannot be written "
            f"({error.strerror or error}). Set config.data.token_cache to another "
            "folder, or to 'off'.",
            stacklevel=2,
        )
    finally:
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)


def _path(folder, key):
    return folder / f"{key}.npz"
