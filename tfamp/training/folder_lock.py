"""One process at a time in a job's folder."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from absl import logging

from tfamp import errors

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other processes of this host from writing a job's folder meanwhile.

    Two of them, given the same command twice, would mix their metrics and backups. The
    lock ends with the process; it is the folder's own, and leaves no file. Where the
    file system has no locks there is none.

    Args:
      folder: The folder.

    Raises:
      RunError: If another process holds the lock.
    """
    handle = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if handle is not None:
            _lock(handle, folder)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle, folder):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise errors.RunError(
            f"Another process is at work in {str(folder)!r}. Wait until it has ended, "
            "or pass another --workdir."
        ) from e
    except OSError:
        logging.debug("No locks on the file system of %s.", folder)
