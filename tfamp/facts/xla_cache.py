"""What XLA compiled for a GPU, kept on disk for the next process.

The owner of TF_XLA_FLAGS. TensorFlow reads them once, when it first looks for devices.
Its own key of a program names neither GPU, nor flags, nor release, nor op determinism,
so each combination has a folder. It writes a file under another name and renames it, so
processes may share a folder; but it raises at a file that is not whole.

References:
  TensorFlow, `compiler/jit/device_executable_persistor.h`.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import stat
import tempfile
from typing import NamedTuple

import tensorflow as tf

from tfamp.facts import builds, graph_context, names, switches, user_code, xla_flags

NAME = "TF_XLA_FLAGS"
LIMIT = 4 * 2**30  # Bytes of all folders; a program of BERT-Base has some 30 MB.
_DIRECTORY = "tf_xla_persistent_cache_directory"
# Read by nothing else in eager code, and it can be asked for: so it tells whether
# TensorFlow has read the variable now, or had done so before.
_PROBE = "tf_xla_disable_constant_folding"
GPU_ALONE = "--tf_xla_persistent_cache_device_types=GPU"
_WHOLE = {1, 2, 3}  # The fields of an entry: key, program, executable.
_LATE = (
    "TensorFlow had read its flags before enable(), as when it lists devices or makes "
    f"a variable: call enable() first, and set {switches.GROWTH}=true in place of "
    "set_memory_growth"
)


class _Cache(NamedTuple):
    """The folder of this process, or why there is none."""

    folder: pathlib.Path | None
    reason: str = ""
    deterministic: bool = False


_cache: _Cache | None = None


def start() -> None:
    """Has TensorFlow keep what XLA compiles for a GPU; what counts is the first call.

    It must come before anything that looks for devices, and holds for the process.
    """
    global _cache
    if _cache is None:
        _cache = _start()


def describe() -> str:
    """Returns the folder in use; else why there is none."""
    if _cache is None or _cache.folder is None:
        return f"none ({_cache.reason if _cache else 'not requested'})"
    text = str(_cache.folder)
    if graph_context.deterministic() != _cache.deterministic:
        text += " (of another op determinism, which belongs before enable())"
    return text


def _start():
    gpus = builds.read_gpus()
    if not gpus:
        return _Cache(None, "no NVIDIA GPU")
    if len(set(gpus)) > 1:
        return _Cache(None, "GPUs of several kinds")
    users = os.environ.get(NAME, "")
    if _DIRECTORY in users or _PROBE in users:
        return _Cache(None, f"{NAME} has its own")
    folder = _root() / _key(gpus[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        if shutil.disk_usage(folder).free < LIMIT:
            raise OSError(f"less than {LIMIT >> 30} GiB are free")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        user_code.log(f"What XLA compiles is not kept in {folder}: {error}")
        return _Cache(None, f"{folder}: {error}")
    if not _read_now(folder, users):
        return _Cache(None, _LATE)
    return _Cache(folder, deterministic=graph_context.deterministic())


def _root():
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(home, "tfamp", "xla").absolute()


def _key(gpu):
    """A name for all that a program depends on, and TensorFlow's key does not name."""
    flags = os.environ.get(xla_flags.NAME, ""), *xla_flags.choose()[0]
    release = tf.version.VERSION, tf.version.GIT_VERSION
    host = builds.driver_release(), builds.find_ptxas(), graph_context.deterministic()
    capability = gpu.compute_capability
    key = json.dumps([flags, release, [gpu.name, capability], *host], default=str)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{tf.version.VERSION}-sm{capability[0]}{capability[1]}-{digest[:16]}"


def _read_now(folder, users):
    """Whether TensorFlow reads the flags now; they are in the environment meanwhile."""
    ask = names.resolve("tensorflow.python.pywrap_tfe:TF_GetXlaConstantFoldingDisabled")
    put = names.resolve("tensorflow.python.pywrap_tfe:TF_SetXlaConstantFoldingDisabled")
    if ask is None or put is None:
        return False
    flags = f'--{_DIRECTORY}="{folder}" {GPU_ALONE}'
    with switches.environ({NAME: f"{users} {flags} --{_PROBE}=true".strip()}):
        if read_now := bool(ask()):
            put(False)
        return read_now


# ---- The files ----


def _tidy(folder):
    """Deletes files of this folder that are not whole, and of all the oldest ones."""
    total = 0
    for _, size, file in sorted(_files(), reverse=True):
        total += size
        with contextlib.suppress(FileNotFoundError):  # Another process tidies, too.
            checked = folder in file.parents and file.suffix == ".pb"
            if total > LIMIT or (checked and not is_whole(file)):
                file.unlink()


def _files():
    for file in _root().rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if stat.S_ISREG(status.st_mode):
                yield status.st_mtime, status.st_size, file


def is_whole(file: pathlib.Path) -> bool:
    """Whether a file has all parts of an entry, to the last byte.

    An entry is a message of protocol buffers; of each field its length is read alone.
    """
    fields, size = set(), file.stat().st_size
    with file.open("rb") as stream:
        while stream.tell() < size:
            field, length = _integer(stream), _integer(stream)
            # All fields have a length.
            if field & 7 != 2 or not 0 < length <= size - stream.tell():
                return False
            fields.add(field >> 3)
            stream.seek(length, os.SEEK_CUR)
    return fields >= _WHOLE


def _integer(stream):
    """The next integer: seven bits of a byte, the lowest first; 0 if there is none."""
    value = 0
    for shift in range(0, 64, 7):
        byte = ord(stream.read(1) or b"\0")
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    return 0
