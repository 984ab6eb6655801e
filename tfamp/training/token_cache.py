"""Arrays on disk by the hash of what they were made of: token ids of large corpora."""

import hashlib
import os
import pathlib
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

OFF = "off"
# What changed bytes of an archive can raise: a flag may say "encrypted" (RuntimeError),
# a name may be another (KeyError), a size too large (MemoryError).
_DAMAGED = (
    *(OSError, ValueError, EOFError, RuntimeError, KeyError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


def find_folder(setting: str) -> pathlib.Path | None:
    """Returns the cache's folder, which need not exist yet.

    Args:
      setting: "off", a folder, or "" for the folder `tokens` in `$TFAMP_CACHE`, else
        in `$XDG_CACHE_HOME/tfamp`, else in `~/.cache/tfamp`.

    Returns:
      The folder; None for "off".
    """
    if setting == OFF:
        return None
    if setting:
        return pathlib.Path(setting).expanduser()
    if root := os.environ.get("TFAMP_CACHE"):
        return pathlib.Path(root, "tokens")
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~", ".cache").expanduser()
    return pathlib.Path(root, "tfamp", "tokens")


def remember(
    setting: str,
    parts: Sequence[str | Sequence[str]],
    names: Collection[str],
    make: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Returns arrays that are kept under a hash, made where there are none.

    Args:
      setting: As in `find_folder`; for "off" they are made.
      parts: All that the arrays depend on.
      names: Names of the arrays.
      make: Function of no argument that makes them.

    Returns:
      The arrays by name.
    """
    folder = find_folder(setting)
    if folder is None:
        return dict(make())
    key = _hash(parts)
    arrays = load(folder, key)
    if arrays is None or arrays.keys() != set(names):
        arrays = dict(make())
        store(folder, key, arrays)
    return arrays


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
    except _DAMAGED:
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


def _hash(parts):
    """Returns a hash of strings and sequences of them, and of where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        items = [part] if isinstance(part, str) else part
        digest.update(f"{len(items)};".encode())
        for item in items:
            encoded = item.encode("utf-8", "surrogatepass")
            digest.update(b"%d:" % len(encoded) + encoded)
    return digest.hexdigest()


def _path(folder, key):
    return folder / f"{key}.npz"
